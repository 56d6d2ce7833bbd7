"""The files of growth without its base, written and read.

`growth.safetensors` holds, as `<kind>.<layer>.<role>.columns`, the new columns of the base's heads and, as `….heads`,
the new heads, each (heads, columns, features): of the inputs, with the bias last where there is one, or of the output.
A learnt softmax scale is `<kind>.<layer>.scale`.
`growth.json` holds what they are for: the base and its hash, the sizes with and without growth, and the history.
"""

import json
import os
from collections.abc import Iterator
from dataclasses import dataclass
from importlib.metadata import version
from pathlib import Path
from typing import Any

import torch
from safetensors.torch import load_file, save_file
from torch import Tensor
from transformers import PreTrainedModel
from transformers.utils import cached_file

from hf_grow.errors import HfGrowError
from hf_grow.files import clear_errors, digest
from hf_grow.modeling.attached_growth import PARTS, SCALE, AttachedGrowth, part_sizes
from hf_grow.modeling.growable_attention import ROLES, AttentionDims, AttentionSite, attention_sites, layer_entry
from hf_grow.modeling.growable_model import GROWTH_FILE, GrowableModel, hub_arguments
from hf_grow.modeling.size_record import RECORD_KEYS, size_record
from hf_grow.surgery.base import base_hash, base_parameters
from hf_grow.surgery.blocks import (
    Parts,
    by_columns,
    divided,
    growth_parts,
    own_blocks,
    part_weights,
)
from hf_grow.surgery.change import new_weights
from hf_grow.surgery.place import input_sizes

WEIGHTS_FILE = "growth.safetensors"
# The parts of a folder that holds growth and LoRA.
GROWTH_FOLDER, LORA_FOLDER = "growth", "lora"
FORMAT = 2
# A whole checkpoint's growth.json has no kind.
KIND = "hf-grow growth file"
# What growth.json holds beside the model's history.
OWN_FIELDS = ("kind", "model_type", "base_dtype", "base_sizes", "sizes", "weights_hash", "versions")

# The type of attention and the layer.
LayerKey = tuple[str, int]


def write_growth(model: Any, folder: Path) -> None:
    """Write what growth added to a growable model, of attached growth that which is active, into a folder."""
    sites = attention_sites(model)
    weights = {name: part for site in sites for name, part in _new_parts(site)}
    if not weights:
        raise HfGrowError("Nothing was grown yet, so there is no growth to save: grow the model first.")
    content = model.growth_history | _description(model, sites, weights)
    save_file(weights, folder / WEIGHTS_FILE, metadata={"format": "pt"})
    content["weights_hash"] = _file_hash(folder / WEIGHTS_FILE)
    (folder / GROWTH_FILE).write_text(json.dumps(content, indent=2) + "\n", encoding="utf-8")


@dataclass(frozen=True)
class GrowthFile:
    """Growth as read from its two files, checked to belong together."""

    name: str
    content: dict[str, Any]
    base_sizes: dict[LayerKey, AttentionDims]
    sizes: dict[LayerKey, AttentionDims]
    weights: dict[str, Tensor]

    @property
    def history(self) -> dict[str, Any]:
        """The history of the model that was saved."""
        kept = {name: value for name, value in self.content.items() if name not in OWN_FIELDS}
        return kept | {"format": 1}

    def summary(self) -> dict[str, Any]:
        """Sizes and new parameters of every attention module, and what was grown; ready for JSON."""
        layers = [
            layer_entry(f"{attention_type}.{layer}", layer, attention_type, dims)
            | {"parameters": self._parameters(f"{attention_type}.{layer}.")}
            for (attention_type, layer), dims in self.sizes.items()
        ]
        return {
            **self.history,
            "model_type": self.content["model_type"],
            "growth_only": True,
            "parameters": self._parameters(),
            "layers": layers,
        }

    def _parameters(self, prefix: str = "") -> int:
        return sum(part.numel() for name, part in self.weights.items() if name.startswith(prefix))

    def check_family(self, model: PreTrainedModel) -> None:
        """Refuse a model of another family."""
        if not isinstance(model, PreTrainedModel):
            raise HfGrowError(f"load_growth takes a transformers model, not {type(model).__name__}.")
        model_type = model.config.model_type
        if model_type.startswith("growable_") and not isinstance(model, GrowableModel):
            raise HfGrowError(f"{type(model).__name__} comes from a checkpoint's own code: call make_growable first.")
        if model_type.removeprefix("growable_") != self.content["model_type"]:
            other = model_type.removeprefix("growable_")
            raise HfGrowError(f"{self.name} is growth of a {self.content['model_type']} model, not of a {other}.")

    def check_base(self, model: PreTrainedModel, *, with_merged: bool) -> None:
        """Refuse a model that is not, to the bit, the base that this growth was made on."""
        if (dtype := _dtype(model)) != self.content["base_dtype"]:
            wanted = self.content["base_dtype"]
            raise HfGrowError(
                f"{self.name} is growth of {wanted} weights, and the model's are {dtype}: load it as {wanted}, or "
                "take it all the same with load_growth(…, check_base=False)."
            )
        if present_hash(model, with_merged=with_merged) != self.content["base_hash"]:
            base = self.content.get("base_model") or "a base model without a name"
            raise HfGrowError(
                f"{self.name} is growth of {base} with other weights than this model has; load_growth(…, "
                "check_base=False) takes it all the same."
            )

    def fits_projections(self, model: PreTrainedModel) -> bool:
        """Whether it was made on projections of the sizes that the model's have, with any growth merged into them."""
        return {_layer_key(site): site.attention.own_dims for site in attention_sites(model)} == self.base_sizes

    def check_sites(self, sites: list[AttentionSite]) -> None:
        """Refuse a model whose attention has other sizes than the base, or to which the weights do not fit."""
        own = {_layer_key(site): site.attention.own_dims for site in sites}
        base = {_layer_key(site): site.attention.base_dims for site in sites}
        if self.base_sizes not in (own, base):
            raise HfGrowError(f"{self.name} is growth of a model whose layers or heads have other sizes.")
        for site in sites:
            inputs = input_sizes(site)
            for role in ROLES:
                for part in PARTS:
                    new = self.weights.get(_key(_layer_key(site), role, part))
                    if new is not None and new.shape[2] != inputs[role]:
                        raise HfGrowError(f"{self.name} is damaged: {role} {part} do not fit to {site.name}.")

    def parts(self, site: AttentionSite) -> Parts:
        """What is new in one attention module."""
        named = {(role, part): self.weights.get(_key(_layer_key(site), role, part)) for role in ROLES for part in PARTS}
        return {place: by_columns(place[0], new) for place, new in named.items() if new is not None}

    def module(self, site: AttentionSite) -> AttachedGrowth | None:
        """What is new in one attention module, to be put beside its projections."""
        key, device = _layer_key(site), next(site.attention.parameters()).device
        weights = part_weights(site, self.parts(site))
        if (scale := self.weights.get(_key(key, SCALE))) is not None:
            weights[SCALE] = scale
        if not weights:
            return None
        placed = new_weights({name: weight.to(device) for name, weight in weights.items()})
        return AttachedGrowth(self.base_sizes[key], self.sizes[key], placed)


def is_growth_folder(folder: Path) -> bool:
    """Whether a folder holds growth and no whole model."""
    return not (folder / "config.json").exists() and any(
        (folder / name).exists() for name in (GROWTH_FILE, WEIGHTS_FILE)
    )


def read_growth(
    path_or_hub_id: str | os.PathLike, *, revision: str | None = None, token: str | None = None
) -> GrowthFile:
    """Read what `save_growth` wrote to a folder or what was pushed to the Hub; refused unless whole."""
    if not isinstance(path_or_hub_id, (str, os.PathLike)):
        raise HfGrowError(f"Growth must be named by a folder or a Hub id, not {path_or_hub_id!r}.")
    name = os.fspath(path_or_hub_id)
    hub = hub_arguments({"revision": revision, "token": token})
    with clear_errors(name):
        files = [
            cached_file(name, file, _raise_exceptions_for_missing_entries=False, **hub)
            for file in (GROWTH_FILE, WEIGHTS_FILE)
        ]
    if files[0] is None:
        raise HfGrowError(f"{name} holds no growth: there is no {GROWTH_FILE} that save_growth would have written.")
    content = _read_content(name, Path(files[0]))
    if files[1] is None:
        raise HfGrowError(f"{name} is incomplete: there is no {WEIGHTS_FILE}.")
    with clear_errors(name):
        weights = load_file(files[1])
        base_sizes, sizes = (dict(_sizes(content[field])) for field in ("base_sizes", "sizes"))
    if _file_hash(Path(files[1])) != content["weights_hash"]:
        raise HfGrowError(f"{name} is damaged: {WEIGHTS_FILE} is not the one that {GROWTH_FILE} was written for.")
    wanted = dict(_wanted(base_sizes, sizes))
    present = {key: part.shape[:-1] for key, part in weights.items() if not key.endswith(f".{SCALE}")}
    if base_sizes.keys() != sizes.keys() or present != wanted:
        raise HfGrowError(f"{name} is damaged: its weights are not of the sizes that {GROWTH_FILE} names.")
    if not all(_finite(part) for part in weights.values()):
        raise HfGrowError(f"{name} is damaged: its weights are not finite.")
    return GrowthFile(name, content, base_sizes, sizes, weights)


def _read_content(name: str, file: Path) -> dict[str, Any]:
    try:
        content = json.loads(file.read_text(encoding="utf-8"))
        if not isinstance(content, dict):
            raise TypeError("it is not an object")
        if content.get("kind") != KIND:
            raise HfGrowError(f"{name} holds no growth by itself: load a whole model with hf_grow.load_grown.")
        if int(content["format"]) > FORMAT:
            raise ValueError(f"its format {content['format']} is newer than {FORMAT}: update hf-grow")
        for field in ("model_type", "base_dtype", "base_hash", "weights_hash"):
            if not isinstance(content[field], str):
                raise TypeError(f"{field} is not a text")
        for field in ("base_sizes", "sizes"):
            if not isinstance(content[field], dict):
                raise TypeError(f"{field} is not an object")
        if not all(isinstance(event["kind"], str) for event in content["events"]):
            raise TypeError("an event has no kind")
    except (ValueError, KeyError, TypeError) as error:
        missing = f"it has no {error}" if isinstance(error, KeyError) else error
        raise HfGrowError(f"{GROWTH_FILE} of {name} cannot be read: {missing}.") from error
    return content


def present_hash(model: PreTrainedModel, *, with_merged: bool = False) -> str:
    """That of the base; with `with_merged` of the projections as they are, which attached growth stands beside."""
    attached = isinstance(model, GrowableModel) and bool(model.config.growths)
    mark = base_hash(model, growth=with_merged and not attached)
    if mark is None:
        raise HfGrowError("The model's weights are not all in memory: load it without offloading.")
    return mark


def _new_parts(site: AttentionSite) -> Iterator[tuple[str, Tensor]]:
    """What is new in an attention module, by its name in the file."""
    own = _own_dims(site)
    parts = divided(own_blocks(site), own) if site.growth is None else growth_parts(site.growth)
    for (role, part), new in parts.items():
        if not _finite(new):
            raise HfGrowError(f"The new {role} weights of {site.name} are not finite, so they are not saved.")
        whole = by_columns(role, new).cpu().clone(memory_format=torch.contiguous_format)
        yield _key(_layer_key(site), role, part), whole
    scale = site.attention.score_scale if site.growth is None else site.growth.scale
    if scale is not None:
        if not _finite(scale):
            raise HfGrowError(f"The learnt scale of {site.name} is not finite, so it is not saved.")
        yield _key(_layer_key(site), SCALE), scale.detach().cpu().clone()


def _own_dims(site: AttentionSite) -> AttentionDims:
    """The sizes that growth stands behind: of the projections beside which it is attached, else of the base."""
    return site.attention.base_dims if site.attention.active_growth is None else site.attention.own_dims


def _wanted(
    base_sizes: dict[LayerKey, AttentionDims], sizes: dict[LayerKey, AttentionDims]
) -> Iterator[tuple[str, tuple[int, int]]]:
    """The names of all weights that a file of these sizes has, each with its heads and columns."""
    for place in base_sizes.keys() & sizes.keys():
        for role, part, heads, columns in part_sizes(base_sizes[place], sizes[place]):
            yield _key(place, role, part), (heads, columns)


def _finite(weights: Tensor) -> bool:
    return bool(torch.isfinite(weights).all())


def _layer_key(site: AttentionSite) -> LayerKey:
    return site.attention_type, site.layer


def _key(place: LayerKey, *names: str) -> str:
    return ".".join((place[0], str(place[1]), *names))


def _description(model: PreTrainedModel, sites: list[AttentionSite], weights: dict[str, Tensor]) -> dict[str, Any]:
    """What growth.json says beside the history."""
    return {
        # hf-grow 0.1 reads all but learnt scales.
        "format": FORMAT if any(name.endswith(f".{SCALE}") for name in weights) else 1,
        "kind": KIND,
        "model_type": model.config.model_type.removeprefix("growable_"),
        "base_dtype": _dtype(model),
        "base_sizes": size_record((site, _own_dims(site)) for site in sites),
        "sizes": size_record((site, site.attention.dims) for site in sites),
        "versions": {name: version(name) for name in ("hf-grow", "torch", "transformers")},
    }


def _sizes(record: dict[str, list[dict]]) -> Iterator[tuple[LayerKey, AttentionDims]]:
    for attention_type, name in RECORD_KEYS.items():
        for layer, dims in enumerate(record.get(name, [])):
            yield (attention_type, layer), AttentionDims(**dims)


def _dtype(model: PreTrainedModel) -> str:
    return ", ".join(sorted({str(weight.dtype).removeprefix("torch.") for _, weight in base_parameters(model)}))


def _file_hash(file: Path) -> str:
    return digest([file.read_bytes()])
