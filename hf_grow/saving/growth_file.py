"""Growth as an adapter: a file of the new columns and heads alone, to be put onto the base model and taken off again.

`growth.safetensors` holds, as `<kind>.<layer>.<role>.columns`, the new columns of the base's heads and, as `….heads`,
the new heads, each (heads, columns, features): of the inputs, with the bias last where there is one, or of the output.
`growth.json` holds what they are for: the base and its hash, the sizes with and without growth, and the history.
"""

import copy
import json
import os
from collections.abc import Callable, Iterator
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
from hf_grow.files import check_out_folder, clear_errors, digest, replacing
from hf_grow.modeling.growable_attention import AttentionDims, AttentionSite, attention_sites, layer_entry
from hf_grow.modeling.growable_model import (
    GROWTH_FILE,
    GROWTH_FORMAT,
    RECORD_KEYS,
    GrowableModel,
    hub_arguments,
    size_record,
)
from hf_grow.surgery.base import Model, base_hash, base_parameters, has_grown, without_adapters
from hf_grow.surgery.blocks import ROLES, Blocks, leading, read_blocks
from hf_grow.surgery.patch import make_growable, require_growable
from hf_grow.surgery.structure import Change, commit, find_site

WEIGHTS_FILE = "growth.safetensors"
# The parts of a folder that holds growth and LoRA.
GROWTH_FOLDER, LORA_FOLDER = "growth", "lora"
FORMAT = 1
# A whole checkpoint's growth.json has no kind.
KIND = "hf-grow growth file"
# What growth.json holds beside the model's history.
OWN_FIELDS = ("kind", "model_type", "base_dtype", "base_sizes", "sizes", "weights_hash", "versions")

# The type of attention and the layer.
LayerKey = tuple[str, int]


@torch.inference_mode(False)
@torch.no_grad()
def save_growth(
    model: Model,
    path: str | os.PathLike,
    *,
    overwrite: bool = False,
    extras: Callable[[Path], None] | None = None,
) -> Path:
    """Write only what growth added to a model, also where PEFT has wrapped it, to a folder that appears all at once.

    Refused where the base model's weights are not those of the first growth any more. `extras` may write more files.
    """
    grown = _growable(model)
    folder = check_out_folder(path, overwrite)
    check_base(grown)
    sites = attention_sites(grown)
    weights = {name: part for site in sites for name, part in _new_parts(site)}
    if not weights:
        raise HfGrowError("Nothing was grown yet, so there is no growth to save: grow the model first.")
    content = grown.growth_history | _description(grown, sites)
    with replacing(folder) as aside:
        save_file(weights, aside / WEIGHTS_FILE, metadata={"format": "pt"})
        content["weights_hash"] = _file_hash(aside / WEIGHTS_FILE)
        (aside / GROWTH_FILE).write_text(json.dumps(content, indent=2) + "\n", encoding="utf-8")
        if extras is not None:
            extras(aside)
    return folder


@torch.inference_mode(False)
@torch.no_grad()
def load_growth(
    model: Model,
    path_or_hub_id: str | os.PathLike,
    *,
    revision: str | None = None,
    token: str | None = None,
    optimizer: torch.optim.Optimizer | None = None,
) -> Any:
    """Put saved growth onto its base model, in place, instead of any that is there; returns the same model.

    The model may be stock, growable or grown, with the base's weights to the bit; otherwise nothing changes. An
    `optimizer` of the model goes on with its state for the base's entries.
    """
    growth = read_growth(path_or_hub_id, revision=revision, token=token)
    target = without_adapters(model)
    growth.check_model(target)
    stock = not isinstance(target, GrowableModel)
    growth.check_sites(attention_sites(_unweighted(target) if stock else target))
    if stock:
        make_growable(target)
    _replace_growth(target, growth.sizes, growth.weights, growth.history, optimizer)
    return model


@torch.inference_mode(False)
@torch.no_grad()
def remove_growth(model: Model, *, optimizer: torch.optim.Optimizer | None = None) -> Any:
    """Take all growth off a model, in place, which leaves the base bit for bit; returns the same model."""
    target = _growable(model)
    check_base(target)
    sizes = {_layer_key(site): site.attention.base_dims for site in attention_sites(target)}
    # The next growth is a first one: until then the base may learn.
    history = {name: value for name, value in target.growth_history.items() if name != "base_hash"}
    _replace_growth(target, sizes, {}, history | {"events": []}, optimizer)
    return model


def check_base(model: PreTrainedModel) -> None:
    """Refuse a growable model whose base is not the leading part of its weights, as it was at the first growth."""
    advice = "so the growth cannot be told from the base: use save_grown, which writes the whole model."
    for site in attention_sites(model):
        now, base = site.attention.dims, site.attention.base_dims
        if any(now.heads(role) < base.heads(role) or now.size(role) < base.size(role) for role in ROLES):
            raise HfGrowError(f"Columns of the base were dropped in {site.name}, {advice}")
    events = model.growth_history["events"]
    for strategy in (event.get("config", {}).get("strategy", "append") for event in events):
        if strategy != "append":
            raise HfGrowError(f"The model grew with strategy={strategy!r}, which changes the base's weights, {advice}")
    recorded = model.growth_history.get("base_hash")
    if recorded is None and (events or has_grown(model)):
        raise HfGrowError(f"The history does not say what the base's weights were at the first growth, {advice}")
    if recorded is not None and recorded != _present_hash(model):
        raise HfGrowError(
            "The base's weights are not those of the first growth any more (all weights were trained, an adapter was "
            f"merged, or the dtype changed), {advice}"
        )


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
        return kept | {"format": GROWTH_FORMAT}

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

    def check_model(self, model: PreTrainedModel) -> None:
        """Refuse a model that is not, to the bit, the base that this growth was made on."""
        if not isinstance(model, PreTrainedModel):
            raise HfGrowError(f"load_growth takes a transformers model, not {type(model).__name__}.")
        model_type = model.config.model_type
        if model_type.startswith("growable_") and not isinstance(model, GrowableModel):
            raise HfGrowError(f"{type(model).__name__} comes from a checkpoint's own code: call make_growable first.")
        if model_type.removeprefix("growable_") != self.content["model_type"]:
            other = model_type.removeprefix("growable_")
            raise HfGrowError(f"{self.name} is growth of a {self.content['model_type']} model, not of a {other}.")
        if (dtype := _dtype(model)) != self.content["base_dtype"]:
            wanted = self.content["base_dtype"]
            raise HfGrowError(
                f"{self.name} is growth of {wanted} weights, and the model's are {dtype}: load it as {wanted}."
            )
        if _present_hash(model) != self.content["base_hash"]:
            base = self.content.get("base_model") or "a base model without a name"
            raise HfGrowError(f"{self.name} is growth of {base} with other weights than this model has.")

    def check_sites(self, sites: list[AttentionSite]) -> None:
        """Refuse a model whose attention has other sizes than the base, or to which the weights do not fit."""
        if {_layer_key(site): site.attention.base_dims for site in sites} != self.base_sizes:
            raise HfGrowError(f"{self.name} is growth of a model whose layers or heads have other sizes.")
        for site in sites:
            for role, block in read_blocks(site).items():
                features = _by_columns(role, block).shape[2]
                for part in ("columns", "heads"):
                    new = self.weights.get(_key(_layer_key(site), role, part))
                    if new is not None and new.shape[2] != features:
                        raise HfGrowError(f"{self.name} is damaged: {role} {part} do not fit to {site.name}.")


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
    if base_sizes.keys() != sizes.keys() or {key: part.shape[:-1] for key, part in weights.items()} != wanted:
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


def _growable(model: PreTrainedModel) -> Any:
    target = without_adapters(model)
    require_growable(target)
    return target


def _present_hash(model: PreTrainedModel) -> str:
    mark = base_hash(model)
    if mark is None:
        raise HfGrowError("The model's weights are not all in memory: load it without offloading.")
    return mark


def _unweighted(model: PreTrainedModel) -> Any:
    """A growable model of the same sizes without memory, to be asked before the model itself is touched."""
    with torch.device("meta"):
        return make_growable(type(model)(copy.deepcopy(model.config)))


def _replace_growth(
    model: PreTrainedModel,
    sizes: dict[LayerKey, AttentionDims],
    weights: dict[str, Tensor],
    history: dict,
    optimizer: torch.optim.Optimizer | None,
) -> None:
    """Keep the base's weights, with these new ones behind them."""
    changes = []
    for site in attention_sites(model):
        find_site(model, site.layer, site.attention_type)
        dims, base = sizes[_layer_key(site)], site.attention.base_dims
        if site.attention.dims != base or dims != base:
            changes.append(Change(site, _with_growth(site, weights), kept=base, scaling=dims.scaling))
    commit(model, changes, None, optimizer)
    model.config.growth_history = history


def _with_growth(site: AttentionSite, weights: dict[str, Tensor]) -> Blocks:
    """The base's weights of an attention module and, behind them, new ones."""
    blocks: Blocks = {}
    for role, block in read_blocks(site).items():
        weight = _by_columns(role, leading(block, role, site.attention.base_dims))
        for dim, part in ((1, "columns"), (0, "heads")):
            new = weights.get(_key(_layer_key(site), role, part))
            # Also without anything new this is a copy, so that the memory of what is removed can be freed.
            weight = torch.cat([weight] if new is None else [weight, new.to(weight)], dim)
        blocks[role] = _by_columns(role, weight)
    return blocks


def _new_parts(site: AttentionSite) -> Iterator[tuple[str, Tensor]]:
    """The inverse of `_with_growth`: what is new, by its name in the file."""
    base = site.attention.base_dims
    for role, block in read_blocks(site).items():
        by_columns = _by_columns(role, block)
        parts = {"columns": by_columns[: base.heads(role), base.size(role) :], "heads": by_columns[base.heads(role) :]}
        for part, new in parts.items():
            if new.numel():
                if not _finite(new):
                    raise HfGrowError(f"The new {role} weights of {site.name} are not finite, so they are not saved.")
                yield _key(_layer_key(site), role, part), new.cpu().clone(memory_format=torch.contiguous_format)


def _wanted(
    base_sizes: dict[LayerKey, AttentionDims], sizes: dict[LayerKey, AttentionDims]
) -> Iterator[tuple[str, tuple[int, int]]]:
    """The names of all weights that a file of these sizes has, each with its heads and columns."""
    for place in base_sizes.keys() & sizes.keys():
        base, dims = base_sizes[place], sizes[place]
        for role in ROLES:
            columns = (base.heads(role), dims.size(role) - base.size(role))
            heads = (dims.heads(role) - base.heads(role), dims.size(role))
            for part, shape in (("columns", columns), ("heads", heads)):
                if 0 not in shape:
                    yield _key(place, role, part), shape


def _by_columns(role: str, block: Tensor) -> Tensor:
    """A role's weights as (heads, columns, features), or back."""
    return block if role == "output" else block.transpose(1, 2)


def _finite(weights: Tensor) -> bool:
    return bool(torch.isfinite(weights).all())


def _layer_key(site: AttentionSite) -> LayerKey:
    return site.attention_type, site.layer


def _key(place: LayerKey, role: str, part: str) -> str:
    return f"{place[0]}.{place[1]}.{role}.{part}"


def _description(model: PreTrainedModel, sites: list[AttentionSite]) -> dict[str, Any]:
    """What growth.json says beside the history."""
    return {
        "format": FORMAT,
        "kind": KIND,
        "model_type": model.config.model_type.removeprefix("growable_"),
        "base_dtype": _dtype(model),
        "base_sizes": size_record((site, site.attention.base_dims) for site in sites),
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
