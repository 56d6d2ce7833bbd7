"""Files and folders that are written whole or not at all, what reading a damaged one says, and marks of contents."""

import hashlib
import os
import shutil
import uuid
from collections.abc import Iterable, Iterator
from contextlib import contextmanager
from pathlib import Path

import torch
from safetensors import SafetensorError
from torch import Tensor

from hf_grow.errors import HfGrowError

# What tells a folder of transformers or hf-grow from any other.
MODEL_FILES = ("config.json", "growth.safetensors", "growth/growth.safetensors", "lora/adapter_config.json")


def check_out_folder(path: str | os.PathLike, overwrite: bool) -> Path:
    """The folder to write, as an absolute path: absent, empty, or a model or growth that the user gives up."""
    if not isinstance(path, (str, os.PathLike)):
        raise HfGrowError(f"A folder must be named by a path, not {path!r}.")
    folder = Path(path).resolve()
    standing = next(place for place in (folder, *folder.parents) if place.exists())
    if not standing.is_dir():
        raise HfGrowError(f"{standing} is a file; name a folder.")
    if not os.access(standing, os.W_OK):
        raise HfGrowError(f"{standing} cannot be written to.")
    if standing == folder and any(folder.iterdir()):
        if not overwrite:
            raise HfGrowError(f"{folder} exists and is not empty; choose another folder or ask to overwrite it.")
        if not any((folder / name).exists() for name in MODEL_FILES):
            raise HfGrowError(f"{folder} holds no model, so it is not overwritten; choose another folder.")
    return folder


@contextmanager
def clear_errors(path: str | os.PathLike) -> Iterator[None]:
    """What reading a damaged folder may raise, as one sentence."""
    try:
        yield
    except HfGrowError:
        raise
    except Exception as error:
        raise HfGrowError(f"{path} cannot be loaded: {first_line(error)}") from error


def first_line(error: BaseException) -> str:
    """What an error says, as one line."""
    return next((line.strip() for line in str(error).splitlines() if line.strip()), type(error).__name__)


def digest(parts: Iterable[str | bytes | Tensor]) -> str:
    """A short mark of texts, bytes and the values of tensors, wherever these are."""
    mark = hashlib.blake2b(digest_size=16)
    for part in parts:
        if isinstance(part, Tensor):
            mark.update(part.detach().to("cpu").contiguous().view(-1).view(torch.uint8).numpy().data)
        else:
            mark.update(part.encode() if isinstance(part, str) else part)
    return mark.hexdigest()


@contextmanager
def replacing_file(file: Path) -> Iterator[Path]:
    """A new file to write, which takes the place of `file` on success and vanishes on failure."""
    aside = file.with_name(f".{file.name}.saving")
    try:
        yield aside
        aside.replace(file)
    except (OSError, SafetensorError) as error:
        raise HfGrowError(f"{file} cannot be written: {error}") from error
    finally:
        aside.unlink(missing_ok=True)


def write_bytes(file: Path, content: bytes) -> None:
    """Write a file that appears whole."""
    with replacing_file(file) as aside:
        aside.write_bytes(content)


@contextmanager
def replacing(folder: Path) -> Iterator[Path]:
    """A new folder to fill, which takes the place of `folder` on success and vanishes on failure."""
    mark = uuid.uuid4().hex[:8]
    aside = folder.with_name(f".{folder.name}.saving-{mark}")
    previous = folder.with_name(f".{folder.name}.previous-{mark}")
    new_parents = [place for place in folder.parents if not place.exists()]
    try:
        aside.mkdir(parents=True)
        yield aside
        _flush(aside)
        if folder.exists():
            folder.rename(previous)
        aside.rename(folder)
    except BaseException as error:
        shutil.rmtree(aside, ignore_errors=True)
        if previous.exists() and not folder.exists():
            previous.rename(folder)
        for place in new_parents:
            if place.exists() and not any(place.iterdir()):
                place.rmdir()
        if isinstance(error, OSError):
            raise HfGrowError(f"{folder} cannot be written: {first_line(error)}") from error
        raise
    shutil.rmtree(previous, ignore_errors=True)


def _flush(folder: Path) -> None:
    """Have the bytes on disk before the folder gets its name."""
    for file in folder.rglob("*"):
        if file.is_file():
            with open(file, "rb") as handle:
                os.fsync(handle.fileno())
