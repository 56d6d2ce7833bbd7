"""What new heads attend to is measured where one is planned that starts uniform, and only there."""

import pytest
import torch
from batches import labelled, sequences_of
from models import causal_model

import hf_grow
from hf_grow import CollectConfig, GrowthConfig, collect_head_scores, collect_statistics, grow, plan_growth
from hf_grow.growth.head_scores import lacks_head_scores
from hf_grow.growth.kinds.head import NewHeads
from hf_grow.measuring import sketch

COLLECT = CollectConfig(kinds=("columns", "heads"), columns=2, held_out=0.0, passes=2)


def uniform_plan(model, batches):
    """Statistics, and a plan in which every pattern gets a head, the uniform one included."""
    statistics = collect_statistics(model, batches, COLLECT)
    heads = statistics.layers[0].place.n_kv_heads + 1
    return statistics, GrowthConfig(columns={1: 2}, heads={1: heads})


@pytest.mark.parametrize("model_type", ["gpt2", "llama"])
def test_only_the_planned_layers_are_measured(model_type):
    model = hf_grow.make_growable(causal_model(model_type))
    batches = sequences_of(labelled(model, size=8, length=16))
    statistics, config = uniform_plan(model, batches)
    plan = plan_growth(statistics, config)
    (name,) = lacks_head_scores(plan)
    assert name == statistics.layers[1].place.name
    more = collect_head_scores(model, batches, statistics, plan)
    assert [layer.uniform_scores is not None for layer in more.layers] == [False, True]
    assert more.calibrations["head_scores"].step >= 0
    again = plan_growth(more, config)
    (piece,) = (piece for piece in again.layers[0].growth.pieces if isinstance(piece, NewHeads))
    (uniform,) = (head for head in piece.heads if head.copy is None)
    place = statistics.layers[1].place
    assert uniform.query.shape[-1] == place.query_key_dim + 2 - place.rotary_dim
    assert not lacks_head_scores(again) and collect_head_scores(model, batches, more, again) is more
    # Where all columns of a new head are rotated, none could take scores.
    narrow = plan_growth(statistics, GrowthConfig(heads=config.heads))
    assert bool(lacks_head_scores(narrow)) == (place.rotary_dim < place.query_key_dim)


def test_growth_measures_them_by_itself_and_nobody_else_does(monkeypatch):
    asked = []
    ask = sketch.ask
    monkeypatch.setattr(sketch, "ask", lambda *args: asked.append(args[4]) or ask(*args))
    model = hf_grow.make_growable(causal_model("gpt2"))
    batches = sequences_of(labelled(model, size=8, length=16))
    statistics, config = uniform_plan(model, batches)
    assert not any("new heads" in what for what in asked)
    _, report = grow(model, batches, config, collect=COLLECT)
    assert sum("new heads" in what for what in asked) == COLLECT.passes
    assert report.loss_after <= report.loss_before and "head_scores" in report.step_sizes
    asked.clear()
    grow(model, batches, GrowthConfig(columns=1), collect=CollectConfig(held_out=0.0, passes=2))
    assert len(asked) == 2
    assert torch.isfinite(model(**batches[0]).loss) and statistics.kinds
