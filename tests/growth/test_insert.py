"""Planning and inserting growth: what is tried is what is built, and what is promised is what happens."""

import copy
from dataclasses import replace

import pytest
import torch
from models import KINDS, causal_model, relative_difference, small_model
from test_collect import CASES, assert_equal, growable, labelled, sequences_of, snapshot

import hf_grow
from hf_grow import CollectConfig, GrowthConfig, GrowthPlan, HfGrowError, collect_statistics, insert_growth, plan_growth
from hf_grow.fields import from_dict, to_dict
from hf_grow.growth.kinds import HEADS, QUERY_KEY_COLUMNS
from hf_grow.growth.line_search import search
from hf_grow.measuring.statistics import Calibration
from hf_grow.running.passes import Passes

every_case = pytest.mark.parametrize(("model_type", "stock_class", "changes"), CASES, ids=str)
SMALL = {"columns": 3, "value_columns": 2, "oversampling": 3}
EVERYTHING = GrowthConfig(columns=3, value_columns=2, heads=2)


def statistics_of(model, batches, **changes):
    """Statistics of all kinds."""
    return collect_statistics(model, batches, CollectConfig(**{"kinds": KINDS, **SMALL, **changes}))


def loss_of(model, batches):
    """The loss by plain evaluation, over all labels."""
    total, count = 0.0, 0
    for batch in batches:
        with torch.no_grad():
            loss = float(model(**batch).loss)
        labels = batch["labels"][..., 1:] if model.loss_type == "ForCausalLM" else batch["labels"]
        size = int((labels != -100).sum())
        total, count = total + loss * size, count + size
    return total / count


@every_case
@pytest.mark.parametrize("multiple", [0.0, 0.7])
def test_what_was_tried_is_what_is_built(model_type, stock_class, changes, multiple):
    """The loss of weights beside the model equals that of the grown model; at step 0 nothing changes at all."""
    model = growable(model_type, stock_class, changes)
    batches = [labelled(model, size=8)]
    statistics = statistics_of(model, batches)
    plan = plan_growth(statistics, GrowthConfig(columns=3, value_columns=2, heads=2, step_size=multiple))
    # Steps that change the loss visibly, whatever the search found.
    plan = GrowthPlan(
        **vars(plan) | {"step_sizes": dict.fromkeys(("columns", "value_columns", "heads", "head_scores"), 1.0)}
    )
    before = loss_of(model, batches)
    tried = insert_growth(model, plan, batches, dry_run=True)
    assert loss_of(model, batches) == before
    report = insert_growth(model, plan, batches)
    assert report.loss_before == pytest.approx(before, rel=1e-6)
    assert report.loss_after == pytest.approx(loss_of(model, batches), rel=1e-6)
    assert report.loss_after == pytest.approx(tried.loss_after, rel=1e-6)
    if multiple == 0:
        assert report.form == "preserving" and report.loss_after == pytest.approx(before, rel=1e-6)
    else:
        assert abs(report.loss_after - before) > 1e-4 * before
    added = report.parameters_after - report.parameters_before
    assert added == plan.parameters_added == tried.parameters_added == report.parameters_added > 0
    layer = model.growth_summary()["layers"][0]
    assert layer["query_key_dim"] == 8 + 3 and layer["value_dim"] == 8 + 2
    assert layer["n_kv_heads"] == statistics.layers[0].place.n_kv_heads + 2


@every_case
def test_the_preserving_form_keeps_the_outputs_and_can_learn(model_type, stock_class, changes):
    model = growable(model_type, stock_class, changes).float()
    batches = [labelled(model, size=8)]
    plan = plan_growth(statistics_of(model, batches), EVERYTHING)
    before = model(**batches[0]).logits
    report = insert_growth(model, plan)
    assert report.form == "preserving" and report.loss_before is None
    after = model(**batches[0])
    assert relative_difference(after.logits, before) < 1e-5
    after.loss.backward()
    for site in (0, 1):
        blocks = hf_grow.surgery.blocks.read_blocks(hf_grow.surgery.structure.find_site(model, site))
        # No pair of new factors is zero on both sides.
        assert blocks["query"][..., 8:].norm(dim=1).min() > 0 and blocks["value"].norm(dim=1).min() > 0


def test_losses_never_rise_and_the_search_falls_back_to_zero():
    curve = search(lambda step: 1.0 + step, 1.0)
    assert curve.step == 0 and curve.loss == 1.0 and len(curve.curve) > 3
    parabola = search(lambda step: (step - 7.3) ** 2, 0.01)
    assert parabola.step == pytest.approx(7.3, rel=0.02)
    broken = search(lambda step: float("inf") if step > 1e-3 else 1.0 - step, 1.0)
    assert 0 < broken.step <= 1e-3


@pytest.mark.parametrize("steps", ["shared", "per_layer"])
@pytest.mark.parametrize("line_search", ["low_rank", "full_rank"])
@pytest.mark.parametrize("collection", ["exact", "sketch"])
def test_both_searches_lower_the_loss(steps, line_search, collection):
    model = hf_grow.make_growable(causal_model("gpt2"))
    batches = sequences_of(labelled(model, size=16, length=24))
    config = GrowthConfig(columns=3, step_scope=steps, line_search=line_search)
    # Random text has nothing to say about other random text: the same sequences choose and judge.
    collect = CollectConfig(collection=collection, held_out=0.0)
    _, report = hf_grow.grow(model, batches, config, collect=collect)
    assert report.form == "stepped" and report.loss_after < report.loss_before
    assert dict(report.curve)[0.0] == report.loss_before and len(report.curve) > 3
    if steps == "per_layer":
        shared = hf_grow.make_growable(causal_model("gpt2"))
        config = GrowthConfig(columns=3, line_search=line_search)
        _, other = hf_grow.grow(shared, batches, config, collect=collect)
        assert report.loss_after <= other.loss_after + 1e-6


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


def test_the_saved_model_is_the_grown_one(tmp_path):
    model = hf_grow.make_growable(causal_model("qwen2"))
    batches = [labelled(model, size=8)]
    _, report = hf_grow.grow(model, batches, EVERYTHING)
    hf_grow.save_grown(model, tmp_path / "grown")
    loaded = hf_grow.load_grown(tmp_path / "grown").eval()
    assert torch.equal(loaded(**batches[0]).logits, model(**batches[0]).logits)
    assert loaded.growth_history["events"][-1]["loss_before"] == report.loss_before
    assert "growth" in (tmp_path / "grown" / "README.md").read_text(encoding="utf-8")


@pytest.mark.parametrize("collection", ["exact", "sketch"])
@pytest.mark.parametrize("columns", [0, 2, -2])
def test_refactor_grows_updates_and_shrinks(columns, collection):
    model = growable("gpt2", *CASES[0][1:])
    batches = sequences_of(labelled(model, size=12, length=40))
    collect = CollectConfig(collection=collection, columns=4, target="gradient", cutoff=1e-10, ridge=0.0, held_out=0.0)
    statistics = collect_statistics(model, batches, collect)
    config = GrowthConfig(columns=columns, strategy="refactor", step_size=0.0)
    preserved = copy.deepcopy(model)
    shown = insert_growth(preserved, plan_growth(statistics, config), batches, dry_run=True)
    done = insert_growth(preserved, plan_growth(statistics, config), batches)
    assert done.loss_after == pytest.approx(shown.loss_after, rel=1e-6)
    assert done.form == ("preserving" if columns >= 0 else "shrunk")
    before, after = model(**batches[0]).logits, preserved(**batches[0]).logits
    assert preserved.growth_summary()["layers"][0]["query_key_dim"] == 8 + columns
    if columns >= 0:
        assert relative_difference(after, before) < 1e-5
        blocks = hf_grow.surgery.blocks.read_blocks(hf_grow.surgery.structure.find_site(preserved, 0))
        assert not columns or blocks["query"][..., 8:].norm(dim=1).min() > 0.1  # no pair that could never learn
    else:
        assert relative_difference(after, before) > 1e-3
    grown = copy.deepcopy(model)
    report = insert_growth(grown, plan_growth(statistics, GrowthConfig(columns=columns, strategy="refactor")), batches)
    assert report.loss_after == pytest.approx(loss_of(grown, batches), rel=1e-6)
    if columns >= 0:
        assert report.loss_after < report.loss_before


def test_step_moves_the_present_columns_only():
    model = hf_grow.make_growable(causal_model("gpt2"))
    batches = sequences_of(labelled(model, size=12, length=40))
    statistics = collect_statistics(model, batches, CollectConfig(collection="exact", columns=1))
    report = insert_growth(model, plan_growth(statistics, GrowthConfig(strategy="step")), batches)
    assert report.parameters_added == 0 and report.form == "stepped" and report.loss_after < report.loss_before
    assert model.growth_summary()["layers"][0]["query_key_dim"] == 8


@pytest.mark.parametrize("estimator", ["per_sequence", "mean_input", "exact"])
def test_every_estimator_lowers_the_loss(estimator):
    model = hf_grow.make_growable(causal_model("gpt2"))
    whole = labelled(model, size=16, length=40)
    whole |= {"attention_mask": torch.ones_like(whole["input_ids"]), "labels": whole["input_ids"]}
    collect = CollectConfig(collection="exact", estimator=estimator, cutoff=1e-4, held_out=0.0)
    _, report = hf_grow.grow(model, [whole], GrowthConfig(columns=4), collect=collect)
    assert report.loss_after < report.loss_before


def test_for_one_sequence_all_estimators_are_the_pooled_one():
    """With one sequence there is nothing to pool: the columns give the same change of the scores."""
    model = growable("gpt2", *CASES[0][1:])
    one = labelled(model, size=1, length=40)
    products = {}
    for estimator in ("pooled", "per_sequence", "mean_input", "exact"):
        config = CollectConfig(
            collection="exact", estimator=estimator, columns=20, held_out=0.0, target="gradient", cutoff=1e-9, ridge=0.0
        )
        found = collect_statistics(model, [one], config).layers[1]
        products[estimator] = found.columns.first @ found.columns.second.mT
        products[estimator] /= products[estimator].norm()
    for estimator in ("per_sequence", "mean_input", "exact"):
        assert relative_difference(products[estimator], products["pooled"]) < 1e-4, estimator


def test_mean_input_refuses_padding():
    model = hf_grow.make_growable(causal_model("gpt2"))
    with pytest.raises(HfGrowError, match="one length"):
        collect_statistics(model, [labelled(model)], CollectConfig(collection="exact", estimator="mean_input"))


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


def test_bad_plans_are_refused_before_anything_changes():
    model = hf_grow.make_growable(causal_model("gpt2"))
    batches = [labelled(model, size=8)]
    statistics = statistics_of(model, batches)
    few = collect_statistics(model, batches, CollectConfig(columns=2, oversampling=0))
    wrong = [
        (statistics, {"columns": 30}, "room for 25 more"),
        (few, {"columns": 4}, r"CollectConfig\(columns=4\)"),
        (few, {"heads": 1}, "know nothing of heads"),
        (statistics, {"heads": 6}, "At most 5 heads"),
        (statistics, {"budget": 10}, "too small: the cheapest growth takes"),
        (statistics, {"columns": {7: 1}}, "names layer 7; the model has layers 0 to 1"),
        (statistics, {"strategy": "refactor", "columns": 2}, "needs the whole wanted change"),
    ]
    for found, amounts, message in wrong:
        with pytest.raises(HfGrowError, match=message):
            plan_growth(found, GrowthConfig(**amounts))
    other = hf_grow.make_growable(causal_model("gpt2", n_layer=3))
    before = snapshot(model)
    plan = plan_growth(statistics, GrowthConfig(columns=2))
    with pytest.raises(HfGrowError, match="made for another model"):
        insert_growth(other, plan, batches)
    twin = copy.deepcopy(model)
    with torch.no_grad():
        twin.transformer.h[0].attn.c_attn.bias[0] += 1
    with pytest.raises(HfGrowError, match="made for another model"):
        insert_growth(twin, plan, batches)
    with pytest.raises(HfGrowError, match="must be a GrowthPlan"):
        insert_growth(model, {"columns": 2}, batches)
    with pytest.raises(HfGrowError, match="does not fit"):
        insert_growth(model, plan, [{"input_ids": batches[0]["input_ids"] + 10_000, "labels": batches[0]["labels"]}])
    with pytest.raises(HfGrowError, match="no batch"):
        insert_growth(model, plan, [])
    with pytest.raises(HfGrowError, match="no sequences"):
        insert_growth(model, plan, [{name: value[:0] for name, value in batches[0].items()}])
    with pytest.raises(HfGrowError, match="1 of 1 batches"):
        insert_growth(model, plan, [{**batches[0], "labels": torch.full_like(batches[0]["labels"], -100)}])
    huge = GrowthPlan(
        **vars(plan) | {"config": GrowthConfig(columns=2, step_size=1e80), "step_sizes": {"columns": 1.0}}
    )
    with pytest.raises(HfGrowError, match="would not be finite"):
        insert_growth(model, huge, batches)
    for wrong_call in (
        lambda: hf_grow.grow(model, batches, {"columns": 2}),
        lambda: plan_growth(statistics, {"columns": 2}),
        lambda: collect_statistics(model, batches, GrowthConfig(columns=2)),
    ):
        with pytest.raises(HfGrowError, match="Give a "):
            wrong_call()
    with pytest.raises(HfGrowError, match="cannot be written"):
        plan.save("absent-folder/plan.safetensors")
    with pytest.raises(HfGrowError, match="room for"):
        hf_grow.grow(model, iter(batches), GrowthConfig(columns=30))
    assert_equal(snapshot(model), before)
    assert model.growth_history["events"] == []
    rotary = hf_grow.make_growable(causal_model("llama"))
    found = statistics_of(rotary, batches, target="gradient")
    with pytest.raises(HfGrowError, match="rotated"):
        plan_growth(found, GrowthConfig(columns=2, strategy="refactor"))


@pytest.mark.parametrize(
    ("values", "message"),
    [
        ({}, "Say how much"),
        ({"columns": 1, "budget": "1%"}, "Say how much"),
        ({"columns": -1}, "at least 0"),
        ({"columns": 1.5}, "whole number"),
        ({"budget": "lots"}, "percentage like '1%'"),
        ({"budget": 0}, "positive number"),
        ({"columns": 1, "strategy": "magic"}, "append, refactor, step"),
        ({"columns": 1, "step_scope": "each"}, "shared, per_layer"),
        ({"columns": 1, "step_size": -1.0}, "not negative"),
        ({"heads": 1, "strategy": "refactor"}, "query/key columns only"),
        ({"columns": 1, "strategy": "step"}, "adds no columns"),
    ],
)
def test_bad_growth_configs_are_refused(values, message):
    with pytest.raises(HfGrowError, match=message):
        GrowthConfig(**values)


@pytest.mark.parametrize(
    ("values", "message"),
    [
        ({"collection": "guess"}, "sketch, exact"),
        ({"kinds": ("layers",)}, "columns, value_columns, heads"),
        ({"kinds": ()}, "at least one"),
        ({"kinds": 5}, "must be a tuple"),
        ({"products": 1}, "at least 2"),
        ({"held_out": 1.0}, "below 1"),
        ({"estimator": "exact"}, "collection='exact'"),
        ({"metric": "none"}, "collection='exact'"),
        ({"inverse": "magic"}, "eigh, pinv"),
    ],
)
def test_bad_collect_configs_are_refused(values, message):
    with pytest.raises(HfGrowError, match=message):
        CollectConfig(**values)


def test_configs_survive_json():
    for config in (GrowthConfig(columns={0: 2, "a.b": 3}), CollectConfig(kinds=KINDS, target="gradient")):
        assert from_dict(type(config), to_dict(config)) == config


EDGES = {
    "fewer tokens than inputs": {"length": 5, "size": 2},
    "a single sequence": {"length": 12, "size": 1},
    "two tokens": {"length": 2, "size": 2},
}


@pytest.mark.parametrize("collection", ["exact", "sketch"])
@pytest.mark.parametrize("edge", EDGES)
@pytest.mark.parametrize("model_type", ["gpt2", "llama"])
def test_little_data_gives_finite_weights(edge, collection, model_type):
    model = hf_grow.make_growable(causal_model(model_type))
    inputs = labelled(model, **EDGES[edge])
    inputs |= {"attention_mask": torch.ones_like(inputs["input_ids"]), "labels": inputs["input_ids"]}
    _, report = hf_grow.grow(model, [inputs], EVERYTHING, collect=CollectConfig(collection=collection))
    assert all(bool(torch.isfinite(parameter).all()) for parameter in model.parameters())
    assert report.loss_after <= report.loss_before + 1e-6


@pytest.mark.parametrize("collection", ["exact", "sketch"])
def test_a_single_token_and_constant_inputs_give_finite_weights(collection):
    model = hf_grow.make_growable(small_model(CASES[3][1], "bert"))
    for ids in (torch.full((3, 1), 5), torch.full((3, 7), 5)):
        twin = copy.deepcopy(model)
        batch = {"input_ids": ids, "attention_mask": torch.ones_like(ids), "labels": torch.tensor([0, 1, 0])}
        _, report = hf_grow.grow(twin, [batch], EVERYTHING, collect=CollectConfig(collection=collection))
        assert all(bool(torch.isfinite(parameter).all()) for parameter in twin.parameters())
        assert report.loss_after <= report.loss_before + 1e-6


@pytest.mark.parametrize("collection", ["exact", "sketch"])
def test_rows_of_padding_alone_count_for_nothing(collection):
    model = growable("bert", *CASES[2][1:])
    inputs = labelled(model, size=8)
    padded = {name: torch.cat((value, value[:4])) for name, value in inputs.items()}
    padded["attention_mask"][8:] = 0
    padded["labels"][8:] = -100
    config = CollectConfig(collection=collection, columns=3, held_out=0.0)
    plain, more = (collect_statistics(model, [batch], config) for batch in (inputs, padded))
    for one, other in zip(plain.layers, more.layers, strict=True):
        assert torch.isfinite(other.columns.first).all()
        # The mean is over twelve sequences instead of eight.
        assert relative_difference(other.query_gram * 12, one.query_gram * 8) < 1e-9


@pytest.mark.parametrize("collection", ["exact", "sketch"])
def test_a_layer_without_gradient_gets_columns_that_change_nothing(collection):
    model = hf_grow.make_growable(causal_model("gpt2"))
    with torch.no_grad():
        model.transformer.h[1].attn.c_proj.weight.zero_()
    batches = sequences_of(labelled(model, size=8, length=30))
    statistics = collect_statistics(model, batches, CollectConfig(collection=collection, columns=3))
    assert float(statistics.layers[1].wanted.sum()) == 0 and statistics.layers[1].reachable_share is None
    report = insert_growth(model, plan_growth(statistics, GrowthConfig(columns=3)), batches)
    assert all(bool(torch.isfinite(parameter).all()) for parameter in model.parameters())
    blocks = hf_grow.surgery.blocks.read_blocks(hf_grow.surgery.structure.find_site(model, 1))
    assert not blocks["key"][..., 8:].any() and blocks["query"][..., 8:].norm(dim=1).min() > 0
    assert report.loss_after < report.loss_before


def test_growing_a_grown_model_again_goes_on():
    model = causal_model("mistral")
    batches = sequences_of(labelled(model, size=16, length=24))
    losses = []
    for _ in range(2):
        model, report = hf_grow.grow(model, batches, EVERYTHING, collect=CollectConfig(held_out=0.0))
        losses += [report.loss_before, report.loss_after]
    assert losses[1] < losses[0] and losses[3] < losses[2]
    assert len(model.growth_history["events"]) == 2
    assert Passes(model).loss(batches) < losses[0]


def test_half_precision_models_grow():
    model = hf_grow.make_growable(causal_model("llama")).bfloat16()
    batches = sequences_of(labelled(model, size=8, length=24))
    _, report = hf_grow.grow(model, batches, EVERYTHING)
    assert all(parameter.dtype == torch.bfloat16 for parameter in model.parameters())
    assert report.loss_after <= report.loss_before + 1e-3
