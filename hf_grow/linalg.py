"""The maths of growth: tensors in, tensors out; no models, nothing mutated.

Shapes: a score gradient T is (heads, query inputs, key inputs), a query gram A (query inputs, query inputs), a key gram
B (key inputs, key inputs). Heads come in groups that share a key head: heads // groups query heads each, in order.
Everything is computed in the dtype it is given; `working_dtype` says which one to give.
"""

from collections.abc import Callable
from dataclasses import dataclass, replace

import torch
from torch import Tensor

from hf_grow.errors import HfGrowError

METRICS = ("whitened", "euclidean", "none")
INVERSES = ("eigh", "pinv", "solve", "newton_schulz")
# Above this size a full SVD costs far more than finding the few strongest directions.
LARGE = 256
# Products come from the model in single precision: what is smaller than this, beside the largest, may be rounding.
NOISE = 1e-5


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
    values, vectors = torch.linalg.eigh(ridged(gram, ridge))
    values = values.clamp(min=0)
    kept = values > cutoff * values.amax(-1, keepdim=True)
    powered = torch.where(kept, values, torch.ones_like(values)) ** power * kept
    return (vectors * powered[..., None, :]) @ vectors.mT


def noisy_inverse(gram: Tensor) -> Tensor:
    """The pseudo-inverse of a gram that is a product of others, which lose twice as many digits."""
    return symmetric_power(gram, -1.0, max(NOISE**2, 10 * torch.finfo(gram.dtype).eps))


def ridged(gram: Tensor, ridge: float) -> Tensor:
    """gram + ridge · mean eigenvalue · I."""
    mean = gram.diagonal(dim1=-2, dim2=-1).mean(-1)[..., None, None]
    return gram + ridge * mean * torch.eye(gram.shape[-1], dtype=gram.dtype, device=gram.device)


def inverse_root_newton_schulz(gram: Tensor, ridge: float = 1e-6, steps: int = 40) -> Tensor:
    """(gram + ridge · mean eigenvalue)^(-1/2) by the coupled Newton–Schulz iteration: matrix products only.

    The ridge bounds the condition number, on which the number of steps needed depends.
    """
    identity = torch.eye(gram.shape[-1], dtype=gram.dtype, device=gram.device)
    gram = ridged(gram, ridge)
    scale = torch.linalg.matrix_norm(gram)[..., None, None].clamp(min=torch.finfo(gram.dtype).tiny)
    root, inverse = gram / scale, identity.expand_as(gram)
    for _ in range(steps):
        correction = 1.5 * identity - 0.5 * inverse @ root
        root, inverse = root @ correction, correction @ inverse
    return inverse / scale.sqrt()


def inverse(gram: Tensor, method: str = "eigh", cutoff: float = 1e-6, ridge: float = 0.0) -> Tensor:
    """The pseudo-inverse of a gram; `solve` needs full rank or a ridge, and is refused without."""
    if method == "eigh":
        return symmetric_power(gram, -1.0, cutoff, ridge)
    if method == "pinv":
        return torch.linalg.pinv(ridged(gram, ridge), rtol=cutoff, hermitian=True)
    if method == "solve":
        identity = torch.eye(gram.shape[-1], dtype=gram.dtype, device=gram.device)
        return torch.cholesky_solve(identity.expand_as(gram), _cholesky(ridged(gram, ridge)))
    if method == "newton_schulz":
        root = inverse_root_newton_schulz(gram, max(ridge, cutoff))
        return root @ root
    raise HfGrowError(f"inverse must be one of {', '.join(INVERSES)}, not {method!r}.")


def _cholesky(gram: Tensor) -> Tensor:
    factor, failed = torch.linalg.cholesky_ex(gram)
    if bool(failed.any()):
        raise HfGrowError("A gram is not of full rank: use inverse='eigh' or 'pinv', or a ridge, instead of 'solve'.")
    return factor


def whitening(gram: Tensor, method: str = "eigh", cutoff: float = 1e-6, ridge: float = 0.0) -> Tensor:
    """A factor F with FᵀAF = I on the range of the gram A, so that F Fᵀ is its `inverse` by the same method."""
    if method == "eigh":
        return symmetric_power(gram, -0.5, cutoff, ridge)
    if method == "newton_schulz":
        return inverse_root_newton_schulz(gram, max(ridge, cutoff))
    if method == "solve":
        identity = torch.eye(gram.shape[-1], dtype=gram.dtype, device=gram.device)
        lower = _cholesky(ridged(gram, ridge))
        return torch.linalg.solve_triangular(lower.mT, identity.expand_as(gram), upper=True)
    return symmetric_power(inverse(gram, method, cutoff, ridge), 0.5, cutoff=0.0)


@dataclass(frozen=True)
class Side:
    """The query or the key side of the scores: its gram, the factor that whitens it, and what the present columns span.

    gram and factor are (inputs, inputs); basis is whitened, (heads, inputs, columns), orthonormal in each of the groups
    of heads that share key columns, whose rows are stacked; None for nothing.
    """

    gram: Tensor
    factor: Tensor
    basis: Tensor | None = None
    groups: int = 1

    def without_gram(self) -> "Side":
        """The same where nobody will ask for the gram any more, which is large."""
        return replace(self, gram=self.gram[:0])

    def whiten(self, product: Tensor) -> Tensor:
        """Fᵀ · product, without what the present columns span."""
        return self.project(self.factor.mT @ product)

    def whitened(self, weights: Tensor) -> Tensor:
        """FᵀA · weights: what columns of these weights are in whitened coordinates, as F⁻¹ is FᵀA."""
        return self.factor.mT @ self.gram @ weights

    def weights(self, whitened: Tensor) -> Tensor:
        """F · whitened: weights for columns that were found in whitened coordinates."""
        return self.factor @ whitened

    def project(self, whitened: Tensor) -> Tensor:
        """(I − Π) · whitened, for (heads, inputs, k)."""
        if self.basis is None:
            return whitened
        inside = stack_groups(self.basis, self.groups).mT @ stack_groups(whitened, self.groups)
        return whitened - self.basis @ repeat_groups(inside, self.basis.shape[0])


def side(gram: Tensor, factor: Tensor, present: Tensor | None = None, groups: int | None = None) -> Side:
    """A side whose columns are sought outside the span of the present weights (heads, inputs, columns), or anywhere.

    With fewer groups than heads, the heads of a group reach a change together: their key columns are the same.
    """
    if present is None:
        return Side(gram, factor)
    groups = groups or present.shape[0]
    whitened = factor.mT @ gram @ present
    basis = orthonormal(stack_groups(whitened, groups)).reshape(*whitened.shape[:2], -1)
    return Side(gram, factor, basis, groups)


def orthonormal(columns: Tensor, tolerance: float | None = None) -> Tensor:
    """An orthonormal basis of the columns' span, with zero columns where they depend on each other.

    Singular values up to tolerance · largest count as zero; by default only rounding does.
    """
    left, values, _ = torch.linalg.svd(columns, full_matrices=False)
    if tolerance is None:
        tolerance = torch.finfo(columns.dtype).eps * max(columns.shape[-2:])
    return left * (values > tolerance * values.amax(-1, keepdim=True))[..., None, :]


def orthonormal_beside(columns: Tensor, basis: Tensor) -> Tensor:
    """An orthonormal basis of columns (…, m, k) without their part in an orthonormal basis (…, m, j).

    Zero columns where no more than rounding is left of them.
    """
    largest = torch.linalg.matrix_norm(columns)
    for _ in range(2):
        columns = columns - basis @ (basis.mT @ columns)
    left, values, _ = torch.linalg.svd(columns, full_matrices=False)
    return left * (values > NOISE * largest[..., None])[..., None, :]


def orthonormal_with(columns: Tensor, images: Tensor, tolerance: float = NOISE) -> tuple[Tensor, Tensor]:
    """An orthonormal basis of columns (…, m, k), and what a linear map that has these images (…, n, k) makes of it.

    Zero columns where they depend on each other.
    """
    left, values, right = torch.linalg.svd(columns, full_matrices=False)
    kept = values > tolerance * values.amax(-1, keepdim=True)
    inverses = torch.where(kept, 1 / values, torch.zeros_like(values))
    return left * kept[..., None, :], images @ (right.mT * inverses[..., None, :])


def stack_groups(per_head: Tensor, groups: int) -> Tensor:
    """(heads, m, n) → (groups, heads of a group · m, n)."""
    return per_head.reshape(groups, -1, per_head.shape[-1])


def repeat_groups(per_group: Tensor, heads: int) -> Tensor:
    """(groups, …) → (heads, …), each group's entry for all its heads."""
    return per_group.repeat_interleave(heads // per_group.shape[0], dim=0)


def grouped_svd(matrix: Tensor, groups: int, rank: int) -> tuple[Tensor, Tensor, Tensor]:
    """The best rank-`rank` factors of (heads, m, n) when the heads of a group share the right factor.

    Returns left (heads, m, rank), singular values (groups, rank) and right (groups, n, rank).
    """
    heads, rows, columns = matrix.shape
    left, values, right = top_svd(stack_groups(matrix, groups), min(rank, columns, heads // groups * rows))
    return left.reshape(heads, rows, -1), values, right


def top_svd(matrix: Tensor, rank: int, products: int = 24) -> tuple[Tensor, Tensor, Tensor]:
    """The `rank` largest singular values of (..., m, n), with left (..., m, rank) and right (..., n, rank).

    Large matrices go through a subspace iteration of that many products, whose sum of squares is within 0.1 % of the
    best even where the spectrum hardly falls.
    """
    smallest = min(matrix.shape[-2:])
    width = rank + max(8, rank // 2)
    if smallest <= LARGE or width * 4 > smallest:
        left, values, right = torch.linalg.svd(matrix, full_matrices=False)
        return left[..., :rank], values[..., :rank], right.mT[..., :rank]
    start = torch.randn(matrix.shape[-1], width, generator=torch.Generator().manual_seed(0))
    basis = start.to(matrix).expand(*matrix.shape[:-2], -1, -1)
    for _ in range(products // 2):
        basis = torch.linalg.qr(matrix.mT @ torch.linalg.qr(matrix @ basis).Q).Q
    left, values, right = torch.linalg.svd(matrix @ basis, full_matrices=False)
    return left[..., :rank], values[..., :rank], (basis @ right.mT)[..., :rank]


def whiten(gradient: Tensor, query: Side, key: Side) -> Tensor:
    """M = A^{-1/2} T B^{-1/2}, where lengths are those of score changes, without what the sides leave out."""
    return project(query.factor.mT @ gradient @ key.factor, query, key)


def project(whitened: Tensor, query: Side, key: Side) -> Tensor:
    """(I − Π_Q) M (I − Π_K): with the bases of the present columns, what no change of them can express."""
    whitened = query.project(whitened)
    if key.basis is None:
        return whitened
    basis = repeat_groups(key.basis, whitened.shape[0])
    return whitened - (whitened @ basis) @ basis.mT


def directions(
    whitened: Tensor, query: Side, key: Side, rank: int, *, groups: int, metric: str = "whitened"
) -> Directions:
    """The best `rank` new columns for a whitened score gradient (heads, query inputs, key inputs).

    `metric` is where the truncation is best: "whitened" in the size of the score change (the optimum), "euclidean" in
    that of A⁺TB⁺, "none" in that of T itself. What the sides' bases span is not sought again.
    """
    if metric not in METRICS:
        raise HfGrowError(f"metric must be one of {', '.join(METRICS)}, not {metric!r}.")
    matrix = project(whitened, query, key)
    if metric == "euclidean":
        return balanced(*grouped_svd(query.weights(matrix) @ key.factor.mT, groups, rank))
    if metric == "none":
        unwhitened = query.gram @ query.weights(matrix) @ key.factor.mT @ key.gram
        return balanced(*grouped_svd(unwhitened, groups, rank))
    factors = balanced(*grouped_svd(matrix, groups, rank))
    return Directions(query.weights(factors.query), key.weights(factors.key))


def balanced(left: Tensor, values: Tensor, right: Tensor) -> Directions:
    """Half of each singular value on either side, which a solver may have turned around together."""
    roots = values.clamp(min=0).sqrt()[:, None, :] * _signs(right)
    return Directions(left * repeat_groups(roots, left.shape[0]), right * roots)


def _signs(vectors: Tensor) -> Tensor:
    """(…, 1, k): what makes the largest entry of each of the vectors (…, n, k) positive."""
    largest = vectors.gather(-2, vectors.abs().argmax(-2, keepdim=True))
    return torch.where(largest < 0, -1.0, 1.0).to(vectors)


def first_order_gains(gradient: Tensor, change: Directions) -> Tensor:
    """How much a unit step along each direction lowers the loss, to first order: (heads, rank).

    With a gradient from other data than the one that chose the directions, the gain is unbiased.
    """
    return (change.query * (gradient @ repeat_groups(change.key, change.query.shape[0]))).sum(1)


def value_directions(gradient: Tensor, pattern_factor: Tensor, rank: int, groups: int) -> tuple[Tensor, Tensor]:
    """The best `rank` new value columns and output rows for R (heads, value inputs, outputs).

    pattern_factor whitens the gram of the inputs as the heads of a group attend to them, (groups, inputs, inputs).
    Returns value (groups, inputs, rank) and output (heads, rank, outputs); D = −step · value output for each head.
    """
    heads, inputs, outputs = gradient.shape
    # The heads of a group share the value columns and have output rows of their own: R side by side.
    joined = gradient.reshape(groups, -1, inputs, outputs).transpose(1, 2).flatten(2)
    left, values, right = top_svd(pattern_factor.mT @ joined, min(rank, inputs, outputs))
    return split_circuit(pattern_factor @ left, values, right, heads)


def split_circuit(left: Tensor, values: Tensor, right: Tensor, heads: int) -> tuple[Tensor, Tensor]:
    """Value columns and output rows from the factors of a group, half of each singular value on either side."""
    roots = values.clamp(min=0).sqrt()[:, None, :] * _signs(left)
    groups, _, rank = right.shape
    output = (right * roots).reshape(groups, heads // groups, -1, rank).flatten(0, 1).mT
    return left * roots, output


def value_gains(gradient: Tensor, value: Tensor, output: Tensor) -> Tensor:
    """How much a unit step along each value column lowers the loss, to first order: (heads, rank)."""
    return ((repeat_groups(value, output.shape[0]).mT @ gradient) * output).sum(2)


def new_columns(change: Directions, step: float, scaling: float) -> tuple[Tensor, Tensor]:
    """Query and key weights whose scores, times the model's scaling, change by −step · query keyᵀ."""
    size = (step / abs(scaling)) ** 0.5
    return -size * change.query * (1 if scaling > 0 else -1), size * change.key


def refactor(
    query_weights: Tensor,
    key_weights: Tensor,
    change: Directions,
    query_gram: Tensor,
    key_gram: Tensor,
    columns: int,
    *,
    step: float,
    scaling: float,
    cutoff: float = 1e-12,
) -> tuple[Tensor, Tensor]:
    """All columns anew: the best rank-`columns` factors of s·W_Q W_Kᵀ − step · change in the size of the score change.

    Weights are (heads, query inputs, old columns) and (groups, key inputs, old columns). With step 0 and no fewer
    columns than before, the new factors give the old scores on all inputs the grams have seen.
    """
    groups, heads = key_weights.shape[0], query_weights.shape[0]
    query_root, key_root = (symmetric_power(gram, 0.5, cutoff) for gram in (query_gram, key_gram))
    query_inverse, key_inverse = (symmetric_power(gram, -0.5, cutoff) for gram in (query_gram, key_gram))
    wanted = scaling * query_weights @ repeat_groups(key_weights, heads).mT
    wanted = wanted - step * change.query @ repeat_groups(change.key, heads).mT
    factors = balanced(*grouped_svd(query_root @ wanted @ key_root, groups, columns))
    size = abs(scaling) ** -0.5
    return size * (1 if scaling > 0 else -1) * (query_inverse @ factors.query), size * (key_inverse @ factors.key)


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
    groups, heads = key_weights.shape[0], query_weights.shape[0]
    key_repeated = repeat_groups(key_weights, heads)
    downhill = -1 if scaling > 0 else 1
    query_change = downhill * gradient @ key_repeated
    key_change = downhill * (gradient.mT @ query_weights).reshape(groups, heads // groups, *key_weights.shape[1:]).sum(
        1
    )
    repeated_change = repeat_groups(key_change, heads)
    change = query_change @ key_repeated.mT + query_weights @ repeated_change.mT
    norm = abs(scaling) * torch.einsum("hij,ik,hkl,lj->h", change, query_gram, change, key_gram).clamp(min=0).sqrt()
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
