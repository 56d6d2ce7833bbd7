"""What both forms of collection share: places, present weights, and the sides of the scores in every layer."""

from collections.abc import Sequence
from dataclasses import dataclass, replace

import torch
from torch import Tensor

from hf_grow import linalg
from hf_grow.linalg import Side
from hf_grow.measuring.config import CollectConfig
from hf_grow.measuring.kind import MEASURED_KINDS
from hf_grow.measuring.probes import Grams, NewHead, single_or_finer, site_device
from hf_grow.measuring.statistics import AttentionStatistics, uniform_circuit
from hf_grow.modeling.growable_attention import AttentionSite
from hf_grow.running.batches import Batch
from hf_grow.running.passes import Passes
from hf_grow.surgery.blocks import effective, query_factors, read_blocks
from hf_grow.surgery.place import place_of


@dataclass(frozen=True)
class PresentColumns:
    """The query (heads, inputs, columns) and key (key heads, inputs, columns) weights a layer has."""

    query: Tensor
    key: Tensor


@dataclass(frozen=True)
class Sides:
    """The query and the key side of a layer's scores."""

    query: Side
    key: Side

    def without_grams(self) -> "Sides":
        """The same where nobody will ask for the grams any more."""
        return Sides(self.query.without_gram(), self.key.without_gram())

    def free(self) -> "Sides":
        """Sides that leave nothing out."""
        return Sides(replace(self.query, basis=None), replace(self.key, basis=None))

    def to(self, like: Tensor) -> "Sides":
        """In another precision."""
        moved: dict[int, Tensor] = {}

        def move(part: Tensor) -> Tensor:
            # What both sides share stays shared.
            return moved.setdefault(id(part), part.to(like))

        query, key = (
            Side(
                move(side.gram), move(side.factor), side.basis if side.basis is None else move(side.basis), side.groups
            )
            for side in (self.query, self.key)
        )
        return Sides(query, key)


class Collector:
    """A collection under way: the model's layers, the data and what is wanted."""

    def __init__(
        self,
        passes: Passes,
        sites: list[AttentionSite],
        choosing: list[Batch],
        judging: list[Batch],
        config: CollectConfig,
    ) -> None:
        self.passes, self.sites, self.choosing, self.judging, self.config = passes, sites, choosing, judging, config
        self.places = [place_of(site) for site in sites]
        self.kinds = [MEASURED_KINDS[name] for name in config.measured_kinds]
        # Whether any process has sequences that judge: all take part in their passes then.
        self.judged = passes.count(judging) > 0
        self.generator = torch.Generator().manual_seed(config.seed)
        # Whether what was found is only what was known when somebody interrupted.
        self.interrupted = False

    def present(self, index: int) -> PresentColumns:
        """The columns of a layer, read from the model, in single precision or finer."""
        site = self.sites[index]
        blocks = effective(read_blocks(site), query_factors(site))
        return PresentColumns(*(blocks[role].to(single_or_finer(site)) for role in ("query", "key")))

    def like(self, index: int) -> Tensor:
        """An empty tensor where and as precise as what is found in a layer."""
        site = self.sites[index]
        return torch.zeros(0, dtype=single_or_finer(site), device=site_device(site))

    @property
    def wants_score_columns(self) -> bool:
        return any(kind.searches_scores for kind in self.kinds)

    @property
    def wants_circuits(self) -> bool:
        return self.circuit_rank() > 0

    def circuit_rank(self) -> int:
        """How many value columns to look for: some of a pattern go to present heads, those behind them to new ones."""
        return sum(kind.circuit_rank(self.config, self.places) for kind in self.kinds)

    def circuit_width(self) -> int:
        """How many value columns the sketch carries along; in the end it has found several times as many."""
        return self.config.value_columns + self.config.oversampling

    def sides(self, grams: Grams, index: int) -> Sides:
        """The query and the key side of a layer, with the span of the present columns, in the working precision."""
        present, fine = self.present(index), linalg.working_dtype(grams.query.device)
        grams = Grams(grams.query.to(fine), grams.key.to(fine))
        query = linalg.ridged(grams.query, self.config.ridge), self.whitening(grams.query)
        same = grams.query.shape == grams.key.shape and torch.equal(grams.query, grams.key)
        key = query if same else (linalg.ridged(grams.key, self.config.ridge), self.whitening(grams.key))
        return Sides(
            linalg.side(*query, present.query.to(grams.query), present.key.shape[0]),
            linalg.side(*key, present.key.to(grams.key)),
        )

    def whitening(self, gram: Tensor) -> Tensor:
        """What whitens a gram, by the numerics of the config."""
        return linalg.whitening(gram, self.config.inverse, self.config.cutoff, self.config.ridge)

    def pattern_whitening(self, gram: Tensor, key_gram: Tensor, span: Tensor | None = None) -> Tensor:
        """What whitens the gram of what heads read, or its part in a span of inputs (…, inputs, k).

        Its ridge is relative to the gram of the inputs, so that it means the same for every pattern and every span.
        """
        identity = torch.eye(gram.shape[-1], dtype=gram.dtype, device=gram.device)
        ridge = self.pattern_ridge(key_gram) * (identity if span is None else span.mT @ span)
        return linalg.whitening(gram + ridge, self.config.inverse, self.config.cutoff)

    def pattern_ridge(self, key_gram: Tensor) -> float:
        """What is added to the eigenvalues of such a gram."""
        return self.config.ridge * float(key_gram.diagonal().mean())

    def searched(self, sides: Sides, index: int) -> Sides:
        """The sides as the target wants them: outside the present columns, or anywhere."""
        return sides if self.target(index) == "bottleneck" else sides.free()

    def target(self, index: int) -> str:
        """Which part of the wanted change to look for: "bottleneck" or "gradient"."""
        return self.config.target or ("gradient" if self.places[index].rotary_dim else "bottleneck")

    def rank(self, index: int) -> int:
        """How many query/key columns to look for in a layer."""
        inputs = self.places[index].inputs
        return min(self.config.columns + self.config.oversampling, inputs["query"], inputs["key"])


def uniform_heads(layers: Sequence[AttentionStatistics]) -> list[NewHead]:
    """The new head that attends uniformly, for every layer, with the sign that it has once inserted."""
    circuits = (uniform_circuit(layer.uniform, layer.place) for layer in layers if layer.uniform)
    return [NewHead(-value, output) for value, output in circuits]
