"""What collection found in each attention module: values that can be saved, read back and planned with."""

import json
import os
from dataclasses import dataclass, field, fields
from math import isnan, nan
from pathlib import Path
from typing import Any

from safetensors import SafetensorError, safe_open
from safetensors.torch import save_file
from torch import Tensor

from hf_grow.config import KINDS, CollectConfig, as_dict, from_dict
from hf_grow.errors import HfGrowError

FORMAT = 1


@dataclass(frozen=True)
class Place:
    """An attention module as it was when measured: where it is, its sizes, and the usual size of its columns.

    inputs     how many inputs query, key and value have (a bias counts as one), and how many outputs, by role
    norms      the root mean square norm of a column of query, key and value, and of a row of output
    """

    name: str
    layer: int
    kind: str
    n_heads: int
    n_kv_heads: int
    query_key_dim: int
    value_dim: int
    scaling: float
    rotary_dim: int
    inputs: dict[str, int]
    norms: dict[str, float]

    @property
    def label(self) -> str:
        """How reports call it."""
        return f"{self.layer}" + (" cross" if self.kind == "cross" else "")

    def cost(self, kind: str, query_key_dim: int, value_dim: int) -> int:
        """Parameters of one more column, value column, or head of these widths."""
        group = self.n_heads // self.n_kv_heads
        column = group * self.inputs["query"] + self.inputs["key"]
        value = self.inputs["value"] + group * self.inputs["output"]
        if kind == "heads":
            return query_key_dim * column + value_dim * value
        return self.n_kv_heads * (column if kind == "columns" else value)


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

    def head_gain(self, copy: int | None, which: str, skipped: int = 0) -> float:
        """First-order decrease of a new head that copies a key head's pattern, or attends uniformly, for a step of one.

        The first value columns of a pattern may be given to the present heads already.
        """
        assert self.values is not None and self.uniform is not None
        width, group = self.place.value_dim, self.place.n_heads // self.place.n_kv_heads
        if copy is None:
            return self.uniform.total(which, width)
        return self.values.total(which, width, skipped, slice(copy * group, (copy + 1) * group))

    def patterns(self, skipped: int = 0) -> list[int | None]:
        """The patterns a new head could have, the most promising first; None is the uniform one."""
        assert self.values is not None
        which = "gains" if self.values.held_out is None else "held_out"
        return sorted([None, *range(self.place.n_kv_heads)], key=lambda copy: -self.head_gain(copy, which, skipped))

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
    """

    step: float
    decrease: float
    first_order: float

    @property
    def realised_share(self) -> float:
        """The share of the first-order decrease that such a step realises."""
        return self.decrease / self.first_order if self.first_order > 0 else 0.0


@dataclass(frozen=True)
class Statistics:
    """Everything one collection found.

    calibrations   by kind; "head_scores" is that of new heads' query/key columns
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
        content["calibrations"] = {kind: Calibration(**part) for kind, part in content["calibrations"].items()}
        return cls(**content)

    @property
    def steps(self) -> dict[str, float]:
        """By kind: how far to go along the gains."""
        return {kind: found.step for kind, found in self.calibrations.items()}

    def summary(self) -> dict[str, Any]:
        """Where growth would help, as plain values for JSON; decreases are what the steps found would realise."""
        return {
            "config": as_dict(self.config),
            "model_type": self.model_type,
            "parameters": self.parameters,
            "sequences": self.sequences,
            "loss": self.loss,
            "calibrations": {kind: vars(found) for kind, found in self.calibrations.items()},
            "layers": [self._layer_summary(layer) for layer in self.layers],
            "seconds": self.seconds,
        }

    def _layer_summary(self, layer: AttentionStatistics) -> dict[str, Any]:
        place = layer.place
        found: dict[str, Any] = {
            "name": place.name,
            "layer": place.layer,
            "kind": place.kind,
            "n_heads": place.n_heads,
            "n_kv_heads": place.n_kv_heads,
            "query_key_dim": place.query_key_dim,
            "value_dim": place.value_dim,
            "reachable_share": layer.reachable_share,
            "wanted": layer.wanted.tolist(),
            "bottleneck": layer.bottleneck.tolist(),
        }
        for kind, candidates in (("columns", layer.columns), ("value_columns", layer.values), ("heads", layer.uniform)):
            if candidates is not None and kind in self.calibrations:
                share = self.calibrations[kind].step * self.calibrations[kind].realised_share
                held_out = candidates.held_out
                found[kind] = {
                    "in_sample": (share * candidates.gains).tolist(),
                    "held_out": None if held_out is None else (share * held_out).tolist(),
                }
        kinds = [kind for kind in KINDS if kind in self.calibrations]
        return found | {"offers": {kind: self._offer(layer, kind) for kind in kinds}}

    def _offer(self, layer: AttentionStatistics, kind: str) -> dict[str, Any]:
        """As much of one kind as was looked for, or the one head that promises most: its parameters and decrease."""
        place, amount = layer.place, 1
        if kind == "heads":
            best = layer.patterns()[0]
            in_sample, held_out = layer.head_gain(best, "gains"), layer.head_gain(best, "held_out")
        else:
            found = layer.columns if kind == "columns" else layer.values
            assert found is not None
            amount = min(getattr(self.config, kind), found.rank)
            in_sample, held_out = found.total("gains", amount), found.total("held_out", amount)
        share = self.calibrations[kind].step * self.calibrations[kind].realised_share
        return {
            "amount": amount,
            "parameters": amount * place.cost(kind, place.query_key_dim, place.value_dim),
            "in_sample": share * in_sample,
            "held_out": None if isnan(held_out) else share * held_out,
        }


def write_tensors(value: Any, path: str | os.PathLike, what: str) -> None:
    """A dataclass of plain values, tensors and dataclasses as one safetensors file that appears whole."""
    tensors: dict[str, Tensor] = {}
    content = _flatten(value, "", tensors)
    file = Path(path)
    aside = file.with_name(f".{file.name}.saving")
    try:
        save_file(tensors, aside, metadata={"hf_grow": what, "format": str(FORMAT), "content": json.dumps(content)})
        aside.replace(file)
    except (OSError, SafetensorError) as error:
        raise HfGrowError(f"{file} cannot be written: {error}") from error
    finally:
        aside.unlink(missing_ok=True)


def read_tensors(path: str | os.PathLike, what: str) -> dict:
    """The plain values of such a file, with its tensors in their places."""
    try:
        with safe_open(path, framework="pt") as file:
            metadata = file.metadata() or {}
            tensors = {name: file.get_tensor(name) for name in file.keys()}  # noqa: SIM118
        if metadata.get("hf_grow") != what or int(metadata["format"]) > FORMAT:
            raise HfGrowError(f"{path} holds no {what} that this version of hf-grow can read.")
        return _unflatten(json.loads(metadata["content"]), tensors)
    except (OSError, SafetensorError, KeyError, ValueError) as error:
        if isinstance(error, HfGrowError):
            raise
        raise HfGrowError(f"{path} cannot be read as {what} of hf-grow: {error}") from error


def _flatten(value: Any, name: str, tensors: dict[str, Tensor]) -> Any:
    """Plain values for JSON; tensors go to `tensors` and leave their name behind."""
    if isinstance(value, Tensor):
        tensors[name] = value.detach().contiguous().clone()
        return {"tensor": name}
    if isinstance(value, CollectConfig):
        return as_dict(value)
    if hasattr(value, "__dataclass_fields__"):
        return {
            part.name: _flatten(getattr(value, part.name), f"{name}.{part.name}", tensors) for part in fields(value)
        }
    if isinstance(value, (list, tuple)):
        return [_flatten(part, f"{name}.{index}", tensors) for index, part in enumerate(value)]
    if isinstance(value, dict):
        return {str(key): _flatten(part, f"{name}.{key}", tensors) for key, part in value.items()}
    return value


def _unflatten(value: Any, tensors: dict[str, Tensor]) -> Any:
    if isinstance(value, dict):
        if set(value) == {"tensor"}:
            return tensors[value["tensor"]]
        return {key: _unflatten(part, tensors) for key, part in value.items()}
    return [_unflatten(part, tensors) for part in value] if isinstance(value, list) else value


def _layer(content: dict) -> AttentionStatistics:
    for name in ("columns", "values", "uniform", "uniform_scores"):
        content[name] = content[name] and Candidates(**content[name])
    content["sums"] = content["sums"] and tuple(AttentionSums(**part) for part in content["sums"])
    content["place"] = Place(**content["place"])
    return AttentionStatistics(**content)
