"""The scores' part of a sketch: query/key columns for present and new heads, from products with score gradients."""

from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass, replace

import torch
from torch import Tensor

from hf_grow import linalg
from hf_grow.linalg import Directions
from hf_grow.measuring.collector import Collector, Sides, uniform_heads
from hf_grow.measuring.probes import NewHead, score_products
from hf_grow.measuring.statistics import AttentionStatistics, Candidates
from hf_grow.running.batches import Batch

# Probes that only measure how large the rest is: enough for about a tenth of accuracy over a layer's heads.
ENERGY_PROBES = 8

# From probes for every layer on the "query" or "key" side to their products with the score gradients.
Product = Callable[[list[Tensor], str], list[Tensor]]


@dataclass(frozen=True)
class ScoreSearch:
    """Where in one layer to look for how many directions; the heads of a group share the key side of each."""

    sides: Sides
    groups: int
    rank: int

    def basis(self, whitened: Tensor) -> Tensor:
        """An orthonormal basis of whitened columns, in each group on the side where heads have their own."""
        return linalg.stacked_orthonormal(whitened, self.groups)


@dataclass(frozen=True)
class FoundDirections:
    """The strongest directions of one layer and their gains (heads, rank) on the data that chose them."""

    directions: Directions
    gains: Tensor

    def candidates(self, held_out: Tensor | None) -> Candidates:
        """As statistics keep them."""
        return Candidates(self.directions.query, self.directions.key, self.gains, held_out)


def find_directions(
    product: Product, searches: Sequence[ScoreSearch], products: int, start: Sequence[Tensor]
) -> list[FoundDirections]:
    """The strongest directions of M in every layer by a randomised range finder: products from either side in turns.

    `start` is Y = MΩ, already taken (heads, query inputs, k), whitened; it counts as the first product. Gains are those
    by the last product.
    """
    answers = list(start)
    for number in range(products - 1):
        asked, answered = ("query", "key") if number % 2 == 0 else ("key", "query")
        bases = [search.basis(answer) for search, answer in zip(searches, answers, strict=True)]
        probes = [search.sides.side(asked).weights(basis) for search, basis in zip(searches, bases, strict=True)]
        answers = [
            search.sides.side(answered).whiten(answer)
            for search, answer in zip(searches, product(probes, asked), strict=True)
        ]
    return [
        _strongest(search, basis, answer, answered)
        for search, basis, answer in zip(searches, bases, answers, strict=True)
    ]


def _strongest(search: ScoreSearch, basis: Tensor, answer: Tensor, answered: str) -> FoundDirections:
    """M ≈ basis · answerᵀ (or answer · basisᵀ): the SVD of the narrow answer is that of the product."""
    left, values, right = _factors(basis, answer, search.groups, answered)
    left, values, right = (part[..., : search.rank] for part in (left, values, right))
    balanced = linalg.balanced(left, values, right)
    directions = Directions(search.sides.query.weights(balanced.query), search.sides.key.weights(balanced.key))
    squares = linalg.repeat_groups(values.square(), left.shape[0])
    return FoundDirections(directions, squares * left.square().sum(1))


def _factors(basis: Tensor, answer: Tensor, groups: int, answered: str) -> tuple[Tensor, Tensor, Tensor]:
    if answered == "key":
        right, values, turn = torch.linalg.svd(answer, full_matrices=False)
        heads = basis.shape[0]
        left = linalg.stack_groups(basis, groups) @ turn.mT
        return left.reshape(heads, -1, left.shape[-1]), values, right
    heads = answer.shape[0]
    left, values, turn = torch.linalg.svd(linalg.stack_groups(answer, groups), full_matrices=False)
    return left.reshape(heads, -1, left.shape[-1]), values, basis @ turn.mT


@dataclass(frozen=True)
class Energies:
    """‖M‖² of each head, all that is wanted, and ‖M⊥‖², the part that the present columns cannot express."""

    wanted: Tensor
    bottleneck: Tensor


class ScoreSketch:
    """Query/key columns of a collection whose sides are known."""

    def __init__(self, collector: Collector, sides: Sequence[Sides]) -> None:
        self.collector, self.sides = collector, sides

    def with_columns(self, layers: list[AttentionStatistics]) -> list[AttentionStatistics]:
        """The layers with new query/key columns and the energies."""
        collector = self.collector
        phases = iter(collector.phases(collector.config.products))
        searches = [
            ScoreSearch(collector.searched(sides, index), collector.places[index].n_kv_heads, collector.rank(index))
            for index, sides in enumerate(self.sides)
        ]
        probes = [search.sides.key.weights(self._start(index, search)) for index, search in enumerate(searches)]
        answers = self._products(next(phases), probes, "key")
        energies = [self._energies(index, searches[index], answer) for index, answer in enumerate(answers)]
        starts = [
            search.sides.query.whiten(answer[..., :-ENERGY_PROBES])
            for search, answer in zip(searches, answers, strict=True)
        ]
        columns = find_directions(self._later(phases), searches, collector.config.products, starts)
        held_out = self._held_out(columns)
        return [
            replace(layer, wanted=energy.wanted, bottleneck=energy.bottleneck, columns=part.candidates(judged))
            for layer, energy, part, judged in zip(layers, energies, columns, held_out, strict=True)
        ]

    def with_head_scores(self, layers: list[AttentionStatistics]) -> list[AttentionStatistics]:
        """The layers with the query/key side of a new head that attends uniformly so far."""
        collector, heads = self.collector, uniform_heads(layers)
        phases = iter(collector.phases(collector.config.products))
        searches = [self._head_search(index) for index in range(len(layers))]
        random = [search.sides.key.weights(self._random(1, search.sides, search.rank)) for search in searches]
        answers = self._products(next(phases), random, "key", heads)
        starts = [search.sides.query.whiten(answer) for search, answer in zip(searches, answers, strict=True)]
        scores = find_directions(self._later(phases, heads), searches, collector.config.products, starts)
        held_out = self._held_out(scores, heads)
        return [
            replace(layer, uniform_scores=part.candidates(judged))
            for layer, part, judged in zip(layers, scores, held_out, strict=True)
        ]

    def _head_search(self, index: int) -> ScoreSearch:
        place, oversampling = self.collector.places[index], self.collector.config.oversampling
        rank = min(place.query_key_dim + oversampling, place.inputs["query"], place.inputs["key"])
        return ScoreSearch(self.sides[index].free(), 1, rank)

    def _products(
        self, batches: Sequence[Batch], probes: list[Tensor], side: str, heads: list[NewHead] | None = None
    ) -> list[Tensor]:
        return score_products(self.collector.passes, self.collector.sites, batches, probes, side, heads)

    def _later(self, phases: Iterator[list[Batch]], heads: list[NewHead] | None = None) -> Product:
        """Products that each take the next phase."""
        return lambda probes, side: self._products(next(phases), probes, side, heads)

    def _random(self, heads: int, sides: Sides, width: int) -> Tensor:
        """Random whitened key probes (heads, key inputs, width)."""
        factor = sides.key.factor
        return torch.randn(heads, factor.shape[0], width, generator=self.collector.generator).to(factor)

    def _start(self, index: int, search: ScoreSearch) -> Tensor:
        """Random whitened probes (key heads, key inputs, k): the first to search with, the last few to measure."""
        basis, key = self.sides[index].key.basis, search.sides.key
        random = self._random(search.groups, search.sides, search.rank + ENERGY_PROBES)
        searching, measuring = random[..., :-ENERGY_PROBES], random[..., -ENERGY_PROBES:]
        assert basis is not None
        inside = basis @ (basis.mT @ measuring)
        return torch.cat((key.project(searching), measuring - inside if key.basis is None else inside), dim=-1)

    def _energies(self, index: int, search: ScoreSearch, answer: Tensor) -> Energies:
        """Estimated from the products with random probes."""
        query = self.sides[index].query
        whitened = query.factor.mT @ answer
        outside = query.project(whitened)
        count = ENERGY_PROBES
        searched, measured = (part.square().sum((1, 2)) for part in (whitened[..., :-count], whitened[..., -count:]))
        searched, measured = searched / (whitened.shape[-1] - count), measured / count
        if search.sides.key.basis is None:  # searched everywhere, measured outside the present columns
            return Energies(searched, torch.minimum(outside[..., -count:].square().sum((1, 2)) / count, searched))
        bottleneck = outside[..., :-count].square().sum((1, 2)) / (whitened.shape[-1] - count)
        return Energies(searched + measured, bottleneck)

    def _held_out(
        self, columns: Sequence[FoundDirections], heads: list[NewHead] | None = None
    ) -> Sequence[Tensor | None]:
        """Their gains (heads, rank) on the sequences that judge; None where there are none."""
        if not self.collector.judged:
            return [None] * len(columns)
        keys = [part.directions.key for part in columns]
        answers = self._products(self.collector.judging, keys, "key", heads)
        return [(part.directions.query * answer).sum(1) for part, answer in zip(columns, answers, strict=True)]
