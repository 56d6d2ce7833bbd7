"""Replaced columns: all query/key columns of a layer anew, more or fewer, or the same number moved."""

from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor

from hf_grow import linalg
from hf_grow.growth.config import GrowthConfig
from hf_grow.growth.kinds.kind import Amounts, Piece, StepSizes
from hf_grow.growth.kinds.query_key import QueryKeyColumns, column_gains, whole_change
from hf_grow.growth.kinds.weights import alive, fitted
from hf_grow.linalg import Directions
from hf_grow.measuring.config import CollectConfig
from hf_grow.measuring.statistics import AttentionStatistics
from hf_grow.surgery.blocks import Blocks
from hf_grow.surgery.place import Place


class ReplacedColumns(QueryKeyColumns):
    """All query/key columns anew; amounts, costs and room are those of query/key columns."""

    label = "replaced query/key column"

    def piece(
        self, layer: AttentionStatistics, amounts: Amounts, config: GrowthConfig, collected: CollectConfig
    ) -> Piece:
        """What the strategy of the config makes of the whole wanted change."""
        change = whole_change(layer)
        return RemadeColumns(
            strategy=config.strategy,
            columns=amounts[self.name],
            change_query=change.query,
            change_key=change.key,
            query_gram=layer.query_gram,
            key_gram=layer.key_gram,
            gradient=_score_gradient(layer, change, collected),
        )


def _score_gradient(layer: AttentionStatistics, change: Directions, collected: CollectConfig) -> Tensor:
    """T, or what the sketch knows of it."""
    if layer.sums is not None:
        return layer.sums[0].mean().gradient
    grams = [linalg.ridged(gram, collected.ridge) for gram in (layer.query_gram, layer.key_gram)]
    query, key = change.query.to(grams[0]), change.key.to(grams[1])
    return grams[0] @ query @ linalg.repeat_groups(key, query.shape[0]).mT @ grams[1]


REPLACED_COLUMNS = ReplacedColumns()


@dataclass(frozen=True)
class RemadeColumns(Piece):
    """All query/key columns of a layer anew.

    strategy                  "refactor": the best factors of old scores and wanted change; "step": a plain step
    columns                   how many more there are afterwards
    change_query, change_key  the whole wanted change (heads, inputs, m), (key heads, inputs, m)
    …_gram                    what score changes are measured with
    gradient                  T, which "step" follows
    """

    kind = REPLACED_COLUMNS
    form = "replaced"
    strategy: str
    columns: int
    change_query: Tensor
    change_key: Tensor
    query_gram: Tensor
    key_gram: Tensor
    gradient: Tensor

    @property
    def count(self) -> int:
        """How many columns more."""
        return self.columns

    @property
    def shrinks(self) -> bool:
        """Fewer columns than before: then the function changes even without a step."""
        return self.columns < 0

    @property
    def remade(self) -> tuple[str, ...]:
        """A plain step moves columns; factors are others altogether."""
        return ("query", "key") if self.strategy == "refactor" else ()

    def judged(self, layer: AttentionStatistics) -> bool:
        """Nothing is known of it on other data."""
        return False

    def decrease(self, layer: AttentionStatistics, step: float, which: str) -> float:
        """−⟨T, D⟩ for the change D that the new columns make."""
        query, key = self.replaced(layer.place, step, {"query": layer.query, "key": layer.key})
        heads = query.shape[0]
        present = layer.query @ linalg.repeat_groups(layer.key, heads).mT
        change = query @ linalg.repeat_groups(key, heads).mT - present.to(query)
        return -layer.place.scaling * float((self.gradient * change).sum())

    def head_gains(self, layer: AttentionStatistics) -> Tensor | None:
        """The gains of the columns that are more, summed for each head."""
        return column_gains(layer, self.count) if self.count > 0 else None

    def tried(self, place: Place, step_sizes: StepSizes, blocks: Blocks, full_rank: bool) -> dict[str, Any]:
        """The difference of two products is one product: new columns beside the old ones turned around."""
        step = step_sizes.get(self.kind.name, 0.0)
        if step == 0 and not self.shrinks:
            return {}
        if full_rank:
            query, key = linalg.new_columns(Directions(self.change_query, self.change_key), step, place.scaling)
            return {"query": query, "key": key}
        new_query, new_key = self.replaced(place, step, blocks)
        query = torch.cat((new_query, -blocks["query"].to(new_query)), dim=-1)
        return {"query": query, "key": torch.cat((new_key, blocks["key"].to(new_key)), dim=-1)}

    def replaced(self, place: Place, step: float, blocks: Blocks) -> tuple[Tensor, Tensor]:
        """All query and key columns anew, in the working dtype; without a step the old ones, and zeros for new ones."""
        # Tiny inputs count here: where the device knows double precision, it is used.
        dtype = torch.float64 if self.query_gram.device.type in ("cpu", "cuda") else torch.float32
        grams = (self.query_gram.to(dtype), self.key_gram.to(dtype))
        query, key = (blocks[role].to(grams[0]) for role in ("query", "key"))
        width = place.query_key_dim + self.columns
        if step == 0 and not self.shrinks:
            return fitted(query, width, 2), fitted(key, width, 2)
        if self.strategy == "refactor":
            change = Directions(self.change_query.to(dtype), self.change_key.to(dtype))
            return linalg.refactor(query, key, change, *grams, width, step=step, scaling=place.scaling)
        moves = linalg.plain_step(query, key, self.gradient.to(dtype), *grams, scaling=place.scaling)
        return query + step * moves[0], key + step * moves[1]

    def built(self, place: Place, step_sizes: StepSizes, blocks: Blocks, generator: torch.Generator) -> Blocks:
        """The new columns instead of the present ones."""
        pair = self.replaced(place, step_sizes[self.kind.name], blocks)
        columns = alive(place, ("query", "key"), pair, torch.zeros_like(pair[0]), generator)
        return blocks | {role: weight.to(blocks[role]) for role, weight in columns.items()}
