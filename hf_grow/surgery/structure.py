"""Structural growth: wider heads and more heads for given weights, or in the form that changes no output.

Weights have the shapes of `blocks`, and the bias, where the projection has one, is the last row.
"""

from collections.abc import Iterable, Iterator, Sequence
from dataclasses import dataclass
from importlib.metadata import version
from typing import Any

import torch
from transformers import PreTrainedModel

from hf_grow.errors import HfGrowError
from hf_grow.fields import formerly
from hf_grow.modeling.growable_attention import (
    AttentionDims,
    AttentionSite,
    attention_sites,
    in_rows,
    install,
    new_parameters,
    weight_rows,
)
from hf_grow.surgery.base import base_hash
from hf_grow.surgery.blocks import Blocks, leading, read_blocks, write_blocks
from hf_grow.surgery.optimizer_state import CarriedState, Replacement, carry_state
from hf_grow.surgery.patch import check_site, require_growable


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
    commit(model, [Change(site, blocks)], _event(site, "query_key_columns", columns), optimizer)


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
    commit(model, [Change(site, blocks)], _event(site, "value_columns", columns), optimizer)


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
    commit(model, [Change(site, blocks)], _event(site, "heads", heads), optimizer)


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
    change = Change(site, blocks, kept_columns=tuple(kept))
    commit(model, [change], _event(site, "query_key_columns", -len(dropped)), optimizer)


def find_site(model: PreTrainedModel, layer: int, attention_type: str = "self") -> AttentionSite:
    """The attention module of a layer, checked to be one that can be grown."""
    require_growable(model)
    if attention_type not in ("self", "cross"):
        raise HfGrowError(f"attention_type must be 'self' or 'cross', not {attention_type!r}.")
    sites = [site for site in attention_sites(model) if site.attention_type == attention_type]
    for site in sites:
        if isinstance(layer, int) and not isinstance(layer, bool) and site.layer == layer:
            check_site(site)
            _check_not_offloaded(site)
            return site
    raise HfGrowError(
        f"There is no {attention_type}-attention in layer {layer!r}: the model has {len(sites)} such layers."
    )


@dataclass(frozen=True)
class Change:
    """New weights for one attention module; its sizes follow from their shapes.

    Present entries stay in front. Where they do not: `kept_columns` are the query/key columns that stay, `remade` are
    the roles in which every weight is another, and of `kept` sizes is the leading part that stays. `scaling` is the new
    softmax scale where it changes.
    """

    site: AttentionSite
    blocks: Blocks
    kept_columns: tuple[int, ...] | None = None
    remade: tuple[str, ...] = ()
    kept: AttentionDims | None = None
    scaling: float | None = None

    @property
    def dims(self) -> AttentionDims:
        """The sizes after the change."""
        query, value = self.blocks["query"], self.blocks["value"]
        scaling = self.site.attention.scaling if self.scaling is None else self.scaling
        return AttentionDims(query.shape[0], self.blocks["key"].shape[0], query.shape[2], value.shape[2], scaling)

    def replacements(self) -> Iterator[tuple[Any, dict[str, Replacement]]]:
        """Each projection that changes, with what takes the place of its parameters."""
        origins = write_blocks(self.site, self._origins())
        written = write_blocks(self.site, self.blocks)
        for (projection, weight, bias), (_, weight_origin, bias_origin) in zip(written, origins, strict=True):
            if weight.shape == weight_rows(projection).shape and _same(projection, weight, bias):
                continue
            if weight.device.type != "meta" and not bool(torch.isfinite(weight).all()):
                raise HfGrowError(f"The new weights of {self.site.name} would not be finite; nothing was changed.")
            new = new_parameters(projection, weight, bias)
            lines = _lines(in_rows(projection, weight_origin), projection.weight.shape[1])
            parameters = {"weight": Replacement(projection.weight, new["weight"], lines)}
            if bias_origin is not None:
                parameters["bias"] = Replacement(projection.bias, new["bias"], (bias_origin.clone(),))
            yield projection, parameters

    def _origins(self) -> Blocks:
        """For each entry of the new weights, the place of the present one it continues; -1 for a new one."""
        present = read_blocks(self.site, _places)
        origins: Blocks = {}
        for role, block in self.blocks.items():
            origins[role] = torch.full(block.shape, -1, device=block.device)
            if role in self.remade:
                continue
            kept = present[role] if self.kept is None else leading(present[role], role, self.kept)
            if role in ("query", "key") and self.kept_columns is not None:
                kept = kept[:, :, list(self.kept_columns)]
            heads, rows, columns = kept.shape
            origins[role][:heads, :rows, :columns] = kept
        return origins


def _places(parameter: torch.Tensor) -> torch.Tensor:
    """The number of every entry."""
    return torch.arange(parameter.numel(), device=parameter.device).view(parameter.shape)


def _lines(origin: torch.Tensor, columns: int) -> tuple[torch.Tensor, torch.Tensor]:
    """From the old place of every entry of a matrix to the old row of every row and the old column of every column."""
    rows, places = origin.amax(1) // columns, origin.amax(0)
    return rows, torch.where(places >= 0, places % columns, -1)


def _same(projection: Any, weight: torch.Tensor, bias: torch.Tensor | None) -> bool:
    if weight.device.type == "meta":
        return True
    return torch.equal(weight, weight_rows(projection)) and (bias is None or torch.equal(bias, projection.bias))


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
    sizes = [change.dims for change in changes]
    ready = [pair for change in changes for pair in change.replacements()]
    replaced = [replacement for _, parameters in ready for replacement in parameters.values()]
    carried = None if optimizer is None else carry_state(optimizer, replaced)
    versions = {name: version(name) for name in ("hf-grow", "torch", "transformers")}
    first = event is not None and model.growth_history.get("base_hash") is None
    base = base_hash(model) if first else None
    for projection, parameters in ready:
        install(projection, {name: replacement.new for name, replacement in parameters.items()})
    for change, dims in zip(changes, sizes, strict=True):
        change.site.attention.set_dims(dims)
    if carried is not None:
        carried.apply()
    model.config.record(attention_sites(model))
    if first:
        model.growth_history["base_hash"] = base
    if event is not None:
        model.growth_history["events"].append({**event, "versions": versions})
    return carried


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
