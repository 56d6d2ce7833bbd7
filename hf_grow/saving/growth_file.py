"""Growth as an adapter: a file of the new columns and heads alone, to be put onto the base model and taken off again.

`growth.safetensors` holds, as `<kind>.<layer>.<role>.columns`, the new columns of the base's heads and, as `….heads`,
the new heads, each (heads, columns, features): of the inputs, with the bias last where there is one, or of the output.
A learnt softmax scale is `<kind>.<layer>.scale`.
`growth.json` holds what they are for: the base and its hash, the sizes with and without growth, and the history.
"""

import copy
import json
import os
from collections.abc import Callable, Iterable, Iterator
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
from hf_grow.modeling.attached_growth import PARTS, SCALE, AttachedGrowth, attach, detach, part_sizes
from hf_grow.modeling.growable_attention import ROLES, AttentionDims, AttentionSite, attention_sites, layer_entry
from hf_grow.modeling.growable_model import (
    GROWTH_FILE,
    RECORD_KEYS,
    GrowableModel,
    hub_arguments,
    size_record,
)
from hf_grow.surgery.base import Model, base_hash, base_parameters, growth_parameters, has_grown, without_adapters
from hf_grow.surgery.blocks import (
    Parts,
    by_columns,
    divided,
    growth_parts,
    leading,
    own_blocks,
    part_weights,
)
from hf_grow.surgery.change import Change, new_weights
from hf_grow.surgery.forms import check_divisible
from hf_grow.surgery.optimizer_state import Added, carry_state, drop_parameters
from hf_grow.surgery.patch import make_growable, require_growable
from hf_grow.surgery.place import input_sizes
from hf_grow.surgery.structure import DEFAULT_NAME, check_name, check_whole

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

    Of attached growth that which is active. Refused where the base model's weights are not those of the first growth
    any more. `extras` may write more files.
    """
    grown = _growable(model)
    folder = check_out_folder(path, overwrite)
    check_base(grown)
    sites = attention_sites(grown)
    weights = {name: part for site in sites for name, part in _new_parts(site)}
    if not weights:
        raise HfGrowError("Nothing was grown yet, so there is no growth to save: grow the model first.")
    content = grown.growth_history | _description(grown, sites, weights)
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
    name: str | None = None,
    check_base: bool = True,
) -> Any:
    """Attach saved growth to its base model, in place, and compute with it from now on; returns the same model.

    The model may be stock, growable or grown, quantised or under adapters, with the base's weights to the bit;
    otherwise nothing changes. `check_base=False` takes another base of the same sizes, such as the plain one of growth
    that was trained beside a quantised one. Without a `name` the growth takes the place of any that is there, else it
    comes beside what is attached under other names, and `model.set_growth(name)` switches between them. An `optimizer`
    of the model goes on with its state for what stays.
    """
    growth = read_growth(path_or_hub_id, revision=revision, token=token)
    target = without_adapters(model)
    growth.check_family(target)
    stock = not isinstance(target, GrowableModel)
    asked = _unweighted(target) if stock else target
    on_projections = growth.fits_projections(asked)
    if name is not None:
        _check_new_name(asked, check_name(name), on_projections)
    if check_base:
        growth.check_base(target, with_merged=on_projections)
    growth.check_sites(attention_sites(asked))
    if stock:
        make_growable(target)
    ready = [(site.attention, growth.module(site)) for site in attention_sites(target)]
    if name is None or not on_projections:
        _take_off(target, optimizer, merged=not on_projections)
    for attention, module in ready:
        if module is not None:
            attach(attention, name or DEFAULT_NAME, module)
    target.config.growths[name or DEFAULT_NAME] = growth.history
    target.set_growth(name or DEFAULT_NAME)
    if optimizer is not None:
        added = [Added(parameter, None) for parameter in growth_parameters(target)]
        carry_state(optimizer, [], added).apply(target.parameters())
    return model


@torch.inference_mode(False)
@torch.no_grad()
def remove_growth(model: Model, *, optimizer: torch.optim.Optimizer | None = None, name: str | None = None) -> Any:
    """Take growth off a model, in place, which leaves the base bit for bit; returns the same model.

    Of attached growth that of a name, or all; without any, growth that is merged into the projections, if these still
    hold the base's weights.
    """
    target = _growable(model)
    if name is not None:
        if name not in target.config.growths:
            known = ", ".join(target.config.growths) or "none"
            raise HfGrowError(f"There is no attached growth of the name {name!r}; attached are: {known}.")
        _take_off(target, optimizer, merged=False, names=[name])
    elif target.config.growths:
        _take_off(target, optimizer, merged=False)
    else:
        check_base(target)
        _take_off(target, optimizer, merged=True)
    return model


def check_base(model: PreTrainedModel) -> None:
    """Refuse a growable model whose base is not the leading part of its weights, as it was at the first growth."""
    if model.active_growth is None:
        check_divisible(model)
    advice = "so the growth cannot be told from the base: use save_grown, which writes the whole model."
    recorded = model.growth_history.get("base_hash")
    if recorded is None and (model.growth_history["events"] or has_grown(model)):
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
                "take it all the same with check_base=False."
            )
        if _present_hash(model, with_merged=with_merged) != self.content["base_hash"]:
            base = self.content.get("base_model") or "a base model without a name"
            raise HfGrowError(
                f"{self.name} is growth of {base} with other weights than this model has; check_base=False takes it "
                "all the same."
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


def _growable(model: PreTrainedModel) -> Any:
    target = without_adapters(model)
    require_growable(target)
    return target


def _present_hash(model: PreTrainedModel, *, with_merged: bool = False) -> str:
    """That of the base; with `with_merged` of the projections as they are, which attached growth stands beside."""
    attached = isinstance(model, GrowableModel) and bool(model.config.growths)
    mark = base_hash(model, growth=with_merged and not attached)
    if mark is None:
        raise HfGrowError("The model's weights are not all in memory: load it without offloading.")
    return mark


def _check_new_name(model: Any, name: str, on_projections: bool) -> None:
    if model.config.growths and not on_projections:
        raise HfGrowError("This growth has another base than what is attached: remove that first, or give no name.")
    if name in model.config.growths:
        raise HfGrowError(f"Growth of the name {name!r} is attached already: take another name, or remove that first.")


def _unweighted(model: PreTrainedModel) -> Any:
    """A growable model of the same sizes without memory, to be asked before the model itself is touched."""
    with torch.device("meta"):
        return make_growable(type(model)(copy.deepcopy(model.config)))


def _take_off(
    model: Any, optimizer: torch.optim.Optimizer | None, *, merged: bool, names: Iterable[str] | None = None
) -> None:
    """Let go of attached growth, all or of these names, and of merged growth if asked to."""
    gone = list(model.config.growths if names is None else names)
    dropped = {
        parameter
        for site in attention_sites(model)
        for name, growth in site.attention.attached.items()
        if name in gone
        for parameter in growth.parameters()
    }
    changes = []
    if merged:
        for site in attention_sites(model):
            base = site.attention.base_dims
            if site.attention.own_dims != base:
                check_whole(site)
                # A copy, so that the memory of what is removed can be freed.
                kept = {role: leading(block, role, base).clone() for role, block in own_blocks(site).items()}
                changes.append(Change(site, kept, kept=base, scaling=base.scaling))
    ready = [change.prepared() for change in changes]
    carried = (
        None if optimizer is None else carry_state(optimizer, [each for edit in ready for each in edit.replacements])
    )
    for site in attention_sites(model):
        for name in gone:
            detach(site.attention, name)
    for edit in ready:
        edit.apply()
    for name in gone:
        del model.config.growths[name]
    if carried is not None:
        carried.apply()
        drop_parameters(carried.optimizer, dropped)
    if merged:
        for site in attention_sites(model):
            site.attention.score_scale = None
        # The next growth is a first one: until then the base may learn.
        history = {name: value for name, value in model.config.growth_history.items() if name != "base_hash"}
        model.config.growth_history = history | {"events": []}
    model.config.record(attention_sites(model))


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
