"""Exact collection: the scores are materialised and their gradient kept. The oracle, and good for small models."""

from collections.abc import Sequence
from contextlib import closing
from dataclasses import replace

import torch
from torch import Tensor

from hf_grow import linalg
from hf_grow.collector import Collector, free
from hf_grow.estimators import ESTIMATOR_CLASSES, Estimator
from hf_grow.growth import uniform_circuit
from hf_grow.linalg import Side
from hf_grow.modeling.growable_attention import AttentionSite
from hf_grow.observe import ExactObserver, input_sizes
from hf_grow.passes import Batch, Passes, batch_size, token_mask
from hf_grow.probes import NewHead, score_products
from hf_grow.statistics import AttentionStatistics, AttentionSums, Candidates


def collect_sums(
    passes: Passes,
    sites: Sequence[AttentionSite],
    batches: Sequence[Batch],
    *,
    values: bool,
    estimators: Sequence[Estimator] | None = None,
) -> list[AttentionSums]:
    """The sums of every attention module over the batches, on all processes together.

    Memory is quadratic in the number of tokens: the scores of all layers are held at once.
    """
    observers = [ExactObserver(site) for site in sites]
    sums = [_zeros(site, values) for site in sites]
    with closing(passes.gradients(batches, observers, "eager", "exact gradients")) as stream:
        for batch, weight, gradients in stream:
            for index, (observer, (scores, block)) in enumerate(zip(observers, gradients, strict=True)):
                dtype = torch.promote_types(scores.dtype, torch.float32)
                seen = _Seen(observer, batch, scores.to(dtype), block.to(dtype))
                sums[index] = sums[index].merge(seen.sums(batch_size(batch), weight, values))
                if estimators is not None:
                    seen.tell(estimators[index])
                observer.forget()
            del gradients, scores, block, seen
    return [_reduced(passes, part) for part in sums]


class _Seen:
    """One batch in one attention module: gradients, inputs and masks in a dtype fit for adding up."""

    def __init__(self, observer: ExactObserver, batch: Batch, scores: Tensor, block: Tensor) -> None:
        self.observer, self.scores, self.block = observer, scores, block
        self.queries, self.keys, self.values = (
            observer.inputs[role].to(scores.dtype) for role in ("query", "key", "value")
        )
        self.query_mask = token_mask(batch, "query", self.queries)
        self.key_mask = token_mask(batch, "cross" if observer.site.kind == "cross" else "key", self.keys)

    def sums(self, sequences: int, weight: float, values: bool) -> AttentionSums:
        """What this batch adds."""
        working = linalg.working_dtype(self.queries.device)
        real_queries, real_keys = (
            (self.queries * self.query_mask).flatten(0, 1),
            (self.keys * self.key_mask).flatten(0, 1),
        )
        parts = {
            "gradient": torch.einsum("bqi,bhqk,bkj->hij", self.queries, self.scores, self.keys),
            "query_gram": real_queries.mT @ real_queries,
            "key_gram": real_keys.mT @ real_keys,
        }
        if values:
            parts |= self._value_sums()
        sums = {name: part.to(working) for name, part in parts.items()}
        return AttentionSums(**sums, sequences=sequences, weight=weight)

    def _value_sums(self) -> dict[str, Tensor]:
        weights = torch.cat((self.observer.weights, self.observer.uniform.to(self.observer.weights)), dim=1)
        read = weights.to(self.scores.dtype) @ self.values[:, None]  # (batch, patterns, queries, inputs)
        real = read * self.query_mask[:, None]
        return {
            "value_gradient": torch.einsum("bhqi,bqo->hio", read, self.block),
            "pattern_gram": torch.einsum("bhqi,bhqj->hij", real, real),
        }

    def tell(self, estimator: Estimator) -> None:
        """Show the sequences to an estimator, one by one."""
        working = linalg.working_dtype(self.queries.device)
        rows = (self.scores, self.queries, self.keys, self.query_mask, self.key_mask)
        for row in zip(*(part.to(working) for part in rows), strict=True):
            estimator.add(*row)


def _zeros(site: AttentionSite, values: bool) -> AttentionSums:
    sizes, heads = input_sizes(site), site.attention.n_heads
    device = next(site.projections())[0].weight.device
    queries, keys, read = sizes["query"], sizes["key"], sizes["value"]
    shapes = {"gradient": (heads, queries, keys), "query_gram": (queries, queries), "key_gram": (keys, keys)}
    if values:
        shapes |= {"value_gradient": (heads + 1, read, sizes["output"]), "pattern_gram": (heads + 1, read, read)}
    dtype = linalg.working_dtype(device)
    zeros = {name: torch.zeros(shape, dtype=dtype, device=device) for name, shape in shapes.items()}
    return AttentionSums(**zeros, sequences=0, weight=0.0)


def _reduced(passes: Passes, sums: AttentionSums) -> AttentionSums:
    tensors = {name: value for name, value in vars(sums).items() if isinstance(value, Tensor)}
    counts = torch.tensor([float(sums.sequences), sums.weight], dtype=torch.float64)
    *reduced, counts = passes.reduce([*tensors.values(), counts])
    named = dict(zip(tensors, reduced, strict=True))
    return AttentionSums(**named, sequences=round(float(counts[0])), weight=float(counts[1]))


class ExactCollector(Collector):
    """Solves from the exact sums of the sequences that choose; those that judge give the held-out gains."""

    def layers(self) -> list[AttentionStatistics]:
        estimators = self._estimators()
        values = self.wants_circuits
        collect = (self.passes, self.sites)
        chosen = collect_sums(*collect, self.choosing, values=values, estimators=estimators)
        judged = collect_sums(*collect, self.judging, values=values)
        found = [self._solve(index, chosen[index], judged[index]) for index in range(len(self.sites))]
        if estimators is not None:
            found = [self._estimated(index, layer, estimators[index]) for index, layer in enumerate(found)]
        return self._with_head_scores(found) if "heads" in self.kinds else found

    def _estimators(self) -> list[Estimator] | None:
        if self.config.estimator == "pooled":
            return None
        return [ESTIMATOR_CLASSES[self.config.estimator](self.config) for _ in self.sites]

    def _solve(self, index: int, chosen: AttentionSums, judged: AttentionSums) -> AttentionStatistics:
        place, mean, other = self.places[index], chosen.mean(), judged.mean() if judged.sequences else None
        sides = self.sides(mean.query_gram, mean.key_gram, index)
        whitened = linalg.whiten(mean.gradient, *free(sides))
        layer = AttentionStatistics(
            place=place,
            query_gram=mean.query_gram,
            key_gram=mean.key_gram,
            query=self.present[index][0],
            key=self.present[index][1],
            wanted=whitened.square().sum((1, 2)),
            bottleneck=linalg.project(whitened, *sides).square().sum((1, 2)),
            sums=(chosen, judged),
            change=sides[0].weights(whitened) @ sides[1].factor.mT,
        )
        if "columns" in self.kinds:
            layer = replace(layer, columns=self._columns(index, sides, whitened, mean, other))
        if self.wants_circuits:
            layer = self._with_circuits(layer, mean, other)
        return layer

    def _columns(
        self, index: int, sides: tuple[Side, Side], whitened: Tensor, mean: AttentionSums, other: AttentionSums | None
    ) -> Candidates:
        groups, metric = self.places[index].n_kv_heads, self.config.metric
        query, key = self.searched(sides, index)
        found = linalg.directions(whitened, query, key, self.rank(index), groups=groups, metric=metric)
        held_out = None if other is None else linalg.first_order_gains(other.gradient, found)
        return Candidates(found.query, found.key, linalg.first_order_gains(mean.gradient, found), held_out)

    def _estimated(self, index: int, layer: AttentionStatistics, estimator: Estimator) -> AttentionStatistics:
        """The change and columns of another step P than the pooled one: that of the gradient A P B."""
        assert layer.sums is not None
        mean, judged = layer.sums[0].mean(), layer.sums[1]
        sides = self.sides(mean.query_gram, mean.key_gram, index)
        change = estimator.step(self.passes)
        layer = replace(layer, change=change)
        if layer.columns is None:
            return layer
        # The grams of the sides have the ridge that is in P.
        whitened = linalg.whiten(sides[0].gram @ change @ sides[1].gram, *free(sides))
        other = judged.mean() if judged.sequences else None
        return replace(layer, columns=self._columns(index, sides, whitened, mean, other))

    def _with_circuits(
        self, layer: AttentionStatistics, mean: AttentionSums, other: AttentionSums | None
    ) -> AttentionStatistics:
        assert mean.value_gradient is not None and mean.pattern_gram is not None
        judged = None if other is None else other.value_gradient
        rank = self.circuit_rank() + self.config.oversampling
        candidates = []
        for rows, groups in ((slice(None, -1), layer.place.n_kv_heads), (slice(-1, None), 1)):
            gradient, gram = mean.value_gradient[rows], mean.pattern_gram[rows]
            pooled = gram.reshape(groups, -1, *gram.shape[1:]).mean(1)
            factor = self.pattern_whitening(pooled, mean.key_gram)
            value, output = linalg.value_directions(gradient, factor, rank, groups)
            held_out = None if judged is None else linalg.value_gains(judged[rows], value, output)
            candidates.append(Candidates(value, output, linalg.value_gains(gradient, value, output), held_out))
        return replace(layer, values=candidates[0], uniform=candidates[1])

    def _with_head_scores(self, layers: list[AttentionStatistics]) -> list[AttentionStatistics]:
        """The query/key side of new uniform heads: T of their own scores, from probes that are the identity."""
        heads = [NewHead(*uniform_circuit(layer.uniform, layer.place)) for layer in layers if layer.uniform]
        identities = [
            torch.eye(layer.place.inputs["key"], dtype=layer.key.dtype, device=layer.key.device)[None]
            for layer in layers
        ]
        gradients = score_products(self.passes, self.sites, self.choosing, identities, "key", heads)
        judged = (
            score_products(self.passes, self.sites, self.judging, identities, "key", heads)
            if self.judged
            else [None] * len(layers)
        )
        found = []
        for index, (layer, gradient, other) in enumerate(zip(layers, gradients, judged, strict=True)):
            sides = free(self.sides(layer.query_gram, layer.key_gram, index))
            scores = linalg.directions(linalg.whiten(gradient, *sides), *sides, layer.place.query_key_dim, groups=1)
            held_out = None if other is None else linalg.first_order_gains(other, scores)
            gains = linalg.first_order_gains(gradient, scores)
            found.append(replace(layer, uniform_scores=Candidates(scores.query, scores.key, gains, held_out)))
        return found
