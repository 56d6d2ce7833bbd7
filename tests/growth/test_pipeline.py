"""`grow` in one call: what comes out of it for little data, half precision and models that grew before."""

import copy

import pytest
import torch
from batches import labelled, sequences_of
from growing import EVERYTHING
from models import CASES, KINDS, causal_model, small_model

import hf_grow
from hf_grow import CollectConfig, GrowthConfig, HfGrowError
from hf_grow.growth import collect, insert
from hf_grow.growth.pipeline import prepare_growth
from hf_grow.running.passes import Passes


def test_growth_is_prepared_once_and_then_carried_out(monkeypatch):
    model = hf_grow.make_growable(causal_model("gpt2"))
    batches = sequences_of(labelled(model, size=8))
    marked, read = [], []
    monkeypatch.setattr(collect, "fingerprint", lambda sites: marked.append(sites) or "mark")
    monkeypatch.setattr(insert, "fingerprint", lambda sites: marked.append(sites) or "mark")
    counted = (read.append(batch) or batch for batch in batches)
    prepared = prepare_growth(model, counted, GrowthConfig(columns=2))
    before = {name: weight.clone() for name, weight in model.state_dict().items()}
    assert prepared.statistics.sequences == len(read) == 8
    assert prepared.search_sequences == 8 - round(8 * 0.75) and set(prepared.seconds) == {"collecting", "planning"}
    tried = prepared.insert(dry_run=True)
    assert tried.dry_run and all(torch.equal(before[name], weight) for name, weight in model.state_dict().items())
    report = prepared.insert()
    # Weights are hashed once, when they were measured.
    assert len(marked) == 1 and report.parameters_added == prepared.plan.parameters_added > 0
    assert set(report.seconds) == {"collecting", "planning", "line search", "inserting"}


def test_what_is_not_planned_cannot_be_inserted():
    model = causal_model("gpt2")
    prepared = prepare_growth(model, [labelled(model, size=4)], collect=CollectConfig(kinds=KINDS, columns=2))
    assert prepared.plan is None and set(prepared.statistics.calibrations) >= {*KINDS}
    with pytest.raises(HfGrowError, match="Nothing was planned"):
        prepared.insert()


def test_the_saved_model_is_the_grown_one(tmp_path):
    model = hf_grow.make_growable(causal_model("qwen2"))
    batches = [labelled(model, size=8)]
    _, report = hf_grow.grow(model, batches, EVERYTHING)
    hf_grow.save_grown(model, tmp_path / "grown")
    loaded = hf_grow.load_grown(tmp_path / "grown").eval()
    assert torch.equal(loaded(**batches[0]).logits, model(**batches[0]).logits)
    assert loaded.growth_history["events"][-1]["loss_before"] == report.loss_before
    assert "growth" in (tmp_path / "grown" / "README.md").read_text(encoding="utf-8")


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
