"""The base model inside a grown one: growth stands behind its columns and heads, so the two can be told apart."""

from collections.abc import Iterator
from typing import Any, TypeAlias

import torch
from peft import PeftModel
from torch import Tensor, nn
from transformers import PreTrainedModel

from hf_grow.files import digest
from hf_grow.modeling.growable_attention import AttentionSite, attention_sites, in_rows
from hf_grow.surgery.blocks import leading, read_blocks, write_blocks

# Stock or growable, also where PEFT has wrapped it.
Model: TypeAlias = PreTrainedModel | PeftModel
# Where PEFT's wrappers keep the module they adapt, and the one they train a copy of.
WRAPPED = ("base_layer", "original_module")


def base_parts(site: AttentionSite) -> Iterator[tuple[nn.Parameter, Tensor]]:
    """The parameters of an attention module, each with what it would be without growth."""
    blocks = {role: leading(block, role, site.attention.base_dims) for role, block in read_blocks(site).items()}
    for projection, weight, bias in write_blocks(site, blocks):
        yield projection.weight, in_rows(projection, weight)
        if bias is not None:
            yield projection.bias, bias


def new_entries(site: AttentionSite) -> Iterator[tuple[Any, str, Tensor]]:
    """The parameters that growth widened, as projection and name, each with a mask of the entries that are new."""
    masks = {}
    for role, places in read_blocks(site, _all_true).items():
        masks[role] = places.clone()
        leading(masks[role], role, site.attention.base_dims).fill_(False)
    for projection, weight, bias in write_blocks(site, masks):
        if bool(weight.any()):
            yield projection, "weight", in_rows(projection, weight)
        if bias is not None and bool(bias.any()):
            yield projection, "bias", bias


def _all_true(parameter: Tensor) -> Tensor:
    # Plain also where the parameter is sharded.
    return torch.ones(parameter.shape, dtype=torch.bool, device=parameter.device)


def without_adapters(model: Model) -> Any:
    """The model that PEFT has wrapped, or the model itself."""
    return model.get_base_model() if hasattr(model, "get_base_model") else model


def has_adapters(model: nn.Module) -> bool:
    """Whether PEFT has put adapters into a model."""
    return any(inside in module._modules for module in model.modules() for inside in WRAPPED)


def has_grown(model: PreTrainedModel) -> bool:
    """Whether any attention module has other sizes than its base."""
    return any(site.attention.dims != site.attention.base_dims for site in attention_sites(model))


def base_hash(model: nn.Module, *, growth: bool = False) -> str | None:
    """A mark of all weights as they are without adapters and, unless with `growth`, without growth.

    None where weights are not in memory.
    """
    model = without_adapters(model)
    sites = [] if growth else attention_sites(model)
    parts = {parameter: part for site in sites for parameter, part in base_parts(site)}
    weights = {name: parts.get(parameter, parameter) for name, parameter in base_parameters(model)}
    if any(values.device.type == "meta" for values in weights.values()):
        return None
    named = ((f"{name} {values.dtype} {tuple(values.shape)}", values) for name, values in weights.items())
    return digest(part for pair in named for part in pair)


def base_parameters(model: nn.Module) -> Iterator[tuple[str, nn.Parameter]]:
    """The parameters that are not an adapter's, by the names they have without adapters."""
    kept = [
        (f"{name}.", f"{name}.{inside}.")
        for name, module in model.named_modules()
        for inside in WRAPPED
        if inside in module._modules
    ]
    for name, parameter in model.named_parameters():
        if all(name.startswith(inside) for wrapper, inside in kept if name.startswith(wrapper)):
            for wrapped in WRAPPED:
                name = name.replace(f".{wrapped}.", ".")
            yield name, parameter
