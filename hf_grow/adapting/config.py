"""What the user wants of a frozen model that adapts. Checked when made."""

from dataclasses import dataclass
from math import inf

from hf_grow.errors import HfGrowError
from hf_grow.fields import is_number, one_of, require, some_of, whole
from hf_grow.growth.config import GrowthConfig
from hf_grow.growth.kinds import COLUMN_KINDS
from hf_grow.measuring.config import CollectConfig
from hf_grow.modeling.growable_attention import ROLES

METHODS = ("grow", "lora", "grow+lora")
# What most methods did best with in the benchmark of adapters, on both models; all weights want far smaller steps.
ADAPTER_LEARNING_RATE = 3e-3


@dataclass(frozen=True)
class AdaptConfig:
    """How to adapt a model whose weights stay as they are.

    method         "grow": new columns; "lora": LoRA; "grow+lora": both
    budget         parameters that learn, as a number or "1%" of the model's; never more, and as near as can be
    share          of the budget for growth in "grow+lora"
    kinds          what the budget for growth buys, in turn: "columns" (query/key), "value_columns"
    lora_on        the roles whose projections get LoRA: "query", "key", "value", "output"
    columns        instead of what the budget allows: new query/key columns per head (and no value columns, if only
                   these are given)
    value_columns  new value columns per head, likewise
    rank           LoRA's rank, instead of what the budget allows
    step_size      of growth; 0: new keys and outputs are zero and nothing changes until training, which did best in the
                   benchmark of adapters; None: line search
    lora_alpha     None: twice the rank, so that what LoRA adds is not scaled by what the budget allows
    lora_dropout   of LoRA's input; none, as new columns have none either
    also_train     names of modules that learn whole; None: the head of a classifier, as it may be new
    collect        how to measure where to grow; its seed is also that of LoRA's first weights
    scaling        the softmax scale of layers that grow: "frozen", "learnable" or "learnable_per_head"
    """

    method: str = "grow+lora"
    budget: int | str = "1%"
    share: float = 0.5
    kinds: tuple[str, ...] = tuple(COLUMN_KINDS)
    lora_on: tuple[str, ...] = ("query", "key")
    columns: int | None = None
    value_columns: int | None = None
    rank: int | None = None
    step_size: float | None = 0.0
    lora_alpha: float | None = None
    lora_dropout: float = 0.0
    also_train: tuple[str, ...] | None = None
    collect: CollectConfig | None = None
    scaling: str = "frozen"

    def __post_init__(self) -> None:
        one_of("method", self.method, METHODS)
        GrowthConfig(budget=self.budget, step_size=self.step_size, scaling=self.scaling)
        for name, known in (("kinds", tuple(COLUMN_KINDS)), ("lora_on", ROLES)):
            given = some_of(name, getattr(self, name), known)
            object.__setattr__(self, name, tuple(one for one in known if one in given))
        for name, used in (*dict.fromkeys(COLUMN_KINDS, self.grows).items(), ("rank", self.has_lora)):
            if getattr(self, name) is None:
                continue
            whole(name, getattr(self, name), 1)
            if not used:
                raise HfGrowError(f"{name} has no meaning with method='{self.method}': leave it out.")
        for name, least, most in (("share", 0, 1), ("lora_dropout", -1, 1), ("lora_alpha", 0, inf)):
            value = getattr(self, name)
            if value is not None and not (is_number(value) and least < value < most and value >= 0):
                raise HfGrowError(f"{name} must be a number between {max(least, 0)} and {most}, not {value!r}.")
        if self.also_train is not None:
            names = (self.also_train,) if isinstance(self.also_train, str) else tuple(self.also_train)
            object.__setattr__(self, "also_train", names)
        if self.collect is not None:
            require(self.collect, CollectConfig)

    @property
    def grows(self) -> bool:
        """Whether the model gets new columns."""
        return self.method != "lora"

    @property
    def has_lora(self) -> bool:
        """Whether the model gets LoRA."""
        return self.method != "grow"

    @property
    def growth(self) -> dict[str, int] | None:
        """The new columns that are given, by kind; None where the budget says how many."""
        given = {name: getattr(self, name) for name in COLUMN_KINDS if getattr(self, name) is not None}
        return given or (None if self.grows else {})

    @property
    def train(self) -> str:
        """What `TrainConfig(train=…)` must be: PEFT alone freezes the base itself."""
        return "new" if self.grows else "all"
