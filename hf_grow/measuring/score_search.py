"""The strongest directions for new query/key columns of one layer, from few products with its score gradients.

A block Krylov search from both sides: in every pass M is multiplied by some columns and Mᵀ by others, each made from
what the other side answered before; in the end the part of M that all answers together know is taken apart.
"""

from dataclasses import dataclass

import torch
from torch import Tensor

from hf_grow import linalg
from hf_grow.linalg import Directions
from hf_grow.measuring.collector import Sides
from hf_grow.measuring.probes import Answers
from hf_grow.measuring.statistics import Candidates

# Probes that only measure how large M is: enough for about a tenth of accuracy over a layer's heads.
ENERGY_PROBES = 8


@dataclass(frozen=True)
class ScoreProbes:
    """Key (key heads, key inputs, k) and query (heads, query inputs, k) weights to probe the scores with."""

    key: Tensor
    query: Tensor


@dataclass(frozen=True)
class Energies:
    """‖M‖² of each head, all that is wanted, and ‖M⊥‖², the part that the present columns cannot express."""

    wanted: Tensor
    bottleneck: Tensor


class ScoreSearch:
    """The search in one layer; the heads of a group share the key side of every direction.

    All is kept in whitened coordinates with the heads of a group stacked: M is (groups, heads of a group · query
    inputs, key inputs). The first probes are plain random numbers, as the grams are not known yet.
    """

    def __init__(self, heads: int, groups: int, inputs: dict[str, int], width: int, like: Tensor) -> None:
        self.heads, self.groups, self.width = heads, groups, min(width, inputs["query"], inputs["key"])
        self.inputs, self.like = inputs, like
        self.right, self.left = _Known(), _Known()
        self.energies: Energies | None = None

    def start(self, generator: torch.Generator) -> ScoreProbes:
        """The first probes."""
        key = torch.randn(self.groups, self.inputs["key"], self.width, generator=generator)
        query = torch.randn(self.heads, self.inputs["query"], self.width, generator=generator)
        self.asked = ScoreProbes(key.to(self.like), query.to(self.like))
        return self.asked

    def take_start(self, answers: Answers, whole: Sides, searched: Sides, present: "Present | None") -> None:
        """The first answers, once the sides are known.

        Where directions are searched for outside the present columns, `present` says what M makes of these.
        """
        self.whole, self.sides = whole, searched
        self.present = present
        # Random weights Ω are F⁻¹Ω in whitened coordinates, and F⁻¹ is FᵀA.
        key = whole.key.factor.mT @ whole.key.gram @ self.asked.key
        query = self._stacked(whole.query.factor.mT @ whole.query.gram @ self.asked.query)
        by_key, by_query = self._whitened(answers)
        if present is not None:
            key, by_key = present.right.without(key, by_key)
            query, by_query = present.left.without(query, by_query)
            by_key, by_query = self._outside(by_key, by_query)
        self.right.add(key, by_key)
        self.left.add(query, by_query)

    def next(self, generator: torch.Generator, energies: bool) -> ScoreProbes:
        """The probes of the next pass, from the answers of the other side; with `energies` some random ones behind."""
        key = self.right.outside(self.left.newest)
        query = self.left.outside(self.right.newest)
        self.asked_key, self.asked_query = key, query
        self.measuring = energies
        weights = self.sides.key.weights(key)
        if energies:
            weights = torch.cat((weights, self.whole.key.weights(self._random(generator))), dim=-1)
        return ScoreProbes(weights, self.sides.query.weights(self._unstacked(query)))

    def take(self, answers: Answers) -> None:
        """The answers to the last probes."""
        by_key, by_query = self._whitened(answers)
        count = self.asked_key.shape[-1]
        if self.measuring:
            self.energies = self._energies(by_key[..., count:])
        by_key, by_query = self._outside(by_key[..., :count], by_query)
        self.right.add(self.asked_key, by_key)
        self.left.add(self.asked_query, by_query)

    def solve(self, rank: int) -> Candidates:
        """The strongest directions of what is known of M, and their gains on the data that answered."""
        left, values, right = self._known_part()
        left, values, right = (part[..., :rank] for part in (left, values, right))
        unstacked = self._unstacked(left)
        balanced = linalg.balanced(unstacked, values, right)
        directions = Directions(self.sides.query.weights(balanced.query), self.sides.key.weights(balanced.key))
        gains = linalg.repeat_groups(values.square(), self.heads) * unstacked.square().sum(1)
        return Candidates(directions.query, directions.key, gains)

    def _known_part(self) -> tuple[Tensor, Tensor, Tensor]:
        """The SVD of PM + MK − PMK, where P and K project on all that was asked from the left and from the right."""
        asked_left, asked_right = self.left.columns, self.right.columns
        beyond = self.right.images - asked_left @ (asked_left.mT @ self.right.images)
        first, first_turn = torch.linalg.qr(torch.cat((asked_left, beyond), dim=-1))
        second, second_turn = torch.linalg.qr(torch.cat((self.left.images, asked_right), dim=-1))
        left, values, right = torch.linalg.svd(first_turn @ second_turn.mT, full_matrices=False)
        return first @ left, values, second @ right.mT

    def _whitened(self, answers: Answers) -> tuple[Tensor, Tensor]:
        """What M and Mᵀ make of the probes."""
        assert answers.key is not None and answers.query is not None
        return self._stacked(self.whole.query.factor.mT @ answers.key), self.whole.key.factor.mT @ answers.query

    def _outside(self, by_key: Tensor, by_query: Tensor) -> tuple[Tensor, Tensor]:
        """Without what the sides leave out."""
        by_key = self._stacked(self.sides.query.project(self._unstacked(by_key)))
        return by_key, self.sides.key.project(by_query)

    def _random(self, generator: torch.Generator) -> Tensor:
        """Random whitened key probes outside the present columns and, unless M is known there, as many inside."""
        basis = self.whole.key.basis
        assert basis is not None
        shape = self.groups, self.whole.key.factor.shape[1], ENERGY_PROBES
        random = torch.randn(*shape, generator=generator).to(self.like)
        inside = basis @ (basis.mT @ random)
        return random - inside if self.present is not None else torch.cat((random - inside, inside), dim=-1)

    def _energies(self, answer: Tensor) -> Energies:
        def squares(images: Tensor) -> Tensor:
            return self._unstacked(images).square().sum((1, 2))

        count = ENERGY_PROBES
        outside, inside = answer[..., :count], answer[..., count:]
        reached = squares(inside) / count if self.present is None else squares(self.present.right.images)
        bottleneck = self._stacked(self.whole.query.project(self._unstacked(outside)))
        return Energies(squares(outside) / count + reached, squares(bottleneck) / count)

    def _stacked(self, per_head: Tensor) -> Tensor:
        return linalg.stack_groups(per_head, self.groups)

    def _unstacked(self, stacked: Tensor) -> Tensor:
        return stacked.reshape(self.heads, -1, stacked.shape[-1])


class _Known:
    """Orthonormal columns (groups, m, k) and what a matrix makes of them, (groups, n, k); empty at first."""

    columns: Tensor
    images: Tensor
    # The images of the columns that came last.
    newest: Tensor

    def __init__(self) -> None:
        self.empty = True

    def add(self, columns: Tensor, images: Tensor) -> None:
        """More columns, beside what is known."""
        if not self.empty:
            columns, images = self.without(columns, images)
        columns, self.newest = linalg.orthonormal_with(columns, images)
        self.columns = columns if self.empty else torch.cat((self.columns, columns), dim=-1)
        self.images = self.newest if self.empty else torch.cat((self.images, self.newest), dim=-1)
        self.empty = False

    def without(self, columns: Tensor, images: Tensor) -> tuple[Tensor, Tensor]:
        """Columns and their images without the part that is known."""
        shares = self.columns.mT @ columns
        return columns - self.columns @ shares, images - self.images @ shares

    def outside(self, columns: Tensor) -> Tensor:
        """An orthonormal basis of the columns without the part that is known."""
        return linalg.orthonormal_beside(columns, self.columns)


class Present:
    """What M makes of the whitened present key columns, and Mᵀ of the present queries."""

    def __init__(self, sides: Sides, query: Tensor, key: Tensor, answers: Answers) -> None:
        assert answers.present_query is not None and answers.present_key is not None
        groups = key.shape[0]
        self.right, self.left = _Known(), _Known()
        by_key = linalg.stack_groups(sides.query.factor.mT @ answers.present_query, groups)
        self.right.add(sides.key.factor.mT @ sides.key.gram @ key, by_key)
        stacked = linalg.stack_groups(sides.query.factor.mT @ sides.query.gram @ query, groups)
        self.left.add(stacked, sides.key.factor.mT @ answers.present_key)
