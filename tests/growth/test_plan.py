"""Plans: how much grows where, and plans as files."""

import copy
from dataclasses import replace

import pytest
from batches import labelled, sequences_of
from growing import statistics_of
from models import assert_equal, causal_model

import hf_grow
from hf_grow import GrowthConfig, GrowthPlan, insert_growth, plan_growth
from hf_grow.growth.kinds import HEADS, QUERY_KEY_COLUMNS
from hf_grow.measuring.statistics import Calibration


def test_a_plan_prints_saves_loads_and_inserts_the_same(tmp_path):
    model = hf_grow.make_growable(causal_model("llama"))
    batches = [labelled(model, size=8)]
    plan = plan_growth(statistics_of(model, batches), GrowthConfig(columns={0: 2, 1: 3}, heads={1: 1}))
    assert len(str(plan).splitlines()) == 4 and "reachable" in str(plan)
    plan.save(tmp_path / "plan.safetensors")
    again = GrowthPlan.load(tmp_path / "plan.safetensors")
    assert again.summary() == plan.summary() and again.config == plan.config
    twin = copy.deepcopy(model)
    first, second = insert_growth(model, plan, batches), insert_growth(twin, again, batches)
    assert first.summary() | {"seconds": 0} == second.summary() | {"seconds": 0}
    assert_equal(model.state_dict(), twin.state_dict())
    assert [layer["query_key_dim"] for layer in model.growth_summary()["layers"]] == [10, 11]
    event = model.growth_history["events"][-1]
    assert event["kind"] == "growth" and event["loss_after"] == first.loss_after


def test_align_rounds_widths_up():
    model = hf_grow.make_growable(causal_model("gpt2"))
    statistics = statistics_of(model, [labelled(model, size=8)], columns=8, value_columns=8)
    plan = plan_growth(statistics, GrowthConfig(columns=3, value_columns=1, align=4))
    assert [layer.growth.dims.qk_head_dim for layer in plan.layers] == [12, 12]
    assert [layer.growth.dims.v_head_dim for layer in plan.layers] == [12, 12]


@pytest.mark.parametrize("budget", [1200, "3%", "10 %"])
def test_a_budget_is_spent_and_never_exceeded(budget):
    model = hf_grow.make_growable(causal_model("gpt2"))
    statistics = statistics_of(model, sequences_of(labelled(model, size=16, length=40)))
    parameters = model.num_parameters()
    allowed = budget if isinstance(budget, int) else parameters * float(budget.strip(" %")) / 100
    plan = plan_growth(statistics, GrowthConfig(budget=budget))
    assert 0 < plan.parameters_added <= allowed
    insert_growth(model, plan)
    assert model.num_parameters() == parameters + plan.parameters_added


def test_a_budget_weighs_gains_by_parameters():
    """A head that promises twice as much as a column but costs four times as much comes last."""
    model = hf_grow.make_growable(causal_model("gpt2"))
    statistics = statistics_of(model, sequences_of(labelled(model, size=16, length=40)), kinds=("columns", "heads"))
    statistics = replace(statistics, calibrations=dict.fromkeys(("columns", "heads"), Calibration(1.0, 1.0, 1.0)))
    place = statistics.layers[0].place
    head = HEADS.cost(place, place.dims)
    assert head > 3 * QUERY_KEY_COLUMNS.cost(place, place.dims)
    for layer in statistics.layers:
        layer.columns.held_out.fill_(1.0 / place.n_heads)
        layer.values.held_out.zero_()
    for gain, expected in ((2.0, 0), (8.0, 1)):
        for layer in statistics.layers:
            layer.uniform.held_out.fill_(gain / place.value_dim)
        plan = plan_growth(statistics, GrowthConfig(budget=head))
        assert sum(layer.growth.amounts["heads"] for layer in plan.layers) == expected


def test_a_budget_goes_where_held_out_gains_are_largest():
    model = hf_grow.make_growable(causal_model("gpt2"))
    statistics = statistics_of(model, sequences_of(labelled(model, size=16, length=40)), kinds=("columns",))
    statistics = replace(statistics, calibrations={"columns": Calibration(1.0, 0.5, 1.0)})
    for index, factor in ((0, -1.0), (1, 1.0)):
        statistics.layers[index].columns.held_out.abs_().mul_(factor)
    plan = plan_growth(statistics, GrowthConfig(budget=600))
    assert [layer.place.layer for layer in plan.layers] == [1]
