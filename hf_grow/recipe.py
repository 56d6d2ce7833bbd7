"""Adapting a frozen pretrained model by few new weights: grown query/key columns, LoRA, or both."""

import json
import os
from collections.abc import Iterable
from dataclasses import asdict, dataclass
from math import inf
from pathlib import Path
from typing import Any

from peft import LoraConfig, PeftModel, get_peft_model
from peft.utils.constants import CONFIG_NAME as LORA_CONFIG_FILE
from peft.utils.constants import DUMMY_TARGET_MODULES
from transformers.pytorch_utils import Conv1D

from hf_grow.base import base_parameters, has_adapters, has_grown, new_entries, without_adapters
from hf_grow.collector import place_of
from hf_grow.config import CollectConfig, GrowthConfig, one_of, require, whole
from hf_grow.errors import HfGrowError
from hf_grow.feed import random_numbers
from hf_grow.folders import check_out_folder, clear_errors, replacing
from hf_grow.growth_file import WEIGHTS_FILE, load_growth, save_growth
from hf_grow.insert import check_growth, grow
from hf_grow.modeling.growable_attention import attention_sites, weight_rows
from hf_grow.modeling.growable_model import GrowableModel
from hf_grow.new_weights import NewWeights
from hf_grow.passes import Batch, growable_sites
from hf_grow.patch import make_growable
from hf_grow.report import GrowthReport

METHODS = ("grow", "lora", "grow+lora")
# What transformers calls the heads that finetuning makes anew: PEFT lets them learn beside LoRA too.
HEADS = ("classifier", "score", "qa_outputs")
GROWTH_FOLDER, LORA_FOLDER, CONFIG_FILE = "growth", "lora", "adapt.json"


@dataclass(frozen=True)
class AdaptConfig:
    """How to adapt a model whose weights stay as they are.

    method        new query/key columns ("grow"), LoRA on the query and key projections ("lora"), or both
    budget        parameters that learn, as a number or "1%" of the model's; never more, and as near as can be
    share         of the budget for growth in "grow+lora"
    columns, rank instead of what the budget allows: new columns per head, LoRA's rank
    step_size     of growth; None: line search; 0: new keys are zero and no output changes until training
    lora_alpha    None: twice the rank, so that what LoRA adds is not scaled by what the budget allows
    lora_dropout  none, as new columns have none either
    also_train    names of modules that learn whole; None: the head of a classifier, as it may be new
    collect       how to measure where to grow; its seed is also that of LoRA's first weights
    """

    method: str = "grow+lora"
    budget: int | str = "1%"
    share: float = 0.5
    columns: int | None = None
    rank: int | None = None
    step_size: float | None = None
    lora_alpha: float | None = None
    lora_dropout: float = 0.0
    also_train: tuple[str, ...] | None = None
    collect: CollectConfig | None = None

    def __post_init__(self) -> None:
        one_of("method", self.method, METHODS)
        GrowthConfig(budget=self.budget, step_size=self.step_size)
        for name, used in (("columns", self.grows), ("rank", self.has_lora)):
            if getattr(self, name) is None:
                continue
            whole(name, getattr(self, name), 1)
            if not used:
                raise HfGrowError(f"{name} has no meaning with method='{self.method}': leave it out.")
        for name, least, most in (("share", 0, 1), ("lora_dropout", -1, 1), ("lora_alpha", 0, inf)):
            value = getattr(self, name)
            number = isinstance(value, (int, float)) and not isinstance(value, bool)
            if value is not None and not (number and least < value < most and value >= 0):
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
    def train(self) -> str:
        """What `TrainConfig(train=…)` must be: PEFT alone freezes the base itself."""
        return "new" if self.grows else "all"


def adapt(
    model: Any, batches: Iterable[Batch], config: AdaptConfig, *, accelerator: Any = None, progress: bool = False
) -> tuple[Any, GrowthReport | None]:
    """Give a pretrained model few new weights to learn with and freeze the others; returns it and how it grew.

    It grows on the batches first, in place, then PEFT wraps it. GPT-2 keeps query, key and value in one projection
    (c_attn), so there LoRA changes values too. Train with `GrowthTrainer` and `TrainConfig(train=config.train)`, or
    with any loop and `NewWeights(model).attach(optimizer)`: the widened projections hold old entries too, which only
    these keep as they are. With an `accelerator` every process brings its own batches.
    """
    require(config, AdaptConfig)
    _check_start(model, config)
    if not isinstance(model, GrowableModel):
        make_growable(model)
    if accelerator is not None:
        model.to(accelerator.device)
    columns, rank = choose_amounts(model, config)
    report = None
    if config.grows:
        growth = GrowthConfig(columns=columns, step_size=config.step_size, align=1)
        options = {"accelerator": accelerator, "progress": progress}
        report = grow(model, batches, growth, collect=config.collect, **options)[1]
    heads = _heads(model, config)
    if config.has_lora or heads:
        model = _wrapped(model, config, rank, heads)
    return _frozen(model), report


def choose_amounts(model: Any, config: AdaptConfig) -> tuple[int, int]:
    """The new columns per head and LoRA's rank for a growable model; an error where the budget allows none."""
    _check_start(model, config)
    costs = _Costs.of(model, config)
    given = (config.columns if config.grows else 0), (config.rank if config.has_lora else 0)
    if given[0] is not None and given[1] is not None:
        chosen = given[0], given[1]
    else:
        budget = GrowthConfig(budget=config.budget).budget_for(model.num_parameters())
        chosen = costs.spend(budget, config, *given)
    if config.grows:
        check_growth(model, GrowthConfig(columns=chosen[0], align=1))
    return chosen


def trainable_parameters(model: Any) -> int:
    """How many numbers learn in an adapted model: new entries of projections, and adapters whole."""
    base = {parameter for _, parameter in base_parameters(model)}
    adapters = sum(
        parameter.numel() for parameter in model.parameters() if parameter.requires_grad and parameter not in base
    )
    return adapters + sum(
        int(mask.sum())
        for site in attention_sites(without_adapters(model))
        for projection, name, mask in new_entries(site)
        if getattr(projection, name).requires_grad
    )


def save_adapted(
    model: Any, path: str | os.PathLike, *, config: AdaptConfig | None = None, overwrite: bool = False
) -> Path:
    """Write only what was added to a frozen model: `growth/` as `save_growth` does, `lora/` as PEFT does.

    The folder appears all at once. For one whole model instead: `save_grown(model.merge_and_unload(), path)`.
    """
    folder = check_adapted_folder(path, overwrite)
    grown, wrapped = has_grown(without_adapters(model)), isinstance(model, PeftModel)
    if not wrapped and has_adapters(model):
        raise HfGrowError("The adapters of this model are not in a PeftModel: put them in with get_peft_model.")
    if not grown and not wrapped:
        raise HfGrowError("Nothing was added to this model, so there is nothing to save: adapt it first.")
    with replacing(folder) as aside:
        if grown:
            save_growth(model, aside / GROWTH_FOLDER)
        if wrapped:
            # "auto" would ask the Hub about the base model.
            model.save_pretrained(str(aside / LORA_FOLDER), save_embedding_layers=False)
        if config is not None:
            (aside / CONFIG_FILE).write_text(_as_json(config), encoding="utf-8")
    return folder


def check_adapted_folder(path: str | os.PathLike, overwrite: bool) -> Path:
    """The folder for `save_adapted` to write, as an absolute path."""
    known = (Path(GROWTH_FOLDER, WEIGHTS_FILE), Path(LORA_FOLDER, LORA_CONFIG_FILE))
    if overwrite and any(Path(path, file).is_file() for file in known):
        return Path(path).resolve()
    return check_out_folder(path, overwrite)


def load_adapted(base: Any, path: str | os.PathLike) -> Any:
    """Put what `save_adapted` wrote onto its base model, as `adapt` leaves it: ready for use or for more training."""
    folder = Path(path)
    parts = [part for part in (GROWTH_FOLDER, LORA_FOLDER) if (folder / part).is_dir()]
    if not parts:
        raise HfGrowError(f"{folder} holds neither {GROWTH_FOLDER} nor {LORA_FOLDER}, which save_adapted would write.")
    model, training = base, base.training
    if GROWTH_FOLDER in parts:
        load_growth(model, folder / GROWTH_FOLDER)
    elif not isinstance(model, GrowableModel):
        make_growable(model)
    if LORA_FOLDER in parts:
        with clear_errors(folder / LORA_FOLDER):
            model = PeftModel.from_pretrained(model, str(folder / LORA_FOLDER), is_trainable=True)
    return _frozen(model).train(training)


def adapt_or_resume(
    model: Any,
    batches: Iterable[Batch],
    config: AdaptConfig,
    folder: str | os.PathLike,
    *,
    resume: bool = False,
    accelerator: Any = None,
    progress: bool = False,
) -> Any:
    """As `adapt`, with the start kept in a folder; with `resume` it is taken from there, for a run that goes on."""
    start = Path(folder)
    if resume and start.is_dir():
        with clear_errors(start):
            kept = (start / CONFIG_FILE).read_text(encoding="utf-8")
        if kept != _as_json(config):
            raise HfGrowError(f"{start} is of a run with another recipe: take it up with the same, or start elsewhere.")
        return load_adapted(model, start)
    model, _ = adapt(model, batches, config, accelerator=accelerator, progress=progress)
    if accelerator is None or accelerator.is_main_process:
        save_adapted(model, start, config=config, overwrite=True)
    if accelerator is not None:
        accelerator.wait_for_everyone()
    return model


@dataclass(frozen=True)
class _Costs:
    """Parameters of one new column per head in every layer, of one rank of LoRA, of one more rank per new column, and
    of the modules that learn whole; and for how many columns there is room."""

    column: int
    rank: int
    rank_per_column: int
    heads: int
    room: int

    @classmethod
    def of(cls, model: Any, config: AdaptConfig) -> "_Costs":
        sites = growable_sites(model)
        places = [place_of(site) for site in sites]
        inputs = [min(place.inputs["query"], place.inputs["key"]) for place in places]
        taken = [0 if place.rotary_dim else place.query_key_dim for place in places]
        targets = [(site.attention.dims, *target) for site in sites for target in _targets(site)]
        return cls(
            column=sum(place.cost("columns", place.query_key_dim, place.value_dim) for place in places),
            rank=sum(sum(weight_rows(projection).shape) for _, _, projection, _ in targets),
            rank_per_column=sum(
                dims.heads(role) for dims, _, _, roles in targets for role in roles if role in ("query", "key")
            ),
            heads=sum(
                parameter.numel() for name in _heads(model, config) for parameter in _module(model, name).parameters()
            ),
            room=min(have - used for have, used in zip(inputs, taken, strict=True)),
        )

    def total(self, columns: int, rank: int) -> int:
        """What learns with these amounts."""
        return self.heads + columns * self.column + rank * (self.rank + columns * self.rank_per_column)

    def spend(self, budget: int, config: AdaptConfig, columns: int | None, rank: int | None) -> tuple[int, int]:
        """The amounts that are not given, so that all of what learns comes as near to the budget as can be."""
        left = budget - self.heads
        if columns is not None:
            tried = [columns]
        elif rank is not None:
            tried = [min(self.room, (left - rank * self.rank) // (self.column + rank * self.rank_per_column))]
        else:
            # However large the share of growth, a rank of LoRA must fit beside it.
            most = (left - self.rank) // (self.column + self.rank_per_column)
            share = max(1, min(int(config.share * left) // self.column, most))
            tried = [min(self.room, share), min(self.room, share + 1)]
        found = [(count, self._rank_within(left, count) if rank is None else rank) for count in tried]
        least = int(config.grows), int(config.has_lora)
        fitting = [amounts for amounts in found if amounts[0] >= least[0] and amounts[1] >= least[1]]
        if not fitting:
            needed = self.total(columns or least[0], rank or least[1])
            raise HfGrowError(
                f"A budget of {budget:,} parameters is too small for {config.method}: the least that can learn is "
                f"{needed:,} ({self.column:,} for a column in every layer, {self.rank:,} for a rank of LoRA)."
            )
        return max(fitting, key=lambda amounts: self.total(*amounts))

    def _rank_within(self, left: int, columns: int) -> int:
        return (left - columns * self.column) // (self.rank + columns * self.rank_per_column)


def _check_start(model: Any, config: AdaptConfig) -> None:
    if isinstance(model, PeftModel) or has_adapters(model):
        raise HfGrowError("The model has adapters already: merge them first with model.merge_and_unload().")
    if config.grows and isinstance(model, GrowableModel) and has_grown(model):
        raise HfGrowError(
            "The model has grown already, and all of its growth would learn: start from its base, merge with "
            "method='lora', or train all weights."
        )


def _targets(site: Any) -> Iterable[tuple[str, Any, tuple[str, ...]]]:
    """The names, modules and roles of the projections that make queries or keys."""
    for path, roles in site.layout.inputs.items():
        if {"query", "key"} & set(roles):
            yield f"{site.name}.{path}", site.projection(path), roles


def _heads(model: Any, config: AdaptConfig) -> list[str]:
    """The names of the modules that learn whole."""
    if config.also_train is None:
        return [name for name, _ in model.named_children() if name in HEADS]
    for name in config.also_train:
        _module(model, name)
    return list(config.also_train)


def _module(model: Any, name: str) -> Any:
    try:
        return model.get_submodule(name)
    except AttributeError as error:
        known = ", ".join(child for child, _ in model.named_children())
        raise HfGrowError(f"also_train names {name!r}, which the model does not have; it has {known}.") from error


def _wrapped(model: Any, config: AdaptConfig, rank: int, heads: list[str]) -> PeftModel:
    """The model with LoRA on its query and key projections, and a copy of every head that learns."""
    targets = [target for site in attention_sites(model) for target in _targets(site)]
    lora = LoraConfig(
        r=rank or 1,
        lora_alpha=config.lora_alpha or 2 * (rank or 1),  # type: ignore[arg-type]
        lora_dropout=config.lora_dropout,
        target_modules=[name for name, _, _ in targets] if config.has_lora else DUMMY_TARGET_MODULES,
        fan_in_fan_out=isinstance(targets[0][1], Conv1D),
        modules_to_save=heads or None,
    )
    with random_numbers((config.collect or CollectConfig()).seed):
        return get_peft_model(model, lora).train(model.training)


def _frozen(model: Any) -> Any:
    """Only adapters and the projections that hold new entries learn."""
    for _, parameter in base_parameters(model):
        parameter.requires_grad_(False)
    if has_grown(without_adapters(model)):
        NewWeights(model).detach()
    return model


def _as_json(config: AdaptConfig) -> str:
    return json.dumps(asdict(config), indent=2) + "\n"
