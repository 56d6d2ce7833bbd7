"""Saving, checking, loading and pushing grown models. A save is whole or absent, never half."""

import os
import shutil
import tempfile
import uuid
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any

import torch
from huggingface_hub import HfApi
from huggingface_hub.errors import HTTPError
from safetensors import SafetensorError, safe_open
from transformers import AutoConfig

from hf_grow.errors import HfGrowError
from hf_grow.families import FAMILIES, family_of
from hf_grow.model_card import write_model_card
from hf_grow.modeling.growable_model import GrowableModel, read_history


def save_grown(
    model: Any,
    path: str | os.PathLike,
    *,
    tokenizer: Any = None,
    overwrite: bool = False,
    max_shard_size: int | str = "5GB",
) -> Path:
    """Write a grown model, its code, history and card (and tokenizer) to a folder that appears all at once."""
    _require_growable(model)
    folder = Path(path)
    check_out_folder(folder, overwrite)
    folder.parent.mkdir(parents=True, exist_ok=True)
    with _replacing(folder) as aside:
        model.save_pretrained(aside, max_shard_size=max_shard_size)
        if tokenizer is not None:
            tokenizer.save_pretrained(aside)
        write_model_card(model, aside)
    return folder


def check_out_folder(folder: Path, overwrite: bool) -> None:
    """A folder that may be written to: absent, empty, or given up by the user."""
    if folder.exists() and not folder.is_dir():
        raise HfGrowError(f"{folder} is a file; name a folder.")
    if folder.is_dir() and any(folder.iterdir()) and not overwrite:
        raise HfGrowError(f"{folder} exists and is not empty; choose another folder or ask to overwrite it.")


def load_grown(path: str | os.PathLike, **kwargs: Any) -> Any:
    """Load a grown model with the task head it was saved with; `kwargs` go to `from_pretrained`."""
    with clear_errors(path):
        growable_class = _saved_class(path, **kwargs)
        model, info = growable_class.from_pretrained(path, output_loading_info=True, **kwargs)
    absent = sorted(info["missing_keys"]) + sorted(str(key) for key in info["mismatched_keys"])
    if absent:
        raise HfGrowError(f"{path} is incomplete: {len(absent)} weights are missing, among them {absent[0]}.")
    return model


def inspect_checkpoint(path: str | os.PathLike) -> dict:
    """The growth summary of a saved folder, after checking that its weights are all there and of the right shape."""
    folder = Path(path)
    if not folder.is_dir():
        raise HfGrowError(f"{folder} is not a folder.")
    with clear_errors(path):
        growable_class: Any = _saved_class(folder)
        config = AutoConfig.from_pretrained(folder)
        with torch.device("meta"):
            model = growable_class(config)
        config.growth_history = read_history(folder) or config.growth_history
        _check_weights(folder, model)
    return model.growth_summary()


def push_grown(
    model: Any,
    repo_id: str,
    *,
    tokenizer: Any = None,
    private: bool | None = None,
    token: str | None = None,
    revision: str | None = None,
    commit_message: str = "Upload grown model",
    create_pr: bool = False,
) -> str:
    """Upload a grown model, or a folder written by `save_grown`, in one commit; returns its address."""
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
        raise HfGrowError(f"{folder} was not pushed to {repo_id}: {_first_line(error)}") from error
    return commit.pr_url or commit.commit_url


def _require_growable(model: Any) -> None:
    if not isinstance(model, GrowableModel):
        raise HfGrowError(f"{type(model).__name__} is not growable: call hf_grow.make_growable(model) first.")


def _saved_class(path: str | os.PathLike, **kwargs: Any) -> Any:
    names = ("cache_dir", "force_download", "local_files_only", "token", "revision", "subfolder")
    config = AutoConfig.from_pretrained(path, **{name: kwargs[name] for name in names if name in kwargs})
    if config.model_type in FAMILIES:
        raise HfGrowError(
            f"{path} is a stock {config.model_type} checkpoint: load it with transformers, then call make_growable."
        )
    architecture = (config.architectures or [None])[0]
    for cls in family_of(config.model_type).model_classes.values():
        if cls.__name__ == architecture:
            return cls
    raise HfGrowError(f"{path} was saved as {architecture!r}, which is no growable class of {config.model_type}.")


def _check_weights(folder: Path, model: Any) -> None:
    files = sorted(folder.glob("*.safetensors"))
    shapes: dict[str, tuple[int, ...]] = {}
    for file in files:
        with safe_open(file, framework="pt") as tensors:
            shapes |= {name: tuple(tensors.get_slice(name).get_shape()) for name in tensors.keys()}  # noqa: SIM118
    for name, tensor in model.state_dict().items():
        if name in model.all_tied_weights_keys:
            continue
        if shapes.get(name) != tuple(tensor.shape):
            found = f"shape {shapes[name]}" if name in shapes else "no such weight"
            raise HfGrowError(f"{folder} is damaged: {name} should have shape {tuple(tensor.shape)}; found {found}.")


@contextmanager
def clear_errors(path: str | os.PathLike) -> Iterator[None]:
    """What reading a damaged folder may raise, as one sentence."""
    try:
        yield
    except HfGrowError:
        raise
    except (OSError, ValueError, KeyError, TypeError, RuntimeError, SafetensorError) as error:
        raise HfGrowError(f"{path} cannot be loaded: {_first_line(error)}") from error


def _first_line(error: Exception) -> str:
    return next((line.strip() for line in str(error).splitlines() if line.strip()), type(error).__name__)


@contextmanager
def _replacing(folder: Path) -> Iterator[Path]:
    """A new folder to fill, which takes the place of `folder` on success and vanishes on failure."""
    mark = uuid.uuid4().hex[:8]
    aside = folder.with_name(f".{folder.name}.saving-{mark}")
    previous = folder.with_name(f".{folder.name}.previous-{mark}")
    aside.mkdir()
    try:
        yield aside
        _flush(aside)
        if folder.exists():
            folder.rename(previous)
        try:
            aside.rename(folder)
        except OSError:
            if previous.exists():
                previous.rename(folder)
            raise
    finally:
        shutil.rmtree(aside, ignore_errors=True)
        if folder.exists():
            shutil.rmtree(previous, ignore_errors=True)


def _flush(folder: Path) -> None:
    """Have the bytes on disk before the folder gets its name."""
    for file in folder.rglob("*"):
        if file.is_file():
            with open(file, "rb") as handle:
                os.fsync(handle.fileno())
