"""Planning and inserting growth: what is tried is what is built, and what is promised is what happens."""

import copy

import pytest
import torch
from batches import labelled, mean_loss, sequences_of
from growing import EVERYTHING, statistics_of
from models import (
    CASES,
    assert_equal,
    causal_model,
    every_case,
    growable,
    relative_difference,
    snapshot,
)

import hf_grow
from hf_grow import CollectConfig, GrowthConfig, GrowthPlan, HfGrowError, collect_statistics, insert_growth, plan_growth


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
    before = mean_loss(model, batches)
    tried = insert_growth(model, plan, batches, dry_run=True)
    assert mean_loss(model, batches) == before
    report = insert_growth(model, plan, batches)
    assert report.loss_before == pytest.approx(before, rel=1e-6)
    assert report.loss_after == pytest.approx(mean_loss(model, batches), rel=1e-6)
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
    assert report.loss_after == pytest.approx(mean_loss(grown, batches), rel=1e-6)
    if columns >= 0:
        assert report.loss_after < report.loss_before


def test_step_moves_the_present_columns_only():
    model = hf_grow.make_growable(causal_model("gpt2"))
    batches = sequences_of(labelled(model, size=12, length=40))
    statistics = collect_statistics(model, batches, CollectConfig(collection="exact", columns=1))
    report = insert_growth(model, plan_growth(statistics, GrowthConfig(strategy="step")), batches)
    assert report.parameters_added == 0 and report.form == "stepped" and report.loss_after < report.loss_before
    assert model.growth_summary()["layers"][0]["query_key_dim"] == 8


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
