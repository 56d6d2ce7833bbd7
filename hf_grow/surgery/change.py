"""New weights for one attention module, made ready in memory before anything changes: in its projections, or beside."""

from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass
from functools import partial
from typing import Any

import torch
from torch import Tensor, nn
from torch.nn import functional as F

from hf_grow.errors import HfGrowError
from hf_grow.modeling.attached_growth import SCALE, AttachedGrowth, attach, detach
from hf_grow.modeling.growable_attention import (
    AttentionDims,
    AttentionSite,
    in_rows,
    install,
    new_parameter,
    new_parameters,
    weight_rows,
)
from hf_grow.surgery.blocks import (
    Blocks,
    Parts,
    divided,
    growth_parts,
    leading,
    own_blocks,
    part_weights,
    write_blocks,
)
from hf_grow.surgery.optimizer_state import Added, Replacement
from hf_grow.surgery.patch import check_site


@dataclass(frozen=True)
class Edit:
    """A change that is ready: parameters in the places of others, more and fewer, and how to put it into effect."""

    replacements: list[Replacement]
    added: list[Added]
    apply: Callable[[], None]
    removed: Sequence[nn.Parameter] = ()


@dataclass(frozen=True)
class Change:
    """New weights for one attention module; its sizes follow from their shapes.

    attach        the name of the growth beside the projections that gets what is new; None: the projections get it
    scale         a learnable scale (1, 1) or (heads, 1) that it gets, or another one than it has

    Present entries stay in front. Where they do not: `kept_columns` are the query/key columns that stay, `remade` are
    the roles in which every weight is another, and of `kept` sizes is the leading part that stays. `scaling` is the new
    softmax scale where it changes.
    """

    site: AttentionSite
    blocks: Blocks
    attach: str | None = None
    scale: Tensor | None = None
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

    def prepared(self) -> Edit:
        """All that is new, in memory; refused where it cannot be put in."""
        for role, block in self.blocks.items():
            self._check_finite(role, block)
        return self._merged() if self.attach is None else self._attached(self.attach)

    def _check_finite(self, what: str, values: Tensor) -> None:
        if values.device.type != "meta" and not bool(torch.isfinite(values).all()):
            raise HfGrowError(f"The new {what} weights of {self.site.name} would not be finite; nothing was changed.")

    def _merged(self) -> Edit:
        check_site(self.site)
        projections = list(self._replaced_projections())
        scale, replaced_scale, added = self._scaled(self.site.attention.score_scale)
        edit = partial(_install, self.site.attention, self.dims, projections, scale)
        replacements = [replacement for _, named in projections for replacement in named.values()]
        return Edit(replacements + replaced_scale, added, edit)

    def _scaled(self, present: nn.Parameter | None) -> tuple[nn.Parameter | None, list[Replacement], list[Added]]:
        """The learnable scale after the change, if there is one, and what an optimizer must know of it."""
        if self.scale is None:
            return present, [], []
        scale = _learnable(self.scale)
        if present is not None:
            return scale, [_replaced(present, scale)], []
        query = next(projection for projection, roles in self.site.projections() if "query" in roles)
        return scale, [], [Added(scale, query.weight)]

    def _replaced_projections(self) -> Iterator[tuple[Any, dict[str, Replacement]]]:
        """Each projection that changes, with what takes the place of its parameters."""
        origins = write_blocks(self.site, self._origins())
        written = write_blocks(self.site, self.blocks)
        for (projection, weight, bias), (_, weight_origin, bias_origin) in zip(written, origins, strict=True):
            if weight.shape == weight_rows(projection).shape and _same(projection, weight, bias):
                continue
            new = new_parameters(projection, weight, bias)
            for parameter in new.values():
                # A coarser precision may not reach as far.
                self._check_finite("projection", parameter)
            lines = _lines(in_rows(projection, weight_origin), projection.weight.shape[1])
            parameters = {"weight": Replacement(projection.weight, new["weight"], lines)}
            if bias_origin is not None:
                parameters["bias"] = Replacement(projection.bias, new["bias"], (bias_origin.clone(),))
            yield projection, parameters

    def _origins(self) -> Blocks:
        """For each entry of the new weights, the place of the present one it continues; -1 for a new one."""
        present = own_blocks(self.site, _places)
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

    def _attached(self, name: str) -> Edit:
        """A growth module with all that stands behind the projections, in place of the present one of that name."""
        if self.remade:
            raise HfGrowError(
                f"Growth beside the projections of {self.site.name} leaves them as they are, but their "
                f"{' and '.join(self.remade)} weights are to be made anew: merge_growth(model) first, or append."
            )
        attention = self.site.attention
        own, present = attention.own_dims, attention.attached.get(name)
        parts = divided(self.blocks, own)
        origins = {} if present is None else part_weights(self.site, self._part_origins(parts, present))
        projections = {role: projection for projection, roles in self.site.projections() for role in roles}
        weights: dict[str, nn.Parameter] = {}
        scale, replacements, added = self._scaled(getattr(present, SCALE, None))
        for key, values in part_weights(self.site, parts).items():
            old = getattr(present, key, None)
            if old is None:
                weights |= new_weights({key: values})
                beside = projections[key.partition("_")[0]]
                added.append(Added(weights[key], beside.bias if key.endswith("_bias") else beside.weight))
            elif old.shape == values.shape and torch.equal(old, values.to(old.dtype)):
                weights[key] = old
            else:
                weights[key] = new_parameter(old, values)
                origin = origins[key]
                lines = _lines(origin, old.shape[1]) if origin.ndim == 2 else (origin.clone(),)
                replacements.append(Replacement(old, weights[key], lines))
        if scale is not None:
            weights[SCALE] = scale
        removed = [] if present is None else [old for key, old in present.named_parameters() if key not in weights]
        apply = partial(attach, attention, name, AttachedGrowth(own, self.dims, weights))
        return Edit(replacements, added, apply if weights else partial(detach, attention, name), removed)

    def _part_origins(self, parts: Parts, present: AttachedGrowth) -> Parts:
        """As `_origins`, for the parts of attached growth."""
        places, origins = growth_parts(present, _places), {}
        for (role, part), block in parts.items():
            origins[role, part] = torch.full(block.shape, -1, device=block.device)
            kept = places.get((role, part))
            if kept is None:
                continue
            if role in ("query", "key") and self.kept_columns is not None:
                first = {"columns": present.own.size(role)}.get(part, 0)
                kept = kept[:, :, [column - first for column in self.kept_columns if column >= first]]
            heads, rows, columns = kept.shape
            origins[role, part][:heads, :rows, :columns] = kept
        return origins


def new_weights(values: dict[str, Tensor]) -> dict[str, nn.Parameter]:
    """Parameters of attached growth, whose small steps half precision would lose."""
    finer = {name: value.to(torch.promote_types(value.dtype, torch.float32)) for name, value in values.items()}
    return {name: nn.Parameter(value.clone(memory_format=torch.contiguous_format)) for name, value in finer.items()}


def _install(
    attention: Any,
    dims: AttentionDims,
    projections: list[tuple[Any, dict[str, Replacement]]],
    scale: nn.Parameter | None,
) -> None:
    for projection, parameters in projections:
        install(projection, {name: replacement.new for name, replacement in parameters.items()})
    attention.score_scale = scale
    attention.set_dims(dims)


def _learnable(scale: Tensor) -> nn.Parameter:
    return nn.Parameter(scale.detach().clone())


def _replaced(old: nn.Parameter, new: nn.Parameter) -> Replacement:
    """A learnable scale that gets more entries, or other ones."""
    places = torch.arange(new.shape[0], device=new.device)
    return Replacement(old, new, (torch.where(places < old.shape[0], places, -1), places[:1]))


def longer_scale(scale: Tensor | None, heads: int) -> Tensor | None:
    """A learnable scale for more heads than it has; None where it stays as it is."""
    if scale is None or scale.shape[0] in (1, heads):
        return None
    return F.pad(scale.detach(), (0, 0, 0, heads - scale.shape[0]))


def _places(module: Any, name: str) -> Tensor:
    """The number of every entry."""
    parameter = getattr(module, name)
    return torch.arange(parameter.numel(), device=parameter.device).view(parameter.shape)


def _lines(origin: Tensor, columns: int) -> tuple[Tensor, Tensor]:
    """From the old place of every entry of a matrix to the old row of every row and the old column of every column."""
    rows, places = origin.amax(1) // columns, origin.amax(0)
    return rows, torch.where(places >= 0, places % columns, -1)


def _same(projection: Any, weight: Tensor, bias: Tensor | None) -> bool:
    if weight.device.type == "meta":
        return True
    return torch.equal(weight, weight_rows(projection)) and (bias is None or torch.equal(bias, projection.bias))
