"""Exact collection: the scores are materialised and their gradient kept. The oracle, and good for small models."""

from collections.abc import Sequence
from contextlib import closing
from dataclasses import replace

import torch
from torch import Tensor

from hf_grow import linalg
from hf_grow.linalg import Directions
from hf_grow.measuring.collector import Collector, Sides
from hf_grow.measuring.estimators import ESTIMATOR_CLASSES, Estimator
from hf_grow.measuring.probes import Grams, NewHead, Question, ask
from hf_grow.measuring.statistics import AttentionStatistics, AttentionSums, Candidates
from hf_grow.modeling.growable_attention import AttentionSite
from hf_grow.running.batches import Batch, batch_size
from hf_grow.running.observe import ExactObserver
from hf_grow.running.passes import Passes, token_mask
from hf_grow.surgery.place import input_sizes


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
        for new in stream:
            for index, (observer, gradients) in enumerate(zip(observers, new.by_observer, strict=True)):
                seen = _Seen(observer, new.batch, *(new.weight * gradients[name] for name in ("scores", "block")))
                sums[index] = sums[index].merge(seen.sums(batch_size(new.batch), new.weight, values))
                if estimators is not None:
                    seen.tell(estimators[index])
                observer.forget()
            # Here, too, nothing may hold on to scores while the next batch makes more.
            del new, gradients, seen
    return [_reduced(passes, part) for part in sums]


class _Seen:
    """One batch in one attention module: gradients, inputs and masks in a dtype fit for adding up."""

    def __init__(self, observer: ExactObserver, batch: Batch, scores: Tensor, block: Tensor) -> None:
        dtype = torch.promote_types(scores.dtype, torch.float32)
        self.observer, self.scores, self.block = observer, scores.to(dtype), block.to(dtype)
        self.queries, self.keys, self.values = (observer.inputs[role].to(dtype) for role in ("query", "key", "value"))
        self.query_mask, self.key_mask = (token_mask(batch, observer, role).to(dtype) for role in ("query", "key"))

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
        # (batch, patterns, queries, inputs)
        read = self.observer.patterns().to(self.scores.dtype) @ self.values[:, None]
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
    (counts,) = passes.reduce([torch.tensor([float(sums.sequences), sums.weight], dtype=torch.float64)])
    sequences, weight = counts.tolist()
    return AttentionSums(**passes.reduce_named(tensors), sequences=round(sequences), weight=weight)


class ExactCollector(Collector):
    """Solves from the exact sums of the sequences that choose; those that judge give the held-out gains."""

    def layers(self) -> list[AttentionStatistics]:
        estimators = self._estimators()
        values = self.wants_circuits
        chosen = collect_sums(self.passes, self.sites, self.choosing, values=values, estimators=estimators)
        judged = collect_sums(self.passes, self.sites, self.judging, values=values)
        layers = [self._solve(index, chosen[index], judged[index]) for index in range(len(self.sites))]
        if estimators is not None:
            layers = [self._estimated(index, layer, estimators[index]) for index, layer in enumerate(layers)]
        return layers

    def _estimators(self) -> list[Estimator] | None:
        if self.config.estimator == "pooled":
            return None
        return [ESTIMATOR_CLASSES[self.config.estimator](self.config) for _ in self.sites]

    def _solve(self, index: int, chosen: AttentionSums, judged: AttentionSums) -> AttentionStatistics:
        mean, other = chosen.mean(), judged.mean() if judged.sequences else None
        sides = self._sides(mean, index)
        whitened = self._whitened(mean.gradient, sides)
        layer = AttentionStatistics(
            place=self.places[index],
            query_gram=mean.query_gram,
            key_gram=mean.key_gram,
            query=self.present(index).query,
            key=self.present(index).key,
            wanted=whitened.square().sum((1, 2)),
            bottleneck=linalg.project(whitened, sides.query, sides.key).square().sum((1, 2)),
            sums=(chosen, judged),
            change=sides.query.weights(whitened) @ sides.key.factor.mT,
        )
        if self.wants_score_columns:
            layer = replace(layer, columns=self._columns(index, sides, whitened, mean, other))
        if self.wants_circuits:
            layer = self._with_circuits(layer, mean, other)
        return layer

    def _sides(self, sums: AttentionSums | AttentionStatistics, index: int) -> Sides:
        return self.sides(Grams(sums.query_gram, sums.key_gram), index)

    @staticmethod
    def _whitened(gradient: Tensor, sides: Sides) -> Tensor:
        """All of M, the part that the present columns can express included."""
        free = sides.free()
        return linalg.whiten(gradient, free.query, free.key)

    def _columns(
        self, index: int, sides: Sides, whitened: Tensor, mean: AttentionSums, other: AttentionSums | None
    ) -> Candidates:
        groups, metric = self.places[index].n_kv_heads, self.config.metric
        searched = self.searched(sides, index)
        change = linalg.directions(
            whitened, searched.query, searched.key, self.rank(index), groups=groups, metric=metric
        )
        return _judged_scores(change, mean.gradient, None if other is None else other.gradient)

    def _estimated(self, index: int, layer: AttentionStatistics, estimator: Estimator) -> AttentionStatistics:
        """The change and columns of another step P than the pooled one: that of the gradient A P B."""
        assert layer.sums is not None
        mean, judged = layer.sums[0].mean(), layer.sums[1]
        sides = self._sides(mean, index)
        change = estimator.step(self.passes)
        layer = replace(layer, change=change)
        if layer.columns is None:
            return layer
        # The grams of the sides have the ridge that is in P.
        whitened = self._whitened(sides.query.gram @ change @ sides.key.gram, sides)
        other = judged.mean() if judged.sequences else None
        return replace(layer, columns=self._columns(index, sides, whitened, mean, other))

    def _with_circuits(
        self, layer: AttentionStatistics, mean: AttentionSums, other: AttentionSums | None
    ) -> AttentionStatistics:
        values = self._circuits(slice(None, -1), layer.place.n_kv_heads, mean, other)
        return replace(layer, values=values, uniform=self._circuits(slice(-1, None), 1, mean, other))

    def _circuits(self, patterns: slice, groups: int, mean: AttentionSums, other: AttentionSums | None) -> Candidates:
        """The best value columns and output rows for some of the patterns, in so many groups."""
        assert mean.value_gradient is not None and mean.pattern_gram is not None
        gradient, gram = mean.value_gradient[patterns], mean.pattern_gram[patterns]
        judged = None if other is None else other.value_gradient
        pooled = gram.reshape(groups, -1, *gram.shape[1:]).mean(1)
        factor = self.pattern_whitening(pooled, mean.key_gram)
        rank = self.circuit_rank() + self.config.oversampling
        value, output = linalg.value_directions(gradient, factor, rank, groups)
        held_out = None if judged is None else linalg.value_gains(judged[patterns], value, output)
        return Candidates(value, output, linalg.value_gains(gradient, value, output), held_out)

    def head_scores(self, layers: Sequence[AttentionStatistics], heads: Sequence[NewHead]) -> list[Candidates]:
        """The query/key side of new heads that attend uniformly so far: T of their scores, by the identity as probe."""
        questions = [
            Question(key=torch.eye(place.inputs["key"]).to(self.like(index))[None], head=head)
            for index, (place, head) in enumerate(zip(self.places, heads, strict=True))
        ]
        chosen = ask(self.passes, self.sites, self.choosing, questions, "scores of new heads")
        judged = ask(self.passes, self.sites, self.judging, questions, "judging the scores of new heads")
        return [
            self._head_scores(index, layer, chosen[index].key, judged[index].key if self.judged else None)
            for index, layer in enumerate(layers)
        ]

    def _head_scores(
        self, index: int, layer: AttentionStatistics, gradient: Tensor | None, judged: Tensor | None
    ) -> Candidates:
        assert gradient is not None
        gradient = gradient.to(layer.query_gram)
        judged = None if judged is None else judged.to(gradient)
        sides, rank = self._sides(layer, index).free(), layer.place.query_key_dim
        whitened = linalg.whiten(gradient, sides.query, sides.key)
        return _judged_scores(linalg.directions(whitened, sides.query, sides.key, rank, groups=1), gradient, judged)


def _judged_scores(change: Directions, gradient: Tensor, judged: Tensor | None) -> Candidates:
    """Query/key columns with their gains by the gradient that chose them, and by another where there is one."""
    held_out = None if judged is None else linalg.first_order_gains(judged, change)
    return Candidates(change.query, change.key, linalg.first_order_gains(gradient, change), held_out)
