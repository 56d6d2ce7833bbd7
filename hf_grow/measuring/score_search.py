"""The strongest directions for new query/key columns of one layer, from few products with its score gradients.

A block Krylov search from both sides: in every pass M is multiplied by some columns and Mᵀ by others, each made from
what the other side answered before; in the end the part of M that all answers together know is taken apart.

All is kept in whitened coordinates with the heads of a group stacked, which share the key side of every direction: M is
(groups, heads of a group · query inputs, key inputs).
"""

from dataclasses import dataclass

import torch
from torch import Tensor

from hf_grow import linalg
from hf_grow.linalg import Directions
from hf_grow.measuring.collector import PresentColumns, Sides
from hf_grow.measuring.probes import Answers
from hf_grow.measuring.statistics import Candidates

# Probes that only measure how large M is: enough for about a tenth of accuracy over a layer's heads.
ENERGY_PROBES = 8


@dataclass(frozen=True)
class Energies:
    """‖M‖² of each head, all that is wanted, and ‖M⊥‖², the part that the present columns cannot express."""

    wanted: Tensor
    bottleneck: Tensor


@dataclass(frozen=True)
class RandomProbes:
    """The first probes, plain random numbers, as no gram is known yet: key (groups, inputs, k), query (heads, …, k)."""

    key: Tensor
    query: Tensor

    @classmethod
    def draw(
        cls, heads: int, groups: int, inputs: dict[str, int], width: int, like: Tensor, generator: torch.Generator
    ) -> "RandomProbes":
        """So many for every head, as far as there are inputs."""
        width = min(width, inputs["query"], inputs["key"])
        key = torch.randn(groups, inputs["key"], width, generator=generator).to(like)
        return cls(key, torch.randn(heads, inputs["query"], width, generator=generator).to(like))


@dataclass(frozen=True)
class ScoreProbes:
    """Whitened key and query probes, stacked and orthonormal, and their weights as the model takes them.

    Behind the key weights there may be some more, that only measure.
    """

    key: Tensor
    query: Tensor
    key_weights: Tensor
    query_weights: Tensor


class Known:
    """Orthonormal columns (groups, m, k) and what a matrix makes of them, (groups, n, k); `newest` of the last ones."""

    def __init__(self, columns: Tensor, images: Tensor) -> None:
        self.columns, self.images = linalg.orthonormal_with(columns, images)
        self.newest = self.images

    def add(self, columns: Tensor, images: Tensor) -> None:
        """More columns, beside what is known."""
        columns, self.newest = linalg.orthonormal_with(*self.without(columns, images))
        self.columns = torch.cat((self.columns, columns), dim=-1)
        self.images = torch.cat((self.images, self.newest), dim=-1)

    def without(self, columns: Tensor, images: Tensor) -> tuple[Tensor, Tensor]:
        """Columns and their images without the part that is known."""
        shares = self.columns.mT @ columns
        return columns - self.columns @ shares, images - self.images @ shares


@dataclass(frozen=True)
class Reached:
    """What M makes of the whitened present key columns, and Mᵀ of the present queries."""

    right: Known
    left: Known

    @classmethod
    def by(cls, present: PresentColumns, sides: Sides, answers: Answers) -> "Reached":
        """By the answers for the present columns."""
        assert answers.present_query is not None and answers.present_key is not None
        groups = present.key.shape[0]
        query, key = sides.query.whitened(present.query), sides.key.whitened(present.key)
        by_key = linalg.stack_groups(sides.query.factor.mT @ answers.present_query, groups)
        by_query = sides.key.factor.mT @ answers.present_key
        return cls(Known(key, by_key), Known(linalg.stack_groups(query, groups), by_query))


class ScoreSearch:
    """The search in one layer from the answers to random probes on.

    whole     the sides with all that the present columns span; sides: those to search in, which may leave that out
    reached   where it is left out, how much of M is there, by head
    """

    def __init__(
        self, first: RandomProbes, answers: Answers, whole: Sides, sides: Sides, reached: Reached | None = None
    ) -> None:
        self.whole, self.sides = whole.without_grams(), sides.without_grams()
        self.heads, self.groups = first.query.shape[0], first.key.shape[0]
        self.energies: Energies | None = None
        key, query = whole.key.whitened(first.key), self._stacked(whole.query.whitened(first.query))
        by_key, by_query = self._whitened(answers)
        if reached is not None:
            key, by_key = reached.right.without(key, by_key)
            query, by_query = reached.left.without(query, by_query)
        by_key, by_query = self._outside(by_key, by_query)
        self.reached = None if reached is None else self._squares(reached.right.images)
        self.right, self.left = Known(key, by_key), Known(query, by_query)

    def ask(self, measuring: torch.Generator | None = None) -> ScoreProbes:
        """The probes of the next pass, from the answers of the other side; with a generator some to measure with."""
        key = linalg.orthonormal_beside(self.left.newest, self.right.columns)
        query = linalg.orthonormal_beside(self.right.newest, self.left.columns)
        weights = self.sides.key.weights(key)
        if measuring is not None:
            weights = torch.cat((weights, self.whole.key.weights(self._random(measuring))), dim=-1)
            # What the present keys span is not looked at again, unless it is left out.
            self.whole = Sides(self.whole.query, self.sides.key)
        return ScoreProbes(key, query, weights, self.sides.query.weights(self._unstacked(query)))

    def take(self, probes: ScoreProbes, answers: Answers) -> None:
        """The answers to these."""
        by_key, by_query = self._whitened(answers)
        count = probes.key.shape[-1]
        if by_key.shape[-1] > count:
            self.energies = self._energies(by_key[..., count:])
            # From here on nobody asks for what the present columns span, unless it is left out.
            self.whole = self.sides
        by_key, by_query = self._outside(by_key[..., :count], by_query)
        self.right.add(probes.key, by_key)
        self.left.add(probes.query, by_query)

    def solve(self, rank: int) -> Candidates:
        """The strongest directions of what is known of M, and their gains on the data that answered."""
        left, values, right = (part[..., :rank] for part in self._known_part())
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
        key = self.whole.key
        assert key.basis is not None
        random = torch.randn(self.groups, key.factor.shape[1], ENERGY_PROBES, generator=generator).to(key.factor)
        outside = key.project(random)
        return outside if self.reached is not None else torch.cat((outside, random - outside), dim=-1)

    def _energies(self, answer: Tensor) -> Energies:
        outside, inside = answer[..., :ENERGY_PROBES], answer[..., ENERGY_PROBES:]
        reached = self._squares(inside) / ENERGY_PROBES if self.reached is None else self.reached
        bottleneck = self.whole.query.project(self._unstacked(outside)).square().sum((1, 2))
        return Energies(self._squares(outside) / ENERGY_PROBES + reached, bottleneck / ENERGY_PROBES)

    def _squares(self, images: Tensor) -> Tensor:
        """The sum of squares of each head."""
        return self._unstacked(images).square().sum((1, 2))

    def _stacked(self, per_head: Tensor) -> Tensor:
        return linalg.stack_groups(per_head, self.groups)

    def _unstacked(self, stacked: Tensor) -> Tensor:
        return stacked.reshape(self.heads, -1, stacked.shape[-1])
