"""Adapting a frozen pretrained model by few new weights: grown columns, LoRA, or both."""

import json
import os
from collections.abc import Collection, Iterable, Iterator, Mapping
from dataclasses import asdict, dataclass
from itertools import count
from pathlib import Path
from typing import Any

from peft import LoraConfig, PeftModel, get_peft_model
from peft.utils.constants import CONFIG_NAME as LORA_CONFIG_FILE
from peft.utils.constants import DUMMY_TARGET_MODULES
from transformers import PreTrainedModel
from transformers.pytorch_utils import Conv1D

from hf_grow.adapt_config import COLUMN_KINDS, WIDENED, AdaptConfig
from hf_grow.base import base_parameters, has_adapters, has_grown, new_entries, without_adapters
from hf_grow.collector import place_of
from hf_grow.config import CollectConfig, GrowthConfig, require
from hf_grow.errors import HfGrowError
from hf_grow.feed import random_numbers
from hf_grow.folders import check_out_folder, clear_errors, replacing
from hf_grow.growth_file import GROWTH_FOLDER, LORA_FOLDER, WEIGHTS_FILE, load_growth, save_growth
from hf_grow.insert import check_growth, grow
from hf_grow.modeling.growable_attention import attention_sites, weight_rows
from hf_grow.modeling.growable_model import GrowableModel
from hf_grow.new_weights import NewWeights
from hf_grow.passes import Batch, growable_sites
from hf_grow.patch import make_growable
from hf_grow.report import GrowthReport

# What transformers calls the heads that finetuning makes anew: PEFT lets them learn beside LoRA too.
HEADS = ("classifier", "score", "qa_outputs")
CONFIG_FILE = "adapt.json"


def adapt(
    model: Any, batches: Iterable[Batch], config: AdaptConfig, *, accelerator: Any = None, progress: bool = False
) -> tuple[Any, GrowthReport | None]:
    """Give a pretrained model few new weights to learn with and freeze the others; returns it and how it grew.

    It grows on the batches first, in place, then PEFT wraps it. GPT-2 keeps query, key and value in one projection
    (c_attn), so there LoRA on one of them changes all.

    Train with `GrowthTrainer` and `TrainConfig(train=config.train)`, or with any loop and
    `NewWeights(model).attach(optimizer)`: the widened projections hold old entries too, which only these keep as they
    are. With an `accelerator` every process brings its own batches.
    """
    require(config, AdaptConfig)
    _check_start(model, config)
    if not isinstance(model, GrowableModel):
        make_growable(model)
    if accelerator is not None:
        model.to(accelerator.device)
    amounts, rank = choose_amounts(model, config)
    report = None
    if config.grows:
        growth = GrowthConfig(**amounts, step_size=config.step_size, align=1)  # type: ignore[arg-type]
        options = {"accelerator": accelerator, "progress": progress}
        report = grow(model, batches, growth, collect=config.collect, **options)[1]
    heads = _heads(model, config)
    if config.has_lora or heads:
        model = _wrapped(model, config, rank, heads)
    return _frozen(model, growth_learns=config.grows), report


def choose_amounts(model: Any, config: AdaptConfig) -> tuple[dict[str, int], int]:
    """The new columns per head, by kind, and LoRA's rank for a growable model; refused where the budget allows none."""
    _check_start(model, config)
    amounts, rank = config.growth, config.rank if config.has_lora else 0
    if amounts is None or rank is None:
        budget = GrowthConfig(budget=config.budget).budget_for(model.num_parameters())
        amounts, rank = _Costs.of(model, config).spend(budget, config, amounts, rank)
    if config.grows:
        check_growth(model, GrowthConfig(**amounts, align=1))  # type: ignore[arg-type]
    return amounts, rank


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

    With a `config` of method="lora" all growth is the frozen model's own and not written. The folder appears all at
    once. For one whole model instead: `save_grown(model.merge_and_unload(), path)`.
    """
    folder = check_out_folder(path, overwrite)
    grown, wrapped = has_grown(without_adapters(model)), isinstance(model, PeftModel)
    grown &= config is None or config.grows
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


def load_adapted(base: Any, path: str | os.PathLike) -> Any:
    """Put what `save_adapted` wrote onto its base model, as `adapt` leaves it: ready for use or for more training."""
    folder, parts = Path(path), adapted_parts(path)
    if not parts:
        raise HfGrowError(f"{folder} holds neither {GROWTH_FOLDER} nor {LORA_FOLDER}, which save_adapted would write.")
    if not isinstance(base, PreTrainedModel):
        raise HfGrowError(f"load_adapted takes a transformers model, not {type(base).__name__}.")
    if LORA_FOLDER in parts and not any((folder / LORA_FOLDER).glob("adapter_model.*")):
        raise HfGrowError(f"{folder / LORA_FOLDER} is incomplete: there is no adapter_model.safetensors.")
    model, training = base, base.training
    if GROWTH_FOLDER in parts:
        load_growth(model, folder / GROWTH_FOLDER)
    elif not isinstance(model, GrowableModel):
        make_growable(model)
    if LORA_FOLDER in parts:
        with clear_errors(folder / LORA_FOLDER):
            model = PeftModel.from_pretrained(model, str(folder / LORA_FOLDER), is_trainable=True)
    return _frozen(model, growth_learns=GROWTH_FOLDER in parts).train(training)


def adapted_parts(path: str | os.PathLike) -> list[str]:
    """What of growth and LoRA there is in a folder of `save_adapted`; nothing in any other."""
    files = {GROWTH_FOLDER: WEIGHTS_FILE, LORA_FOLDER: LORA_CONFIG_FILE}
    return [part for part, file in files.items() if Path(path, part, file).is_file()]


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
    """Parameters of what learns, over all layers.

    column           of a new column in every head, by kind
    rank             of a rank of LoRA
    rank_per_column  of a rank of LoRA on a new column in every head, by kind
    heads            of the modules that learn whole
    room             how many query/key columns there is room for
    """

    column: dict[str, int]
    rank: int
    rank_per_column: dict[str, int]
    heads: int
    room: int

    @classmethod
    def of(cls, model: Any, config: AdaptConfig) -> "_Costs":
        sites = growable_sites(model)
        places = [place_of(site) for site in sites]
        inputs = [min(place.inputs["query"], place.inputs["key"]) for place in places]
        taken = [0 if place.rotary_dim else place.query_key_dim for place in places]
        targets = [(site.attention.dims, *target) for site in sites for target in _targets(site, config.lora_on)]
        return cls(
            column={
                kind: sum(place.cost(kind, place.query_key_dim, place.value_dim) for place in places)
                for kind in COLUMN_KINDS
            },
            rank=sum(sum(weight_rows(projection).shape) for _, _, projection, _ in targets),
            rank_per_column={
                kind: sum(dims.heads(role) for dims, _, _, held in targets for role in held if role in roles)
                for kind, roles in WIDENED.items()
            },
            heads=sum(
                parameter.numel() for name in _heads(model, config) for parameter in _module(model, name).parameters()
            ),
            room=min(have - used for have, used in zip(inputs, taken, strict=True)),
        )

    def total(self, amounts: Mapping[str, int], rank: int) -> int:
        """What learns with these amounts."""
        growth = sum(new * (self.column[kind] + rank * self.rank_per_column[kind]) for kind, new in amounts.items())
        return self.heads + growth + rank * self.rank

    def spend(
        self, budget: int, config: AdaptConfig, amounts: dict[str, int] | None, rank: int | None
    ) -> tuple[dict[str, int], int]:
        """The amounts that are not given, so that all of what learns comes as near to the budget as can be."""
        least = {config.kinds[-1]: 1} if amounts is None else amounts, int(config.has_lora) if rank is None else rank
        if self.total(*least) > budget:
            raise HfGrowError(
                f"A budget of {budget:,} parameters is too small for {config.method}: the least that can learn is "
                f"{self.total(*least):,} of them."
            )
        if amounts is not None:
            return amounts, self._rank_within(budget, amounts)
        fitting = list(self._fitting(budget, config.kinds, least[1])) or [least[0]]
        if rank is not None:
            return fitting[-1], rank
        # As many columns as their share pays for, or one more, and LoRA for the rest.
        paid = config.share * (budget - self.heads)
        share = sum(self.total(amounts, 0) - self.heads <= paid for amounts in fitting)
        tried = [(amounts, self._rank_within(budget, amounts)) for amounts in fitting[max(share - 1, 0) : share + 1]]
        return max(tried, key=lambda found: self.total(*found))

    def _fitting(self, budget: int, kinds: tuple[str, ...], rank: int) -> Iterator[dict[str, int]]:
        """One column, two and so on, of the kinds in turn, as long as there is room and budget beside a rank."""
        for number in count(1):
            # The last kind first: of both, values.
            shares = {kind: (number + place) // len(kinds) for place, kind in enumerate(kinds)}
            if self.total(shares, rank) > budget or shares.get("columns", 0) > self.room:
                return
            yield {kind: share for kind, share in shares.items() if share}

    def _rank_within(self, budget: int, amounts: Mapping[str, int]) -> int:
        return (budget - self.total(amounts, 0)) // (self.total(amounts, 1) - self.total(amounts, 0))


def _check_start(model: Any, config: AdaptConfig) -> None:
    if isinstance(model, PeftModel) or has_adapters(model):
        raise HfGrowError("The model has adapters already: merge them first with model.merge_and_unload().")
    if config.grows and isinstance(model, GrowableModel) and has_grown(model):
        raise HfGrowError(
            "The model has grown already, and all of its growth would learn: start from its base, use method='lora', "
            "or train all weights."
        )


def _targets(site: Any, wanted: Collection[str]) -> Iterator[tuple[str, Any, tuple[str, ...]]]:
    """The names, modules and roles of the projections that hold a wanted role."""
    for path, roles in (*site.layout.inputs.items(), (site.layout.output, ("output",))):
        if set(wanted) & set(roles):
            root = site.name.rpartition(".")[0] if path.startswith(".") else site.name
            yield f"{root}.{path.removeprefix('.')}", site.projection(path), roles


def _heads(model: Any, config: AdaptConfig) -> list[str]:
    """The names of the modules that learn whole, which the model has."""
    if config.also_train is None:
        return [name for name, _ in model.named_children() if name in HEADS]
    for name in config.also_train:
        _module(model, name)
    return list(config.also_train)


def _module(model: Any, name: str) -> Any:
    found = dict(model.named_modules()).get(name) if name else None
    if found is None:
        known = ", ".join(child for child, _ in model.named_children())
        raise HfGrowError(f"also_train names {name!r}, which the model does not have; it has {known}.")
    return found


def _wrapped(model: Any, config: AdaptConfig, rank: int, heads: list[str]) -> PeftModel:
    """The model with LoRA on its projections, and a copy of every head that learns."""
    targets = [target for site in attention_sites(model) for target in _targets(site, config.lora_on)]
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


def _frozen(model: Any, growth_learns: bool) -> Any:
    """Only adapters learn, and the projections that hold new entries if these do."""
    for _, parameter in base_parameters(model):
        parameter.requires_grad_(False)
        parameter.grad = None
    if growth_learns:
        NewWeights(model).detach()
    return model


def _as_json(config: AdaptConfig) -> str:
    return json.dumps(asdict(config), indent=2) + "\n"
