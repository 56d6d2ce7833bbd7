"""Saving, checking, loading and pushing grown models. A save is whole or absent, never half."""

import json
import os
import re
import tempfile
from collections.abc import Callable
from pathlib import Path
from typing import Any

import torch
from huggingface_hub import HfApi
from huggingface_hub.errors import HTTPError
from peft.utils.constants import CONFIG_NAME as LORA_CONFIG_FILE
from safetensors import safe_open
from transformers import AutoConfig, PreTrainedModel, PreTrainedTokenizerBase

from hf_grow.errors import HfGrowError
from hf_grow.files import check_out_folder, clear_errors, first_line, replacing
from hf_grow.modeling.growable_model import hub_arguments, read_history, take_history
from hf_grow.saving.growth_file import GROWTH_FOLDER, LORA_FOLDER, is_growth_folder, read_growth
from hf_grow.saving.model_card import write_model_card
from hf_grow.surgery.base import has_adapters, without_adapters
from hf_grow.surgery.families import FAMILIES, family_of
from hf_grow.surgery.forms import merged_copy
from hf_grow.surgery.patch import require_growable


def save_grown(
    model: PreTrainedModel,
    path: str | os.PathLike,
    *,
    tokenizer: PreTrainedTokenizerBase | None = None,
    overwrite: bool = False,
    max_shard_size: int | str = "5GB",
    extras: Callable[[Path], None] | None = None,
) -> Path:
    """Write a grown model, its code, history and card (and tokenizer) to a folder that appears all at once.

    Attached growth that is active is merged into what is written; the model itself stays as it is.
    `extras` may write more files into that folder before it gets its name.
    """
    _require_growable(model)
    folder = check_out_folder(path, overwrite)
    whole = model if model.active_growth is None else merged_copy(model)
    with replacing(folder) as aside:
        whole.save_pretrained(aside, max_shard_size=max_shard_size)
        if tokenizer is not None:
            tokenizer.save_pretrained(aside)
        write_model_card(whole, aside)
        if extras is not None:
            extras(aside)
    return folder


def load_grown(path: str | os.PathLike, **kwargs: Any) -> Any:
    """Load a grown model with the task head it was saved with; `kwargs` go to `from_pretrained`."""
    with clear_errors(path):
        if is_growth_folder(Path(path)):
            raise HfGrowError(f"{path} holds growth alone: put it onto its base model with hf_grow.load_growth.")
        growable_class = _saved_class(path, **kwargs)
        model, info = growable_class.from_pretrained(path, output_loading_info=True, **kwargs)
    check_loading(path, info, model.config.num_hidden_layers)
    return model


def check_loading(path: str | os.PathLike, info: dict, n_layers: int) -> None:
    """Refuse a model that got random weights, or whose files hold layers that the config does not know.

    Other weights without a use are harmless: old checkpoints hold masks, and those of another task a head.
    """
    absent = sorted(str(key) for key in (*info["missing_keys"], *info["mismatched_keys"]))
    if absent:
        raise HfGrowError(f"{path} is incomplete: {len(absent)} weights are missing, among them {absent[0]}.")
    numbered = {key: re.search(r"\.(\d+)\.", key) for key in info["unexpected_keys"]}
    extra = sorted(key for key, number in numbered.items() if number and int(number[1]) >= n_layers)
    if extra:
        raise HfGrowError(f"{path} has {len(extra)} weights that its config knows nothing of, among them {extra[0]}.")


def inspect_checkpoint(path: str | os.PathLike) -> dict:
    """The growth summary of a saved folder, after checking that its weights are all there and of the right shape.

    Of a folder written by `save_growth` or `save_adapted` it counts the new columns and heads only, and says so in
    `growth_only`.
    """
    folder = Path(path)
    if not folder.is_dir():
        raise HfGrowError(f"{folder} is not a folder.")
    if is_growth_folder(folder):
        return read_growth(folder).summary()
    if is_growth_folder(folder / GROWTH_FOLDER):
        # As save_adapted, or as PEFT lays it out.
        patterns = (LORA_FOLDER, LORA_CONFIG_FILE, f"*/{LORA_CONFIG_FILE}")
        lora = any(any(folder.glob(pattern)) for pattern in patterns)
        return read_growth(folder / GROWTH_FOLDER).summary() | {"lora": lora}
    if (folder / LORA_FOLDER).is_dir():
        raise HfGrowError(f"{folder} holds LoRA alone, which is PEFT's: look at {folder / LORA_FOLDER}.")
    with clear_errors(path):
        growable_class: Any = _saved_class(folder)
        config = AutoConfig.from_pretrained(folder, trust_remote_code=False)
        with torch.device("meta"):
            model = growable_class(config)
        take_history(model.config, read_history(folder) or model.config.growth_history)
        _check_weights(folder, model)
    return model.growth_summary()


def push_grown(
    model: PreTrainedModel,
    repo_id: str,
    *,
    tokenizer: PreTrainedTokenizerBase | None = None,
    private: bool | None = None,
    token: str | None = None,
    revision: str | None = None,
    commit_message: str = "Upload grown model",
    create_pr: bool = False,
) -> str:
    """Upload a grown model, or a folder of `save_grown`, `save_growth` or `save_adapted`, in one commit.

    Returns its address.
    """
    if isinstance(model, (str, os.PathLike)):
        inspect_checkpoint(model)
        return _upload(Path(model), repo_id, private, token, revision, commit_message, create_pr)
    _require_growable(model)
    with tempfile.TemporaryDirectory() as aside:
        folder = save_grown(model, Path(aside) / "model", tokenizer=tokenizer)
        return _upload(folder, repo_id, private, token, revision, commit_message, create_pr)


def _upload(
    folder: Path,
    repo_id: str,
    private: bool | None,
    token: str | None,
    revision: str | None,
    message: str,
    create_pr: bool,
) -> str:
    api = HfApi(token=token)
    try:
        repo = api.create_repo(repo_id, private=private, exist_ok=True)
        if revision is not None:
            api.create_branch(repo.repo_id, branch=revision, exist_ok=True)
        commit = api.upload_folder(
            repo_id=repo.repo_id,
            folder_path=folder,
            revision=revision,
            commit_message=message,
            create_pr=create_pr,
        )
    except (HTTPError, OSError, RuntimeError, ValueError) as error:
        raise HfGrowError(f"{folder} was not pushed to {repo_id}: {first_line(error)}") from error
    return commit.pr_url or commit.commit_url


def _require_growable(model: PreTrainedModel) -> None:
    require_growable(without_adapters(model))
    if has_adapters(model):
        raise HfGrowError(
            f"{type(model).__name__} has adapters, which would be lost: merge and unload them first, or save them with "
            "PEFT's own save_pretrained and the growth with save_growth."
        )


def _saved_class(path: str | os.PathLike, **kwargs: Any) -> Any:
    config = AutoConfig.from_pretrained(path, trust_remote_code=False, **hub_arguments(kwargs))
    if config.model_type in FAMILIES:
        raise HfGrowError(
            f"{path} is a stock {config.model_type} checkpoint: load it with transformers, then call make_growable."
        )
    family = family_of(config.model_type)
    if config.hf_grow is None:
        raise HfGrowError(f"The config.json of {path} has lost its record of sizes, 'hf_grow'.")
    architecture = (config.architectures or [None])[0]
    for cls in family.model_classes.values():
        if cls.__name__ == architecture:
            return cls
    raise HfGrowError(f"{path} was saved as {architecture!r}, which is no growable class of {config.model_type}.")


def weight_files(folder: Path) -> list[Path]:
    """The files that hold a saved model's weights."""
    index = folder / "model.safetensors.index.json"
    if not index.exists():
        return sorted(folder.glob("*.safetensors"))
    return sorted({folder / name for name in json.loads(index.read_text(encoding="utf-8"))["weight_map"].values()})


def _check_weights(folder: Path, model: PreTrainedModel) -> None:
    if getattr(model.config, "quantization_config", None) is not None:
        # Packed weights have names and shapes of their own.
        return
    wanted = model.state_dict()
    shapes: dict[str, tuple[int, ...]] = {}
    for file in weight_files(folder):
        with safe_open(file, framework="pt") as tensors:
            shapes |= {name: tuple(tensors.get_slice(name).get_shape()) for name in tensors.keys()}  # noqa: SIM118
    extra = {"missing_keys": (), "mismatched_keys": (), "unexpected_keys": shapes.keys() - wanted.keys()}
    check_loading(folder, extra, model.config.num_hidden_layers)
    for name, tensor in wanted.items():
        if name in model.all_tied_weights_keys:
            continue
        if shapes.get(name) != tuple(tensor.shape):
            there = f"shape {shapes[name]}" if name in shapes else "no such weight"
            raise HfGrowError(f"{folder} is damaged: {name} should have shape {tuple(tensor.shape)}; found {there}.")
