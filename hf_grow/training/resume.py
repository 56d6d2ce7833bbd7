"""A model takes the sizes of the checkpoint whose weights are loaded into it.

transformers' Trainer resumes, and loads its best model, by `load_state_dict` into the model it has, which is of another
size when the run grew in between. No callback is asked before, but a hook of the model is.
"""

import json
import re
from collections.abc import Iterator
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import torch
from torch import Tensor, nn
from transformers import PreTrainedModel

from hf_grow.errors import HfGrowError
from hf_grow.modeling.attached_growth import SCALE, attached_shapes
from hf_grow.modeling.growable_attention import in_rows
from hf_grow.modeling.growable_model import projection_shapes, read_history, resize, take_history
from hf_grow.modeling.size_record import entries, recorded_growths, recorded_sizes
from hf_grow.surgery.optimizer_state import State, swap_parameters
from hf_grow.surgery.quantized import is_plain
from hf_grow.training.learning import freeze_base

Shapes = dict[str, tuple[int, ...]]


class SizesFromCheckpoint:
    """A pre-hook for `load_state_dict` of a growable model: finds the sizes of what comes in a run's checkpoints.

    It holds no more than paths, as it is copied and pickled with the model. `replaced` are the parameters that had to
    give way, each with the one that took its place; whoever has them in an optimizer must exchange them.
    """

    def __init__(self, *folders: str | Path | None, freezes: bool = False) -> None:
        self.folders = [Path(folder).resolve() for folder in folders if folder]
        self.freezes = freezes
        self.replaced: list[tuple[nn.Parameter, nn.Parameter]] = []

    def __call__(self, model: PreTrainedModel, state_dict: dict[str, Tensor], prefix: str, *_: Any) -> None:
        """Resize the model where the incoming weights are of other sizes than its own."""
        incoming = {
            name.removeprefix(prefix): tuple(value.shape)
            for name, value in state_dict.items()
            if name.startswith(prefix)
        }
        own = _attention_shapes(model, model.config.hf_grow)
        present = dict(model.named_parameters())
        attention = {name: shape for name, shape in incoming.items() if name in own or _is_growth(name)}
        others = {name for name, shape in incoming.items() if name in present and tuple(present[name].shape) != shape}
        # Of a sharded checkpoint only a part comes at a time.
        whole = all(name in attention for name in own if not _is_growth(name))
        if _fits(attention, own, whole) or not others <= own.keys():
            # Nothing to do, or nothing that growth could explain.
            return
        record, folder = self._find(model, attention, whole)
        resize(model, record)
        take_history(model.config, read_history(folder) or model.config.growth_history)
        if self.freezes:
            freeze_base(model)
        now = dict(model.named_parameters())
        pairs = ((present[name], now[name]) for name in present.keys() & now.keys())
        self.replaced += [(old, new) for old, new in pairs if old is not new]

    def _find(self, model: PreTrainedModel, incoming: Shapes, whole: bool) -> tuple[dict, Path]:
        for folder in self._candidates():
            try:
                record = json.loads((folder / "config.json").read_text(encoding="utf-8"))["hf_grow"]
                shapes = _attention_shapes(model, record)
            except (OSError, ValueError, KeyError, TypeError):
                continue
            if _fits(incoming, shapes, whole):
                return record, folder
        raise HfGrowError(
            "These weights are of a model that grew to other sizes, and no checkpoint of this run has them: load the "
            "model with hf_grow.load_grown(checkpoint) before training goes on from it."
        )

    def _candidates(self) -> Iterator[Path]:
        """The folders themselves, and the checkpoints in them, the last first."""
        for folder in self.folders:
            yield folder
            numbered = {path: re.fullmatch(r"checkpoint-(\d+)", path.name) for path in folder.glob("checkpoint-*")}
            steps = {path: int(number[1]) for path, number in numbered.items() if number}
            yield from sorted(steps, key=lambda path: -steps[path])


@dataclass(frozen=True)
class WatchedModel:
    """A model that takes the sizes of a run's checkpoints when their weights are loaded into it."""

    model: PreTrainedModel
    sizes: SizesFromCheckpoint

    @classmethod
    def watch(cls, model: PreTrainedModel, *folders: str | Path | None, freezes: bool = False) -> "WatchedModel":
        """Watch a model from now on, for checkpoints of these folders; with `freezes` the base is frozen then."""
        sizes = SizesFromCheckpoint(*folders, freezes=freezes)
        model.register_load_state_dict_pre_hook(sizes)
        return cls(model, sizes)

    def exchange(self, optimizer: torch.optim.Optimizer) -> bool:
        """Whether parameters had to give way; the optimizer gets the new ones, with a state that fits, if it has it."""
        new = dict(self.sizes.replaced)
        swap_parameters(optimizer, {old: _last(old, new) for old in new}, _fitting)
        self.sizes.replaced = []
        return bool(new)


def _fitting(parameter: nn.Parameter, state: State) -> State | None:
    """The state, if it was loaded for a parameter of this size."""
    # Some optimizers keep one number for each row or column.
    sizes = {size for value in state.values() if isinstance(value, Tensor) for size in value.shape}
    return state if state and sizes <= {*parameter.shape, 1} else None


def _last(parameter: nn.Parameter, new: dict[nn.Parameter, nn.Parameter]) -> nn.Parameter:
    while parameter in new:
        parameter = new[parameter]
    return parameter


def _fits(incoming: Shapes, shapes: Shapes, whole: bool) -> bool:
    return incoming == shapes if whole else all(shapes.get(name) == shape for name, shape in incoming.items())


def _is_growth(name: str) -> bool:
    """Whether a parameter is one of attached growth, or a learnable scale."""
    return ".grown." in name or name.endswith(".score_scale")


def _attention_shapes(model: PreTrainedModel, record: Any) -> Shapes:
    """The shapes that the parameters of all attention modules have with recorded sizes, by name."""
    names = {parameter: name for name, parameter in model.named_parameters()}
    shapes: Shapes = {}
    own_sizes = recorded_sizes(model, record)
    scales = entries(record.get("scales"), [site for site, _ in own_sizes])
    for (site, dims), scale in zip(own_sizes, scales, strict=True):
        for projection, (rows, columns) in projection_shapes(site, dims):
            if not is_plain(projection):
                # Packed weights never grow.
                shapes |= {names[parameter]: tuple(parameter.shape) for parameter in projection.parameters()}
                continue
            turned = in_rows(projection, projection.weight) is not projection.weight
            shapes[names[projection.weight]] = (columns, rows) if turned else (rows, columns)
            if projection.bias is not None:
                shapes[names[projection.bias]] = (rows,)
        if scale:
            shapes[f"{site.name}.score_scale"] = (scale, 1)
    base = {site.name: dims for site, dims in own_sizes}
    for growth, sizes in recorded_growths(model, record).items():
        for site, dims, scale in sizes:
            named = attached_shapes(site, base[site.name], dims) | ({SCALE: (scale, 1)} if scale else {})
            shapes |= {f"{site.name}.grown.{growth}.{name}": shape for name, shape in named.items()}
    return shapes
