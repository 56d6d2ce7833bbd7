"""Ways to make one step out of many sequences, other than by pooling their sums. They see sequences one by one."""

from typing import Protocol

import torch
from torch import Tensor

from hf_grow import linalg
from hf_grow.errors import HfGrowError
from hf_grow.measuring.config import CollectConfig
from hf_grow.running.passes import Passes


class Estimator(Protocol):
    """Makes one step out of many sequences, other than by pooling their sums."""

    def add(self, score_gradient: Tensor, queries: Tensor, keys: Tensor, query_mask: Tensor, key_mask: Tensor) -> None:
        """See one sequence: G (heads, queries, keys) and its inputs (tokens, inputs)."""

    def step(self, passes: Passes) -> Tensor:
        """P (heads, query inputs, key inputs): the wanted change is −step · P."""


class PerSequence:
    """The mean over sequences of A⁺TB⁺."""

    def __init__(self, config: CollectConfig) -> None:
        self.config = config
        self.total: Tensor | float = 0.0
        self.count = 0

    def add(self, score_gradient: Tensor, queries: Tensor, keys: Tensor, query_mask: Tensor, key_mask: Tensor) -> None:
        """Solve for this sequence alone."""
        config = self.config
        grams = ((states * mask).mT @ (states * mask) for states, mask in ((queries, query_mask), (keys, key_mask)))
        left, right = (linalg.inverse(gram, config.inverse, config.cutoff, config.ridge) for gram in grams)
        self.total = self.total + left @ (queries.mT @ score_gradient @ keys) @ right
        self.count += 1

    def step(self, passes: Passes) -> Tensor:
        """The mean of all sequences' own steps."""
        total, count = passes.reduce([torch.as_tensor(self.total), torch.tensor(float(self.count))])
        return total / count


class MeanInput:
    """E[X]⁺ E[G] E[X]⁺ᵀ, for sequences of one length."""

    def __init__(self, config: CollectConfig) -> None:
        self.config = config
        self.sums: dict[str, Tensor] = {}
        self.count = 0

    def add(self, score_gradient: Tensor, queries: Tensor, keys: Tensor, query_mask: Tensor, key_mask: Tensor) -> None:
        """Add up position by position."""
        new = {"gradient": score_gradient, "queries": queries * query_mask, "keys": keys * key_mask}
        fits = not self.sums or self.sums["gradient"].shape == score_gradient.shape
        if not bool(query_mask.all()) or not bool(key_mask.all()) or not fits:
            raise HfGrowError("estimator='mean_input' needs sequences of one length without padding: use 'pooled'.")
        self.sums = {name: part + new[name] for name, part in self.sums.items()} or new
        self.count += 1

    def step(self, passes: Passes) -> Tensor:
        """The step of the mean sequence."""
        (count,) = passes.reduce([torch.tensor(float(self.count))])
        means = {name: part / count for name, part in passes.reduce_named(self.sums).items()}
        cutoff = self.config.cutoff**0.5
        queries, keys = (torch.linalg.pinv(means[name], rtol=cutoff) for name in ("queries", "keys"))
        return queries @ means["gradient"] @ keys.mT


class ExactMetric:
    """The exact metric over many sequences, which does not factor: conjugate gradients over all their grams."""

    def __init__(self, config: CollectConfig) -> None:
        self.config = config
        self.gradients: list[Tensor] = []
        self.query_grams: list[Tensor] = []
        self.key_grams: list[Tensor] = []

    def add(self, score_gradient: Tensor, queries: Tensor, keys: Tensor, query_mask: Tensor, key_mask: Tensor) -> None:
        """Keep this sequence's grams."""
        self.gradients.append(queries.mT @ score_gradient @ keys)
        self.query_grams.append((queries * query_mask).mT @ (queries * query_mask))
        self.key_grams.append((keys * key_mask).mT @ (keys * key_mask))

    def step(self, passes: Passes) -> Tensor:
        """Solve for all sequences at once."""
        if passes.accelerator is not None and passes.accelerator.num_processes > 1:
            raise HfGrowError("estimator='exact' keeps every sequence's grams and runs on one process only.")
        config = self.config
        gradients, query_grams, key_grams = (
            torch.stack(parts) for parts in (self.gradients, self.query_grams, self.key_grams)
        )
        # In the coordinates that whiten the pooled grams, few iterations are enough.
        query, key = (
            linalg.whitening(grams.sum(0), config.inverse, config.cutoff, config.ridge)
            for grams in (query_grams, key_grams)
        )
        whitened = linalg.exact_step(
            query.mT @ gradients @ key,
            query.mT @ query_grams @ query,
            key.mT @ key_grams @ key,
            max(self.config.ridge, 1e-6),
        )
        return query @ whitened @ key.mT


ESTIMATOR_CLASSES: dict[str, type[PerSequence] | type[MeanInput] | type[ExactMetric]] = {
    "per_sequence": PerSequence,
    "mean_input": MeanInput,
    "exact": ExactMetric,
}
