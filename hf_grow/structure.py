"""Structural growth: wider heads and more heads for given weights, or in the form that changes no output.

Weights follow the maths: query, key and value are (heads, inputs, columns), where a projection with a bias has one
input more and the bias is the last row; output is (heads, columns, outputs).
"""

from collections.abc import Iterable, Iterator, Sequence
from dataclasses import dataclass
from importlib.metadata import version
from typing import Any

import torch

from hf_grow.errors import HfGrowError
from hf_grow.modeling.growable_attention import (
    AttentionDims,
    AttentionSite,
    attention_sites,
    install,
    new_parameters,
    weight_rows,
)
from hf_grow.modeling.growable_model import GrowableModel
from hf_grow.patch import check_site

Blocks = dict[str, torch.Tensor]


@torch.inference_mode(False)
@torch.no_grad()
def widen_query_key(
    model: Any,
    layer: int,
    columns: int,
    *,
    query: torch.Tensor | None = None,
    key: torch.Tensor | None = None,
    kind: str = "self",
    generator: torch.Generator | None = None,
) -> None:
    """Add query/key columns to every head of a layer.

    `query` is (n_heads, inputs, columns), `key` is (n_kv_heads, inputs, columns). Without `key` the new key columns
    are zero and no score changes; without `query` the new query columns are random, of the size of the present ones.
    """
    site = find_site(model, layer, kind)
    blocks = read_blocks(site)
    new = _new_blocks(site, blocks, {"query": query, "key": key}, positive(columns, "columns"), "key", generator)
    for role, block in new.items():
        blocks[role] = torch.cat((blocks[role], block), dim=2)
    commit(model, [Change(site, blocks)], _event(site, "query_key_columns", columns))


@torch.inference_mode(False)
@torch.no_grad()
def widen_value(
    model: Any,
    layer: int,
    columns: int,
    *,
    value: torch.Tensor | None = None,
    output: torch.Tensor | None = None,
    kind: str = "self",
    generator: torch.Generator | None = None,
) -> None:
    """Add value columns to every head of a layer.

    `value` is (n_kv_heads, inputs, columns), `output` is (n_heads, columns, outputs). Without `output` the new rows of
    the output projection are zero and nothing changes; without `value` the new value columns are random.
    """
    site = find_site(model, layer, kind)
    blocks = read_blocks(site)
    given = {"value": value, "output": output}
    new = _new_blocks(site, blocks, given, positive(columns, "columns"), "output", generator)
    blocks["value"] = torch.cat((blocks["value"], new["value"]), dim=2)
    blocks["output"] = torch.cat((blocks["output"], new["output"]), dim=1)
    commit(model, [Change(site, blocks)], _event(site, "value_columns", columns))


@torch.inference_mode(False)
@torch.no_grad()
def add_heads(
    model: Any,
    layer: int,
    heads: int,
    *,
    query: torch.Tensor | None = None,
    key: torch.Tensor | None = None,
    value: torch.Tensor | None = None,
    output: torch.Tensor | None = None,
    kind: str = "self",
    generator: torch.Generator | None = None,
) -> None:
    """Add heads of the layer's present sizes. With grouped keys, one head more is one key/value head and its queries.

    Without `output` the new rows of the output projection are zero and nothing changes; the other weights, where not
    given, are random, of the size of the present ones.
    """
    site = find_site(model, layer, kind)
    blocks = read_blocks(site)
    given = {"query": query, "key": key, "value": value, "output": output}
    new = _new_blocks(site, blocks, given, None, "output", generator, heads=positive(heads, "heads"))
    for role, block in new.items():
        blocks[role] = torch.cat((blocks[role], block), dim=0)
    commit(model, [Change(site, blocks)], _event(site, "heads", heads))


@torch.inference_mode(False)
@torch.no_grad()
def drop_query_key(model: Any, layer: int, columns: Iterable[int], *, kind: str = "self") -> None:
    """Remove the query/key columns with these indices from every head of a layer. Rotated columns must stay."""
    site = find_site(model, layer, kind)
    dims, rotary = site.attention.dims, site.attention.rotary_dim
    if not isinstance(columns, Iterable):
        raise HfGrowError(f"columns must be a list of column numbers, not {columns!r}.")
    dropped = {_column_index(index, dims.qk_head_dim) for index in columns}
    if any(index < rotary for index in dropped):
        raise HfGrowError(f"The first {rotary} query/key columns of {site.name} are rotated and cannot be dropped.")
    kept = [index for index in range(dims.qk_head_dim) if index not in dropped]
    if not dropped or not kept:
        raise HfGrowError(f"Name some, but not all, of the {dims.qk_head_dim} query/key columns of {site.name}.")
    blocks = read_blocks(site)
    for role in ("query", "key"):
        blocks[role] = blocks[role][:, :, kept]
    commit(model, [Change(site, blocks)], _event(site, "query_key_columns", -len(dropped)))


def find_site(model: Any, layer: int, kind: str = "self") -> AttentionSite:
    """The attention module of a layer, checked to be one that can be grown."""
    if not isinstance(model, GrowableModel):
        raise HfGrowError(f"{type(model).__name__} is not growable yet: call hf_grow.make_growable(model) first.")
    if kind not in ("self", "cross"):
        raise HfGrowError(f"kind must be 'self' or 'cross', not {kind!r}.")
    sites = [site for site in attention_sites(model) if site.kind == kind]  # type: ignore[arg-type]
    for site in sites:
        if isinstance(layer, int) and not isinstance(layer, bool) and site.layer == layer:
            check_site(site)
            _check_not_offloaded(site)
            return site
    raise HfGrowError(f"There is no {kind}-attention in layer {layer!r}: the model has {len(sites)} such layers.")


def read_blocks(site: AttentionSite) -> Blocks:
    """The weights of an attention module by role, in the shapes of this file's first lines."""
    blocks: Blocks = {}
    dims: AttentionDims = site.attention.dims
    for projection, roles in site.projections():
        rows = weight_rows(projection).detach()
        if roles == ("output",):
            blocks["output"] = rows.T.reshape(dims.heads("output"), dims.size("output"), -1)
            continue
        if projection.bias is not None:
            rows = torch.cat((rows, projection.bias.detach()[:, None]), dim=1)
        for role, part in zip(roles, _split(site, rows, roles, dims), strict=True):
            blocks[role] = part.transpose(1, 2)
    return blocks


def _split(site: AttentionSite, rows: torch.Tensor, roles: tuple[str, ...], dims: AttentionDims) -> list[torch.Tensor]:
    """(out, inputs) of a fused projection → one (heads, width, inputs) for each role."""
    if site.layout.per_head:
        per_head = rows.reshape(dims.heads(roles[0]), -1, rows.shape[1])
        return list(per_head.split([dims.size(role) for role in roles], dim=1))
    parts = rows.split([dims.heads(role) * dims.size(role) for role in roles])
    return [part.reshape(dims.heads(role), -1, rows.shape[1]) for role, part in zip(roles, parts, strict=True)]


def _fuse(site: AttentionSite, blocks: Blocks, roles: tuple[str, ...]) -> torch.Tensor:
    """The inverse of `_split`."""
    parts = [blocks[role].transpose(1, 2) for role in roles]
    if site.layout.per_head:
        return torch.cat(parts, dim=1).flatten(0, 1)
    return torch.cat([part.flatten(0, 1) for part in parts])


@dataclass(frozen=True)
class Change:
    """New weights for one attention module; its sizes follow from their shapes."""

    site: AttentionSite
    blocks: Blocks

    @property
    def dims(self) -> AttentionDims:
        """The sizes after the change."""
        query, value = self.blocks["query"], self.blocks["value"]
        scaling = self.site.attention.scaling
        return AttentionDims(query.shape[0], self.blocks["key"].shape[0], query.shape[2], value.shape[2], scaling)

    def parameters(self) -> Iterator[tuple[Any, dict[str, torch.nn.Parameter]]]:
        """Each projection that changes, with its new parameters."""
        for projection, roles in self.site.projections():
            bias = None
            if roles == ("output",):
                weight = self.blocks["output"].flatten(0, 1).T
            else:
                weight = _fuse(self.site, self.blocks, roles)
                if projection.bias is not None:
                    weight, bias = weight[:, :-1], weight[:, -1]
            old = weight_rows(projection)
            if weight.shape != old.shape or (weight.device.type != "meta" and not _same(projection, weight, bias)):
                if weight.device.type != "meta" and not bool(torch.isfinite(weight).all()):
                    raise HfGrowError(f"The new weights of {self.site.name} would not be finite; nothing was changed.")
                yield projection, new_parameters(projection, weight, bias)


def _same(projection: Any, weight: torch.Tensor, bias: torch.Tensor | None) -> bool:
    return torch.equal(weight, weight_rows(projection)) and (bias is None or torch.equal(bias, projection.bias))


@torch.inference_mode(False)
@torch.no_grad()
def commit(model: Any, changes: Sequence[Change], event: dict[str, Any]) -> None:
    """Put new weights into a model and record the event. All memory is taken before the first weight changes."""
    sizes = [change.dims for change in changes]
    ready = [pair for change in changes for pair in change.parameters()]
    versions = {name: version(name) for name in ("hf-grow", "torch", "transformers")}
    for projection, parameters in ready:
        install(projection, parameters)
    for change, dims in zip(changes, sizes, strict=True):
        change.site.attention.set_dims(dims)
    model.config.record(attention_sites(model))
    model.growth_history["events"].append({**event, "versions": versions})


def _event(site: AttentionSite, what: str, count: int) -> dict[str, Any]:
    return {"kind": what, "layer": site.layer, "attention": site.kind, "count": count}


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
        kind = weight.dtype if isinstance(weight, torch.Tensor) else type(weight).__name__
        raise HfGrowError(f"{where} must be a tensor of floating-point numbers, not {kind}.")
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
            return weight_rows(projection).shape[1]
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


def _check_not_offloaded(site: AttentionSite) -> None:
    hooked = [module for module, _ in site.projections() if hasattr(module, "_hf_hook")]
    if any(module.weight.device.type == "meta" for module in hooked):
        raise HfGrowError(f"The weights of {site.name} are offloaded; load the model without offloading to grow it.")


def positive(size: Any, name: str) -> int:
    """A positive integer, or a clear error."""
    if not isinstance(size, int) or isinstance(size, bool) or size < 1:
        raise HfGrowError(f"{name} must be a positive integer, not {size!r}.")
    return size


def _column_index(index: Any, width: int) -> int:
    if not isinstance(index, int) or isinstance(index, bool) or not 0 <= index < width:
        raise HfGrowError(f"{index!r} is not a query/key column: they are numbered 0 to {width - 1}.")
    return index
