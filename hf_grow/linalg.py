"""The maths of growth: tensors in, tensors out; no models, nothing mutated.

Shapes: a score gradient T is (heads, query inputs, key inputs), a query gram A (query inputs, query inputs), a key gram
B (key inputs, key inputs). Heads come in groups that share a key head: heads // groups query heads each, in order.
Everything is computed in the dtype it is given; `working_dtype` says which one to give.
"""

from collections.abc import Callable
from dataclasses import dataclass

import torch
from torch import Tensor

from hf_grow.errors import HfGrowError

METRICS = ("whitened", "euclidean", "none")
INVERSES = ("eigh", "pinv", "solve")


@dataclass(frozen=True)
class Directions:
    """Rank-one changes of the scores: D = −step · Σ_j query_j key_jᵀ for each head.

    query is (heads, query inputs, rank), key is (groups, key inputs, rank), strongest first.
    """

    query: Tensor
    key: Tensor

    def take(self, rank: int) -> "Directions":
        """The strongest `rank` directions."""
        return Directions(self.query[..., :rank], self.key[..., :rank])


def working_dtype(device: torch.device) -> torch.dtype:
    """float64 where it is exact and cheap enough, float32 on accelerators."""
    return torch.float64 if device.type == "cpu" else torch.float32


def symmetric_power(gram: Tensor, power: float, cutoff: float = 1e-6, ridge: float = 0.0) -> Tensor:
    """gram^power for a positive semi-definite (..., d, d); eigenvalues below cutoff · largest count as absent.

    The ridge is relative to the mean eigenvalue.
    """
    values, vectors = torch.linalg.eigh(gram)
    values = values.clamp(min=0)
    values = values + ridge * values.mean(-1, keepdim=True)
    kept = values > cutoff * values.amax(-1, keepdim=True)
    powered = torch.where(kept, values, torch.ones_like(values)) ** power * kept
    return (vectors * powered[..., None, :]) @ vectors.mT


def inverse_root_newton_schulz(gram: Tensor, ridge: float = 1e-6, steps: int = 40) -> Tensor:
    """(gram + ridge · mean eigenvalue)^(-1/2) by the coupled Newton–Schulz iteration: matrix products only.

    The ridge bounds the condition number, on which the number of steps needed depends.
    """
    size = gram.shape[-1]
    identity = torch.eye(size, dtype=gram.dtype, device=gram.device)
    mean = gram.diagonal(dim1=-2, dim2=-1).mean(-1)[..., None, None]
    ridged = gram + ridge * mean * identity
    scale = torch.linalg.matrix_norm(ridged)[..., None, None].clamp(min=torch.finfo(gram.dtype).tiny)
    root, inverse = ridged / scale, identity.expand_as(ridged)
    for _ in range(steps):
        correction = 1.5 * identity - 0.5 * inverse @ root
        root, inverse = root @ correction, correction @ inverse
    return inverse / scale.sqrt()


def inverse(gram: Tensor, method: str = "eigh", cutoff: float = 1e-6, ridge: float = 0.0) -> Tensor:
    """The pseudo-inverse of a gram; `solve` needs full rank or a ridge, and is refused without."""
    if method == "eigh":
        return symmetric_power(gram, -1.0, cutoff, ridge)
    identity = torch.eye(gram.shape[-1], dtype=gram.dtype, device=gram.device)
    mean = gram.diagonal(dim1=-2, dim2=-1).mean(-1)[..., None, None]
    ridged = gram + ridge * mean * identity
    if method == "pinv":
        return torch.linalg.pinv(ridged, rtol=cutoff, hermitian=True)
    if method == "solve":
        factor, failed = torch.linalg.cholesky_ex(ridged)
        if bool(failed.any()):
            raise HfGrowError(
                "A gram is not of full rank: use inverse='eigh' or 'pinv', or a ridge, instead of 'solve'."
            )
        return torch.cholesky_solve(identity.expand_as(ridged), factor)
    raise HfGrowError(f"inverse must be one of {', '.join(INVERSES)}, not {method!r}.")


def grouped_svd(matrix: Tensor, groups: int, rank: int) -> tuple[Tensor, Tensor, Tensor]:
    """The best rank-`rank` factors of (heads, m, n) when the heads of a group share the right factor.

    Returns left (heads, m, rank), singular values (groups, rank) and right (groups, n, rank).
    """
    heads, rows, columns = matrix.shape
    stacked = matrix.reshape(groups, heads // groups * rows, columns)
    left, values, right = torch.linalg.svd(stacked, full_matrices=False)
    left = left[..., :rank].reshape(heads, rows, -1)
    return left, values[..., :rank], right.mT[..., :rank]


def whiten(gradient: Tensor, query_inverse_root: Tensor, key_inverse_root: Tensor) -> Tensor:
    """M = A^{-1/2} T B^{-1/2}, in whose metric lengths are lengths of score changes."""
    return query_inverse_root @ gradient @ key_inverse_root


def bottleneck(whitened: Tensor, query_weights: Tensor, key_weights: Tensor, groups: int) -> Tensor:
    """The part of M that no change of the present columns can express: (I − Π_Q) M (I − Π_K).

    The weights are whitened too: A^{1/2} W_Q (heads, query inputs, columns), B^{1/2} W_K (groups, key inputs, columns).
    """
    per_group = whitened.shape[0] // groups
    query_basis = _orthonormal(query_weights)
    key_basis = _orthonormal(key_weights).repeat_interleave(per_group, dim=0)
    rest = whitened - query_basis @ (query_basis.mT @ whitened)
    return rest - (rest @ key_basis) @ key_basis.mT


def _orthonormal(columns: Tensor) -> Tensor:
    """An orthonormal basis of the columns' span, with zero columns where they depend on each other."""
    left, values, _ = torch.linalg.svd(columns, full_matrices=False)
    eps = torch.finfo(columns.dtype).eps * max(columns.shape[-2:])
    return left * (values > eps * values.amax(-1, keepdim=True))[..., None, :]


def directions(
    gradient: Tensor,
    query_gram: Tensor,
    key_gram: Tensor,
    rank: int,
    *,
    groups: int,
    metric: str = "whitened",
    present: tuple[Tensor, Tensor] | None = None,
    cutoff: float = 1e-6,
    ridge: float = 0.0,
) -> Directions:
    """The best `rank` new columns for a score gradient.

    `metric` is where the truncation is best: "whitened" in the size of the score change (the optimum), "euclidean" in
    that of A⁺TB⁺, "none" in that of T itself. With `present` = (W_Q, W_K) only what those cannot express is sought.
    """
    if metric not in METRICS:
        raise HfGrowError(f"metric must be one of {', '.join(METRICS)}, not {metric!r}.")
    powers = {"cutoff": cutoff, "ridge": ridge}
    if metric == "none" and present is None:
        return _balanced(*grouped_svd(gradient, groups, rank))
    query_inverse, key_inverse = (symmetric_power(gram, -0.5, **powers) for gram in (query_gram, key_gram))
    matrix = whiten(gradient, query_inverse, key_inverse)
    if present is not None:
        query_root, key_root = (symmetric_power(gram, 0.5, **powers) for gram in (query_gram, key_gram))
        matrix = bottleneck(matrix, query_root @ present[0], key_root @ present[1], groups)
        if metric == "none":
            return _balanced(*grouped_svd(query_root @ matrix @ key_root, groups, rank))
    if metric == "euclidean":
        return _balanced(*grouped_svd(query_inverse @ matrix @ key_inverse, groups, rank))
    found = _balanced(*grouped_svd(matrix, groups, rank))
    return Directions(query_inverse @ found.query, key_inverse @ found.key)


def _balanced(left: Tensor, values: Tensor, right: Tensor) -> Directions:
    """Half of each singular value on either side."""
    roots = values.sqrt()[:, None, :]
    return Directions(left * roots.repeat_interleave(left.shape[0] // right.shape[0], dim=0), right * roots)


def first_order_gains(gradient: Tensor, found: Directions) -> Tensor:
    """How much a unit step along each direction lowers the loss, to first order: (heads, rank).

    With a gradient from other data than the one that chose the directions, the gain is unbiased.
    """
    key = found.key.repeat_interleave(found.query.shape[0] // found.key.shape[0], dim=0)
    return torch.einsum("hip,hij,hjp->hp", found.query, gradient, key)


def score_change_norm(found: Directions, query_gram: Tensor, key_gram: Tensor) -> Tensor:
    """‖X_q D X_kᵀ‖ of a unit step for each head, when both grams belong to one sequence: (heads,)."""
    per_group = found.query.shape[0] // found.key.shape[0]
    query = found.query.mT @ query_gram @ found.query
    key = (found.key.mT @ key_gram @ found.key).repeat_interleave(per_group, dim=0)
    return (query * key).sum((-2, -1)).clamp(min=0).sqrt()


def new_columns(found: Directions, step: float, scaling: float) -> tuple[Tensor, Tensor]:
    """Query and key weights whose scores, times the model's scaling, change by −step · query keyᵀ."""
    size = (step / scaling) ** 0.5
    return -size * found.query, size * found.key


def refactor(
    query_weights: Tensor,
    key_weights: Tensor,
    gradient: Tensor,
    query_gram: Tensor,
    key_gram: Tensor,
    columns: int,
    *,
    step: float,
    scaling: float,
    cutoff: float = 1e-12,
) -> tuple[Tensor, Tensor]:
    """All columns anew: the best rank-`columns` factors of s·W_Q W_Kᵀ − step · A⁺TB⁺ in the size of the score change.

    Weights are (heads, query inputs, old columns) and (groups, key inputs, old columns). With step 0 and no fewer
    columns than before, the new factors give the old scores on all inputs the grams have seen.
    """
    groups = key_weights.shape[0]
    per_group = query_weights.shape[0] // groups
    query_root, key_root = (symmetric_power(gram, 0.5, cutoff) for gram in (query_gram, key_gram))
    query_inverse, key_inverse = (symmetric_power(gram, -0.5, cutoff) for gram in (query_gram, key_gram))
    products = query_weights @ key_weights.repeat_interleave(per_group, dim=0).mT
    target = scaling * (query_root @ products @ key_root) - step * whiten(gradient, query_inverse, key_inverse)
    left, values, right = grouped_svd(target, groups, columns)
    found = _balanced(left, values, right)
    size = scaling**-0.5
    return size * (query_inverse @ found.query), size * (key_inverse @ found.key)


def plain_step(
    query_weights: Tensor,
    key_weights: Tensor,
    gradient: Tensor,
    query_gram: Tensor,
    key_gram: Tensor,
    *,
    scaling: float,
) -> tuple[Tensor, Tensor]:
    """Changes of the present columns along −∂L/∂W, scaled so that all scores change by 1 in norm, to first order."""
    groups = key_weights.shape[0]
    heads = query_weights.shape[0]
    key_repeated = key_weights.repeat_interleave(heads // groups, dim=0)
    query_change = -gradient @ key_repeated
    key_change = -(gradient.mT @ query_weights).reshape(groups, heads // groups, *key_weights.shape[1:]).sum(1)
    repeated_change = key_change.repeat_interleave(heads // groups, dim=0)
    change = query_change @ key_repeated.mT + query_weights @ repeated_change.mT
    norm = scaling * torch.einsum("hij,ik,hkl,lj->h", change, query_gram, change, key_gram).clamp(min=0).sqrt()
    # One size for all heads keeps the direction the gradient's own.
    size = 1 / norm.square().sum().sqrt().clamp(min=torch.finfo(norm.dtype).tiny)
    return size * query_change, size * key_change


def conjugate_gradients(
    apply: Callable[[Tensor], Tensor], right_side: Tensor, tolerance: float = 1e-10, max_steps: int = 1000
) -> Tensor:
    """Solve apply(D) = right_side for a symmetric positive semi-definite map, for all leading dimensions at once.

    The residual norm is taken over the last two dimensions; started at zero, the iterates stay in the range of the map.
    """

    def dot(first: Tensor, second: Tensor) -> Tensor:
        return (first * second).sum((-2, -1), keepdim=True)

    solution = torch.zeros_like(right_side)
    residual = right_side
    direction = residual
    energy = dot(residual, residual)
    target = tolerance**2 * energy
    tiny = torch.finfo(right_side.dtype).tiny
    for _ in range(max_steps):
        active = energy > target
        if not bool(active.any()):
            break
        mapped = apply(direction)
        length = torch.where(active, energy / dot(direction, mapped).clamp(min=tiny), torch.zeros_like(energy))
        solution = solution + length * direction
        residual = residual - length * mapped
        renewed = dot(residual, residual)
        direction = (
            residual + torch.where(active, renewed / energy.clamp(min=tiny), torch.zeros_like(energy)) * direction
        )
        energy = torch.where(active, renewed, energy)
    return solution


def exact_step(gradients: Tensor, query_grams: Tensor, key_grams: Tensor, ridge: float = 1e-6) -> Tensor:
    """P that solves Σ_i A_i P B_i + ridge · P = Σ_i T_i, the exact metric over many sequences: (heads, d, d).

    gradients are (sequences, heads, d, d), grams (sequences, d, d); the ridge is relative to the map's mean eigenvalue.
    """
    traces = query_grams.diagonal(dim1=-2, dim2=-1).mean(-1) * key_grams.diagonal(dim1=-2, dim2=-1).mean(-1)
    weight = ridge * traces.sum()

    def apply(change: Tensor) -> Tensor:
        return torch.einsum("sij,hjk,skl->hil", query_grams, change, key_grams) + weight * change

    return conjugate_gradients(apply, gradients.sum(0))
