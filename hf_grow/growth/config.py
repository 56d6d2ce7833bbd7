"""What the user wants of growth. Checked when made."""

import re
from collections.abc import Mapping
from dataclasses import dataclass

from hf_grow.errors import HfGrowError
from hf_grow.fields import former_fields, is_number, one_of, whole
from hf_grow.measuring.kind import MEASURED_KINDS, default_kinds
from hf_grow.surgery.structure import check_name

STRATEGIES = ("append", "refactor", "step")
LINE_SEARCHES = ("low_rank", "full_rank")
STEP_SCOPES = ("shared", "per_layer")
SCALINGS = ("frozen", "learnable", "learnable_per_head")

Amount = int | Mapping[int | str, int] | None


@former_fields(steps="step_scope")
@dataclass(frozen=True)
class GrowthConfig:
    """How much to grow, where, and how far to step.

    columns        new query/key columns per head: 8 for every layer, or by layer: 0:8,3:4 (in Python a dict)
    value_columns  new value columns per head, likewise
    heads          new heads, likewise
    budget         instead of these: new parameters, as a number or "1%" of the model's, spent where they promise most
    strategy       "append" new columns; "refactor": all query/key columns anew, also fewer (columns < 0); "step": no
                   new column, the present ones move along the gradient
    align          round query/key and value widths up to a multiple of this; None: 8 on CUDA, 1 elsewhere
    step_size      None: line search; 0: exactly preserving; a number: that multiple of the step found while collecting
    step_scope     "shared": one step for all layers; "per_layer": one for each
    line_search    "low_rank": with the columns that will be inserted; "full_rank": with all of the wanted change
    scaling        the softmax scale of layers that grow: "frozen"; "learnable", from its present value on, one number
                   for each layer; "learnable_per_head"
    attach         whether what is new is put beside the projections, in parameters of its own; None: only beside
                   quantised ones, those with adapters, and where growth is attached already. A text is its name
    """

    columns: Amount = None
    value_columns: Amount = None
    heads: Amount = None
    budget: int | str | None = None
    strategy: str = "append"
    align: int | None = None
    step_size: float | None = None
    step_scope: str = "shared"
    line_search: str = "low_rank"
    scaling: str = "frozen"
    attach: bool | str | None = None

    def __post_init__(self) -> None:
        one_of("strategy", self.strategy, STRATEGIES)
        one_of("step_scope", self.step_scope, STEP_SCOPES)
        one_of("line_search", self.line_search, LINE_SEARCHES)
        one_of("scaling", self.scaling, SCALINGS)
        if self.attach is not None and not isinstance(self.attach, bool):
            check_name(self.attach)
        if self.attach and self.strategy != "append":
            raise HfGrowError(
                f"strategy='{self.strategy}' makes present columns anew, so it cannot be attached to them."
            )
        amounts = {name: getattr(self, name) for name in MEASURED_KINDS if getattr(self, name) is not None}
        replaceable = {name for name, kind in MEASURED_KINDS.items() if kind.replaceable}
        for name, amount in amounts.items():
            least = -(10**9) if name in replaceable and self.strategy == "refactor" else 0
            for value in amount.values() if isinstance(amount, Mapping) else (amount,):
                whole(name, value, least)
        if self.align is not None:
            whole("align", self.align, 1)
        if self.step_size is not None and (not is_number(self.step_size) or self.step_size < 0):
            raise HfGrowError(f"step_size must be a number that is not negative, not {self.step_size!r}.")
        if self.strategy != "append" and (self.budget is not None or amounts.keys() - replaceable):
            raise HfGrowError(f"strategy='{self.strategy}' concerns query/key columns only: give columns=… alone.")
        searched = self.budget is not None or any(largest(amounts.get(name)) for name in replaceable)
        if self.strategy == "append" and self.line_search == "full_rank" and amounts and not searched:
            raise HfGrowError("line_search='full_rank' concerns query/key columns: ask for some, or use 'low_rank'.")
        if self.strategy == "step" and amounts:
            raise HfGrowError("strategy='step' adds no columns: give neither columns nor anything else to add.")
        nothing = not amounts or (self.strategy == "append" and not any(largest(amount) for amount in amounts.values()))
        if self.strategy != "step" and (self.budget is None) == nothing:
            raise HfGrowError("Say how much to grow: columns, value_columns and heads, or else a budget.")
        if self.budget is not None:
            self.budget_for(1)

    def budget_for(self, parameters: int) -> int:
        """The budget in parameters, for a model that has so many."""
        if isinstance(self.budget, str) and (percent := re.fullmatch(r"\s*(\d+(?:\.\d*)?)\s*%\s*", self.budget)):
            if float(percent[1]) > 0:
                return int(parameters * float(percent[1]) / 100)
        elif isinstance(self.budget, int) and not isinstance(self.budget, bool) and self.budget > 0:
            return self.budget
        elif isinstance(self.budget, str) and self.budget.strip().isdigit() and int(self.budget) > 0:
            return int(self.budget)
        raise HfGrowError(f"budget must be a positive number of parameters or a percentage like '1%': {self.budget!r}.")

    @property
    def kinds(self) -> tuple[str, ...]:
        """What this config may grow; without amounts, what is measured by default."""
        if self.budget is not None:
            return tuple(MEASURED_KINDS)
        return tuple(name for name in MEASURED_KINDS if getattr(self, name) is not None) or default_kinds()


def largest(amount: Amount) -> int:
    """The largest amount asked for in any layer."""
    if isinstance(amount, Mapping):
        return max(amount.values(), default=0)
    return amount or 0
