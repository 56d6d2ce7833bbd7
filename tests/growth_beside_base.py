"""A small model with growth beside a frozen base, data for it, and whether the base is as it was."""

from typing import Any

import torch
from models import VOCABULARY, causal_model

import hf_grow
from hf_grow import GrowthConfig

AMOUNTS = {"columns": 2, "value_columns": 2, "heads": {0: 1}}
Weights = dict[str, torch.Tensor]


def rows(count: int = 16, length: int = 12) -> list[dict[str, Any]]:
    """Sequences of tokens."""
    ids = torch.randint(2, VOCABULARY, (count, length), generator=torch.Generator().manual_seed(1))
    return [{"input_ids": row, "labels": row} for row in ids]


def batches() -> list[dict[str, torch.Tensor]]:
    """The same, four at once."""
    ids = torch.stack([row["input_ids"] for row in rows()])
    return [{"input_ids": part, "labels": part} for part in ids.split(4)]


def adapted(model_type: str = "llama", dtype: torch.dtype = torch.float32) -> tuple[Any, Weights]:
    """A model with growth of all kinds that alone learns, and the weights of its base as they are."""
    model = hf_grow.make_growable(causal_model(model_type).to(dtype))
    hf_grow.grow(model, batches(), GrowthConfig(**AMOUNTS, attach=True, scaling="learnable"))
    hf_grow.freeze_base(model)
    return model, {name: parameter.detach().clone() for name, parameter in model.named_parameters()}


def without_wrapper(name: str) -> str:
    """The name of a parameter inside wrappers and compiled models."""
    for prefix in ("module.", "_orig_mod."):
        name = name.removeprefix(prefix)
    return name


def same_base(now: Weights, before: Weights) -> bool:
    """Whether the base is the same to the bit, and growth has moved."""
    assert now.keys() == before.keys()
    growth = {name for name in before if ".grown." in name}
    moved = {name for name in before if not torch.equal(now[name], before[name])}
    # The gradient of a key's bias is zero, as the softmax ignores what it adds.
    still = {name for name in growth - moved if not name.endswith("_bias")}
    assert growth and not still, still
    return moved <= growth


def named_weights(model: Any) -> Weights:
    """All parameters of a model, perhaps inside a wrapper."""
    return {without_wrapper(name): parameter.detach() for name, parameter in model.named_parameters()}
