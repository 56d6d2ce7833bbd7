"""The weights of an attention module by role, as the maths has them, whatever projections they are kept in.

Query, key and value are (heads, inputs, columns), where a projection with a bias has one input more and the bias is the
last row; output is (heads, columns, outputs).
"""

from collections.abc import Callable, Iterator
from typing import Any

import torch

from hf_grow.modeling.growable_attention import AttentionDims, AttentionSite, in_rows

ROLES = ("query", "key", "value", "output")
Blocks = dict[str, torch.Tensor]


def read_blocks(site: AttentionSite, read: Callable[[torch.Tensor], torch.Tensor] = torch.Tensor.detach) -> Blocks:
    """The weights of an attention module by role, in the shapes of this file's first lines.

    `read` may give other tensors of the parameters' shapes instead.
    """
    blocks: Blocks = {}
    dims: AttentionDims = site.attention.dims
    for projection, roles in site.projections():
        rows = in_rows(projection, read(projection.weight))
        if roles == ("output",):
            blocks["output"] = rows.T.reshape(dims.heads("output"), dims.size("output"), -1)
            continue
        if projection.bias is not None:
            rows = torch.cat((rows, read(projection.bias)[:, None]), dim=1)
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


def write_blocks(site: AttentionSite, blocks: Blocks) -> Iterator[tuple[Any, torch.Tensor, torch.Tensor | None]]:
    """The inverse of `read_blocks`: each projection with its weight as (out, in) and, unless it stays, its bias."""
    for projection, roles in site.projections():
        if roles == ("output",):
            yield projection, blocks["output"].flatten(0, 1).T, None
        elif projection.bias is None:
            yield projection, _fuse(site, blocks, roles), None
        else:
            rows = _fuse(site, blocks, roles)
            yield projection, rows[:, :-1], rows[:, -1]


def leading(block: torch.Tensor, role: str, dims: AttentionDims) -> torch.Tensor:
    """The part of a role's weights that a module of these sizes would have: growth stands behind it."""
    heads, width = dims.heads(role), dims.size(role)
    return block[:heads, :width] if role == "output" else block[:heads, :, :width]
