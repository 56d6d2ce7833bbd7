"""What 0.1 wrote of frozen models with growth: whole widened projections, and LoRA on these.

There growth was part of the projections, and LoRA sat on old and new columns alike. Now growth stands beside them, and
LoRA sits on the old ones; what it did to the new ones goes into these, so that the model computes the same.
"""

from collections.abc import Iterator, Mapping
from typing import Any, NamedTuple

import torch
from torch import Tensor

from hf_grow.files import digest
from hf_grow.modeling.growable_attention import AttentionSite, attention_sites, in_rows, projection_size
from hf_grow.modeling.size_record import size_record
from hf_grow.surgery.base import base_parameters, without_adapters
from hf_grow.surgery.blocks import (
    Blocks,
    Parts,
    divided,
    fuse_rows,
    growth_parts,
    leading,
    part_weights,
    read_blocks,
    split_rows,
    write_blocks,
)

Tensors = Mapping[str, Tensor]


class _Holder(NamedTuple):
    """A projection, the roles it holds, and the names of its parameters and of LoRA's, where it has some."""

    projection: Any
    roles: tuple[str, ...]
    weight: str
    bias: str | None
    lora_a: str | None
    lora_b: str | None
    scaling: float


def is_former(model: Any, tensors: Tensors) -> bool:
    """Whether these weights of a model, whose growth is attached, are from when growth was part of the projections."""
    for site in attention_sites(without_adapters(model)):
        for holder in _holders(model, site):
            outputs, inputs = projection_size(holder.projection)
            a, b = (tensors.get(name or "") for name in (holder.lora_a, holder.lora_b))
            if holder.weight in tensors or (a is not None and a.shape[1] != inputs):
                return True
            if b is not None and b.shape[0] != outputs:
                return True
    return False


@torch.no_grad()
def converted(model: Any, tensors: Tensors, *, fold: bool = True) -> dict[str, Tensor]:
    """Such weights (or states of an optimizer for them, without `fold`) as a model with attached growth has them."""
    now = dict(tensors)
    for site in attention_sites(without_adapters(model)):
        parts: Parts = {}
        biases: Parts = {}
        for holder in _holders(model, site):
            _convert_holder(site, holder, now, parts, biases, fold)
        if site.growth is None:
            continue
        if not parts and fold:
            continue
        prefix = _name_of(model, next(site.growth.parameters())).rpartition(".")[0]
        whole = {
            place: torch.cat((part, biases[place]), 1) if place in biases else part for place, part in parts.items()
        }
        now |= {f"{prefix}.{name}": weight for name, weight in part_weights(site, whole).items()}
    return now


def former_mark(model: Any) -> str:
    """As `base_hash(model, growth=True)` was when growth was part of the projections."""
    inner = without_adapters(model)
    wide: dict[Tensor, Tensor] = {}
    for site in attention_sites(inner):
        for projection, weight, bias in write_blocks(site, read_blocks(site)):
            wide[projection.weight] = in_rows(projection, weight.to(projection.weight.dtype))
            if bias is not None:
                wide[projection.bias] = bias.to(projection.bias.dtype)
    weights = ((name, wide.get(parameter, parameter)) for name, parameter in base_parameters(inner))
    return digest(part for name, weight in weights for part in (f"{name} {weight.dtype} {tuple(weight.shape)}", weight))


def former_sizes(model: Any) -> dict[str, Any]:
    """The record of sizes of a model when growth was part of the projections."""
    inner = without_adapters(model)
    kept = {name: inner.config.hf_grow[name] for name in ("model_type", "vocab_size")}
    return kept | size_record((site, site.attention.dims) for site in attention_sites(inner))


def _convert_holder(
    site: AttentionSite, holder: _Holder, now: dict[str, Tensor], parts: Parts, biases: Parts, fold: bool
) -> None:
    """Take the wide tensors of one projection out of `now`, put back what is LoRA's own, and note what is growth's."""
    weight, bias = now.pop(holder.weight, None), now.pop(holder.bias or "", None)
    own_dims = site.attention.own_dims
    if weight is not None:
        parts |= divided(_wide_blocks(site, holder.roles, in_rows(holder.projection, weight)), own_dims)
    elif site.growth is not None and fold:
        present = growth_parts(site.growth)
        has_bias = holder.bias is not None
        mine = {place: part for place, part in present.items() if place[0] in holder.roles}
        parts |= {place: part[:, :-1] if has_bias and place[0] != "output" else part for place, part in mine.items()}
        biases |= {place: part[:, -1:] for place, part in mine.items() if has_bias and place[0] != "output"}
    if bias is not None and holder.roles != ("output",):
        biases |= divided(_wide_blocks(site, holder.roles, bias[:, None]), own_dims)
    if holder.lora_a is None or holder.lora_b is None or holder.lora_a not in now or holder.lora_b not in now:
        return
    a, b = now[holder.lora_a], now[holder.lora_b]
    wide = _wide_blocks(site, holder.roles, a if holder.roles == ("output",) else b)
    kept: Blocks = {role: leading(block, role, own_dims) for role, block in wide.items()}
    other = b if holder.roles == ("output",) else a
    if holder.roles == ("output",):
        now[holder.lora_a] = kept["output"].flatten(0, 1).T.contiguous()
    else:
        now[holder.lora_b] = fuse_rows(site, kept, holder.roles).contiguous()
    for place, new in divided(wide, own_dims).items() if fold else ():
        # (heads, columns, rank) times (rank, outputs), or (inputs, rank) times (heads, rank, columns).
        change = new @ other.T if place[0] == "output" else other.T @ new
        if bool(change.any()):
            parts[place] = parts[place] + holder.scaling * change


def _wide_blocks(site: AttentionSite, roles: tuple[str, ...], rows: Tensor) -> Blocks:
    """A tensor with a row for each output of a widened projection, or a column for each input of the output one."""
    dims = site.attention.dims
    if roles == ("output",):
        return {"output": rows.T.reshape(dims.heads("output"), dims.size("output"), -1)}
    parts = split_rows(site, rows, roles, dims)
    return {role: part.transpose(1, 2) for role, part in zip(roles, parts, strict=True)}


def converted_optimizer(model: Any, saved: dict[str, Any], tensors: Tensors) -> dict[str, Any]:
    """The state of an optimizer that 0.1 saved with such weights, for what learns in a model with attached growth."""
    former = list(_former_order(model))
    present = dict(model.named_parameters())
    groups = [[name for name in former if (present[name].ndim > 1) is matrices] for matrices in (True, False)]
    numbers = {name: number for number, name in enumerate(name for group in groups for name in group)}
    learning = {name: value for name, value in model.named_parameters() if value.requires_grad}
    order = [[name for name, value in learning.items() if (value.ndim > 1) is matrices] for matrices in (True, False)]
    states: dict[str, dict[str, Any]] = {name: {} for name in learning}
    by_key: dict[str, dict[str, Any]] = {}
    for name, number in numbers.items():
        for key, value in saved["state"].get(number, {}).items():
            by_key.setdefault(key, {})[name] = value
    for key, values in by_key.items():
        plain = all(isinstance(value, Tensor) and value.shape == tensors[name].shape for name, value in values.items())
        moved = converted(model, values, fold=False) if plain else {}
        for name in learning:
            # A number for each parameter, such as that of the step, is the same for all.
            states[name][key] = moved[name] if plain else next(iter(values.values()))
    first = 0
    groups_now = []
    for group, names in zip(saved["param_groups"], order, strict=True):
        groups_now.append({**group, "params": list(range(first, first + len(names)))})
        first += len(names)
    ordered = [name for group in order for name in group]
    return {"state": {number: states[name] for number, name in enumerate(ordered)}, "param_groups": groups_now}


def _former_order(model: Any) -> Iterator[str]:
    """The names of what an optimizer of 0.1 held: adapters first, then all projections of attention."""
    base = {parameter for _, parameter in base_parameters(model)}
    growths = {
        parameter
        for site in attention_sites(without_adapters(model))
        for growth in site.attention.attached.values()
        for parameter in growth.parameters()
    }
    for name, parameter in model.named_parameters():
        if parameter.requires_grad and parameter not in base | growths:
            yield name
    for site in attention_sites(without_adapters(model)):
        for holder in _holders(model, site):
            yield holder.weight
            if holder.projection.bias is not None:
                yield _name_of(model, holder.projection.bias)


def _holders(model: Any, site: AttentionSite) -> Iterator[_Holder]:
    for path, roles in (*site.layout.inputs.items(), (site.layout.output, ("output",))):
        wrapper = projection = site.projection(path)
        while hasattr(projection, "base_layer"):
            projection = projection.base_layer
        lora: tuple[str | None, ...] = (None, None)
        adapters = list(getattr(wrapper, "lora_A", {}))
        if adapters:
            lora = tuple(_name_of(model, getattr(wrapper, side)[adapters[0]].weight) for side in ("lora_A", "lora_B"))
        yield _Holder(
            projection=projection,
            roles=roles,
            weight=_name_of(model, projection.weight),
            bias=None if projection.bias is None else _name_of(model, projection.bias),
            lora_a=lora[0],
            lora_b=lora[1],
            scaling=wrapper.scaling[adapters[0]] if adapters else 0.0,
        )


def _name_of(model: Any, parameter: Tensor) -> str:
    return next(name for name, each in model.named_parameters() if each is parameter)
