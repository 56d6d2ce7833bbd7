"""The whole state of a training run in a folder, so that a run that was killed goes on as if it had not been.

A checkpoint appears all at once, with the model as `save_pretrained` writes it (for a model with adapters: the weights
that learn), the optimizer, the learning rate's schedule and what the run remembers.
"""

import json
import shutil
from collections.abc import Iterator, Mapping
from contextlib import contextmanager
from dataclasses import dataclass, field, replace
from pathlib import Path
from typing import Any

import torch
from safetensors.torch import load_file, save_file
from torch import nn
from transformers import PreTrainedModel, PreTrainedTokenizerBase
from transformers.utils import logging

from hf_grow.errors import HfGrowError
from hf_grow.fields import completed, to_dict
from hf_grow.files import clear_errors, replacing
from hf_grow.growth.config import GrowthConfig
from hf_grow.measuring.config import CollectConfig
from hf_grow.modeling.growable_model import GROWTH_FILE, GrowableModel, read_history, resize, take_history
from hf_grow.saving.checkpoint import weight_files
from hf_grow.surgery.base import base_parameters, has_adapters, without_adapters
from hf_grow.surgery.patch import is_widenable
from hf_grow.training.config import TrainConfig
from hf_grow.training.former import converted, converted_optimizer, former_mark, former_sizes, is_former
from hf_grow.training.schedule import GrowthSchedule

STATE_FILE, OPTIMIZER_FILE, LEARNING_FILE = "trainer_state.json", "optimizer.pt", "learning.safetensors"
PREFIX = "checkpoint-"
# The settings of a run that are configs.
CONFIGS = {"train": TrainConfig, "growth": GrowthConfig, "schedule": GrowthSchedule, "collect": CollectConfig}
FORMAT = 1


@dataclass
class RunState:
    """What a run remembers beside weights and optimizer.

    settings   those of the run, which must be the same when it is taken up again
    base       a mark of the weights it started from
    recent     losses that are still to be logged
    history    losses, rates and evaluations, a dict for each time
    growth     when it grew and what it watches to decide
    reports    of the growth events
    attached   with a frozen base, whose weights are not written: the sizes and histories of the growth beside it
    """

    settings: dict[str, Any]
    base: str | None
    step: int = 0
    recent: list[float] = field(default_factory=list)
    history: list[dict[str, Any]] = field(default_factory=list)
    growth: dict[str, Any] = field(default_factory=dict)
    reports: list[dict[str, Any]] = field(default_factory=list)
    attached: dict[str, Any] | None = None


def checkpoints(folder: Path) -> list[Path]:
    """The checkpoints of a run, oldest first."""
    numbered = [place for place in folder.glob(f"{PREFIX}*") if place.is_dir() and place.name[len(PREFIX) :].isdigit()]
    return sorted(numbered, key=lambda place: int(place.name[len(PREFIX) :]))


def save_run(
    folder: Path,
    model: PreTrainedModel,
    state: RunState,
    training: Mapping[str, Any],
    *,
    tokenizer: PreTrainedTokenizerBase | None = None,
    keep: int = 2,
) -> Path:
    """Write a checkpoint of the present step and drop all but the newest ones."""
    place = folder / f"{PREFIX}{state.step}"
    inner = without_adapters(model)
    state.attached = None
    if not _is_whole(model) and inner.active_growth is not None:
        state.attached = {"sizes": inner.config.hf_grow, "histories": inner.config.growths}
    with replacing(place) as aside, quietly():
        if _is_whole(model):
            model.save_pretrained(aside)
        else:
            save_file(_learning(model), aside / LEARNING_FILE)
        if tokenizer is not None:
            tokenizer.save_pretrained(aside)
        torch.save(dict(training), aside / OPTIMIZER_FILE)
        content = json.dumps({"format": FORMAT, **to_dict(state)}, indent=1)
        (aside / STATE_FILE).write_text(content + "\n", encoding="utf-8")
    _drop_old(folder, keep)
    return place


def _is_whole(model: PreTrainedModel) -> bool:
    """Whether a checkpoint holds all of the model: not beside a base that is frozen or quantised, nor adapters."""
    alone = isinstance(model, GrowableModel) and not has_adapters(model)  # type: ignore[arg-type]
    return alone and is_widenable(model) and _base_learns(model)


def _base_learns(model: nn.Module) -> bool:
    return any(parameter.requires_grad for _, parameter in base_parameters(model))


@contextmanager
def quietly() -> Iterator[None]:
    """No progress bars of transformers inside: the run has its own."""
    shown = logging.is_progress_bar_enabled()
    logging.disable_progress_bar()
    try:
        yield
    finally:
        if shown:
            logging.enable_progress_bar()


def _drop_old(folder: Path, keep: int) -> None:
    for place in checkpoints(folder)[:-keep]:
        # The name goes first: half a checkpoint must not look like one.
        doomed = place.with_name(f".{place.name}.removed")
        place.rename(doomed)
        shutil.rmtree(doomed, ignore_errors=True)


def clear_remains(folder: Path, keep: int) -> None:
    """Remove what a killed run left half written or had still to remove."""
    for place in folder.glob(f".{PREFIX}*"):
        shutil.rmtree(place, ignore_errors=True)
    _drop_old(folder, keep)


def _learning(model: nn.Module) -> dict[str, torch.Tensor]:
    return {name: value.detach().contiguous() for name, value in model.named_parameters() if value.requires_grad}


def load_run(
    place: Path, model: PreTrainedModel, expected: RunState, free: tuple[str, ...]
) -> tuple[RunState, dict[str, Any]]:
    """What a checkpoint holds, checked against the run that is about to take it up; the model gets its weights.

    `expected` has the settings and the base of that run, of which `free` ones of training may differ. The model changes
    last.
    """
    state, training = _read(place)
    beside_growth = without_adapters(model).active_growth is not None
    if beside_growth and state.attached is None and (place / LEARNING_FILE).exists():
        sizes = {**expected.settings["model"], "sizes": former_sizes(model)}
        expected = replace(expected, base=former_mark(model), settings={**expected.settings, "model": sizes})
    if state.base != expected.base:
        raise HfGrowError(f"{place} is of another model: its run started from other weights than those given.")
    _check_settings(place, state.settings, expected.settings, free)
    if (place / LEARNING_FILE).exists():
        training = _load_learning(place, model, state.attached, training)
    else:
        _load_grown(place, model)
    return state, training


def _read(place: Path) -> tuple[RunState, dict[str, Any]]:
    try:
        content = json.loads((place / STATE_FILE).read_text(encoding="utf-8"))
        number = content.pop("format")
        state = RunState(**content)
        training = torch.load(place / OPTIMIZER_FILE, map_location="cpu", weights_only=True)
    except Exception as error:
        raise HfGrowError(
            f"{place} is not a whole checkpoint of a run ({type(error).__name__}): remove it to use an older one."
        ) from error
    if number != FORMAT:
        raise HfGrowError(f"{place} has format {number}, this hf-grow reads {FORMAT}: use the version that wrote it.")
    return state, training


def _check_settings(place: Path, saved: dict[str, Any], wanted: dict[str, Any], free: tuple[str, ...]) -> None:
    plain = json.loads(json.dumps(wanted))
    for part in plain:
        before = saved.get(part)
        if not isinstance(plain[part], dict) or not isinstance(before, dict):
            different = [part] if before != plain[part] else []
        else:
            before = completed(CONFIGS[part], before) if part in CONFIGS else before
            names = (plain[part].keys() | before.keys()) - set(free if part == "train" else ())
            different = sorted(name for name in names if plain[part].get(name) != before.get(name))
        if different:
            raise HfGrowError(
                f"{place} is of a run with other settings ({part}: {', '.join(different)}): take it up with the same, "
                "or start in another folder."
            )


def _load_grown(place: Path, model: PreTrainedModel) -> None:
    """The sizes and weights of a checkpoint, into a model of the same kind."""
    with clear_errors(place):
        config = json.loads((place / "config.json").read_text(encoding="utf-8"))
        weights: dict[str, torch.Tensor] = {}
        for file in weight_files(place):
            weights |= load_file(file)
        history = read_history(place)
    if config.get("model_type") != model.config.model_type:
        raise HfGrowError(f"{place} holds a {config.get('model_type')} model, not a {model.config.model_type} one.")
    wanted = set(model.state_dict()) - set(model.all_tied_weights_keys)
    missing = sorted(wanted - weights.keys()) + ([GROWTH_FILE] if history is None else [])
    if missing:
        raise HfGrowError(f"{place} is not a whole checkpoint of a run: {missing[0]} is missing.")
    with clear_errors(place):
        resize(model, config["hf_grow"])
        model.load_state_dict(weights, strict=False)
    model.tie_weights()
    take_history(model.config, history or {})


def _load_learning(
    place: Path, model: Any, attached: dict[str, Any] | None, training: dict[str, Any]
) -> dict[str, Any]:
    """What learnt beside a frozen base, which is known to be the same; returns the states of what trains it."""
    inner = without_adapters(model)
    with clear_errors(place):
        weights = load_file(place / LEARNING_FILE)
        before = inner.config.hf_grow
        if attached is not None:
            resize(inner, attached["sizes"])
    if attached is None and inner.active_growth is not None and is_former(model, weights):
        with clear_errors(place):
            training = {**training, "optimizer": converted_optimizer(model, training["optimizer"], weights)}
            weights = converted(model, weights)
    present = {name: value.shape for name, value in model.named_parameters()}
    if [name for name, value in weights.items() if present.get(name) != value.shape]:
        resize(inner, before)
        raise HfGrowError(f"{place} does not fit: other weights learn in this model than in that of the checkpoint.")
    model.load_state_dict(weights, strict=False)
    if attached is not None:
        inner.config.growths = attached["histories"]
    return training
