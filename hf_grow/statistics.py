"""What collection measures in each attention module: sums that add up over batches, processes and restarts."""

from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor


@dataclass(frozen=True)
class AttentionSums:
    """Sums over sequences for one attention module; nothing is normalised, so sums of parts are the sum of the whole.

    gradient is Σ X_qᵀ G X_k (heads, query inputs, key inputs), the grams are Σ XᵀX over tokens that are not padding. A
    projection with a bias has one more input, which is always one and whose row is the bias.
    """

    gradient: Tensor
    query_gram: Tensor
    key_gram: Tensor
    sequences: int = 0

    @classmethod
    def zeros(cls, heads: int, query_inputs: int, key_inputs: int, **kwargs: Any) -> "AttentionSums":
        """Nothing seen yet."""
        return cls(
            torch.zeros(heads, query_inputs, key_inputs, **kwargs),
            torch.zeros(query_inputs, query_inputs, **kwargs),
            torch.zeros(key_inputs, key_inputs, **kwargs),
        )

    def merge(self, other: "AttentionSums") -> "AttentionSums":
        """The sums of both."""
        return AttentionSums(
            self.gradient + other.gradient,
            self.query_gram + other.query_gram,
            self.key_gram + other.key_gram,
            self.sequences + other.sequences,
        )


@dataclass(frozen=True)
class AttentionStatistics:
    """The statistics of one attention module in two halves of the data, so that one can judge what the other chose."""

    name: str
    layer: int
    kind: str
    groups: int
    scaling: float
    halves: tuple[AttentionSums, AttentionSums]

    def total(self) -> AttentionSums:
        """Both halves together."""
        return self.halves[0].merge(self.halves[1])
