"""The weights of an attention module by role, as the maths has them, whatever modules they are kept in.

Query, key and value are (heads, inputs, columns), where a projection with a bias has one input more and the bias is the
last row; output is (heads, columns, outputs).
"""

from collections.abc import Callable, Iterator, Mapping
from typing import Any

import torch
from torch import Tensor, nn

from hf_grow.modeling.attached_growth import PARTS, AttachedGrowth
from hf_grow.modeling.growable_attention import ROLES, AttentionDims, AttentionSite, in_rows, scale_factors
from hf_grow.surgery.quantized import values

Blocks = dict[str, Tensor]
# What growth added, by role and part: the new columns of present heads, or new heads.
Parts = dict[tuple[str, str], Tensor]
# How a parameter of a module, by its name, is to be read.
Read = Callable[[Any, str], Tensor]


def read_blocks(site: AttentionSite, read: Read = values) -> Blocks:
    """The weights of an attention module by role, with attached growth, in the shapes of this file's first lines.

    `read` may give other tensors of the parameters' shapes instead.
    """
    own = own_blocks(site, read)
    return own if site.growth is None else joined(own, growth_parts(site.growth, read))


def own_blocks(site: AttentionSite, read: Read = values) -> Blocks:
    """The weights of the projections alone."""
    blocks: Blocks = {}
    dims: AttentionDims = site.attention.own_dims
    for projection, roles in site.projections():
        rows = in_rows(projection, read(projection, "weight"))
        if roles == ("output",):
            blocks["output"] = rows.T.reshape(dims.heads("output"), dims.size("output"), -1)
            continue
        if projection.bias is not None:
            rows = torch.cat((rows, read(projection, "bias")[:, None]), dim=1)
        for role, part in zip(roles, split_rows(site, rows, roles, dims), strict=True):
            blocks[role] = part.transpose(1, 2)
    return blocks


def split_rows(site: AttentionSite, rows: Tensor, roles: tuple[str, ...], dims: AttentionDims) -> list[Tensor]:
    """(out, inputs) of a fused projection → one (heads, width, inputs) for each role."""
    if site.layout.per_head:
        per_head = rows.reshape(dims.heads(roles[0]), -1, rows.shape[1])
        return list(per_head.split([dims.size(role) for role in roles], dim=1))
    parts = rows.split([dims.heads(role) * dims.size(role) for role in roles])
    return [part.reshape(dims.heads(role), -1, rows.shape[1]) for role, part in zip(roles, parts, strict=True)]


def fuse_rows(site: AttentionSite, blocks: Blocks, roles: tuple[str, ...]) -> Tensor:
    """The inverse of `split_rows`."""
    parts = [blocks[role].transpose(1, 2) for role in roles]
    if site.layout.per_head:
        return torch.cat(parts, dim=1).flatten(0, 1)
    return torch.cat([part.flatten(0, 1) for part in parts])


def write_blocks(site: AttentionSite, blocks: Blocks) -> Iterator[tuple[Any, Tensor, Tensor | None]]:
    """The inverse of `own_blocks`: each projection with its weight as (out, in) and, unless it stays, its bias."""
    for projection, roles in site.projections():
        if roles == ("output",):
            yield projection, blocks["output"].flatten(0, 1).T, None
        elif projection.bias is None:
            yield projection, fuse_rows(site, blocks, roles), None
        else:
            rows = fuse_rows(site, blocks, roles)
            yield projection, rows[:, :-1], rows[:, -1]


def growth_parts(growth: AttachedGrowth, read: Read = values) -> Parts:
    """The weights of attached growth by role and part, in the shapes of this file's first lines."""
    parts: Parts = {}
    for role in ROLES:
        for part in PARTS:
            name = f"{role}_{part}"
            if getattr(growth, name) is None:
                continue
            rows, bias = read(growth, name), getattr(growth, f"{name}_bias")
            present = growth.own.heads(role)
            heads = {"columns": present, "heads": growth.dims.heads(role) - present}[part]
            if role == "output":
                parts[role, part] = rows.T.reshape(heads, -1, rows.shape[0])
                continue
            if bias is not None:
                rows = torch.cat((rows, read(growth, f"{name}_bias")[:, None]), dim=1)
            parts[role, part] = rows.reshape(heads, -1, rows.shape[1]).transpose(1, 2)
    return parts


def part_weights(site: AttentionSite, parts: Mapping[tuple[str, str], Tensor]) -> dict[str, Tensor]:
    """The inverse of `growth_parts`: the weights and biases of attached growth by their names."""
    biased = {role for projection, roles in site.projections() for role in roles if projection.bias is not None}
    weights = {}
    for (role, part), block in parts.items():
        name = f"{role}_{part}"
        if role == "output":
            weights[name] = block.flatten(0, 1).T
            continue
        rows = block.transpose(1, 2).flatten(0, 1)
        weights[name] = rows[:, :-1] if role in biased else rows
        if role in biased:
            weights[f"{name}_bias"] = rows[:, -1]
    return weights


def joined(blocks: Blocks, parts: Mapping[tuple[str, str], Tensor]) -> Blocks:
    """Weights by role with new columns and heads behind them, in the finer of their precisions."""
    whole: Blocks = {}
    for role, block in blocks.items():
        for part, dim in (("columns", _column_dim(role)), ("heads", 0)):
            new = parts.get((role, part))
            block = block if new is None else torch.cat((block, new), dim)
        whole[role] = block
    return whole


def divided(blocks: Blocks, own: AttentionDims) -> Parts:
    """The inverse of `joined`: what stands behind the weights of a module of these sizes."""
    parts: Parts = {}
    for role, block in blocks.items():
        heads, width = own.heads(role), own.size(role)
        columns = block[:heads].narrow(_column_dim(role), width, block.shape[_column_dim(role)] - width)
        parts |= {(role, part): new for part, new in zip(PARTS, (columns, block[heads:]), strict=True) if new.numel()}
    return parts


def leading(block: Tensor, role: str, dims: AttentionDims) -> Tensor:
    """The part of a role's weights that a module of these sizes would have: growth stands behind it."""
    heads, width = dims.heads(role), dims.size(role)
    return block[:heads, :width] if role == "output" else block[:heads, :, :width]


def by_columns(role: str, block: Tensor) -> Tensor:
    """A role's weights as (heads, columns, features), or back."""
    return block if role == "output" else block.transpose(1, 2)


def _column_dim(role: str) -> int:
    return 1 if role == "output" else 2


def query_factors(site: AttentionSite, heads: int | None = None) -> Tensor | None:
    """What the queries of each head are multiplied with beside the softmax scale, None where that is not learnt.

    `heads` may be more than there are.
    """
    heads = heads or site.attention.n_heads
    scales: list[nn.Parameter | None] = [site.attention.score_scale, getattr(site.growth, "scale", None)]
    factors = [scale_factors(scale.detach(), heads) for scale in scales if scale is not None]
    return torch.stack(factors).prod(0) if factors else None


def effective(blocks: Blocks, factors: Tensor | None) -> Blocks:
    """The weights with learnt factors in the queries."""
    return (
        blocks if factors is None else blocks | {"query": blocks["query"] * factors.to(blocks["query"])[:, None, None]}
    )
