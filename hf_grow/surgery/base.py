"""The base model inside a grown one: growth stands behind its columns and heads, so the two can be told apart."""

from collections.abc import Iterator
from typing import Any, TypeAlias

from peft import PeftModel
from torch import Tensor, nn
from transformers import PreTrainedModel

from hf_grow.files import digest
from hf_grow.modeling.attached_growth import AttachedGrowth
from hf_grow.modeling.growable_attention import AttentionSite, attention_sites, in_rows
from hf_grow.surgery.blocks import leading, own_blocks, write_blocks
from hf_grow.surgery.quantized import values

# Stock or growable, also where PEFT has wrapped it.
Model: TypeAlias = PreTrainedModel | PeftModel
# Where PEFT's wrappers keep the module they adapt, the one they train a copy of, and an embedding with trained tokens.
WRAPPED = ("base_layer", "original_module", "token_adapter")


def base_parts(site: AttentionSite) -> Iterator[tuple[nn.Parameter, Tensor]]:
    """The parameters of an attention module's projections, each with what it would be without merged growth."""
    blocks = {role: leading(block, role, site.attention.base_dims) for role, block in own_blocks(site).items()}
    for projection, weight, bias in write_blocks(site, blocks):
        yield projection.weight, in_rows(projection, weight)
        if bias is not None:
            yield projection.bias, bias


def without_adapters(model: Model) -> Any:
    """The model that PEFT has wrapped, or the model itself."""
    return model.get_base_model() if hasattr(model, "get_base_model") else model


def has_adapters(model: nn.Module) -> bool:
    """Whether PEFT has put adapters into a model."""
    return any(inside in module._modules for module in model.modules() for inside in WRAPPED)


def has_merged_growth(model: nn.Module) -> bool:
    """Whether the projections of any attention module have other sizes than their base."""
    return any(_is_merged(site) for site in attention_sites(model))


def has_grown(model: nn.Module) -> bool:
    """Whether a model has growth, attached and active, or merged."""
    return has_merged_growth(model) or any(site.growth is not None for site in attention_sites(model))


def growth_parameters(model: nn.Module) -> list[nn.Parameter]:
    """The parameters of the attached growth that is active, for a group of their own in an optimizer."""
    growths = [site.growth for site in attention_sites(model)]
    return [parameter for growth in growths if growth is not None for parameter in growth.parameters()]


def base_hash(model: nn.Module, *, growth: bool = False) -> str | None:
    """A mark of all weights as they are without adapters and, unless with `growth`, without growth.

    Without attached growth but with growth that is merged, of the weights before that. None where weights are not in
    memory.
    """
    model = without_adapters(model)
    attached = list(attached_parameters(model))
    sites = [] if growth or attached else attention_sites(model)
    parts = {parameter: part for site in sites if _is_merged(site) for parameter, part in base_parts(site)}
    weights = dict(base_parameters(model)) | (dict(attached) if growth else {})
    for site in sites:
        # Learnt by growth that is merged.
        weights.pop(f"{site.name}.score_scale", None)
    if any(parameter.device.type == "meta" for parameter in weights.values()):
        return None
    owners = {id(parameter): (module, name) for module in model.modules() for name, parameter in _own(module)}
    named = ((name, parts.get(weight, values(*owners[id(weight)]))) for name, weight in weights.items())
    return digest(part for name, weight in named for part in (f"{name} {weight.dtype} {tuple(weight.shape)}", weight))


def _is_merged(site: AttentionSite) -> bool:
    return site.attention.own_dims != site.attention.base_dims


def _own(module: nn.Module) -> Iterator[tuple[str, nn.Parameter]]:
    return ((name, parameter) for name, parameter in module._parameters.items() if parameter is not None)


def base_parameters(model: nn.Module) -> Iterator[tuple[str, nn.Parameter]]:
    """The parameters that are neither an adapter's nor attached growth, by the names they have without adapters."""
    kept = {
        f"{name}.": tuple(f"{name}.{inside}." for inside in WRAPPED if inside in module._modules)
        for name, module in model.named_modules()
        if any(inside in module._modules for inside in WRAPPED)
    }
    attached = {name for name, _ in attached_parameters(model)}
    for name, parameter in model.named_parameters():
        if name in attached:
            continue
        if all(name.startswith(insides) for wrapper, insides in kept.items() if name.startswith(wrapper)):
            for wrapped in WRAPPED:
                name = name.replace(f".{wrapped}.", ".")
            yield name, parameter


def attached_parameters(model: nn.Module) -> Iterator[tuple[str, nn.Parameter]]:
    """The parameters of all attached growth, active or not, by name."""
    for prefix, module in model.named_modules():
        if isinstance(module, AttachedGrowth):
            yield from ((f"{prefix}.{name}", parameter) for name, parameter in module.named_parameters())
