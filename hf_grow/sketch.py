"""Collection by probing: the strongest directions from products with the gradients, phase by phase."""

from collections.abc import Callable, Sequence
from dataclasses import dataclass, replace

import torch
from torch import Tensor

from hf_grow import linalg
from hf_grow.collector import Collector, free
from hf_grow.growth import uniform_circuit
from hf_grow.linalg import Directions, Side
from hf_grow.modeling.growable_attention import AttentionSite
from hf_grow.observe import input_sizes
from hf_grow.passes import Batch, Passes
from hf_grow.probes import NewHead, collect_grams, driving_inputs, output_products, score_products
from hf_grow.statistics import AttentionStatistics, Candidates

# Probes that only measure how large the rest is: enough for about a tenth of accuracy over a layer's heads.
ENERGY_PROBES = 8


def find_directions(
    product: Callable[[list[Tensor], str], list[Tensor]],
    sides: Sequence[tuple[Side, Side]],
    groups: Sequence[int],
    ranks: Sequence[int],
    products: int,
    start: Sequence[Tensor],
) -> tuple[list[Directions], list[Tensor]]:
    """The strongest directions of M in every layer by a randomised range finder: products from either side in turns.

    `start` is Y = MΩ, already taken (heads, query inputs, k), whitened; it counts as the first product. Returns the
    directions and their gains (heads, rank) by the last product.
    """
    found = [linalg.stacked_orthonormal(first, count) for first, count in zip(start, groups, strict=True)]
    on_query = True
    for _ in range(products - 1):
        side = "query" if on_query else "key"
        index = 0 if on_query else 1
        probes = [pair[index].weights(basis) for pair, basis in zip(sides, found, strict=True)]
        answers = product(probes, side)
        whitened = [pair[1 - index].whiten(answer) for pair, answer in zip(sides, answers, strict=True)]
        last = found
        found = [linalg.stacked_orthonormal(answer, count) for answer, count in zip(whitened, groups, strict=True)]
        on_query = not on_query
    # M ≈ basis · answerᵀ (or answer · basisᵀ): the SVD of the narrow answer is that of the product.
    result, gains = [], []
    for pair, basis, answer, count, rank in zip(sides, last, whitened, groups, ranks, strict=True):
        left, values, right = _factors(basis, answer, count, answered_key=not on_query)
        balanced = linalg.balanced(left[..., :rank], values[..., :rank], right[..., :rank])
        result.append(Directions(pair[0].weights(balanced.query), pair[1].weights(balanced.key)))
        squares = linalg.repeat_groups(values[..., :rank].square(), left.shape[0])
        gains.append(squares * left[..., :rank].square().sum(1))
    return result, gains


def _factors(basis: Tensor, answer: Tensor, groups: int, answered_key: bool) -> tuple[Tensor, Tensor, Tensor]:
    if answered_key:
        right, values, turn = torch.linalg.svd(answer, full_matrices=False)
        heads = basis.shape[0]
        left = linalg.stack_groups(basis, groups) @ turn.mT
        return left.reshape(heads, -1, left.shape[-1]), values, right
    heads = answer.shape[0]
    left, values, turn = torch.linalg.svd(linalg.stack_groups(answer, groups), full_matrices=False)
    return left.reshape(heads, -1, left.shape[-1]), values, basis @ turn.mT


@dataclass(frozen=True)
class Circuits:
    """Value columns and output rows for the patterns of the present heads, then for the uniform pattern.

    value (key heads, inputs, rank) with output (heads, rank, outputs); uniform_value (1, …) with uniform_output (1, …).
    """

    value: Tensor
    output: Tensor
    uniform_value: Tensor
    uniform_output: Tensor

    def gains(self, gradient: Tensor, uniform_gradient: Tensor) -> tuple[Tensor, Tensor]:
        """First-order decrease of a unit step, from ΩᵀR with these value columns as Ω: (heads, rank), (1, rank)."""
        return (gradient * self.output).sum(-1), (uniform_gradient * self.uniform_output).sum(-1)


Solved = tuple[Circuits, tuple[Tensor, Tensor]]


def find_circuits(
    passes: Passes,
    sites: Sequence[AttentionSite],
    batches: Sequence[Sequence[Batch]],
    factors: Sequence[Tensor],
    width: int,
    solve: Callable[[int, Tensor, list[Tensor]], Solved],
    generator: torch.Generator,
) -> list[Solved]:
    """The best value columns and output rows of every attention module, and their gains on these data.

    In turns: which inputs drive the wanted outputs (RΨ), then the optimum among these (ΩᵀR and its metric). `factors`
    whiten the inputs, which puts those that matter first; `solve` finds the optimum of a layer for value columns Ω.
    Each entry of `batches` serves one product.
    """
    outputs = [_random_outputs(site, factor, width, generator) for site, factor in zip(sites, factors, strict=True)]
    seen: list[list[Tensor]] = [[] for _ in sites]
    for first, second in zip(batches[::2], batches[1::2], strict=True):
        for spans, factor, product in zip(seen, factors, driving_inputs(passes, sites, first, outputs), strict=True):
            spans.append(factor.mT @ product)
        tried = [f @ torch.linalg.qr(torch.cat(spans, dim=-1)).Q for f, spans in zip(factors, seen, strict=True)]
        answers = output_products(passes, sites, second, tried, grams=True)
        solved = [solve(index, span, answer) for index, (span, answer) in enumerate(zip(tried, answers, strict=True))]
        outputs = [(part.output[:, :width], part.uniform_output[:, :width]) for part, _ in solved]
    return solved


def _random_outputs(site: AttentionSite, like: Tensor, width: int, generator: torch.Generator) -> tuple[Tensor, Tensor]:
    outputs = input_sizes(site)["output"]
    random = torch.randn(site.attention.n_heads + 1, width, outputs, generator=generator).to(like)
    return random[:-1], random[-1:]


class SketchCollector(Collector):
    """Solves from products with probes, phase by phase."""

    def layers(self) -> list[AttentionStatistics]:
        self.grams = collect_grams(self.passes, self.sites, self.choosing)
        self.all_sides = [self.sides(*pair, index) for index, pair in enumerate(self.grams)]
        nothing = torch.zeros(0)
        found = [
            AttentionStatistics(self.places[index], *self.grams[index], *self.present[index], nothing, nothing)
            for index in range(len(self.sites))
        ]
        if "columns" in self.kinds:
            found = self._with_columns(found)
        if self.wants_circuits:
            found = self._with_circuits(found)
        return self._with_head_scores(found) if "heads" in self.kinds else found

    def _phases(self, count: int) -> list[list[Batch]]:
        """The batches for each of so many products: all, or a part of them each."""
        if self.config.phases == "all" or len(self.choosing) < count:
            return [self.choosing] * count
        return [self.choosing[phase::count] for phase in range(count)]

    def _with_columns(self, layers: list[AttentionStatistics]) -> list[AttentionStatistics]:
        first, *rest = self._phases(self.config.products)
        searched = [self.searched(sides, index) for index, sides in enumerate(self.all_sides)]
        probes = [self._start(index, sides) for index, sides in enumerate(searched)]
        weights = [sides[1].weights(probe) for sides, probe in zip(searched, probes, strict=True)]
        answers = score_products(self.passes, self.sites, first, weights, "key")
        energies = [self._energies(index, searched[index], answer) for index, answer in enumerate(answers)]
        starts = [
            sides[0].whiten(answer[..., :-ENERGY_PROBES]) for sides, answer in zip(searched, answers, strict=True)
        ]
        later = iter(rest)

        def product(probes: list[Tensor], side: str) -> list[Tensor]:
            return score_products(self.passes, self.sites, next(later), probes, side)

        groups = [place.n_kv_heads for place in self.places]
        ranks = [self.rank(index) for index in range(len(layers))]
        found, gains = find_directions(product, searched, groups, ranks, self.config.products, starts)
        held_out = self._held_out(found)
        return [
            replace(
                layer,
                wanted=energies[index][0],
                bottleneck=energies[index][1],
                columns=Candidates(found[index].query, found[index].key, gains[index], held_out[index]),
            )
            for index, layer in enumerate(layers)
        ]

    def _start(self, index: int, sides: tuple[Side, Side]) -> Tensor:
        """Random whitened probes (key heads, key inputs, k): the first to search with, the last few to measure."""
        place, basis = self.places[index], self.all_sides[index][1].basis
        width = self.rank(index) + ENERGY_PROBES
        random = torch.randn(place.n_kv_heads, place.inputs["key"], width, generator=self.generator).to(sides[1].factor)
        search, measure = random[..., :-ENERGY_PROBES], random[..., -ENERGY_PROBES:]
        assert basis is not None
        inside = basis @ (basis.mT @ measure)
        return torch.cat((sides[1].project(search), measure - inside if sides[1].basis is None else inside), dim=-1)

    def _energies(self, index: int, sides: tuple[Side, Side], answer: Tensor) -> tuple[Tensor, Tensor]:
        """‖M‖² and ‖M⊥‖² of each head, estimated from the products with random probes."""
        query = self.all_sides[index][0]
        whitened = query.factor.mT @ answer
        outside = query.project(whitened)
        count = ENERGY_PROBES
        searched, measured = (part.square().sum((1, 2)) for part in (whitened[..., :-count], whitened[..., -count:]))
        searched, measured = searched / (whitened.shape[-1] - count), measured / count
        if sides[1].basis is None:  # searched everywhere, measured outside the present columns
            return searched, torch.minimum(outside[..., -count:].square().sum((1, 2)) / count, searched)
        return searched + measured, outside[..., :-count].square().sum((1, 2)) / (whitened.shape[-1] - count)

    def _held_out(self, found: list[Directions], heads: list[NewHead] | None = None) -> list[Tensor | None]:
        if not self.judged:
            return [None] * len(found)
        keys = [direction.key for direction in found]
        answers = score_products(self.passes, self.sites, self.judging, keys, "key", heads)
        return [(direction.query * answer).sum(1) for direction, answer in zip(found, answers, strict=True)]

    def _with_circuits(self, layers: list[AttentionStatistics]) -> list[AttentionStatistics]:
        width = self.circuit_rank() + self.config.oversampling
        width = min(width, *(min(place.inputs["value"], place.inputs["output"]) for place in self.places))
        phases = self._phases(2 * ((self.config.products + 1) // 2))
        factors = [self._value_factor(index) for index in range(len(layers))]
        solved = find_circuits(self.passes, self.sites, phases, factors, width, self._best_circuits, self.generator)
        found, gains = [part for part, _ in solved], [gain for _, gain in solved]
        judged: list = [(None, None)] * len(layers)
        if self.judged:
            values = [torch.cat((part.value, part.uniform_value)) for part in found]
            answers = output_products(self.passes, self.sites, self.judging, values)
            judged = [part.gains(*answer) for part, answer in zip(found, answers, strict=True)]
        return [
            replace(
                layer,
                values=Candidates(part.value, part.output, gain[0], held_out[0]),
                uniform=Candidates(part.uniform_value, part.uniform_output, gain[1], held_out[1]),
            )
            for layer, part, gain, held_out in zip(layers, found, gains, judged, strict=True)
        ]

    def _best_circuits(self, index: int, span: Tensor, answer: list[Tensor]) -> Solved:
        """The optimum among value columns in the span (key heads + 1, value inputs, k), and its gains."""
        gradient, uniform_gradient, gram, uniform_gram = answer
        value, output, gains = self._best(index, span[:-1], gradient, gram)
        uniform, uniform_output, uniform_gains = self._best(index, span[-1:], uniform_gradient, uniform_gram)
        return Circuits(value, output, uniform, uniform_output), (gains, uniform_gains)

    def _best(self, index: int, span: Tensor, gradient: Tensor, gram: Tensor) -> tuple[Tensor, Tensor, Tensor]:
        groups, width = span.shape[0], span.shape[-1]
        pooled = gram.reshape(groups, -1, width, width).mean(1)
        factor = self.pattern_whitening(pooled, self.grams[index][1], span)
        value, output = linalg.value_directions(gradient, factor, width, groups)
        return span @ value, output, linalg.value_gains(gradient, value, output)

    def _value_factor(self, index: int) -> Tensor:
        """What whitens the value inputs: the keys' factor, as both read the same states."""
        factor, inputs = self.all_sides[index][1].factor, self.places[index].inputs
        if inputs["value"] == inputs["key"]:
            return factor
        return torch.eye(inputs["value"], dtype=factor.dtype, device=factor.device)

    def _with_head_scores(self, layers: list[AttentionStatistics]) -> list[AttentionStatistics]:
        heads = [NewHead(*uniform_circuit(layer.uniform, layer.place)) for layer in layers if layer.uniform]
        sides = [free(pair) for pair in self.all_sides]
        ranks = [
            min(place.query_key_dim + self.config.oversampling, place.inputs["query"], place.inputs["key"])
            for place in self.places
        ]
        phases = iter(self._phases(self.config.products))

        def product(probes: list[Tensor], side: str) -> list[Tensor]:
            return score_products(self.passes, self.sites, next(phases), probes, side, heads)

        random = [
            key.weights(torch.randn(1, key.factor.shape[0], rank, generator=self.generator).to(key.factor))
            for (_, key), rank in zip(sides, ranks, strict=True)
        ]
        starts = [query.whiten(answer) for (query, _), answer in zip(sides, product(random, "key"), strict=True)]
        ones = [1] * len(layers)
        found, gains = find_directions(product, sides, ones, ranks, self.config.products, starts)
        held_out = self._held_out(found, heads)
        return [
            replace(layer, uniform_scores=Candidates(part.query, part.key, gain, judged))
            for layer, part, gain, judged in zip(layers, found, gains, held_out, strict=True)
        ]
