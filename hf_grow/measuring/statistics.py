"""What collection found in each attention module: values that can be saved, read back and planned with."""

import os
from dataclasses import dataclass, field, fields
from math import isnan, nan
from typing import Any

import torch
from torch import Tensor

from hf_grow.errors import HfGrowError
from hf_grow.fields import former_attributes, from_dict, to_dict
from hf_grow.measuring.config import CollectConfig
from hf_grow.measuring.kind import MEASURED_KINDS, MeasuredKind
from hf_grow.measuring.tensor_file import read_tensors, write_tensors
from hf_grow.surgery.place import Place, read_place


@dataclass(frozen=True)
class AttentionSums:
    """Sums over sequences for one attention module; nothing is normalised, so sums of parts are the sum of the whole.

    Gradients are those of the loss summed over what it is a mean of, labels or sequences: `weight` counts these.

    gradient       Σ X_qᵀ G X_k (heads, query inputs, key inputs)
    query_gram     Σ X_qᵀX_q over tokens that are not padding; key_gram likewise
    value_gradient Σ (A₀X)ᵀE (heads + 1, value inputs, outputs): each head's pattern A₀, and last the uniform one
    pattern_gram   Σ (A₀X)ᵀ(A₀X) (heads + 1, value inputs, value inputs)
    A projection with a bias has one more input, which is always one and whose row is the bias.
    """

    gradient: Tensor
    query_gram: Tensor
    key_gram: Tensor
    value_gradient: Tensor | None = None
    pattern_gram: Tensor | None = None
    sequences: int = 0
    weight: float = 0.0

    def merge(self, other: "AttentionSums") -> "AttentionSums":
        """The sums of both."""
        parts = ((part.name, getattr(self, part.name), getattr(other, part.name)) for part in fields(self))
        return AttentionSums(**{name: first if second is None else first + second for name, first, second in parts})

    def mean(self) -> "AttentionSums":
        """Grams per sequence, and gradients of the mean loss."""
        values = {part.name: getattr(self, part.name) for part in fields(self)}
        counts = {name: self.weight if "gradient" in name else self.sequences for name in values}
        means = {name: part / max(counts[name], 1) for name, part in values.items() if isinstance(part, Tensor)}
        return AttentionSums(**means, sequences=1, weight=1.0)


@dataclass(frozen=True)
class Candidates:
    """Columns or value columns that could be added, strongest first.

    first, second  query (heads, inputs, rank) and key (key heads, inputs, rank), or value (key heads, inputs, rank) and
                   output (heads, rank, outputs)
    gains          first-order decrease of the loss for a step of one, (heads, rank), on the data that chose them
    held_out       the same on other data; None where there was none
    """

    first: Tensor
    second: Tensor
    gains: Tensor
    held_out: Tensor | None = None

    @property
    def expected(self) -> Tensor:
        """The most honest gains there are: those on other data, where there is any."""
        return self.gains if self.held_out is None else self.held_out

    @property
    def rank(self) -> int:
        """How many there are."""
        return self.gains.shape[-1]

    def total(self, which: str, count: int, skipped: int = 0, heads: slice = slice(None)) -> float:
        """The "gains" or "held_out" gains of so many together; not a number where nothing was held out."""
        gains = getattr(self, which)
        return nan if gains is None else float(gains[heads, skipped : skipped + count].sum())


@dataclass(frozen=True)
class AttentionStatistics:
    """What was found in one attention module.

    wanted         ‖M‖² of each head: the wanted change of the scores, in the metric of section 2 of the maths
    bottleneck     ‖M⊥‖² of each head: the part of it that the present columns cannot express
    columns        new query/key columns; values: new value columns for the present heads
    uniform        the value and output side of one new head that attends uniformly; uniform_scores its query/key side
    sums           with exact collection: the sums of the sequences that chose and of those that judged
    change         with exact collection: the whole wanted change of the scores, A⁺TB⁺ or what the estimator makes of it
    """

    place: Place
    query_gram: Tensor
    key_gram: Tensor
    query: Tensor
    key: Tensor
    wanted: Tensor
    bottleneck: Tensor
    columns: Candidates | None = None
    values: Candidates | None = None
    uniform: Candidates | None = None
    uniform_scores: Candidates | None = None
    sums: tuple[AttentionSums, AttentionSums] | None = None
    change: Tensor | None = None

    def total(self) -> AttentionSums:
        """With exact collection: the sums over all sequences."""
        if self.sums is None:
            raise HfGrowError("Only exact collection keeps the sums: use CollectConfig(collection='exact').")
        return self.sums[0].merge(self.sums[1])

    @property
    def judged(self) -> bool:
        """Whether all gains are known on other data than those that chose."""
        return all(part is None or part.held_out is not None for part in (self.columns, self.values, self.uniform))

    @property
    def reachable_share(self) -> float | None:
        """The share of the wanted change that training or LoRA on the present query/key columns could express.

        None where nothing is wanted, or where it was not collected. Rotated columns count as if they were not rotated.
        """
        wanted = float(self.wanted.sum())
        return min(max(1 - float(self.bottleneck.sum()) / wanted, 0.0), 1.0) if wanted > 0 else None


@dataclass(frozen=True)
class Calibration:
    """The step along one kind of growth that lowered the loss most, tried in all layers at once on held-out data.

    decrease       how much it lowered the loss
    first_order    how much the gains alone would have it lower the loss; far steps keep only a share of that
    error          the standard error of the decrease, as batches differ; None where they were too few to tell
    """

    step: float
    decrease: float
    first_order: float
    error: float | None = None

    def __str__(self) -> str:
        if self.step == 0:
            return "no step lowers the loss"
        error = "" if self.error is None else f" ± {self.error:.4f}"
        return f"a step of {self.step:.3g} lowers the loss by {self.decrease:.4f}{error} nats"

    @property
    def realised_share(self) -> float:
        """The share of the first-order decrease that such a step realises."""
        return self.decrease / self.first_order if self.first_order > 0 else 0.0

    @property
    def realised_step(self) -> float:
        """What gains are to be multiplied with for the decrease that such a step realises."""
        return self.step * self.realised_share


@former_attributes(steps="step_sizes")
@dataclass(frozen=True)
class Statistics:
    """Everything one collection found.

    calibrations   by what is stepped along
    loss           on the held-out sequences, or on all where none were held out
    fingerprint    of the attention weights that were measured
    """

    layers: list[AttentionStatistics]
    config: CollectConfig
    model_type: str
    parameters: int
    fingerprint: str
    sequences: int
    loss: float
    calibrations: dict[str, Calibration] = field(default_factory=dict)
    seconds: dict[str, float] = field(default_factory=dict)

    def save(self, path: str | os.PathLike) -> None:
        """Write one safetensors file, all at once."""
        write_tensors(self, path, "statistics")

    @classmethod
    def load(cls, path: str | os.PathLike) -> "Statistics":
        """Read what `save` wrote."""
        content = read_tensors(path, "statistics")
        content["config"] = from_dict(CollectConfig, content["config"])
        content["layers"] = [_layer(layer) for layer in content["layers"]]
        content["calibrations"] = {name: Calibration(**part) for name, part in content["calibrations"].items()}
        return cls(**content)

    @property
    def step_sizes(self) -> dict[str, float]:
        """By what is stepped along: how far to go along the gains."""
        return {name: calibration.step for name, calibration in self.calibrations.items()}

    @property
    def kinds(self) -> list[MeasuredKind]:
        """The kinds whose step was found."""
        return [kind for kind in MEASURED_KINDS.values() if kind.name in self.calibrations]

    def summary(self) -> dict[str, Any]:
        """Where growth would help, as plain values for JSON; decreases are what the steps found would realise."""
        return {
            "config": to_dict(self.config),
            "model_type": self.model_type,
            "parameters": self.parameters,
            "sequences": self.sequences,
            "loss": self.loss,
            "calibrations": {name: to_dict(calibration) for name, calibration in self.calibrations.items()},
            "layers": [self._layer_summary(layer) for layer in self.layers],
            "seconds": self.seconds,
        }

    def _layer_summary(self, layer: AttentionStatistics) -> dict[str, Any]:
        gains = {kind.name: self._gains(layer, kind) for kind in self.kinds if kind.candidates(layer) is not None}
        return {
            **layer.place.entry(),
            "reachable_share": layer.reachable_share,
            "wanted": layer.wanted.tolist(),
            "bottleneck": layer.bottleneck.tolist(),
            **gains,
            "offers": {kind.name: self._offer(layer, kind) for kind in self.kinds},
            "first_order": {kind.name: self._first_order(layer, kind) for kind in self._measured(layer)},
        }

    def _measured(self, layer: AttentionStatistics) -> list[MeasuredKind]:
        kinds = (MEASURED_KINDS[name] for name in self.config.measured_kinds)
        return [kind for kind in kinds if kind.candidates(layer) is not None]

    def _first_order(self, layer: AttentionStatistics, kind: MeasuredKind) -> float:
        """What as much of one kind as was looked for promises for a step of one, to compare layers with."""
        which = "held_out" if layer.judged else "gains"
        return kind.gain(layer, kind.sample(layer, self.config), which)

    def _gains(self, layer: AttentionStatistics, kind: MeasuredKind) -> dict[str, Any]:
        """What each column promises in each head, strongest first."""
        candidates, realised = kind.candidates(layer), self.calibrations[kind.name].realised_step
        assert candidates is not None
        held_out = None if candidates.held_out is None else (realised * candidates.held_out).tolist()
        return {"in_sample": (realised * candidates.gains).tolist(), "held_out": held_out}

    def _offer(self, layer: AttentionStatistics, kind: MeasuredKind) -> dict[str, Any]:
        """As much of one kind as was looked for: its parameters and decrease."""
        place, amount, realised = (
            layer.place,
            kind.sample(layer, self.config),
            self.calibrations[kind.name].realised_step,
        )
        held_out = kind.gain(layer, amount, "held_out")
        return {
            "amount": amount,
            "parameters": amount * kind.cost(place, place.dims),
            "in_sample": realised * kind.gain(layer, amount, "gains"),
            "held_out": None if isnan(held_out) else realised * held_out,
        }


def _layer(content: dict) -> AttentionStatistics:
    for name in ("columns", "values", "uniform", "uniform_scores"):
        content[name] = content[name] and Candidates(**content[name])
    content["sums"] = content["sums"] and tuple(AttentionSums(**part) for part in content["sums"])
    content["place"] = read_place(content["place"])
    return AttentionStatistics(**content)


def uniform_circuit(uniform: Candidates, place: Place) -> tuple[Tensor, Tensor]:
    """The value and output side of a uniform head, its output rows dealt out among the query heads of one group.

    Query heads with the same output would get the same gradient for ever.
    """
    width = min(place.value_dim, uniform.rank)
    owner = torch.arange(width, device=uniform.second.device) % place.group
    heads = torch.arange(place.group, device=owner.device)
    return uniform.first[..., :width], uniform.second[:, :width] * (owner == heads[:, None])[..., None]
