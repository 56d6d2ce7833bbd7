"""The best value columns and output rows for the patterns of one layer, from few products with their gradients.

What is sought solves N W = R in the metric of what heads read (section 11 of the maths). In every pass some value
columns are asked for ΩᵀR and NΩ, and some output rows for RΨ. The next value columns correct what the best solution
among all so far leaves of RΨ, as if N were what the answers say of it, and a multiple of the identity elsewhere.
"""

from dataclasses import dataclass

import torch
from torch import Tensor

from hf_grow import linalg
from hf_grow.measuring.probes import Answers
from hf_grow.measuring.statistics import Candidates

# How many times as many value columns as are wanted are asked for in a pass, at most, as the first ones must also tell
# what N is like; and how many times as many output rows as long as these are random.
COLUMNS, FIRST_ROWS = 3, 2


@dataclass(frozen=True)
class CircuitProbes:
    """Value columns (groups, inputs, k), and output rows (groups, outputs of all heads, m) or none; orthonormal."""

    columns: Tensor
    rows: Tensor | None

    @classmethod
    def draw(
        cls, heads: int, groups: int, inputs: int, outputs: int, width: int, like: Tensor, generator: torch.Generator
    ) -> "CircuitProbes":
        """The first ones: random."""
        width = min(width, inputs, outputs)
        columns = torch.randn(groups, inputs, min(COLUMNS * width, inputs), generator=generator).to(like)
        rows = torch.randn(groups, heads // groups * outputs, min(FIRST_ROWS * width, outputs), generator=generator)
        return cls(torch.linalg.qr(columns).Q, torch.linalg.qr(rows.to(like)).Q)

    def output(self, heads: int) -> Tensor | None:
        """The output rows by head, (heads, m, outputs)."""
        return None if self.rows is None else self.rows.reshape(heads, -1, self.rows.shape[-1]).mT


class CircuitSearch:
    """The search for some patterns of a layer, the heads of a group sharing the value columns.

    spanned   all value columns asked for, orthonormal (groups, inputs, m); their products ΩᵀR (heads, m, outputs)
    known     what N, the mean over a group, makes of them; gram is their product with that
    driven    RΨ (groups, inputs, m) for all output rows Ψ asked for; asked_rows are these
    first     how many of the value columns were random
    """

    def __init__(self, first: CircuitProbes, answers: Answers, patterns: slice, width: int, ridge: float) -> None:
        assert answers.value is not None and first.rows is not None
        self.patterns, self.width, self.ridge = patterns, width, ridge
        self.heads, self.groups = answers.value[patterns].shape[0], first.columns.shape[0]
        self.first = first.columns.shape[-1]
        inputs, outputs = first.columns.shape[1], answers.value.shape[-1]
        nothing = first.columns[..., :0]
        self.spanned = self.known = self.driven = nothing
        self.products = nothing.new_zeros(self.heads, 0, outputs)
        self.gram = nothing.new_zeros(self.groups, 0, 0)
        self.asked_rows, self.inputs = first.rows[..., :0], inputs
        self.take(first, answers)

    def ask(self, last: bool) -> CircuitProbes:
        """The value columns and, unless it is the last time, the output rows to ask for now."""
        probes = CircuitProbes(self._corrections(), None if last else self._best_rows())
        if last:
            # These make further probes only.
            self.driven, self.asked_rows = self.driven[..., :0].clone(), self.asked_rows[..., :0].clone()
        return probes

    def take(self, probes: CircuitProbes, answers: Answers) -> None:
        """The answers to these."""
        assert answers.value is not None and answers.read is not None
        group = self.heads // self.groups
        gram = answers.read[self.patterns].unflatten(0, (self.groups, group)).mean(1)
        across = self.known.mT @ probes.columns
        self.gram = torch.cat((torch.cat((self.gram, across), dim=2), torch.cat((across.mT, gram), dim=2)), dim=1)
        self.spanned = torch.cat((self.spanned, probes.columns), dim=2)
        self.products = torch.cat((self.products, answers.value[self.patterns]), dim=1)
        if answers.metric is not None:
            self.known = torch.cat((self.known, answers.metric[self.patterns] / group), dim=2)
        if answers.output is not None and probes.rows is not None:
            self.driven = torch.cat((self.driven, answers.output[self.patterns]), dim=2)
            self.asked_rows = torch.cat((self.asked_rows, probes.rows), dim=2)

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
        return corrections[..., : COLUMNS * self.width].to(self.spanned)

    def _rest(self, gram: Tensor, known: Tensor) -> Tensor:
        """The mean eigenvalue of N beside what is known of it; its trace is estimated from the first, random probes."""
        trace = gram.diagonal(dim1=1, dim2=2)[:, : self.first].mean(1) * self.inputs
        inside = torch.einsum("gim,gmn,gin->g", known, linalg.noisy_inverse(gram), known)
        return (trace - inside).clamp(min=0) / self.inputs

    def _best_rows(self) -> Tensor:
        """The output rows of the best solution so far, beside those already asked for."""
        factor = linalg.whitening(self._ridged(self.fine_gram())).to(self.products)
        _, output = linalg.value_directions(self.products, factor, self.width, self.groups)
        return linalg.orthonormal_beside(output.mT.reshape(self.groups, -1, output.shape[1]), self.asked_rows)

    def _ridged(self, gram: Tensor) -> Tensor:
        return gram + self.ridge * torch.eye(gram.shape[-1]).to(gram)
