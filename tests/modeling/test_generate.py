"""Generation with a grown model: every cache, beams, assistants, padding; the same ids as the stock model's."""

import copy
import importlib.util

import pytest
import torch
from models import CAUSAL_TYPES, batch, causal_model, fill_new_weights, grow_everything, small_model
from transformers import BertLMHeadModel, DynamicCache, EncoderDecoderCache, GPT2LMHeadModel

from hf_grow import make_growable

every_causal = pytest.mark.parametrize("model_type", CAUSAL_TYPES)
both_kernels = pytest.mark.parametrize("attn", ["eager", "sdpa"])


def grown(model_type, attn="sdpa", **changes):
    """A grown causal model whose new weights matter."""
    return fill_new_weights(grow_everything(make_growable(causal_model(model_type, attn, **changes))))


def generate(model, padding="left", **kwargs):
    """Greedy ids, 12 tokens long, whatever the model would like to stop at."""
    inputs = batch(model, padding)
    return model.generate(**inputs, min_new_tokens=12, max_new_tokens=12, do_sample=False, **kwargs)


@every_causal
@both_kernels
@pytest.mark.parametrize("kwargs", [{}, {"num_beams": 3}, {"cache_implementation": "static"}], ids=str)
def test_an_ungrown_model_generates_the_same_ids(model_type, attn, kwargs):
    stock = causal_model(model_type, attn)
    expected = generate(stock, **kwargs, disable_compile=True)
    assert torch.equal(generate(make_growable(stock), **kwargs, disable_compile=True), expected)


@every_causal
@both_kernels
def test_preserving_growth_generates_the_same_ids(model_type, attn):
    stock = causal_model(model_type, attn)
    expected = generate(stock)
    assert torch.equal(generate(grow_everything(make_growable(stock))), expected)


@every_causal
@both_kernels
@pytest.mark.parametrize("padding", ["left", None])
@pytest.mark.parametrize("cache", ["dynamic", "static"])
def test_a_cache_changes_no_token_of_a_grown_model(model_type, attn, padding, cache):
    model = grown(model_type, attn)
    without = generate(model, padding, use_cache=False)
    kwargs = {} if cache == "dynamic" else {"cache_implementation": "static", "disable_compile": True}
    assert torch.equal(generate(model, padding, **kwargs), without)


@every_causal
@pytest.mark.parametrize("kwargs", [{"num_beams": 3}, {"num_beams": 2, "num_return_sequences": 2}], ids=str)
def test_beam_search_of_a_grown_model_needs_no_cache(model_type, kwargs):
    model = grown(model_type)
    assert torch.equal(generate(model, **kwargs), generate(model, use_cache=False, **kwargs))


@every_causal
def test_an_assistant_changes_no_token(model_type):
    model, assistant = grown(model_type), make_growable(causal_model(model_type))
    inputs = {name: value[:1] for name, value in batch(model, None).items()}
    kwargs = {"min_new_tokens": 12, "max_new_tokens": 12, "do_sample": False}
    expected = model.generate(**inputs, **kwargs)
    assert torch.equal(model.generate(**inputs, **kwargs, assistant_model=assistant), expected)
    assert torch.equal(model.generate(**inputs, **kwargs, prompt_lookup_num_tokens=3), expected)


@every_causal
def test_chunked_prefill_with_a_static_cache_works(model_type):
    model = grown(model_type)
    inputs = {name: value[:1] for name, value in batch(model, None).items()}
    kwargs = {"min_new_tokens": 8, "max_new_tokens": 8, "do_sample": False, "disable_compile": True}
    expected = model.generate(**inputs, **kwargs)
    chunked = model.generate(**inputs, **kwargs, cache_implementation="static", prefill_chunk_size=4)
    assert torch.equal(chunked, expected)


@pytest.mark.slow  # The first use compiles a kernel.
@pytest.mark.skipif(importlib.util.find_spec("optimum") is None, reason="needs optimum-quanto (extra: quantized)")
@every_causal
def test_a_quantized_cache_works(model_type):
    changes = {"sliding_window": None} if model_type == "mistral" else {}
    model = grown(model_type, **changes)
    kwargs = {"cache_implementation": "quantized", "cache_config": {"backend": "quanto", "nbits": 4, "q_group_size": 1}}
    assert generate(model, **kwargs).shape == generate(model).shape
    stock = causal_model(model_type, **changes)
    expected = generate(stock, **kwargs)
    assert torch.equal(generate(grow_everything(make_growable(stock)), **kwargs), expected)


@every_causal
def test_sliding_windows_and_long_prompts_agree_with_no_cache(model_type):
    changes = {"mistral": {"sliding_window": 4}}.get(model_type, {})
    if model_type == "qwen2":
        changes = {"use_sliding_window": True, "sliding_window": 4, "max_window_layers": 1}
    model = grown(model_type, **changes)
    assert torch.equal(generate(model, None), generate(model, None, use_cache=False))


@pytest.mark.parametrize(
    ("stock_class", "model_type", "changes"),
    [
        (BertLMHeadModel, "bert", {"is_decoder": True}),
        (BertLMHeadModel, "bert", {"is_decoder": True, "add_cross_attention": True}),
        (GPT2LMHeadModel, "gpt2", {"add_cross_attention": True}),
    ],
    ids=["bert", "bert-cross", "gpt2-cross"],
)
def test_decoders_with_cross_attention_generate_with_a_cache(stock_class, model_type, changes):
    model = small_model(stock_class, model_type, **changes)
    kwargs = {}
    if changes.get("add_cross_attention"):
        kwargs["encoder_hidden_states"] = torch.randn(2, 7, 32, generator=torch.Generator().manual_seed(0))

    def cached(model):
        # Stock BERT with cross-attention takes no other cache.
        cross = changes.get("add_cross_attention")
        cache = EncoderDecoderCache(DynamicCache(), DynamicCache()) if cross else None
        return generate(model, None, past_key_values=cache, **kwargs)

    expected = cached(copy.deepcopy(model))
    assert torch.equal(cached(make_growable(model)), expected)
    fill_new_weights(grow_everything(model))
    assert torch.equal(cached(model), generate(model, None, use_cache=False, **kwargs))
