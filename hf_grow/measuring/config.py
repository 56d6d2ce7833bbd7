"""What the user wants of measuring. Checked when made."""

import math
from dataclasses import dataclass

from hf_grow.errors import HfGrowError
from hf_grow.fields import ANY, gone, is_number, one_of, some_of, whole
from hf_grow.linalg import INVERSES, METRICS
from hf_grow.measuring.kind import MEASURED_KINDS, default_kinds

COLLECTIONS = ("sketch", "exact")
TARGETS = ("bottleneck", "gradient")
ESTIMATORS = ("pooled", "per_sequence", "mean_input", "exact")


@gone("the sketch asks about everything in every pass; `passes` says how many there are.", products=ANY, phases=ANY)
@dataclass(frozen=True)
class CollectConfig:
    """How to measure where attention lacks capacity.

    collection     "sketch": through the model's own kernel, memory linear in the tokens; "exact": scores held
    kinds          what may grow afterwards: "columns" (query/key), "value_columns", "heads"; None: what `grow` was
                   asked for, or columns
    columns        how many query/key columns per head to look for
    value_columns  how many value columns per head to look for
    oversampling   how many columns more the sketch carries along
    target         "bottleneck": what the present columns cannot express; "gradient": everything; None: the bottleneck,
                   but the gradient for rotated columns, whose span depends on the position
    metric         where a truncation to few columns is best: "whitened" (the optimum), or with exact collection
                   "euclidean", "none"
    estimator      how many sequences make one step: "pooled", or with exact collection "per_sequence", "mean_input",
                   "exact"
    inverse        how grams are inverted: "eigh", "pinv", "solve", "newton_schulz"
    cutoff         eigenvalues of a gram below this, relative to its largest, count as zero
    ridge          added to grams before they are inverted, relative to their mean eigenvalue; a small one keeps columns
                   along inputs that hardly vary from becoming large, which does better on other data
    held_out       the share of sequences that judge what the others chose; 0 for none
    max_batches    stop reading after so many batches; None: read all
    seed           of the sketch and of preserving growth
    passes         how often the sketch goes over the sequences that choose; the more, the more exact
    """

    collection: str = "sketch"
    kinds: tuple[str, ...] | None = None
    columns: int = 8
    value_columns: int = 8
    oversampling: int = 8
    target: str | None = None
    metric: str = "whitened"
    estimator: str = "pooled"
    inverse: str = "eigh"
    cutoff: float = 1e-6
    ridge: float = 0.03
    held_out: float = 0.25
    max_batches: int | None = None
    seed: int = 0
    passes: int = 3

    def __post_init__(self) -> None:
        one_of("collection", self.collection, COLLECTIONS)
        one_of("metric", self.metric, METRICS)
        one_of("estimator", self.estimator, ESTIMATORS)
        one_of("inverse", self.inverse, INVERSES)
        if self.target is not None:
            one_of("target", self.target, TARGETS)
        if self.kinds is not None:
            object.__setattr__(self, "kinds", some_of("kinds", self.kinds, tuple(MEASURED_KINDS)))
        for name, least in (("columns", 1), ("value_columns", 1), ("oversampling", 0), ("passes", 2), ("seed", 0)):
            whole(name, getattr(self, name), least)
        if self.max_batches is not None:
            whole("max_batches", self.max_batches, 1)
        for name, most in (("cutoff", 1.0), ("ridge", math.inf), ("held_out", 1.0)):
            value = getattr(self, name)
            if not is_number(value) or not 0 <= value < most:
                raise HfGrowError(f"{name} must be a number from 0 to below {most:g}, not {value!r}.")
        if self.collection == "sketch" and (self.metric != "whitened" or self.estimator != "pooled"):
            raise HfGrowError(
                "The sketch knows metric='whitened' and estimator='pooled' only: use collection='exact' for others."
            )

    @property
    def measured_kinds(self) -> tuple[str, ...]:
        """What this config measures."""
        return default_kinds() if self.kinds is None else self.kinds
