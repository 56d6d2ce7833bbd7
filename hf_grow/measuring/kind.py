"""What a kind of growth is to measuring: what must be found for it, and what of all that was found is its own.

The kinds are in `hf_grow.growth.kinds`, one file each, and enter themselves here, in the order of their files.
"""

from abc import ABC, abstractmethod
from collections.abc import Sequence
from typing import TYPE_CHECKING, ClassVar

from hf_grow.modeling.growable_attention import AttentionDims
from hf_grow.surgery.place import Place

if TYPE_CHECKING:
    from hf_grow.measuring.config import CollectConfig
    from hf_grow.measuring.statistics import AttentionStatistics, Candidates


class MeasuredKind(ABC):
    """A kind of growth.

    name                 that of its amount in configs, plans, reports and files
    step_names           what it steps along: its own name first, then what is searched for with that fixed
    by_default           whether it is measured where nothing is said
    replaceable          whether it can be made anew where it stands (strategies other than "append")
    searches_scores      whether directions for more query/key columns of the present heads are wanted
    """

    name: ClassVar[str]
    step_names: ClassVar[tuple[str, ...]]
    by_default: ClassVar[bool] = False
    replaceable: ClassVar[bool] = False
    searches_scores: ClassVar[bool] = False

    def circuit_rank(self, config: "CollectConfig", places: Sequence[Place]) -> int:
        """How many value columns are to be found for every pattern."""
        return 0

    @abstractmethod
    def candidates(self, layer: "AttentionStatistics") -> "Candidates | None":
        """Of what was found in a layer, what each more of this kind would take."""

    @abstractmethod
    def sample(self, layer: "AttentionStatistics", config: "CollectConfig") -> int:
        """As much as was asked to be looked for in a layer."""

    @abstractmethod
    def gain(self, layer: "AttentionStatistics", amount: int, which: str) -> float:
        """First-order decrease of the loss for a step of one: of the "gains" or of the "held_out" ones."""

    @abstractmethod
    def cost(self, place: Place, dims: AttentionDims) -> int:
        """Parameters of one more of it in a layer that has these sizes afterwards."""


MEASURED_KINDS: dict[str, MeasuredKind] = {}


def default_kinds() -> tuple[str, ...]:
    """What is measured where nothing is said."""
    return tuple(name for name, kind in MEASURED_KINDS.items() if kind.by_default)
