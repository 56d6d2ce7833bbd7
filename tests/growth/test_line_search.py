"""The step of new weights is where the loss is lowest, and zero where none lowers it."""

import pytest
from batches import labelled, sequences_of
from models import causal_model

import hf_grow
from hf_grow import CollectConfig, GrowthConfig
from hf_grow.growth.line_search import search


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
