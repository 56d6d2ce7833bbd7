"""Collection against slow loops and finite differences, and what it leaves behind: nothing."""

from itertools import count
from math import isfinite

import pytest
import torch
from batches import labelled, sequences_of
from models import (
    CASES,
    KINDS,
    assert_equal,
    batch,
    causal_model,
    fill_new_weights,
    grow_everything,
    growable,
    relative_difference,
    small_model,
    snapshot,
)
from transformers import BertForMaskedLM, BertLMHeadModel

import hf_grow
from hf_grow import CollectConfig, HfGrowError, collect_statistics, make_growable
from hf_grow.growth.collect import Interrupted
from hf_grow.reporting.html_report import reading, statistics_table
from hf_grow.running.passes import Passes


@pytest.mark.parametrize("collection", ["exact", "sketch"])
def test_one_batch_of_eight_equals_eight_batches_of_one(collection):
    """Also with padding: every label counts the same."""
    model = growable("llama", None, {})
    whole = labelled(model, size=8)
    config = CollectConfig(collection=collection, kinds=KINDS, columns=2, value_columns=2, oversampling=2)
    first, second = (collect_statistics(model, batches, config) for batches in ([whole], sequences_of(whole)))
    assert first.sequences == second.sequences == 8
    for one, other in zip(first.layers, second.layers, strict=True):
        assert relative_difference(one.query_gram, other.query_gram) < 1e-9
        assert relative_difference(one.bottleneck, other.bottleneck) < 1e-6
        for name in ("columns", "values", "uniform"):
            candidates, expected = getattr(one, name), getattr(other, name)
            assert relative_difference(candidates.gains, expected.gains) < 1e-5, name
            assert relative_difference(candidates.held_out, expected.held_out) < 1e-4, name
        if collection == "exact":
            # transformers computes the loss of a causal model in float32.
            assert relative_difference(one.total().gradient, other.total().gradient) < 1e-6


def test_cross_attention_has_a_key_gram_of_its_own():
    model = make_growable(small_model(BertLMHeadModel, "bert", is_decoder=True, add_cross_attention=True)).double()
    inputs = labelled(model)
    inputs["encoder_hidden_states"] = torch.randn(4, 7, 32).double()
    inputs["encoder_attention_mask"] = torch.tensor([[1] * 7, [1] * 4 + [0] * 3] * 2)
    config = CollectConfig(collection="exact", kinds=KINDS, columns=2, value_columns=2, held_out=0.0)
    layer = next(
        part for part in collect_statistics(model, [inputs], config).layers if part.place.attention_type == "cross"
    )
    cross = layer.total()
    states = inputs["encoder_hidden_states"][inputs["encoder_attention_mask"].bool()]
    states = torch.cat((states, torch.ones_like(states[:, :1])), -1)
    assert relative_difference(cross.key_gram, states.T @ states) < 1e-9
    assert relative_difference(cross.query_gram, cross.key_gram) > 0.1
    assert cross.gradient.abs().max() > 0
    sketched = collect_statistics(model, [inputs], CollectConfig(columns=28, oversampling=5, held_out=0.0))
    sketch = next(part for part in sketched.layers if part.place.name == layer.place.name)
    assert relative_difference(sketch.key_gram, layer.key_gram) < 1e-9
    assert float(sketch.columns.gains.sum()) == pytest.approx(float(layer.bottleneck.sum()), rel=1e-4)


@pytest.mark.parametrize("collection", ["exact", "sketch"])
@pytest.mark.parametrize("fails", [False, True])
def test_collecting_leaves_everything_as_found(fails, collection):
    model = fill_new_weights(grow_everything(make_growable(causal_model("gpt2")))).train()
    model.transformer.h[0].mlp.eval()
    model.transformer.wte.weight.requires_grad_(False)
    inputs = labelled(model)
    model(**inputs).loss.backward()
    before = snapshot(model)
    config = CollectConfig(collection=collection, kinds=KINDS, columns=2, value_columns=2)
    if fails:
        with pytest.raises(HfGrowError, match=r"Batch 1 does not fit .*: index out of range"):
            collect_statistics(model, [inputs, {**inputs, "input_ids": inputs["input_ids"] + 10_000}], config)
    else:
        collect_statistics(model, [inputs], config)
    assert_equal(snapshot(model), before)


def test_bad_batches_are_refused_or_counted(caplog):
    model = make_growable(causal_model("gpt2"))
    inputs = labelled(model)
    config = CollectConfig(collection="exact", columns=1, held_out=0.0)
    with pytest.raises(HfGrowError, match="no batch"):
        collect_statistics(model, [], config)
    with pytest.raises(HfGrowError, match="returned no loss"):
        collect_statistics(model, [batch(model)], config)
    with pytest.raises(HfGrowError, match="make_growable"):
        collect_statistics(causal_model("gpt2"), [inputs], config)
    with pytest.raises(HfGrowError, match="iterable of dicts"):
        collect_statistics(model, inputs, config)
    with pytest.raises(HfGrowError, match="dict of tensors"):
        collect_statistics(model, [inputs["input_ids"]], config)
    with pytest.raises(HfGrowError, match="does not fit"):
        collect_statistics(model, [{**inputs, "labels": inputs["labels"][:2]}], config)
    empty = {**inputs, "labels": torch.full_like(inputs["labels"], -100)}
    with pytest.raises(HfGrowError, match="1 of 2 batches"):
        collect_statistics(model, [inputs, empty], config)
    kept = collect_statistics(model, [inputs] * 10 + [empty], config)
    assert caplog.text.count("Skipped 1 of 11") == 1
    assert kept.layers[0].total().sequences == 40


@pytest.mark.parametrize("collection", ["exact", "sketch"])
def test_sequences_without_labels_and_broken_ones_are_passed_over(collection, caplog):
    """Parts of a batch may have no labels, and one batch in twenty a loss that is not finite: the rest counts."""
    model = make_growable(small_model(BertForMaskedLM, "bert"))
    inputs = labelled(model, size=8)
    inputs["labels"][1] = -100  # the second sequence judges, alone in its part of the batch with the fifth
    inputs["labels"][4] = -100
    config = CollectConfig(collection=collection, columns=2)
    statistics = collect_statistics(model, [inputs] * 4, config)
    assert isfinite(statistics.loss) and not caplog.text
    broken = {**inputs, "inputs_embeds": torch.full((8, 9, 32), float("nan"))}
    del broken["input_ids"]
    statistics = collect_statistics(model, [*[inputs] * 30, broken], config)
    assert isfinite(statistics.loss) and "not finite" in caplog.text
    assert all(bool(torch.isfinite(layer.columns.first).all()) for layer in statistics.layers)
    with pytest.raises(HfGrowError, match="not finite"):
        collect_statistics(model, [inputs, broken], config)


def test_inference_mode_does_not_hide_the_gradient():
    model = make_growable(causal_model("gpt2"))
    with torch.inference_mode():
        statistics = collect_statistics(model, [labelled(model, size=8)], CollectConfig(columns=2))
    assert float(statistics.layers[0].wanted.sum()) > 0


def test_unused_cross_attention_is_named():
    model = make_growable(small_model(BertLMHeadModel, "bert", is_decoder=True, add_cross_attention=True))
    for collection in ("exact", "sketch"):
        with pytest.raises(HfGrowError, match=r"crossattention.* needs encoder_hidden_states"):
            collect_statistics(model, [labelled(model)], CollectConfig(collection=collection))


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


@pytest.mark.parametrize(("stop", "known"), [(1, None), (2, None), (3, "gains"), (4, "gains"), (5, "held_out")])
def test_an_interrupted_collection_tells_what_is_known(stop, known, monkeypatch):
    """In the first two passes nothing is; then directions, judged ones in the end, and the model is as it was."""
    model = make_growable(causal_model("gpt2"))
    before = snapshot(model)
    batches = sequences_of(labelled(model, size=8, length=16))
    streams = count()
    told = Passes._told

    def interrupted(passes, batches, what, units):
        number = next(streams)
        for one in told(passes, batches, what, units):
            if number == stop - 1:
                raise KeyboardInterrupt
            yield one

    monkeypatch.setattr(Passes, "_told", interrupted)
    config = CollectConfig(kinds=KINDS, columns=2, value_columns=2)
    with pytest.raises(KeyboardInterrupt) as error:
        collect_statistics(model, batches, config)
    assert isinstance(error.value, Interrupted) == (known is not None)
    assert_equal(snapshot(model), before)
    if known:
        summary = error.value.statistics.summary()
        layers = error.value.statistics.layers
        assert all(layer.judged == (known == "held_out") for layer in layers)
        assert not summary["calibrations"] and all(layer["first_order"]["columns"] != 0 for layer in summary["layers"])
        table = statistics_table(summary)
        assert "share of heads" in table.headers and "interrupted" in reading(summary)


def test_a_decrease_says_how_sure_it_is():
    model = hf_grow.make_growable(causal_model("gpt2"))
    batches = sequences_of(labelled(model, size=16, length=24))
    config = CollectConfig(columns=2, held_out=0.0)
    calibration = collect_statistics(model, batches, config).calibrations["columns"]
    assert calibration.step > 0 and 0 < calibration.error < calibration.decrease
    few = collect_statistics(model, [{name: part[:2] for name, part in batches[0].items()}], config)
    assert few.calibrations["columns"].error is None
