"""The best value columns and output rows for the patterns of one layer, from few products with their gradients.

What is sought solves N W = R in the metric of what heads read (section 11 of the maths). In every pass some value
columns are asked for ΩᵀR and NΩ, and some output rows for RΨ. The next value columns correct what the best solution
among all so far leaves of RΨ, as if N were what the answers say of it, and a multiple of the identity elsewhere.
"""

import torch
from torch import Tensor

from hf_grow import linalg
from hf_grow.measuring.probes import Answers
from hf_grow.measuring.statistics import Candidates

# The first value probes, which must also tell what N is like, and the last are this much wider than the others.
WIDER = 2


class CircuitSearch:
    """The search for some patterns of a layer, the heads of a group sharing the value columns.

    spanned   all value columns asked for, orthonormal (groups, inputs, m); their products (heads, m, outputs)
    known     what N, the mean over a group, makes of them; gram is their product with that
    driven    RΨ (groups, inputs, m) for all output rows Ψ asked for, asked_rows (groups, outputs of all heads, m)
    """

    def __init__(self, heads: int, groups: int, inputs: int, outputs: int, width: int, like: Tensor) -> None:
        self.heads, self.groups, self.inputs, self.outputs, self.like = heads, groups, inputs, outputs, like
        self.width = min(width, inputs, outputs)
        self.spanned = like.new_zeros(groups, inputs, 0)
        self.products = like.new_zeros(heads, 0, outputs)
        self.known = like.new_zeros(groups, inputs, 0)
        self.gram = like.new_zeros(groups, 0, 0)
        self.driven = like.new_zeros(groups, inputs, 0)
        self.asked_rows = like.new_zeros(groups, heads // groups * outputs, 0)
        self.ridge = 0.0

    def start(self, generator: torch.Generator) -> tuple[Tensor, Tensor | None]:
        """The first value columns (groups, inputs, k) and output rows (heads, k, outputs): random."""
        width = min(WIDER * self.width, self.inputs)
        columns = torch.randn(self.groups, self.inputs, width, generator=generator).to(self.like)
        rows = torch.randn(self.groups, self.asked_rows.shape[1], self.width, generator=generator).to(self.like)
        self.columns, self.rows = torch.linalg.qr(columns).Q, torch.linalg.qr(rows).Q
        return self.columns, self._per_head(self.rows)

    def next(self, last: bool) -> tuple[Tensor, Tensor | None]:
        """The value columns and, unless it is the last time, the output rows to ask for now."""
        self.columns = self._corrections()
        self.rows = None if last else self._best_rows()
        return self.columns, None if self.rows is None else self._per_head(self.rows)

    def take(self, answers: Answers, patterns: slice) -> None:
        """The answers for these patterns of the layer."""
        assert answers.value is not None and answers.read is not None
        group = self.heads // self.groups
        gram = answers.read[patterns].unflatten(0, (self.groups, group)).mean(1)
        across = self.known.mT @ self.columns
        self.gram = torch.cat((torch.cat((self.gram, across), dim=2), torch.cat((across.mT, gram), dim=2)), dim=1)
        self.spanned = torch.cat((self.spanned, self.columns), dim=2)
        self.products = torch.cat((self.products, answers.value[patterns]), dim=1)
        if answers.metric is not None:
            self.known = torch.cat((self.known, answers.metric[patterns] / group), dim=2)
        if answers.output is not None:
            assert self.rows is not None
            self.driven = torch.cat((self.driven, answers.output[patterns]), dim=2)
            self.asked_rows = torch.cat((self.asked_rows, self.rows), dim=2)

    def solve(self, factor: Tensor, rank: int) -> Candidates:
        """The best among all value columns asked for; `factor` whitens their gram."""
        value, output = linalg.value_directions(self.products, factor.to(self.products), rank, self.groups)
        return Candidates(self.spanned @ value, output, linalg.value_gains(self.products, value, output))

    def fine_gram(self) -> Tensor:
        """The gram of all value columns asked for, fit to be inverted."""
        return self.gram.to(linalg.working_dtype(self.gram.device))

    def _corrections(self) -> Tensor:
        """New value columns: what the best solution leaves of RΨ, as N would be inverted by what is known of it."""
        gram = self.fine_gram()
        known, spanned, driven = (part.to(gram) for part in (self.known, self.spanned, self.driven))
        solution = linalg.noisy_inverse(self._ridged(gram)) @ (spanned.mT @ driven)
        left = driven - known @ solution - self.ridge * (spanned @ solution)
        # N ≈ Y G⁺ Yᵀ + rest · I with Y = NΩ and G = ΩᵀNΩ, inverted by its small part.
        size = (self._rest(gram, known) + self.ridge)[:, None, None].clamp(min=torch.finfo(gram.dtype).tiny)
        inner = linalg.noisy_inverse(size * gram + known.mT @ known) @ (known.mT @ left)
        corrections = linalg.orthonormal_beside((left - known @ inner) / size, spanned)
        return corrections[..., : WIDER * self.width].to(self.like)

    def _rest(self, gram: Tensor, known: Tensor) -> Tensor:
        """The mean eigenvalue of N beside what is known of it; its trace is estimated from the first, random probes."""
        first = min(WIDER * self.width, self.inputs)
        trace = gram[:, :first, :first].diagonal(dim1=1, dim2=2).mean(1) * self.inputs
        inside = torch.einsum("gim,gmn,gin->g", known, linalg.noisy_inverse(gram), known)
        return (trace - inside).clamp(min=0) / self.inputs

    def _best_rows(self) -> Tensor:
        """The output rows of the best solution so far, beside those already asked for."""
        factor = linalg.whitening(self._ridged(self.fine_gram())).to(self.products)
        _, output = linalg.value_directions(self.products, factor, self.width, self.groups)
        return linalg.orthonormal_beside(output.mT.reshape(self.groups, -1, output.shape[1]), self.asked_rows)

    def _ridged(self, gram: Tensor) -> Tensor:
        return gram + self.ridge * torch.eye(gram.shape[-1]).to(gram)

    def _per_head(self, rows: Tensor) -> Tensor:
        """(groups, outputs of all heads, k) → (heads, k, outputs)."""
        return rows.reshape(self.heads, self.outputs, -1).mT
