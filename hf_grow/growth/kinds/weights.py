"""New weights in their places: cut or filled to a width, never zero on both sides, and of the usual size."""

from collections.abc import Iterable

import torch
from torch import Tensor

from hf_grow import linalg
from hf_grow.surgery.blocks import Blocks
from hf_grow.surgery.place import Place


def alive(
    place: Place,
    roles: tuple[str, str],
    pair: tuple[Tensor, Tensor],
    direction: Tensor,
    generator: torch.Generator,
) -> Blocks:
    """The pair of factors; columns that are zero on both sides get the direction, or else chance, on the first.

    The second side stays zero there, so that nothing changes, but it will learn.
    """
    first, second = pair
    sums = second.abs().sum(2 if roles[1] == "output" else 1)  # (heads or key heads, columns)
    heads = max(first.shape[0], second.shape[0])
    dead = (linalg.repeat_groups(first.abs().sum(1), heads) == 0) & (linalg.repeat_groups(sums, heads) == 0)
    dead = dead.reshape(first.shape[0], -1, dead.shape[-1]).all(1)[:, None]
    chance = torch.randn(first.shape, generator=generator, dtype=torch.float32).to(first)
    lengths = direction.norm(dim=1, keepdim=True)
    chosen = torch.where(lengths > 0, direction / lengths.clamp(min=torch.finfo(first.dtype).tiny), 0 * direction)
    chance = chance / chance.norm(dim=1, keepdim=True)
    usual = place.norms[roles[0]] or 0.02 * first.shape[1] ** 0.5
    living = torch.where(dead, usual * torch.where(lengths > 0, chosen, chance), first)
    return {roles[0]: living, roles[1]: second}


def fitted(weight: Tensor, size: int, dim: int) -> Tensor:
    """Cut or filled with zeros along a dimension."""
    weight = weight.narrow(dim, 0, min(size, weight.shape[dim]))
    shape = list(weight.shape)
    shape[dim] = size - weight.shape[dim]
    return torch.cat((weight, weight.new_zeros(shape)), dim=dim)


def shifted(weight: Tensor, columns: int) -> Tensor:
    """With zero columns in front."""
    return torch.cat((weight.new_zeros(*weight.shape[:2], columns), weight), dim=2)


def usual_score_step(place: Place, pairs: Iterable[tuple[Tensor, Tensor]]) -> float:
    """The step that makes the largest of these query/key columns as large as the present ones."""
    return _usual_step(abs(place.scaling) * place.norms["query"] * place.norms["key"], pairs)


def usual_value_step(place: Place, pairs: Iterable[tuple[Tensor, Tensor]]) -> float:
    """The same for value columns and output rows."""
    turned = ((value, output.mT) for value, output in pairs)
    return _usual_step(place.norms["value"] * place.norms["output"], turned)


def _usual_step(present: float, pairs: Iterable[tuple[Tensor, Tensor]]) -> float:
    sizes = [float(first.norm(dim=1).mean() * second.norm(dim=1).mean()) for first, second in pairs]
    return present / max(sizes) if sizes and max(sizes) > 0 else 0.0
