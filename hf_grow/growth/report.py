"""What happened when a model grew, as a value that prints and saves."""

import json
from dataclasses import dataclass, field
from math import isfinite
from typing import Any

from hf_grow.fields import former_fields, to_dict


@former_fields(steps="step_sizes")
@dataclass(frozen=True)
class GrowthReport:
    """What `insert_growth` did.

    form          "stepped": new weights lower the loss at once; "preserving": nothing changes until training; "shrunk":
                  fewer columns, and no step
    step          the multiple of the planned steps that was taken; with one step for each layer, their list
    step_sizes    what that makes by what is stepped along, for a shared step
    curve         all multiples tried, each with its loss on the line-search batches
    predicted     first-order decrease of the loss at that step, on the data that chose and on held-out data
    layers        what was planned and done in each attention module, ready for JSON
    seconds       by part of the work
    optimizer     what became of the optimizer's state, None without an optimizer
    """

    form: str
    loss_before: float | None
    loss_after: float | None
    step: float | list[float]
    step_sizes: dict[str, float]
    curve: list[tuple[float, float]]
    predicted: dict[str, float | None]
    parameters_before: int
    parameters_after: int
    layers: list[dict[str, Any]]
    config: dict[str, Any]
    collected: dict[str, Any]
    seconds: dict[str, float] = field(default_factory=dict)
    dry_run: bool = False
    optimizer: str | None = None

    @property
    def parameters_added(self) -> int:
        """How many parameters the model has more."""
        return self.parameters_after - self.parameters_before

    @property
    def realised(self) -> float | None:
        """How much lower the loss is on the line-search batches."""
        if self.loss_before is None or self.loss_after is None:
            return None
        return self.loss_before - self.loss_after

    def summary(self) -> dict[str, Any]:
        """Plain values for JSON."""
        # JSON has no number for a loss that is not finite.
        curve = [(step, loss if isfinite(loss) else None) for step, loss in self.curve]
        return to_dict(self) | {
            "curve": curve,
            "parameters_added": self.parameters_added,
            "realised": self.realised,
        }

    def to_json(self) -> str:
        """The summary as text."""
        return json.dumps(self.summary(), indent=2)

    def __str__(self) -> str:
        growth = f"{self.parameters_added:,} parameters added ({self.parameters_added / self.parameters_before:.2%})"
        if self.loss_before is None or self.loss_after is None:
            return f"{growth}, {self.form}: no batches to measure the loss on."
        return f"{growth}, {self.form}: loss {self.loss_before:.4f} → {self.loss_after:.4f}."
