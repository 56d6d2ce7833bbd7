"""Heads: whole ones more, which take over the pattern of a present head or start uniform."""

from collections.abc import Sequence
from dataclasses import dataclass, replace
from typing import Any

import torch
from torch import Tensor

from hf_grow import linalg
from hf_grow.errors import HfGrowError
from hf_grow.growth.config import GrowthConfig
from hf_grow.growth.kinds.kind import Amounts, Kind, Piece, StepSizes
from hf_grow.growth.kinds.query_key import QUERY_KEY_COLUMNS, score_column_cost
from hf_grow.growth.kinds.value import UNIFORM, VALUE_COLUMNS, scaled_circuit, value_column_cost
from hf_grow.growth.kinds.weights import alive, fitted, shifted, usual_score_step, usual_value_step
from hf_grow.linalg import Directions
from hf_grow.measuring.config import CollectConfig
from hf_grow.measuring.statistics import AttentionStatistics, Candidates, uniform_circuit
from hf_grow.modeling.growable_attention import AttentionDims
from hf_grow.surgery.blocks import Blocks
from hf_grow.surgery.place import Place

# What the query/key columns of uniform heads step along.
SCORES = "head_scores"


class Heads(Kind):
    """More heads; with grouped keys one is a key head with its queries."""

    name = "heads"
    step_names = ("heads", SCORES)
    label = "head"
    size_name = "n_heads"
    limit = "max_heads"
    per_head = False

    def circuit_rank(self, config: CollectConfig, places: Sequence[Place]) -> int:
        """As many as a layer is wide."""
        return max(place.value_dim for place in places)

    def candidates(self, layer: AttentionStatistics) -> Candidates | None:
        """The circuit of a uniform head."""
        return layer.uniform

    def sample(self, layer: AttentionStatistics, config: CollectConfig) -> int:
        """One, that promises most."""
        return 1

    def gain(self, layer: AttentionStatistics, amount: int, which: str) -> float:
        """That of the most promising patterns."""
        return sum(pattern_gain(layer, copy, which) for copy in best_patterns(layer)[:amount])

    def size(self, dims: AttentionDims) -> int:
        """The number of query heads."""
        return dims.num_attention_heads

    def grown(self, dims: AttentionDims, amount: int) -> AttentionDims:
        """More key heads, each with its queries."""
        group = dims.num_attention_heads // dims.num_key_value_heads
        return replace(
            dims,
            num_attention_heads=dims.num_attention_heads + amount * group,
            num_key_value_heads=dims.num_key_value_heads + amount,
        )

    def cost(self, place: Place, dims: AttentionDims) -> int:
        """All columns of a head of these widths."""
        return dims.qk_head_dim * score_column_cost(place) + dims.v_head_dim * value_column_cost(place)

    def room(self, place: Place) -> int:
        """One for each present pattern and one for the uniform one."""
        return place.n_kv_heads + 1

    def check_room(self, place: Place, amount: int) -> None:
        """Refuse more heads than there are patterns."""
        if amount > self.room(place):
            raise HfGrowError(
                f"At most {self.room(place)} heads can be added to layer {place.label} at once: one for each "
                "present pattern and one for the uniform one."
            )

    def piece(
        self, layer: AttentionStatistics, amounts: Amounts, config: GrowthConfig, collected: CollectConfig
    ) -> "NewHeads | None":
        """The new heads whose patterns promise most, beside columns that the layer gets."""
        if amounts[self.name] == 0 or layer.values is None:
            return None
        skipped = amounts[VALUE_COLUMNS.name]
        width = layer.place.query_key_dim + amounts[QUERY_KEY_COLUMNS.name]
        patterns = best_patterns(layer, skipped)[: amounts[self.name]]
        return NewHeads(tuple(_head(layer, copy, skipped, width) for copy in patterns), skipped)


def pattern_gain(layer: AttentionStatistics, copy: int | None, which: str, skipped: int = 0) -> float:
    """First-order decrease of a new head that copies a key head's pattern, or attends uniformly, for a step of one.

    The first value columns of a pattern may be given to the present heads already.
    """
    assert layer.values is not None and layer.uniform is not None
    width, group = layer.place.value_dim, layer.place.group
    if copy is None:
        return layer.uniform.total(which, width)
    return layer.values.total(which, width, skipped, slice(copy * group, (copy + 1) * group))


def best_patterns(layer: AttentionStatistics, skipped: int = 0) -> list[int | None]:
    """The patterns a new head could have, the most promising first; None is the uniform one."""
    assert layer.values is not None
    which = "gains" if layer.values.held_out is None else "held_out"
    patterns = [None, *range(layer.place.n_kv_heads)]
    return sorted(patterns, key=lambda copy: -pattern_gain(layer, copy, which, skipped))


def _head(layer: AttentionStatistics, copy: int | None, skipped: int, query_key_dim: int) -> "HeadGrowth":
    assert layer.values is not None and layer.uniform is not None
    place, scores = layer.place, layer.uniform_scores
    if copy is not None:
        taken = slice(skipped, skipped + place.value_dim)
        output = layer.values.second[copy * place.group : (copy + 1) * place.group, taken]
        return HeadGrowth(copy, layer.values.first[copy : copy + 1, :, taken], output)
    head = HeadGrowth(None, *uniform_circuit(layer.uniform, place))
    width = query_key_dim - place.rotary_dim
    if scores is None or width == 0:
        return head
    return replace(head, query=scores.first[..., :width], key=scores.second[..., :width])


@dataclass(frozen=True)
class HeadGrowth:
    """One new head: value (1, inputs, columns) and output (heads of a group, columns, outputs) for a step of one.

    copy       the key head whose pattern it takes over, or None for the uniform pattern
    query, key for the uniform pattern: where its scores should go, for a step of one; None where nothing was found
    """

    copy: int | None
    value: Tensor
    output: Tensor
    query: Tensor | None = None
    key: Tensor | None = None

    def circuit(self, step: float, width: int) -> tuple[Tensor, Tensor]:
        """Its value and output side at a step, cut or filled to a width."""
        value, output = scaled_circuit(self.value, self.output, step)
        return fitted(value, width, 2), fitted(output, width, 1)

    def scores(self, place: Place, step: float) -> tuple[Tensor, Tensor]:
        """The query/key side of a uniform head at a step."""
        if self.query is None or self.key is None:
            query = self.value.new_zeros(place.group, place.inputs["query"], 1)
            return query, self.value.new_zeros(1, place.inputs["key"], 1)
        return linalg.new_columns(Directions(self.query, self.key), step, place.scaling)


HEADS = Heads()


@dataclass(frozen=True)
class NewHeads(Piece):
    """New heads; `skipped` are the value columns of each pattern that the present heads get."""

    kind = HEADS
    form = "heads"
    heads: tuple[HeadGrowth, ...]
    skipped: int = 0

    @classmethod
    def read(cls, content: dict[str, Any]) -> "NewHeads":
        """As files have it."""
        return cls(tuple(HeadGrowth(**head) for head in content["heads"]), content["skipped"])

    @property
    def count(self) -> int:
        """How many heads."""
        return len(self.heads)

    @property
    def step_names(self) -> tuple[str, ...]:
        """The heads, and the scores of the uniform one where something was found for them."""
        has_scores = any(head.query is not None for head in self.heads)
        return self.kind.step_names if has_scores else self.kind.step_names[:1]

    @property
    def patterns(self) -> list[str]:
        """What each attends to."""
        return [UNIFORM if head.copy is None else f"head {head.copy}" for head in self.heads]

    def slope(self, layer: AttentionStatistics, which: str) -> float:
        """First-order decrease of all these heads for a step of one."""
        return sum(pattern_gain(layer, head.copy, which, self.skipped) for head in self.heads)

    def usual_step(self, place: Place, name: str) -> float:
        """The step that makes the columns of new heads as large as the present ones."""
        if name != SCORES:
            return usual_value_step(place, [(head.value, head.output) for head in self.heads])
        pairs = [(head.query, head.key) for head in self.heads if head.query is not None and head.key is not None]
        return usual_score_step(place, pairs)

    def tried(self, place: Place, step_sizes: StepSizes, blocks: Blocks, full_rank: bool) -> dict[str, Any]:
        """The heads as they would be inserted, those that copy a pattern first."""
        step = step_sizes.get(self.kind.name, 0.0)
        if step == 0:
            return {}
        heads = sorted(self.heads, key=lambda head: head.copy is None)
        width = max(head.value.shape[2] for head in heads)
        values, outputs = zip(*(head.circuit(step, width) for head in heads), strict=True)
        extra: dict[str, Any] = {
            "copies": tuple(head.copy for head in heads if head.copy is not None),
            "head_value": torch.cat(values),
            "head_output": torch.cat(outputs),
        }
        uniform = [head.scores(place, step_sizes.get(SCORES, 0.0)) for head in heads if head.copy is None]
        if uniform:
            queries, keys = zip(*uniform, strict=True)
            extra |= {"head_query": torch.cat(queries), "head_key": torch.cat(keys)}
        return extra

    def built(self, place: Place, step_sizes: StepSizes, blocks: Blocks, generator: torch.Generator) -> Blocks:
        """The new heads behind the present ones."""
        heads = [self._built(head, place, step_sizes, blocks, generator) for head in self.heads]
        return {role: torch.cat((block, *(head[role].to(block) for head in heads))) for role, block in blocks.items()}

    def _built(
        self, head: HeadGrowth, place: Place, step_sizes: StepSizes, blocks: Blocks, generator: torch.Generator
    ) -> Blocks:
        width = blocks["value"].shape[2]
        circuit = head.circuit(step_sizes[self.kind.name], width)
        built = alive(place, ("value", "output"), circuit, fitted(head.value, width, 2), generator)
        if head.copy is not None:
            built["query"] = blocks["query"][head.copy * place.group : (head.copy + 1) * place.group]
            built["key"] = blocks["key"][head.copy : head.copy + 1]
            return built
        # What was found are columns without positions: they stand behind the rotated ones.
        columns = blocks["query"].shape[2]
        query, key = (
            fitted(shifted(part, place.rotary_dim), columns, 2) for part in head.scores(place, step_sizes[SCORES])
        )
        return built | alive(place, ("query", "key"), (query, key), torch.zeros_like(query), generator)
