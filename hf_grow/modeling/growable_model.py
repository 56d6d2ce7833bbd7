"""Growable models and configs: conversion in place, the record of sizes, saving with code and history.

This file travels with every checkpoint, so it imports torch and transformers only.
"""

import copy
import json
import shutil
from collections.abc import Iterable, Iterator
from dataclasses import asdict
from pathlib import Path
from typing import Any, ClassVar

import transformers
from torch import nn
from transformers import PreTrainedConfig
from transformers.models.auto.modeling_auto import MODEL_FOR_CAUSAL_LM_MAPPING_NAMES
from transformers.utils import cached_file
from transformers.utils.output_capturing import _CAN_RECORD_REGISTRY

from .growable_attention import (
    AttentionDims,
    AttentionSite,
    attention_sites,
    install,
    layer_entry,
    new_parameters,
    weight_rows,
)

GROWTH_FILE = "growth.json"
GROWTH_FORMAT = 1
# Where the sizes of each type of attention are in a record of sizes, layer by layer.
RECORD_KEYS = {"self": "layers", "cross": "cross_layers"}
STOCK_LOAD_REFUSED = (
    "this checkpoint was grown by hf-grow and the stock class would compute something else; "
    "load it with hf_grow.load_grown(path) or AutoModel….from_pretrained(path, trust_remote_code=True)"
)


class GrowableConfig:
    """Mixin over a stock config: `hf_grow` records the sizes of every attention module."""

    hf_grow: dict | None
    growth_history: dict

    def to_dict(self) -> dict[str, Any]:
        """As in transformers, without the history, which has a file of its own."""
        content = super().to_dict()  # type: ignore[misc]
        content.pop("growth_history", None)
        return content

    def record(self, sites: list[AttentionSite]) -> None:
        """Write the sizes of all attention modules into `hf_grow`."""
        # A stock config class that reads this file finds its own model_type here, and stops at the next line.
        stock_type = type(self).model_type.removeprefix("growable_")  # type: ignore[attr-defined]
        self.hf_grow = {"model_type": stock_type, "vocab_size": STOCK_LOAD_REFUSED}
        self.hf_grow |= size_record((site, site.attention.dims) for site in sites)
        # transformers then leaves static caches to be sized by the first keys and values they get.
        self.qk_head_dim = max(site.attention.query_key_dim for site in sites)

    def recorded(self, sites: list[AttentionSite]) -> list[AttentionDims]:
        """The recorded sizes of all attention modules."""
        for attention_type, key in RECORD_KEYS.items():
            modules = sum(site.attention_type == attention_type for site in sites)
            entries = len((self.hf_grow or {}).get(key, []))
            if entries != modules:
                raise ValueError(
                    f"config.hf_grow['{key}'] has {entries} entries for {modules} {attention_type}-attention modules."
                )
        return [self._dims(site) for site in sites]

    def _dims(self, site: AttentionSite) -> AttentionDims:
        key = RECORD_KEYS[site.attention_type]
        layers = (self.hf_grow or {})[key]
        try:
            dims = AttentionDims(**layers[site.layer])
        except (TypeError, ValueError) as error:
            raise ValueError(f"config.hf_grow['{key}'][{site.layer}] is not valid: {error}") from error
        if dims.qk_head_dim < site.attention.rotary_dim:
            raise ValueError(f"{site.name} rotates {site.attention.rotary_dim} columns but has {dims.qk_head_dim}.")
        return dims


class GrowableModel:
    """Mixin over a stock model class. A direct subclass is a family; its subclasses are the task heads."""

    config_class: ClassVar[type[PreTrainedConfig]]
    stock_config_class: ClassVar[type[PreTrainedConfig]]
    attention_classes: ClassVar[dict[type, type]]
    model_classes: ClassVar[dict[type, type["GrowableModel"]]]
    auto_classes: ClassVar[tuple[str, ...]] = ()
    code_files: ClassVar[tuple[str, ...]]
    config: Any

    def __init_subclass__(cls, **kwargs: Any) -> None:
        super().__init_subclass__(**kwargs)
        if GrowableModel in cls.__bases__:
            cls.model_classes = {}
        elif "auto_classes" in cls.__dict__:
            cls.model_classes[cls.__bases__[1]] = cls
            for name in cls.auto_classes:
                getattr(transformers, name).register(cls.config_class, cls, exist_ok=True)
            if "AutoModelForCausalLM" in cls.auto_classes:
                # By this table of names the Trainer knows whose labels to shift when it smooths them.
                MODEL_FOR_CAUSAL_LM_MAPPING_NAMES[cls.config_class.model_type] = cls.__name__

    @classmethod
    def attention_class(cls, module: nn.Module) -> Any:
        """The growable class of a stock attention module, None for any other module."""
        return cls.attention_classes.get(type(module))

    def post_init(self) -> None:
        """Become growable before transformers initialises or loads the weights."""
        own_config(self, copy.deepcopy(self.config))
        adopt(self)
        super().post_init()  # type: ignore[misc]

    def _initialize_weights(self, module: nn.Module, is_custom_code: bool = False) -> None:
        """transformers passes over modules without parameters of their own in custom code; GPT-2's attention is one."""
        super()._initialize_weights(module, False)  # type: ignore[misc]

    @property
    def growth_history(self) -> dict:
        """Base model and growth events, as saved in growth.json."""
        return self.config.growth_history

    def growth_summary(self) -> dict:
        """Sizes and parameters of every attention module, and what was grown so far; ready for JSON."""
        layers = [
            layer_entry(site.name, site.layer, site.attention_type, site.attention.dims)
            | {"parameters": sum(p.numel() for module, _ in site.projections() for p in module.parameters())}
            for site in attention_sites(self)  # type: ignore[arg-type]
        ]
        return {
            **self.growth_history,
            "model_type": self.config.model_type,
            "parameters": self.num_parameters(),  # type: ignore[attr-defined]
            "layers": layers,
        }

    def save_pretrained(self, save_directory: Any, is_main_process: bool = True, *args: Any, **kwargs: Any) -> None:
        """As in transformers, with the modelling code and the growth history beside the weights."""
        kwargs.setdefault("save_original_format", False)
        self.config.record(attention_sites(self))  # type: ignore[arg-type]
        self.config.auto_map = auto_map(type(self))
        if is_main_process:
            Path(save_directory).mkdir(parents=True, exist_ok=True)
            _write_companions(self, Path(save_directory))
        super().save_pretrained(save_directory, is_main_process, *args, **kwargs)  # type: ignore[misc]

    def _get_files_timestamps(self, working_dir: Any) -> dict[str, float]:
        """transformers uploads what is newer than these; the companions were written before it looked."""
        stamps = super()._get_files_timestamps(working_dir)  # type: ignore[misc]
        return {name: stamp for name, stamp in stamps.items() if name not in (*self.code_files, GROWTH_FILE)}

    @classmethod
    def from_pretrained(cls, pretrained_model_name_or_path: Any, *args: Any, **kwargs: Any) -> Any:
        """As in transformers, with the growth history read back."""
        history = read_history(pretrained_model_name_or_path, **kwargs)
        loaded = super().from_pretrained(pretrained_model_name_or_path, *args, **kwargs)  # type: ignore[misc]
        model = loaded[0] if isinstance(loaded, tuple) else loaded
        if history is not None:
            model.config.growth_history = history
        return loaded


def own_config(model: Any, config: Any) -> None:
    """Give a model and all that is in it one config that no other model shares: growth will write to it."""
    stock_or_growable = (type(model.config), type(config))
    for module in model.modules():
        if isinstance(getattr(module, "config", None), stock_or_growable):
            module.config = config
    if not hasattr(config, "growth_history"):
        config.growth_history = new_history(config)


def adopt(model: Any) -> None:
    """Turn a stock model whose config is already growable into a growable one, in place, and fit the sizes.

    Classes change, module objects do not: hooks that transformers or the user installed stay in force.
    """
    family = type(model)
    for module in model.modules():
        if attention_class := family.attention_class(module):
            module.__class__ = attention_class
            module.base_dims = module.stock_dims()
            module.set_dims(module.base_dims)
        elif type(module) in family.model_classes:
            set_model_class(module, family.model_classes[type(module)])
    sites = attention_sites(model)
    if model.config.hf_grow is None:
        model.config.record(sites)
    else:
        for site, dims in zip(sites, model.config.recorded(sites), strict=True):
            _resize(site, dims)


def resize(model: Any, record: dict) -> None:
    """Give a growable model the sizes of another's `hf_grow` record; what changes its shape is still to be loaded."""
    for site, dims in recorded_sizes(model, record):
        _resize(site, dims)
        for module in (site.attention, *(projection for projection, _ in site.projections())):
            module._is_hf_initialized = True
    model.config.record(attention_sites(model))


def size_record(sizes: Iterable[tuple[AttentionSite, AttentionDims]]) -> dict[str, list[dict]]:
    """Sizes of attention modules as `hf_grow` in config.json and growth files have them."""
    record: dict[str, list[dict]] = {}
    for site, dims in sorted(sizes, key=lambda pair: pair[0].layer):
        record.setdefault(RECORD_KEYS[site.attention_type], []).append(asdict(dims))
    return record


def recorded_sizes(model: Any, record: dict) -> list[tuple[AttentionSite, AttentionDims]]:
    """The attention modules of a model, each with its sizes in an `hf_grow` record that must fit it."""
    config = copy.copy(model.config)
    config.hf_grow = record
    sites = attention_sites(model)
    return list(zip(sites, config.recorded(sites), strict=True))


def projection_shapes(site: AttentionSite, dims: AttentionDims) -> Iterator[tuple[Any, tuple[int, int]]]:
    """Each projection and the shape (out, in) that its weight has with these sizes."""
    for projection, roles in site.projections():
        width = sum(dims.heads(role) * dims.size(role) for role in roles)
        rows, columns = weight_rows(projection).shape
        yield projection, (rows, width) if roles == ("output",) else (width, columns)


def _resize(site: AttentionSite, dims: AttentionDims) -> None:
    """Give the projections the shapes of `dims`, with weights that are still to be loaded or initialised."""
    for projection, shape in projection_shapes(site, dims):
        if shape == weight_rows(projection).shape:
            continue
        weight = projection.weight.new_empty(shape)
        bias = None if projection.bias is None else projection.bias.new_empty(shape[0])
        install(projection, new_parameters(projection, weight, bias, initialized=False))
        # transformers initialises a module once: ask it to do these again at their new size.
        projection._is_hf_initialized = site.attention._is_hf_initialized = False
    site.attention.set_dims(dims)


def set_model_class(model: Any, growable_class: type) -> None:
    """Change a model's class and what transformers keeps by class name: recordable outputs and loss."""
    model.__class__ = growable_class
    _CAN_RECORD_REGISTRY[str(growable_class)] = model._can_record_outputs
    if model.loss_type is None and growable_class.__name__.endswith("ForCausalLM"):
        model.loss_type = "ForCausalLM"


def auto_map(model_class: type[GrowableModel]) -> dict[str, str]:
    """Every auto class and the growable class it loads from the code beside the checkpoint."""
    module = model_class.__module__.rpartition(".")[2]
    names = {"AutoConfig": model_class.config_class.__name__}
    names |= {auto: cls.__name__ for cls in model_class.model_classes.values() for auto in cls.auto_classes}
    return {auto: f"{module}.{name}" for auto, name in names.items()}


def new_history(config: Any) -> dict:
    """The record of a model that was not grown yet."""
    name = config.name_or_path or None
    return {
        "format": GROWTH_FORMAT,
        # Where a folder lay on the machine that made the model is nobody's business.
        "base_model": Path(name).name if name and Path(name).is_dir() else name,
        "base_revision": getattr(config, "_commit_hash", None),
        "events": [],
    }


def hub_arguments(kwargs: dict[str, Any]) -> dict[str, Any]:
    """Those arguments of `from_pretrained` that say where files are."""
    names = ("cache_dir", "force_download", "local_files_only", "token", "revision", "subfolder")
    return {name: kwargs[name] for name in names if kwargs.get(name) is not None}


def read_history(name_or_path: Any, **kwargs: Any) -> dict | None:
    """The contents of growth.json in a folder or Hub repository, None where there is none."""
    if name_or_path is None:
        return None
    hub = hub_arguments(kwargs)
    file = cached_file(name_or_path, GROWTH_FILE, _raise_exceptions_for_missing_entries=False, **hub)
    if file is None:
        return None
    try:
        history = json.loads(Path(file).read_text(encoding="utf-8"))
        format_number = int(history["format"])
        if format_number > GROWTH_FORMAT:
            raise ValueError(f"its format {format_number} is newer than {GROWTH_FORMAT}: update hf-grow")
        if not all(isinstance(event["kind"], str) for event in history["events"]):
            raise TypeError("an event has no kind")
    except (ValueError, KeyError, TypeError) as error:
        raise ValueError(f"{GROWTH_FILE} of {name_or_path} cannot be read: {error}") from error
    return {"base_model": None, "base_revision": None, **history}


def _write_companions(model: Any, folder: Path) -> None:
    here = Path(__file__).parent
    for name in model.code_files:
        shutil.copyfile(here / name, folder / name)
    history = json.dumps(model.growth_history, indent=2) + "\n"
    (folder / GROWTH_FILE).write_text(history, encoding="utf-8")
