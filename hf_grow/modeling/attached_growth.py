"""Growth in parameters of its own: a small module beside the stock projections of an attention module.

This file travels with every checkpoint, so it imports torch and transformers only.
"""

from collections.abc import Iterator, Mapping
from typing import Any

import torch
from torch import nn
from torch.nn import functional as F
from transformers import initialization as init

from .growable_attention import ROLES, AttentionDims, AttentionSite, projection_size, scaled_queries

# What growth adds of each role: more columns of the present heads, and more heads with all their columns.
PARTS = ("columns", "heads")
SCALE = "scale"


class AttachedGrowth(nn.Module):
    """What growth added to one attention module; the projections beside it stay as they are.

    own     the sizes of these projections
    dims    the sizes with growth
    weights `query_columns`, `key_heads` and so on, (out, in) as a Linear has it, their biases as `query_columns_bias`,
            and `scale`, how far learnable factors of the scores are from one, (1, 1) or (heads, 1): so decaying
            weights decay to the scale that the model had
    """

    output_columns: nn.Parameter | None
    output_heads: nn.Parameter | None
    scale: nn.Parameter | None

    def __init__(self, own: AttentionDims, dims: AttentionDims, weights: Mapping[str, nn.Parameter]) -> None:
        super().__init__()
        self.own, self.dims = own, dims
        for name in parameter_names():
            self.register_parameter(name, weights.get(name))

    def extend(self, role: str, own: torch.Tensor, states: torch.Tensor) -> torch.Tensor:
        """Queries, keys or values (batch, heads, tokens, width) with the new columns and heads of these states."""
        columns = self._project(f"{role}_columns", states, own.shape[1])
        if columns is not None:
            own = torch.cat((own, columns.to(own.dtype)), dim=-1)
        heads = self._project(f"{role}_heads", states, self.dims.heads(role) - self.own.heads(role))
        if heads is not None:
            own = torch.cat((own, heads.to(own.dtype)), dim=1)
        return own if role != "query" or self.scale is None else scaled_queries(own, self.scale)

    def contribution(self, output: torch.Tensor) -> torch.Tensor | None:
        """What new value columns and heads add to the block's output, of what was read: (batch, tokens, heads, width).

        None where there are only new query/key columns.
        """
        heads, width = self.own.num_attention_heads, self.own.v_head_dim
        parts = []
        if self.output_columns is not None:
            parts.append(linear(output[..., :heads, width:].flatten(-2), self.output_columns))
        if self.output_heads is not None:
            parts.append(linear(output[..., heads:, :].flatten(-2), self.output_heads))
        return sum(parts[1:], start=parts[0]) if parts else None

    def _project(self, name: str, states: torch.Tensor, heads: int) -> torch.Tensor | None:
        """(batch, heads, tokens, columns), None where there are none."""
        weight = getattr(self, name)
        if weight is None:
            return None
        flat = linear(states, weight, getattr(self, f"{name}_bias"))
        return flat.view(*flat.shape[:-1], heads, -1).transpose(1, 2)

    def reset_parameters(self) -> None:
        """As a model without weights starts: the new columns and heads add nothing."""
        for name, parameter in self.named_parameters():
            if name.startswith(("query", "value")) and not name.endswith("_bias"):
                init.normal_(parameter, std=0.02)
            else:
                init.zeros_(parameter)

    def extra_repr(self) -> str:
        return ", ".join(f"{name}={tuple(weight.shape)}" for name, weight in self.named_parameters())


def linear(states: torch.Tensor, weight: torch.Tensor, bias: torch.Tensor | None = None) -> torch.Tensor:
    """As torch's, in the precision of the states: the few new weights may be kept in a finer one."""
    return F.linear(states, weight.to(states.dtype), None if bias is None else bias.to(states.dtype))


def part_sizes(own: AttentionDims, dims: AttentionDims) -> Iterator[tuple[str, str, int, int]]:
    """Each role and part of what growth from one size to another adds, with its heads and their columns."""
    for role in ROLES:
        columns = (own.heads(role), dims.size(role) - own.size(role))
        heads = (dims.heads(role) - own.heads(role), dims.size(role))
        for part, sizes in zip(PARTS, (columns, heads), strict=True):
            if 0 not in sizes:
                yield role, part, *sizes


def parameter_names() -> Iterator[str]:
    """All parameters that attached growth may have."""
    for role in ROLES:
        for part in PARTS:
            yield f"{role}_{part}"
            yield f"{role}_{part}_bias"
    yield SCALE


def attached_shapes(site: AttentionSite, own: AttentionDims, dims: AttentionDims) -> dict[str, tuple[int, ...]]:
    """The shapes of all weights that growth from one size to another has beside the projections, by name."""
    shapes: dict[str, tuple[int, ...]] = {}
    projections = {role: projection for projection, roles in site.projections() for role in roles}
    for role, part, heads, width in part_sizes(own, dims):
        outputs, inputs = projection_size(projections[role])
        new = heads * width
        shapes[f"{role}_{part}"] = (outputs, new) if role == "output" else (new, inputs)
        if role != "output" and projections[role].bias is not None:
            shapes[f"{role}_{part}_bias"] = (new,)
    return shapes


def attach_empty(site: AttentionSite, name: str, dims: AttentionDims, scale: int = 0) -> None:
    """Attach growth of these sizes whose weights are still to be loaded or initialised.

    `scale` is how many numbers its learnable softmax scale has.
    """
    own = site.attention.own_dims
    shapes = attached_shapes(site, own, dims) | ({SCALE: (scale, 1)} if scale else {})
    device = next(site.attention.parameters()).device
    weights = {name: nn.Parameter(torch.empty(shape, device=device)) for name, shape in shapes.items()}
    attach(site.attention, name, AttachedGrowth(own, dims, weights))


def attach(attention: Any, name: str, growth: AttachedGrowth) -> None:
    """Put growth beside the projections of an attention module, under a name, in place of any of that name."""
    if "grown" not in attention._modules:
        attention.add_module("grown", nn.ModuleDict())
    attention.grown[name] = growth.train(attention.training)
    attention.refresh_sizes()


def detach(attention: Any, name: str) -> None:
    """Take the growth of a name off an attention module, if it has any."""
    if name in attention.attached:
        del attention.grown[name]
        if not attention.attached:
            del attention.grown
    if attention.active_growth == name:
        attention.active_growth = None
    attention.refresh_sizes()


def activate(attention: Any, name: str | None) -> None:
    """Have an attention module compute with the growth of this name, or with none."""
    attention.active_growth = name
    attention.refresh_sizes()
