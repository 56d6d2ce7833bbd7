"""The circuits' part of a sketch: value columns and output rows, from products with the gradients of the outputs."""

from collections.abc import Callable, Sequence
from dataclasses import dataclass, replace

import torch
from torch import Tensor

from hf_grow import linalg
from hf_grow.measuring.collector import Collector, Sides
from hf_grow.measuring.probes import Grams, OutputProducts, OutputRows, PatternProducts, driving_inputs, output_products
from hf_grow.measuring.statistics import AttentionStatistics, Candidates
from hf_grow.modeling.growable_attention import AttentionSite
from hf_grow.running.batches import Batch
from hf_grow.running.passes import Passes
from hf_grow.surgery.place import input_sizes


@dataclass(frozen=True)
class Circuit:
    """Value columns (groups, inputs, rank), output rows (heads, rank, outputs) and their gains (heads, rank)."""

    value: Tensor
    output: Tensor
    gains: Tensor

    def candidates(self, judged: PatternProducts | None) -> Candidates:
        """As statistics keep them, with gains on other data by the products of the value columns with these."""
        held_out = None if judged is None else (judged.gradient * self.output).sum(-1)
        return Candidates(self.value, self.output, self.gains, held_out)


@dataclass(frozen=True)
class Circuits:
    """What one layer could get for the patterns of its present heads, and for the uniform pattern."""

    present: Circuit
    uniform: Circuit

    @property
    def values(self) -> Tensor:
        """All value columns, (key heads + 1, inputs, rank)."""
        return torch.cat((self.present.value, self.uniform.value))

    def output_rows(self, width: int) -> OutputRows:
        """The strongest of the output rows."""
        return OutputRows(self.present.output[:, :width], self.uniform.output[:, :width])


def find_circuits(
    passes: Passes,
    sites: Sequence[AttentionSite],
    batches: Sequence[Sequence[Batch]],
    factors: Sequence[Tensor],
    width: int,
    solve: Callable[[int, Tensor, OutputProducts], Circuits],
    generator: torch.Generator,
) -> list[Circuits]:
    """The best value columns and output rows of every attention module, and their gains on these data.

    In turns: which inputs drive the wanted outputs (RΨ), then the optimum among these (ΩᵀR and its metric). `factors`
    whiten the inputs, which puts those that matter first; `solve` finds the optimum of a layer for value columns Ω.
    Each entry of `batches` serves one product.
    """
    outputs = [_random_outputs(site, factor, width, generator) for site, factor in zip(sites, factors, strict=True)]
    driving: list[list[Tensor]] = [[] for _ in sites]
    for first, second in zip(batches[::2], batches[1::2], strict=True):
        answers = driving_inputs(passes, sites, first, outputs)
        for whitened, factor, answer in zip(driving, factors, answers, strict=True):
            whitened.append(factor.mT @ answer)
        spans = [
            factor @ torch.linalg.qr(torch.cat(whitened, dim=-1)).Q
            for factor, whitened in zip(factors, driving, strict=True)
        ]
        products = output_products(passes, sites, second, spans, grams=True)
        circuits = [solve(index, span, part) for index, (span, part) in enumerate(zip(spans, products, strict=True))]
        outputs = [part.output_rows(width) for part in circuits]
    return circuits


def _random_outputs(site: AttentionSite, like: Tensor, width: int, generator: torch.Generator) -> OutputRows:
    outputs = input_sizes(site)["output"]
    random = torch.randn(site.attention.n_heads + 1, width, outputs, generator=generator).to(like)
    return OutputRows(random[:-1], random[-1:])


class CircuitSketch:
    """Value columns and uniform heads of a collection whose grams and sides are known."""

    def __init__(self, collector: Collector, grams: Sequence[Grams], sides: Sequence[Sides]) -> None:
        self.collector, self.grams, self.sides = collector, grams, sides

    def with_circuits(self, layers: list[AttentionStatistics]) -> list[AttentionStatistics]:
        """The layers with new value columns, and with the value and output side of a uniform head."""
        collector = self.collector
        phases = collector.phases(2 * ((collector.config.products + 1) // 2))
        factors = [self._value_factor(index) for index in range(len(layers))]
        circuits = find_circuits(
            collector.passes, collector.sites, phases, factors, self._width(), self._best_circuits, collector.generator
        )
        judged = self._judged(circuits)
        return [
            replace(
                layer,
                values=part.present.candidates(products.present if products else None),
                uniform=part.uniform.candidates(products.uniform if products else None),
            )
            for layer, part, products in zip(layers, circuits, judged, strict=True)
        ]

    def _width(self) -> int:
        width = self.collector.circuit_rank() + self.collector.config.oversampling
        return min(width, *(min(place.inputs["value"], place.inputs["output"]) for place in self.collector.places))

    def _value_factor(self, index: int) -> Tensor:
        """What whitens the value inputs: the keys' factor, as both read the same states."""
        factor, inputs = self.sides[index].key.factor, self.collector.places[index].inputs
        if inputs["value"] == inputs["key"]:
            return factor
        return torch.eye(inputs["value"], dtype=factor.dtype, device=factor.device)

    def _judged(self, circuits: Sequence[Circuits]) -> Sequence[OutputProducts | None]:
        """Products of their value columns on the sequences that judge; None where there are none."""
        collector = self.collector
        if not collector.judged:
            return [None] * len(circuits)
        values = [part.values for part in circuits]
        return output_products(collector.passes, collector.sites, collector.judging, values)

    def _best_circuits(self, index: int, span: Tensor, products: OutputProducts) -> Circuits:
        """The optimum among value columns in the span (key heads + 1, value inputs, k)."""
        present = self._best(index, span[:-1], products.present)
        return Circuits(present, self._best(index, span[-1:], products.uniform))

    def _best(self, index: int, span: Tensor, products: PatternProducts) -> Circuit:
        assert products.gram is not None
        groups, width = span.shape[0], span.shape[-1]
        pooled = products.gram.reshape(groups, -1, width, width).mean(1)
        factor = self.collector.pattern_whitening(pooled, self.grams[index].key, span)
        value, output = linalg.value_directions(products.gradient, factor, width, groups)
        return Circuit(span @ value, output, linalg.value_gains(products.gradient, value, output))
