"""What the user wants: how to measure (`CollectConfig`) and how to grow (`GrowthConfig`). Checked when made."""

import math
import re
from collections.abc import Mapping
from dataclasses import dataclass, fields
from typing import Any

from hf_grow.errors import HfGrowError
from hf_grow.linalg import INVERSES, METRICS

COLLECTIONS = ("sketch", "exact")
KINDS = ("columns", "value_columns", "heads")
TARGETS = ("bottleneck", "gradient")
ESTIMATORS = ("pooled", "per_sequence", "mean_input", "exact")
PHASES = ("all", "split")
STRATEGIES = ("append", "refactor", "step")
LINE_SEARCHES = ("low_rank", "full_rank")
STEPS = ("shared", "per_layer")

Amount = int | Mapping[int | str, int] | None


@dataclass(frozen=True)
class CollectConfig:
    """How to measure where attention lacks capacity.

    collection     "sketch": through the model's own kernel, memory linear in the tokens; "exact": scores held
    kinds          what may grow afterwards: "columns" (query/key), "value_columns", "heads"; None: what `grow` was
                   asked for, or columns
    columns        how many query/key columns per head to look for; value_columns likewise
    oversampling   how many more the sketch carries along
    products       how many products with the gradient the sketch takes in turns, from either side
    phases         "all": every product sees all batches; "split": each sees its own, one pass over the data in all,
                   which is not reliable on little data
    target         "bottleneck": what the present columns cannot express; "gradient": everything; None: the bottleneck,
                   but the gradient for rotated columns, whose span depends on the position
    metric         where a truncation to few columns is best: "whitened" (the optimum), "euclidean", "none"
    estimator      how many sequences make one step: "pooled", or with exact collection "per_sequence", "mean_input",
                   "exact"
    inverse        how grams are inverted: "eigh", "pinv", "solve", "newton_schulz"
    cutoff, ridge  relative to a gram's largest and mean eigenvalue; a small ridge keeps columns along inputs that
                   hardly vary from becoming large, which does better on other data
    held_out       the share of sequences that judge what the others chose; 0 for none
    max_batches    stop reading after so many batches; None for all
    """

    collection: str = "sketch"
    kinds: tuple[str, ...] | None = None
    columns: int = 8
    value_columns: int = 8
    oversampling: int = 8
    products: int = 5
    phases: str = "all"
    target: str | None = None
    metric: str = "whitened"
    estimator: str = "pooled"
    inverse: str = "eigh"
    cutoff: float = 1e-6
    ridge: float = 0.03
    held_out: float = 0.25
    max_batches: int | None = None
    seed: int = 0

    def __post_init__(self) -> None:
        one_of("collection", self.collection, COLLECTIONS)
        one_of("phases", self.phases, PHASES)
        one_of("metric", self.metric, METRICS)
        one_of("estimator", self.estimator, ESTIMATORS)
        one_of("inverse", self.inverse, INVERSES)
        if self.target is not None:
            one_of("target", self.target, TARGETS)
        if self.kinds is not None:
            if not isinstance(self.kinds, (str, list, tuple)):
                raise HfGrowError(f"kinds must be a tuple of some of {', '.join(KINDS)}, not {self.kinds!r}.")
            object.__setattr__(self, "kinds", (self.kinds,) if isinstance(self.kinds, str) else tuple(self.kinds))
            for kind in self.kinds:
                one_of("kinds", kind, KINDS)
            if not self.kinds:
                raise HfGrowError(f"kinds must name at least one of {', '.join(KINDS)}.")
        for name, least in (("columns", 1), ("value_columns", 1), ("oversampling", 0), ("products", 2), ("seed", 0)):
            whole(name, getattr(self, name), least)
        if self.max_batches is not None:
            whole("max_batches", self.max_batches, 1)
        for name, most in (("cutoff", 1.0), ("ridge", math.inf), ("held_out", 1.0)):
            value = getattr(self, name)
            if not _number(value) or not 0 <= value < most:
                raise HfGrowError(f"{name} must be a number from 0 to below {most:g}, not {value!r}.")
        if self.collection == "sketch" and (self.metric != "whitened" or self.estimator != "pooled"):
            raise HfGrowError(
                "The sketch knows metric='whitened' and estimator='pooled' only: use collection='exact' for others."
            )

    @property
    def measured_kinds(self) -> tuple[str, ...]:
        """What this config measures."""
        return ("columns",) if self.kinds is None else self.kinds


@dataclass(frozen=True)
class GrowthConfig:
    """How much to grow, where, and how far to step.

    columns, value_columns, heads   for every layer, or a dict from layer numbers (or attention names) to amounts
    budget       instead: new parameters, as a number or "1%" of the model's, spent where they promise most
    strategy     "append" new columns; "refactor": all query/key columns anew, also fewer (columns < 0); "step": no new
                 column, the present ones move along the gradient
    align        round query/key and value widths up to a multiple of this; None: 8 on CUDA, 1 elsewhere
    step_size    None: line search; 0: exactly preserving; a number: that multiple of the step found while collecting
    steps        one step for all layers ("shared") or one for each ("per_layer")
    line_search  "low_rank": with the columns that will be inserted; "full_rank": with all of the wanted change
    """

    columns: Amount = None
    value_columns: Amount = None
    heads: Amount = None
    budget: int | str | None = None
    strategy: str = "append"
    align: int | None = None
    step_size: float | None = None
    steps: str = "shared"
    line_search: str = "low_rank"

    def __post_init__(self) -> None:
        one_of("strategy", self.strategy, STRATEGIES)
        one_of("steps", self.steps, STEPS)
        one_of("line_search", self.line_search, LINE_SEARCHES)
        amounts = {kind: getattr(self, kind) for kind in KINDS if getattr(self, kind) is not None}
        for kind, amount in amounts.items():
            least = -(10**9) if kind == "columns" and self.strategy == "refactor" else 0
            for value in amount.values() if isinstance(amount, Mapping) else (amount,):
                whole(kind, value, least)
        if self.align is not None:
            whole("align", self.align, 1)
        if self.step_size is not None and (not _number(self.step_size) or self.step_size < 0):
            raise HfGrowError(f"step_size must be a number that is not negative, not {self.step_size!r}.")
        if self.strategy != "append" and (self.budget is not None or amounts.keys() - {"columns"}):
            raise HfGrowError(f"strategy='{self.strategy}' concerns query/key columns only: give columns=… alone.")
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
        """What this config may grow."""
        if self.budget is not None:
            return KINDS
        return tuple(kind for kind in KINDS if getattr(self, kind) is not None) or ("columns",)


def largest(amount: Amount) -> int:
    """The largest amount asked for in any layer."""
    if isinstance(amount, Mapping):
        return max(amount.values(), default=0)
    return amount or 0


def as_dict(config: CollectConfig | GrowthConfig) -> dict[str, Any]:
    """A config as plain values for JSON."""
    values = {field.name: getattr(config, field.name) for field in fields(config)}
    return {name: _plain(value) for name, value in values.items()}


def from_dict(cls: type, values: Mapping[str, Any]) -> Any:
    """The config that `as_dict` wrote; layer numbers come back as numbers."""
    restored = {}
    for name, value in values.items():
        if isinstance(value, Mapping):
            value = {int(key) if re.fullmatch(r"\d+", str(key)) else key: amount for key, amount in value.items()}
        restored[name] = tuple(value) if isinstance(value, list) else value
    return cls(**restored)


def require(config: Any, cls: type) -> Any:
    """Refuse anything but a config of this class."""
    if not isinstance(config, cls):
        raise HfGrowError(f"Give a {cls.__name__}(…), not {type(config).__name__}.")
    return config


def one_of(name: str, value: Any, allowed: tuple[str, ...]) -> None:
    """Refuse anything but the allowed names, and list them."""
    if value not in allowed:
        raise HfGrowError(f"{name} must be one of {', '.join(allowed)}, not {value!r}.")


def whole(name: str, value: Any, least: int) -> None:
    """Refuse anything but a whole number of at least `least`."""
    if not isinstance(value, int) or isinstance(value, bool) or value < least:
        raise HfGrowError(f"{name} must be a whole number of at least {least}, not {value!r}.")


def _number(value: Any) -> bool:
    return isinstance(value, (int, float)) and not isinstance(value, bool) and math.isfinite(value)


def _plain(value: Any) -> Any:
    if isinstance(value, Mapping):
        return {str(key): amount for key, amount in value.items()}
    return list(value) if isinstance(value, tuple) else value
