"""What all kinds of growth have in common, and what one attention module gets of a kind."""

from abc import abstractmethod
from collections.abc import Iterable, Mapping
from dataclasses import dataclass
from typing import Any, ClassVar

import torch
from torch import Tensor

from hf_grow.growth.config import GrowthConfig
from hf_grow.measuring.config import CollectConfig
from hf_grow.measuring.kind import MeasuredKind
from hf_grow.measuring.statistics import AttentionStatistics
from hf_grow.modeling.growable_attention import AttentionDims
from hf_grow.surgery.blocks import Blocks
from hf_grow.surgery.place import Place

# How far to go along the wanted change, by what is stepped along.
StepSizes = Mapping[str, float]
# How much of each kind, by its name.
Amounts = dict[str, int]


class Kind(MeasuredKind):
    """A kind of growth, beyond what measuring asks of it.

    label     one of it, in a sentence; `units` are several
    per_head  whether amounts are those of each head
    size_name what summaries call the size that it makes larger
    limit     the field of a growth schedule that limits that, if there is one
    widened   the roles whose weights become wider, for columns
    """

    label: ClassVar[str]
    size_name: ClassVar[str]
    limit: ClassVar[str | None] = None
    per_head: ClassVar[bool] = True
    widened: ClassVar[tuple[str, ...]] = ()

    @property
    def units(self) -> str:
        """Several of it, in a sentence."""
        return f"{self.label}s"

    def in_words(self, amount: int) -> str:
        """So many of it."""
        return f"{amount} {self.units}" if self.per_head or amount != 1 else f"one {self.label}"

    @abstractmethod
    def size(self, dims: AttentionDims) -> int:
        """Which of the sizes of an attention module it makes larger."""

    @abstractmethod
    def grown(self, dims: AttentionDims, amount: int) -> AttentionDims:
        """The sizes with so much more."""

    def room(self, place: Place) -> int | None:
        """How much more there is room for; None for any amount."""
        return None

    def check_room(self, place: Place, amount: int) -> None:
        """Refuse more than there is room for."""

    def aligned(self, place: Place, amount: int, align: int) -> int:
        """At least so much, so that widths are a multiple of `align`."""
        return amount

    def known(self, layer: AttentionStatistics) -> int | None:
        """How much was collected in a layer; None where there is no such limit."""
        return None

    def may_join(self, pieces: "Iterable[Piece]") -> bool:
        """Whether more of it does something beside what a layer gets already."""
        return True

    @abstractmethod
    def piece(
        self, layer: AttentionStatistics, amounts: Amounts, config: GrowthConfig, collected: CollectConfig
    ) -> "Piece | None":
        """What a layer gets of this kind for amounts of all kinds; None for nothing."""


class ColumnKind(Kind):
    """Columns of every head of a layer."""

    def sample(self, layer: AttentionStatistics, config: CollectConfig) -> int:
        """As many as the config asks for, or as there are."""
        return min(getattr(config, self.name), self.known(layer))

    def gain(self, layer: AttentionStatistics, amount: int, which: str) -> float:
        """That of the first ones together."""
        candidates = self.candidates(layer)
        assert candidates is not None
        return candidates.total(which, amount)

    def known(self, layer: AttentionStatistics) -> int:
        """How many were found."""
        candidates = self.candidates(layer)
        return 0 if candidates is None else candidates.rank

    def aligned(self, place: Place, amount: int, align: int) -> int:
        """At least so many that the width is a multiple."""
        width = self.size(place.dims)
        return -(-(width + amount) // align) * align - width if amount > 0 else amount


@dataclass(frozen=True)
class Piece:
    """What one attention module gets of one kind, at any step size. Without a step, no output changes.

    form  what files call it
    """

    kind: ClassVar[Kind]
    form: ClassVar[str]

    @classmethod
    def read(cls, content: dict[str, Any]) -> "Piece":
        """As files have it: its fields, with tensors in their places."""
        return cls(**content)

    @property
    @abstractmethod
    def count(self) -> int:
        """How much is added."""

    @property
    def step_names(self) -> tuple[str, ...]:
        """What it steps along."""
        return self.kind.step_names

    @property
    def shrinks(self) -> bool:
        """Whether the function changes even without a step."""
        return False

    @property
    def remade(self) -> tuple[str, ...]:
        """The roles in which every weight becomes another."""
        return ()

    @property
    def patterns(self) -> list[str]:
        """What new heads attend to."""
        return []

    def judged(self, layer: AttentionStatistics) -> bool:
        """Whether its decrease is known on other data than those that chose."""
        return layer.judged

    def slope(self, layer: AttentionStatistics, which: str) -> float:
        """First-order decrease for a step of one: of the "gains" or of the "held_out" ones."""
        return self.kind.gain(layer, self.count, which)

    def decrease(self, layer: AttentionStatistics, step: float, which: str) -> float:
        """First-order decrease for a step."""
        return step * self.slope(layer, which)

    def head_gains(self, layer: AttentionStatistics) -> Tensor | None:
        """First-order decrease for a step of one by present head, as far as it is theirs."""
        return None

    def column_size(self, place: Place, step_sizes: StepSizes) -> float | None:
        """How large new query columns are, as a multiple of the usual size of the present ones."""
        return None

    def usual_step(self, place: Place, name: str) -> float:
        """The step along something that makes new columns as large as the present ones; 0 where there is none."""
        return 0.0

    @abstractmethod
    def tried(self, place: Place, step_sizes: StepSizes, blocks: Blocks, full_rank: bool) -> dict[str, Any]:
        """The weights to try beside the model's own `blocks`, as fields of `Extra`."""

    @abstractmethod
    def built(self, place: Place, step_sizes: StepSizes, blocks: Blocks, generator: torch.Generator) -> Blocks:
        """The module's weights with it."""
