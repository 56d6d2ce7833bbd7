"""Dataclasses of plain values and tensors as one safetensors file: statistics and plans."""

import json
import os
from dataclasses import fields, is_dataclass
from pathlib import Path
from typing import Any

from safetensors import SafetensorError, safe_open
from safetensors.torch import save_file
from torch import Tensor

from hf_grow.errors import HfGrowError
from hf_grow.files import replacing_file

FORMAT = 2


def write_tensors(value: Any, path: str | os.PathLike, what: str) -> None:
    """A dataclass of plain values, tensors and dataclasses as one safetensors file that appears whole."""
    tensors: dict[str, Tensor] = {}
    content = _flatten(value, "", tensors)
    metadata = {"hf_grow": what, "format": str(FORMAT), "content": json.dumps(content)}
    with replacing_file(Path(path)) as aside:
        save_file(tensors, aside, metadata=metadata)


def read_tensors(path: str | os.PathLike, what: str) -> dict:
    """The plain values of such a file, with its tensors in their places."""
    try:
        with safe_open(path, framework="pt") as file:
            metadata = file.metadata() or {}
            tensors = {name: file.get_tensor(name) for name in file.keys()}  # noqa: SIM118
        if metadata.get("hf_grow") != what or int(metadata["format"]) > FORMAT:
            raise HfGrowError(f"{path} holds no {what} that this version of hf-grow can read.")
        return _unflatten(json.loads(metadata["content"]), tensors)
    except HfGrowError:
        raise
    except (OSError, SafetensorError, KeyError, ValueError) as error:
        raise HfGrowError(f"{path} cannot be read as {what} of hf-grow: {error}") from error


def _flatten(value: Any, name: str, tensors: dict[str, Tensor]) -> Any:
    """Plain values for JSON; tensors go to `tensors` and leave their name behind."""
    if isinstance(value, Tensor):
        tensors[name] = value.detach().contiguous().clone()
        return {"tensor": name}
    if is_dataclass(value):
        # What may be of several classes says of which it is.
        form = getattr(type(value), "form", None)
        tag = {"form": form} if isinstance(form, str) else {}
        own = {part.name: getattr(value, part.name) for part in fields(value)}
        return tag | _flatten(own, name, tensors)
    if isinstance(value, (list, tuple)):
        return [_flatten(part, f"{name}.{index}", tensors) for index, part in enumerate(value)]
    if isinstance(value, dict):
        return {str(key): _flatten(part, f"{name}.{key}", tensors) for key, part in value.items()}
    return value


def _unflatten(value: Any, tensors: dict[str, Tensor]) -> Any:
    if isinstance(value, dict):
        if set(value) == {"tensor"}:
            return tensors[value["tensor"]]
        return {key: _unflatten(part, tensors) for key, part in value.items()}
    return [_unflatten(part, tensors) for part in value] if isinstance(value, list) else value
