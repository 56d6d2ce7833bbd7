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
from hf_grow.modeling.growable_attention import in_rows
from hf_grow.modeling.growable_model import projection_shapes, read_history, recorded_sizes, resize
from hf_grow.surgery.optimizer_state import State, swap_parameters

Shapes = dict[str, tuple[int, ...]]


class SizesFromCheckpoint:
    """A pre-hook for `load_state_dict` of a growable model: finds the sizes of what comes in a run's checkpoints.

    It holds no more than paths, as it is copied and pickled with the model. `replaced` are the parameters that had to
    give way, each with the one that took its place; whoever has them in an optimizer must exchange them.
    """

    def __init__(self, *folders: str | Path | None) -> None:
        self.folders = [Path(folder).resolve() for folder in folders if folder]
        self.replaced: list[tuple[nn.Parameter, nn.Parameter]] = []

    def __call__(self, model: PreTrainedModel, state_dict: dict[str, Tensor], prefix: str, *_: Any) -> None:
        """Resize the model where the incoming weights are of other sizes than its own."""
        present = {name: parameter for name, parameter in model.named_parameters() if prefix + name in state_dict}
        incoming = {name: tuple(state_dict[prefix + name].shape) for name in present}
        other = {name for name, parameter in present.items() if tuple(parameter.shape) != incoming[name]}
        own_sizes = _attention_shapes(model, model.config.hf_grow)
        if not other or not other <= own_sizes.keys():
            # Nothing to do, or nothing that growth could explain.
            return
        record, folder = self._find(model, incoming)
        resize(model, record)
        model.config.growth_history = read_history(folder) or model.config.growth_history
        now = dict(model.named_parameters())
        self.replaced += [(present[name], now[name]) for name in present if present[name] is not now[name]]

    def _find(self, model: PreTrainedModel, incoming: Shapes) -> tuple[dict, Path]:
        for folder in self._candidates():
            try:
                record = json.loads((folder / "config.json").read_text(encoding="utf-8"))["hf_grow"]
                shapes = _attention_shapes(model, record)
            except (OSError, ValueError, KeyError, TypeError):
                continue
            if all(incoming.get(name, shape) == shape for name, shape in shapes.items()):
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
    def watch(cls, model: PreTrainedModel, *folders: str | Path | None) -> "WatchedModel":
        """Watch a model from now on, for checkpoints of these folders."""
        sizes = SizesFromCheckpoint(*folders)
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


def _attention_shapes(model: PreTrainedModel, record: Any) -> Shapes:
    """The shapes that the parameters of all attention projections have with recorded sizes, by name."""
    names = {parameter: name for name, parameter in model.named_parameters()}
    shapes: Shapes = {}
    for site, dims in recorded_sizes(model, record):
        for projection, (rows, columns) in projection_shapes(site, dims):
            turned = in_rows(projection, projection.weight) is not projection.weight
            shapes[names[projection.weight]] = (columns, rows) if turned else (rows, columns)
            if projection.bias is not None:
                shapes[names[projection.bias]] = (rows,)
    return shapes
