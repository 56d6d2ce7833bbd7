"""Query/key columns: more of them for every head of a layer."""

from dataclasses import dataclass, replace
from typing import Any

import torch
from torch import Tensor

from hf_grow import linalg
from hf_grow.errors import HfGrowError
from hf_grow.growth.config import GrowthConfig
from hf_grow.growth.kinds.kind import Amounts, ColumnKind, Piece, StepSizes
from hf_grow.growth.kinds.weights import alive, usual_score_step
from hf_grow.linalg import Directions
from hf_grow.measuring.config import CollectConfig
from hf_grow.measuring.statistics import AttentionStatistics, Candidates
from hf_grow.modeling.growable_attention import AttentionDims
from hf_grow.surgery.blocks import Blocks
from hf_grow.surgery.place import Place


class QueryKeyColumns(ColumnKind):
    """More query/key columns for every head."""

    name = "columns"
    step_names = ("columns",)
    by_default = replaceable = searches_scores = True
    label = "query/key column"
    size_name = "query_key_dim"
    limit = "max_query_key_dim"
    widened = ("query", "key")

    def candidates(self, layer: AttentionStatistics) -> Candidates | None:
        """The directions found for the scores."""
        return layer.columns

    def size(self, dims: AttentionDims) -> int:
        """The query/key width."""
        return dims.qk_head_dim

    def grown(self, dims: AttentionDims, amount: int) -> AttentionDims:
        """Wider queries and keys."""
        return replace(dims, qk_head_dim=dims.qk_head_dim + amount)

    def cost(self, place: Place, dims: AttentionDims) -> int:
        """A query column in every head and a key column in every key head."""
        return place.n_kv_heads * score_column_cost(place)

    def room(self, place: Place) -> int:
        """As many as there are inputs; rotated columns do not count, as what they reach depends on the position."""
        taken = 0 if place.rotary_dim else place.query_key_dim
        return max(min(place.inputs["query"], place.inputs["key"]) - taken, 0)

    def check_room(self, place: Place, amount: int) -> None:
        """Refuse more columns than there are inputs, or fewer than one."""
        if amount > self.room(place):
            raise HfGrowError(
                f"Layer {place.label} has room for {self.room(place)} more query/key columns: its heads read "
                f"{min(place.inputs['query'], place.inputs['key'])} inputs and have {place.query_key_dim} columns. "
                f"{amount} were asked for."
            )
        if place.query_key_dim + amount < 1:
            present = f"Layer {place.label} has {place.query_key_dim} query/key columns"
            raise HfGrowError(f"{present}: {-amount} are too many.")

    def piece(
        self, layer: AttentionStatistics, amounts: Amounts, config: GrowthConfig, collected: CollectConfig
    ) -> Piece | None:
        """The strongest directions, and all of the wanted change where the line search is to try it."""
        count = amounts[self.name]
        if count <= 0 or layer.columns is None:
            return None
        change = whole_change(layer) if config.line_search == "full_rank" else None
        return NewColumns(
            query=layer.columns.first[..., :count],
            key=layer.columns.second[..., :count],
            change_query=None if change is None else change.query,
            change_key=None if change is None else change.key,
        )


QUERY_KEY_COLUMNS = QueryKeyColumns()


@dataclass(frozen=True)
class NewColumns(Piece):
    """New columns for a step of one: scores change by −step · query keyᵀ.

    change_query, change_key  the whole wanted change (heads, inputs, m), (key heads, inputs, m), for a line search of
                              full rank
    """

    kind = QUERY_KEY_COLUMNS
    form = "columns"
    query: Tensor
    key: Tensor
    change_query: Tensor | None = None
    change_key: Tensor | None = None

    @property
    def count(self) -> int:
        """How many columns."""
        return self.query.shape[-1]

    def head_gains(self, layer: AttentionStatistics) -> Tensor | None:
        """The gains of these columns, summed for each head."""
        return column_gains(layer, self.count)

    def column_size(self, place: Place, step_sizes: StepSizes) -> float | None:
        """How large the new query columns are, as a multiple of the usual size of the present ones."""
        if not place.norms["query"]:
            return None
        query, _ = self._weights(place, step_sizes)
        return float(query.norm(dim=1).square().mean().sqrt()) / place.norms["query"]

    def usual_step(self, place: Place, name: str) -> float:
        """The step that makes new columns as large as the present ones."""
        return usual_score_step(place, [(self.query, self.key)])

    def _weights(self, place: Place, step_sizes: StepSizes) -> tuple[Tensor, Tensor]:
        return linalg.new_columns(Directions(self.query, self.key), step_sizes[self.kind.name], place.scaling)

    def tried(self, place: Place, step_sizes: StepSizes, blocks: Blocks, full_rank: bool) -> dict[str, Any]:
        """Columns as they would be inserted, or the whole change."""
        step = step_sizes.get(self.kind.name, 0.0)
        if step == 0:
            return {}
        directions = Directions(self.query, self.key)
        if full_rank and self.change_query is not None and self.change_key is not None:
            directions = Directions(self.change_query, self.change_key)
        query, key = linalg.new_columns(directions, step, place.scaling)
        return {"query": query, "key": key}

    def built(self, place: Place, step_sizes: StepSizes, blocks: Blocks, generator: torch.Generator) -> Blocks:
        """The new columns behind the present ones."""
        columns = alive(place, ("query", "key"), self._weights(place, step_sizes), self.query, generator)
        wider = {role: torch.cat((blocks[role], part.to(blocks[role])), dim=2) for role, part in columns.items()}
        return blocks | wider


def score_column_cost(place: Place) -> int:
    """Parameters of a query/key column in one key head and the query heads it serves."""
    return place.group * place.inputs["query"] + place.inputs["key"]


def column_gains(layer: AttentionStatistics, count: int) -> Tensor | None:
    """The most honest gains of so many new columns, by head."""
    return None if layer.columns is None else layer.columns.expected[:, :count].sum(1)


def whole_change(layer: AttentionStatistics) -> Directions:
    """The whole wanted change as query and key columns: itself and the identity, or all that the sketch has."""
    if layer.change is None:
        if layer.columns is None:
            raise HfGrowError("The statistics know nothing of columns: collect with kinds=('columns',).")
        return Directions(layer.columns.first, layer.columns.second)
    inputs = layer.place.inputs["key"]
    identity = torch.eye(inputs, dtype=layer.change.dtype, device=layer.change.device)
    return Directions(layer.change, identity.expand(layer.place.n_kv_heads, -1, -1))
