"""Structural growth: wider heads and more heads for given weights, or in the form that changes no output.

Weights have the shapes of `blocks`, and the bias, where the projection has one, is the last row.
"""

import re
from collections.abc import Iterable, Sequence
from importlib.metadata import version
from typing import Any

import torch
from torch import nn
from torch.distributed.tensor import DTensor
from transformers import PreTrainedModel

from hf_grow.errors import HfGrowError
from hf_grow.fields import formerly
from hf_grow.modeling.growable_attention import AttentionDims, AttentionSite, attention_sites, projection_size
from hf_grow.surgery.base import base_hash, growth_parameters
from hf_grow.surgery.blocks import Blocks, read_blocks
from hf_grow.surgery.change import Change
from hf_grow.surgery.optimizer_state import CarriedState, carry_state, drop_parameters
from hf_grow.surgery.patch import is_widenable, require_growable

# The name of attached growth that was given none.
DEFAULT_NAME = "default"


@formerly(kind="attention_type")
@torch.inference_mode(False)
@torch.no_grad()
def widen_query_key(
    model: PreTrainedModel,
    layer: int,
    columns: int,
    *,
    query: torch.Tensor | None = None,
    key: torch.Tensor | None = None,
    attention_type: str = "self",
    generator: torch.Generator | None = None,
    optimizer: torch.optim.Optimizer | None = None,
) -> None:
    """Add query/key columns to every head of a layer.

    `query` is (n_heads, inputs, columns), `key` is (n_kv_heads, inputs, columns). Without `key` the new key columns
    are zero and no score changes; without `query` the new query columns are random, of the size of the present ones.
    """
    site = find_site(model, layer, attention_type)
    blocks = read_blocks(site)
    new = _new_blocks(site, blocks, {"query": query, "key": key}, positive(columns, "columns"), "key", generator)
    for role, block in new.items():
        blocks[role] = torch.cat((blocks[role], block), dim=2)
    _commit_one(model, site, blocks, _event(site, "query_key_columns", columns), optimizer)


@formerly(kind="attention_type")
@torch.inference_mode(False)
@torch.no_grad()
def widen_value(
    model: PreTrainedModel,
    layer: int,
    columns: int,
    *,
    value: torch.Tensor | None = None,
    output: torch.Tensor | None = None,
    attention_type: str = "self",
    generator: torch.Generator | None = None,
    optimizer: torch.optim.Optimizer | None = None,
) -> None:
    """Add value columns to every head of a layer.

    `value` is (n_kv_heads, inputs, columns), `output` is (n_heads, columns, outputs). Without `output` the new rows of
    the output projection are zero and nothing changes; without `value` the new value columns are random.
    """
    site = find_site(model, layer, attention_type)
    blocks = read_blocks(site)
    given = {"value": value, "output": output}
    new = _new_blocks(site, blocks, given, positive(columns, "columns"), "output", generator)
    blocks["value"] = torch.cat((blocks["value"], new["value"]), dim=2)
    blocks["output"] = torch.cat((blocks["output"], new["output"]), dim=1)
    _commit_one(model, site, blocks, _event(site, "value_columns", columns), optimizer)


@formerly(kind="attention_type")
@torch.inference_mode(False)
@torch.no_grad()
def add_heads(
    model: PreTrainedModel,
    layer: int,
    heads: int,
    *,
    query: torch.Tensor | None = None,
    key: torch.Tensor | None = None,
    value: torch.Tensor | None = None,
    output: torch.Tensor | None = None,
    attention_type: str = "self",
    generator: torch.Generator | None = None,
    optimizer: torch.optim.Optimizer | None = None,
) -> None:
    """Add heads of the layer's present sizes. With grouped keys, one head more is one key/value head and its queries.

    Without `output` the new rows of the output projection are zero and nothing changes; the other weights, where not
    given, are random, of the size of the present ones.
    """
    site = find_site(model, layer, attention_type)
    blocks = read_blocks(site)
    given = {"query": query, "key": key, "value": value, "output": output}
    new = _new_blocks(site, blocks, given, None, "output", generator, heads=positive(heads, "heads"))
    for role, block in new.items():
        blocks[role] = torch.cat((blocks[role], block), dim=0)
    _commit_one(model, site, blocks, _event(site, "heads", heads), optimizer)


@formerly(kind="attention_type")
@torch.inference_mode(False)
@torch.no_grad()
def drop_query_key(
    model: PreTrainedModel,
    layer: int,
    columns: Iterable[int],
    *,
    attention_type: str = "self",
    optimizer: torch.optim.Optimizer | None = None,
) -> None:
    """Remove the query/key columns with these indices from every head of a layer. Rotated columns must stay."""
    site = find_site(model, layer, attention_type)
    dims, rotary = site.attention.dims, site.attention.rotary_dim
    attached = attachment_name(model, None)
    if not isinstance(columns, Iterable):
        raise HfGrowError(f"columns must be a list of column numbers, not {columns!r}.")
    dropped = {_column_index(index, dims.qk_head_dim) for index in columns}
    if any(index < rotary for index in dropped):
        raise HfGrowError(f"The first {rotary} query/key columns of {site.name} are rotated and cannot be dropped.")
    own = site.attention.own_dims.qk_head_dim
    if attached is not None and any(index < own for index in dropped):
        raise HfGrowError(
            f"Of {site.name} only columns of attached growth can be dropped, those from {own} on: merge_growth(model) "
            "first."
        )
    kept = [index for index in range(dims.qk_head_dim) if index not in dropped]
    if not dropped or not kept:
        raise HfGrowError(f"Name some, but not all, of the {dims.qk_head_dim} query/key columns of {site.name}.")
    blocks = read_blocks(site)
    for role in ("query", "key"):
        blocks[role] = blocks[role][:, :, kept]
    change = Change(site, blocks, attach=attached, kept_columns=tuple(kept))
    commit(model, [change], _event(site, "query_key_columns", -len(dropped)), optimizer)


def find_site(model: PreTrainedModel, layer: int, attention_type: str = "self") -> AttentionSite:
    """The attention module of a layer, checked to be one that can be grown."""
    require_growable(model)
    if attention_type not in ("self", "cross"):
        raise HfGrowError(f"attention_type must be 'self' or 'cross', not {attention_type!r}.")
    sites = [site for site in attention_sites(model) if site.attention_type == attention_type]
    for site in sites:
        if isinstance(layer, int) and not isinstance(layer, bool) and site.layer == layer:
            check_whole(site)
            return site
    raise HfGrowError(
        f"There is no {attention_type}-attention in layer {layer!r}: the model has {len(sites)} such layers."
    )


def attachment_name(model: Any, attach: bool | str | None) -> str | None:
    """The name under which growth is attached beside the projections; None where it is put into them.

    `attach` is whether it is to be attached, or under which name. None: if there is attached growth already, or if the
    projections cannot take it, being quantised or under an adapter.
    """
    active, known = model.active_growth, model.config.growths
    if active is not None and attach is False:
        raise HfGrowError(
            f"The model has attached growth ({active!r}), beside which nothing is widened: merge it first."
        )
    if active is None and known and not (isinstance(attach, str) and attach not in known):
        raise HfGrowError(
            f"Growth is attached ({', '.join(known)}) but none of it is active: call model.set_growth(name) first, or "
            "attach more under another name."
        )
    if isinstance(attach, str):
        if attach != active and active is not None:
            raise HfGrowError(
                f"The growth {active!r} is active: call model.set_growth(None) before another one begins."
            )
        return check_name(attach)
    wanted = (active is not None or not is_widenable(model)) if attach is None else attach
    return (active or DEFAULT_NAME) if wanted else None


def check_name(name: Any) -> str:
    """Refuse a name under which no growth can be attached: it becomes part of the names of parameters."""
    if not isinstance(name, str) or not re.fullmatch(r"[A-Za-z0-9_-]+", name):
        raise HfGrowError(f"Growth is named by letters, digits, _ and -, not {name!r}.")
    if hasattr(nn.ModuleDict(), name):
        raise HfGrowError(f"Growth cannot be named {name!r}, as modules of torch use that name: take another.")
    return name


def _commit_one(
    model: PreTrainedModel,
    site: AttentionSite,
    blocks: Blocks,
    event: dict[str, Any],
    optimizer: torch.optim.Optimizer | None,
) -> None:
    commit(model, [Change(site, blocks, attach=attachment_name(model, None))], event, optimizer)


@torch.inference_mode(False)
@torch.no_grad()
def commit(
    model: PreTrainedModel,
    changes: Sequence[Change],
    event: dict[str, Any] | None,
    optimizer: torch.optim.Optimizer | None = None,
) -> CarriedState | None:
    """Put new weights into a model and record the event. All memory is taken before the first weight changes.

    An optimizer goes on with the new parameters in the places of the old ones.
    """
    ready = [change.prepared() for change in changes]
    replaced = [replacement for edit in ready for replacement in edit.replacements]
    added = [parameter for edit in ready for parameter in edit.added]
    removed = [parameter for edit in ready for parameter in edit.removed]
    carried = None
    if optimizer is not None:
        carried = carry_state(optimizer, replaced, added, present=model.parameters(), kin=growth_parameters(model))
    attached = next((change.attach for change in changes if change.attach is not None), None)
    history = _history(model, attached, event)
    for edit in ready:
        edit.apply()
    if attached is not None:
        model.config.growths[attached] = history
        model.set_growth(attached)
    else:
        model.config.growth_history = history
    if carried is not None:
        carried.apply(model.parameters() if added else ())
        drop_parameters(carried.optimizer, removed)
    model.config.record(attention_sites(model))
    return carried


def _history(model: Any, attached: str | None, event: dict[str, Any] | None) -> dict[str, Any]:
    """The history of a model, or of growth that is attached to it, with one event more."""
    history = model.config.growth_history
    if attached is not None:
        # Of growth of its own: what the base went through before is the base's.
        history = model.config.growths.get(attached, {**history, "base_hash": None, "events": []})
    if event is None:
        return history
    versions = {name: version(name) for name in ("hf-grow", "torch", "transformers")}
    # What growth is attached to are the projections as they are, with any growth that is merged into them.
    whole = attached is not None and not model.config.growths
    base = history.get("base_hash") or base_hash(model, growth=whole)
    return {**history, "base_hash": base, "events": [*history["events"], {**event, "versions": versions}]}


def _event(site: AttentionSite, what: str, count: int) -> dict[str, Any]:
    return {"kind": what, "layer": site.layer, "attention": site.attention_type, "count": count}


def _new_blocks(
    site: AttentionSite,
    blocks: Blocks,
    given: dict[str, torch.Tensor | None],
    columns: int | None,
    zero_role: str,
    generator: torch.Generator | None,
    heads: int | None = None,
) -> Blocks:
    """Checked new weights for the roles in `given`; where None, zero for `zero_role` and random for the others."""
    dims: AttentionDims = site.attention.dims
    new: Blocks = {}
    for role, weight in given.items():
        old = blocks[role]
        n_heads = dims.heads(role) if heads is None else heads * dims.heads(role) // dims.num_key_value_heads
        width = old.shape[1 if role == "output" else 2] if columns is None else columns
        shape = (n_heads, width, old.shape[2]) if role == "output" else (n_heads, old.shape[1], width)
        if weight is not None:
            new[role] = _checked(site, role, weight, shape, old)
        elif role == zero_role:
            new[role] = old.new_zeros(shape)
        else:
            new[role] = _random_like(site, role, old, shape, generator)
    _refuse_dead_saddle(site, new, given)
    return new


def _checked(site: AttentionSite, role: str, weight: Any, shape: tuple[int, ...], old: torch.Tensor) -> torch.Tensor:
    where = f"The new {role} weights for {site.name}"
    if not isinstance(weight, torch.Tensor) or not weight.is_floating_point():
        given = weight.dtype if isinstance(weight, torch.Tensor) else type(weight).__name__
        raise HfGrowError(f"{where} must be a tensor of floating-point numbers, not {given}.")
    if tuple(weight.shape) != shape:
        raise HfGrowError(f"{where} must have shape {shape}, not {tuple(weight.shape)}.")
    weight = weight.detach().to(device=old.device, dtype=old.dtype)
    if weight.device.type != "meta" and not bool(torch.isfinite(weight).all()):
        raise HfGrowError(f"{where} are not all finite in {old.dtype}.")
    return weight


def _random_like(
    site: AttentionSite, role: str, old: torch.Tensor, shape: tuple[int, ...], generator: torch.Generator | None
) -> torch.Tensor:
    """Normal weights with the spread of the present ones; new biases start at zero."""
    has_bias = old.shape[1] > _input_features(site, role)
    weights = old[:, :-1] if has_bias else old
    if generator is not None and not isinstance(generator, torch.Generator):
        raise HfGrowError(f"generator must be a torch.Generator, not {type(generator).__name__}.")
    device = old.device if generator is None else generator.device
    random = torch.randn(shape, generator=generator, dtype=torch.float32, device=device).to(old.device)
    spread = weights.float().square().mean().sqrt()
    # Where the present weights are all zero, so would the new ones be: take the usual size instead.
    random = random * torch.where(spread > 0, spread, torch.full_like(spread, 0.02))
    if has_bias:
        random[:, -1] = 0
    return random.to(old.dtype)


def _input_features(site: AttentionSite, role: str) -> int:
    for projection, roles in site.projections():
        if role in roles:
            return projection_size(projection)[1]
    raise AssertionError(role)


def _refuse_dead_saddle(site: AttentionSite, new: Blocks, given: dict[str, torch.Tensor | None]) -> None:
    """Two zero factors never get a gradient."""
    for pair in (("query", "key"), ("value", "output")):
        weights = [new[role] for role in pair if role in new]
        if len(weights) < 2 or all(given[role] is None for role in pair) or weights[0].device.type == "meta":
            continue
        if not any(bool(weight.any()) for weight in weights):
            raise HfGrowError(
                f"New {pair[0]} and {pair[1]} weights for {site.name} are both zero: they could never learn."
            )


def check_whole(site: AttentionSite) -> None:
    """Refuse weights that are not all in one place."""
    hooked = [module for module, _ in site.projections() if hasattr(module, "_hf_hook")]
    if any(module.weight.device.type == "meta" for module in hooked):
        raise HfGrowError(f"The weights of {site.name} are offloaded; load the model without offloading to grow it.")
    if any(isinstance(parameter, DTensor) for module, _ in site.projections() for parameter in module.parameters()):
        raise HfGrowError(f"The weights of {site.name} are sharded; change the model before it is sharded.")


def positive(size: Any, name: str) -> int:
    """A positive integer, or a clear error."""
    if not isinstance(size, int) or isinstance(size, bool) or size < 1:
        raise HfGrowError(f"{name} must be a positive integer, not {size!r}.")
    return size


def _column_index(index: Any, width: int) -> int:
    if not isinstance(index, int) or isinstance(index, bool) or not 0 <= index < width:
        raise HfGrowError(f"{index!r} is not a query/key column: they are numbered 0 to {width - 1}.")
    return index
