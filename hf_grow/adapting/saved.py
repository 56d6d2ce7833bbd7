"""What was added to a frozen model in a folder of its own: growth, LoRA, and the recipe of a run."""

import json
import os
from collections.abc import Iterable
from dataclasses import dataclass, replace
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
from hf_grow.training.learning import freeze_base, freeze_growth

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
    if isinstance(model, PeftModel) and len(model.peft_config) > 1:
        raise HfGrowError(
            f"The model has several adapters ({', '.join(model.peft_config)}): delete all but the one to be saved."
        )
    with replacing(folder) as aside:
        if grown:
            save_growth(model, aside / GROWTH_FOLDER)
        if isinstance(model, PeftModel):
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
    growth, training = parts.get(GROWTH_FOLDER), base.training
    if LORA_FOLDER in parts:
        place = parts[LORA_FOLDER]
        name = "default" if place in (folder, folder / LORA_FOLDER) else place.name
        model = _with_lora(base, _SavedLora.read(place, name), growth)
    else:
        model = load_growth(base, growth)  # type: ignore[arg-type]
    return (freeze_growth(model) if growth is None else freeze_base(model)).train(training)


def _downloaded(name: str | os.PathLike, revision: str | None, token: str | None) -> Path:
    with clear_errors(name):
        files = [f"{part}/*" for part in (GROWTH_FOLDER, LORA_FOLDER)] + ["adapter_*"]
        return Path(snapshot_download(os.fspath(name), revision=revision, token=token, allow_patterns=files))


@dataclass(frozen=True)
class _SavedLora:
    """One adapter of PEFT as read from its folder."""

    folder: Path
    name: str
    config: PeftConfig
    weights: dict[str, Tensor]

    @classmethod
    def read(cls, folder: Path, name: str) -> "_SavedLora":
        if not any(folder.glob("adapter_model.*")):
            raise HfGrowError(f"{folder} is incomplete: there is no adapter_model.safetensors.")
        with clear_errors(folder):
            config = replace(PeftConfig.from_pretrained(str(folder)), inference_mode=False)
            return cls(folder, name, config, load_peft_weights(str(folder), device="cpu"))

    def parameters(self) -> dict[str, str]:
        """The names of the weights by those of the parameters that hold them."""
        sides = {f".{side}.": f".{side}.{self.name}." for side in ("lora_A", "lora_B")}
        names = {}
        for name in self.weights:
            parameter = name
            for short, full in sides.items():
                parameter = parameter.replace(short, full)
            names[parameter] = name
        return names


def _with_lora(base: Any, lora: _SavedLora, growth: Path | None) -> PeftModel:
    """A model with saved LoRA and growth; where that cannot be, the base computes what it did."""
    learning = {parameter: parameter.requires_grad for parameter in base.parameters()}
    with clear_errors(lora.folder):
        wrapped: Any = get_peft_model(base, lora.config, lora.name)
        try:
            _fill(wrapped, lora, growth)
        except BaseException:
            if not lora.config.is_prompt_learning:
                wrapped.unload()
            for parameter, learns in learning.items():
                parameter.requires_grad_(learns)
            raise
    return wrapped


def _fill(wrapped: PeftModel, lora: _SavedLora, growth: Path | None) -> None:
    """Put saved LoRA and growth into a model, of which 0.1 put LoRA onto projections that growth had widened."""
    if not isinstance(without_adapters(wrapped), GrowableModel):
        make_growable(wrapped)
    names = lora.parameters()
    weights = {parameter: lora.weights[name] for parameter, name in names.items()}
    if growth is None or not is_former(wrapped, weights):
        set_peft_model_state_dict(wrapped, lora.weights, lora.name)
        if growth is not None:
            load_growth(wrapped, growth)
        return
    load_growth(wrapped, growth)
    now = converted(wrapped, weights)
    wrapped.load_state_dict({name: weight for name, weight in now.items() if name not in names}, strict=False)
    set_peft_model_state_dict(wrapped, {names[name]: now[name] for name in names}, lora.name)


def adapted_parts(path: str | os.PathLike) -> dict[str, Path]:
    """Where growth and LoRA are in a folder of `save_adapted`, or of what PEFT saved of both; empty for any other."""
    folder = Path(path)
    growth = folder / GROWTH_FOLDER
    parts = {GROWTH_FOLDER: growth} if (growth / WEIGHTS_FILE).is_file() else {}
    # PEFT keeps an adapter of another name than "default" in a folder of that name.
    roots = (folder / LORA_FOLDER, folder) if parts else (folder / LORA_FOLDER,)
    files = (file for root in roots for name in ("", "*/") for file in sorted(root.glob(f"{name}{LORA_CONFIG_FILE}")))
    places = list(dict.fromkeys(file.parent for file in files))
    if len(places) > 1:
        names = ", ".join(place.name for place in places)
        raise HfGrowError(f"{folder} holds several adapters ({names}): load them with PEFT, growth with load_growth.")
    return parts | ({LORA_FOLDER: places[0]} if places else {})


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
