"""The model that comes with the package: small, trained, and unchanged by preserving growth."""

import math
import re
from pydoc_data.topics import topics

import pytest
import torch
from models import relative_difference
from transformers import AutoTokenizer

import hf_grow
from hf_grow.assets import SMALL_MODEL


@pytest.fixture(scope="module")
def tokenizer():
    """The small model's tokenizer."""
    return AutoTokenizer.from_pretrained(SMALL_MODEL)


@pytest.fixture(scope="module")
def held_out(tokenizer):
    """Blocks of 128 tokens from the topics that training left out, by the names in the model's card."""
    card = (SMALL_MODEL / "README.md").read_text(encoding="utf-8")
    names = re.search(r"is held out:\s+([\w, ]+)\.", card).group(1).split(", ")
    text = "\n\n".join(topics[name] for name in names if name in topics)
    ids = torch.tensor(tokenizer(text)["input_ids"][: 16 * 128])
    return ids.view(16, 128)


def test_it_is_small_and_has_a_card():
    size = sum(file.stat().st_size for file in SMALL_MODEL.iterdir())
    assert size <= 4_000_000
    assert 500_000 <= hf_grow.small_model().num_parameters() <= 1_000_000
    assert "nats" in (SMALL_MODEL / "README.md").read_text(encoding="utf-8")


def test_it_is_far_better_than_chance_on_text_it_never_saw(held_out):
    model = hf_grow.small_model()
    with torch.no_grad():
        loss = float(model(held_out, labels=held_out).loss)
    assert loss < 0.6 * math.log(model.config.vocab_size)


@pytest.mark.parametrize("attn", ["eager", "sdpa"])
def test_preserving_growth_changes_no_logit_by_more_than_rounding(held_out, attn):
    model = hf_grow.small_model()
    model.set_attn_implementation(attn)
    hf_grow.make_growable(model)
    with torch.no_grad():
        before = model(held_out).logits
        for layer in range(4):
            hf_grow.widen_query_key(model, layer, 3 + layer)
            hf_grow.widen_value(model, 3 - layer, 2 + layer)
            hf_grow.add_heads(model, layer, 1 + layer % 2)
        after = model(held_out).logits
    assert relative_difference(after, before) <= 1e-5


def test_a_cache_changes_no_token_of_the_grown_model(tokenizer):
    model = hf_grow.make_growable(hf_grow.small_model())
    hf_grow.widen_query_key(model, 0, 8)
    hf_grow.widen_value(model, 1, 8)
    hf_grow.add_heads(model, 2, 1)
    inputs = tokenizer(["The statement", "A class definition is an executable"], return_tensors="pt", padding=True)
    kwargs = {"max_new_tokens": 40, "do_sample": False}
    cached, plain = (model.generate(**inputs, **kwargs, use_cache=use) for use in (True, False))
    assert torch.equal(cached, plain)
    stock = hf_grow.small_model().generate(**inputs, **kwargs)
    assert torch.equal(cached, stock)
