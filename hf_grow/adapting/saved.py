"""What was added to a frozen model in a folder of its own: growth, LoRA, and the recipe of a run."""

import json
import os
from collections.abc import Iterable
from dataclasses import replace
from pathlib import Path
from typing import Any

from accelerate import Accelerator
from huggingface_hub import snapshot_download
from peft import PeftConfig, PeftModel, get_peft_model, set_peft_model_state_dict
from peft.utils import load_peft_weights
from peft.utils.constants import CONFIG_NAME as LORA_CONFIG_FILE
from torch import Tensor
from transformers import PreTrainedModel

from hf_grow.adapting.adapt import adapt
from hf_grow.adapting.config import AdaptConfig
from hf_grow.errors import HfGrowError
from hf_grow.fields import from_dict, to_dict
from hf_grow.files import check_out_folder, clear_errors, replacing
from hf_grow.modeling.growable_model import GrowableModel
from hf_grow.running.batches import Batch
from hf_grow.saving.growth_file import GROWTH_FOLDER, LORA_FOLDER, WEIGHTS_FILE
from hf_grow.saving.growth_on_base import load_growth, save_growth
from hf_grow.surgery.base import Model, has_adapters, has_grown, without_adapters
from hf_grow.surgery.patch import make_growable
from hf_grow.training.former import converted, is_former
from hf_grow.training.learning import freeze_base

CONFIG_FILE = "adapt.json"


def save_adapted(
    model: Model,
    path: str | os.PathLike,
    *,
    config: AdaptConfig | None = None,
    overwrite: bool = False,
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
            # Its own function, as growth has a folder already; "auto" would ask the Hub about the base model.
            PeftModel.save_pretrained(model, str(aside / LORA_FOLDER), save_embedding_layers=False)
        if config is not None:
            (aside / CONFIG_FILE).write_text(json.dumps(to_dict(config), indent=2) + "\n", encoding="utf-8")
    return folder


def load_adapted(base: Any, path: str | os.PathLike, *, revision: str | None = None, token: str | None = None) -> Any:
    """Put what `save_adapted` wrote onto its base model, as `adapt` leaves it: ready for use or for more training.

    It is in a folder, or was pushed to the Hub. A checkpoint of an adapted model that a Trainer wrote will do as well.
    """
    folder = Path(path) if Path(path).is_dir() else _downloaded(path, revision, token)
    parts = adapted_parts(folder)
    if not parts:
        raise HfGrowError(f"{folder} holds neither {GROWTH_FOLDER} nor {LORA_FOLDER}, which save_adapted would write.")
    if not isinstance(base, PreTrainedModel):
        raise HfGrowError(f"load_adapted takes a transformers model, not {type(base).__name__}.")
    lora = _read_lora(parts[LORA_FOLDER]) if LORA_FOLDER in parts else None
    model, training = base, base.training
    if GROWTH_FOLDER in parts:
        load_growth(model, parts[GROWTH_FOLDER])
    elif not isinstance(model, GrowableModel):
        make_growable(model)
    if lora is not None:
        with clear_errors(parts[LORA_FOLDER]):
            model = _with_lora(model, *lora)
    return freeze_base(model).train(training)


def _downloaded(name: str | os.PathLike, revision: str | None, token: str | None) -> Path:
    with clear_errors(name):
        files = [f"{part}/*" for part in (GROWTH_FOLDER, LORA_FOLDER)] + ["adapter_*"]
        return Path(snapshot_download(os.fspath(name), revision=revision, token=token, allow_patterns=files))


def _read_lora(folder: Path) -> tuple[PeftConfig, dict[str, Tensor]]:
    """The config and weights of saved LoRA."""
    if not any(folder.glob("adapter_model.*")):
        raise HfGrowError(f"{folder} is incomplete: there is no adapter_model.safetensors.")
    with clear_errors(folder):
        config = replace(PeftConfig.from_pretrained(str(folder)), inference_mode=False)
        return config, load_peft_weights(str(folder), device="cpu")


def _with_lora(model: Any, config: PeftConfig, saved: dict[str, Tensor]) -> PeftModel:
    """A model with saved LoRA, which 0.1 put onto projections that growth had widened."""
    wrapped = get_peft_model(model, config)
    named = {
        name.replace(".lora_A.", ".lora_A.default.").replace(".lora_B.", ".lora_B.default."): name for name in saved
    }
    present = {name: saved[short] for name, short in named.items()}
    if is_former(wrapped, present):
        weights = converted(wrapped, present)
        wrapped.load_state_dict({name: weight for name, weight in weights.items() if name not in named}, strict=False)
        saved = {named[name]: weight for name, weight in weights.items() if name in named}
    set_peft_model_state_dict(wrapped, saved)
    return wrapped


def adapted_parts(path: str | os.PathLike) -> dict[str, Path]:
    """Where growth and LoRA are in a folder of `save_adapted`, or of what PEFT saved of both; empty for any other."""
    folder = Path(path)
    growth, lora = folder / GROWTH_FOLDER, folder / LORA_FOLDER
    parts = {GROWTH_FOLDER: growth} if (growth / WEIGHTS_FILE).is_file() else {}
    for place in (lora, *([folder] if parts else [])):
        if (place / LORA_CONFIG_FILE).is_file():
            return parts | {LORA_FOLDER: place}
    return parts


def adapt_or_resume(
    model: PreTrainedModel,
    batches: Iterable[Batch],
    config: AdaptConfig,
    folder: str | os.PathLike,
    *,
    resume: bool = False,
    accelerator: Accelerator | None = None,
    progress: bool = False,
) -> Any:
    """As `adapt`, with the start kept in a folder; with `resume` it is taken from there, for a run that goes on."""
    start = Path(folder)
    if resume and start.is_dir():
        with clear_errors(start):
            kept = json.loads((start / CONFIG_FILE).read_text(encoding="utf-8"))
        if not _says(kept, config):
            raise HfGrowError(f"{start} is of a run with another recipe: take it up with the same, or start elsewhere.")
        return load_adapted(model, start)
    model, _ = adapt(model, batches, config, accelerator=accelerator, progress=progress)
    if accelerator is None or accelerator.is_main_process:
        save_adapted(model, start, config=config, overwrite=True)
    if accelerator is not None:
        accelerator.wait_for_everyone()
    return model


def _says(kept: dict[str, Any], config: AdaptConfig) -> bool:
    """Whether a kept recipe is this one; what it lacks is as it is by default, what is unknown makes it another."""
    try:
        return from_dict(AdaptConfig, kept) == config
    except (TypeError, HfGrowError):
        return False
