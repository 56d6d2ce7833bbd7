"""Value columns: more of them for every head of a layer, which reads with the pattern it has."""

from collections.abc import Iterable, Sequence
from dataclasses import dataclass, replace
from typing import Any

import torch
from torch import Tensor

from hf_grow.growth.config import GrowthConfig
from hf_grow.growth.kinds.kind import Amounts, ColumnKind, Piece, StepSizes
from hf_grow.growth.kinds.weights import alive, usual_value_step
from hf_grow.measuring.config import CollectConfig
from hf_grow.measuring.statistics import AttentionStatistics, Candidates
from hf_grow.modeling.growable_attention import AttentionDims
from hf_grow.surgery.blocks import Blocks
from hf_grow.surgery.place import Place


class ValueColumns(ColumnKind):
    """More value columns for every head."""

    name = "value_columns"
    step_names = ("value_columns",)
    label = "value column"
    size_name = "value_dim"
    limit = "max_value_dim"
    widened = ("value", "output")

    def circuit_rank(self, config: CollectConfig, places: Sequence[Place]) -> int:
        """As many as are asked for."""
        return config.value_columns

    def candidates(self, layer: AttentionStatistics) -> Candidates | None:
        """The circuits found for the present patterns."""
        return layer.values

    def size(self, dims: AttentionDims) -> int:
        """The value width."""
        return dims.v_head_dim

    def grown(self, dims: AttentionDims, amount: int) -> AttentionDims:
        """Wider values."""
        return replace(dims, v_head_dim=dims.v_head_dim + amount)

    def cost(self, place: Place, dims: AttentionDims) -> int:
        """A value column in every key head and an output row in every head."""
        return place.n_kv_heads * value_column_cost(place)

    def may_join(self, pieces: Iterable[Piece]) -> bool:
        """A head that copies a pattern takes over its value columns; more of them would be the same again."""
        return not any(pattern != UNIFORM for piece in pieces for pattern in piece.patterns)

    def piece(
        self, layer: AttentionStatistics, amounts: Amounts, config: GrowthConfig, collected: CollectConfig
    ) -> "NewValueColumns | None":
        """The strongest circuits of the present patterns."""
        count = amounts[self.name]
        if count <= 0 or layer.values is None:
            return None
        return NewValueColumns(layer.values.first[..., :count], layer.values.second[:, :count])


VALUE_COLUMNS = ValueColumns()
# What a new head attends to that copies no other.
UNIFORM = "uniform"


@dataclass(frozen=True)
class NewValueColumns(Piece):
    """New value columns for a step of one: outputs change by −step · value output."""

    kind = VALUE_COLUMNS
    form = "value_columns"
    value: Tensor
    output: Tensor

    @property
    def count(self) -> int:
        """How many columns."""
        return self.value.shape[-1]

    def usual_step(self, place: Place, name: str) -> float:
        """The step that makes new columns as large as the present ones."""
        return usual_value_step(place, [(self.value, self.output)])

    def tried(self, place: Place, step_sizes: StepSizes, blocks: Blocks, full_rank: bool) -> dict[str, Any]:
        """Columns as they would be inserted."""
        step = step_sizes.get(self.kind.name, 0.0)
        if step == 0:
            return {}
        value, output = scaled_circuit(self.value, self.output, step)
        return {"value": value, "output": output}

    def built(self, place: Place, step_sizes: StepSizes, blocks: Blocks, generator: torch.Generator) -> Blocks:
        """The new columns behind the present ones, and their output rows."""
        pair = scaled_circuit(self.value, self.output, step_sizes[self.kind.name])
        columns = alive(place, ("value", "output"), pair, self.value, generator)
        value = torch.cat((blocks["value"], columns["value"].to(blocks["value"])), dim=2)
        output = torch.cat((blocks["output"], columns["output"].to(blocks["output"])), dim=1)
        return blocks | {"value": value, "output": output}


def value_column_cost(place: Place) -> int:
    """Parameters of a value column in one key head and its output rows in the query heads it serves."""
    return place.inputs["value"] + place.group * place.inputs["output"]


def scaled_circuit(value: Tensor, output: Tensor, step: float) -> tuple[Tensor, Tensor]:
    """A circuit for a step of one at another step, which both sides share."""
    size = step**0.5
    return -size * value, size * output
