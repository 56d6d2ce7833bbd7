"""Growable models and configs: conversion in place, sizes as recorded, saving with code and history.

This file travels with every checkpoint, so it imports torch and transformers only.
"""

import copy
import json
import shutil
from collections.abc import Iterable, Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any, ClassVar

import torch
import transformers
from torch import nn
from transformers import PreTrainedConfig
from transformers import initialization as init
from transformers.models.auto.modeling_auto import MODEL_FOR_CAUSAL_LM_MAPPING_NAMES
from transformers.utils import cached_file
from transformers.utils.output_capturing import _CAN_RECORD_REGISTRY

from .attached_growth import SCALE, AttachedGrowth, activate, attach_empty, attached_shapes, detach
from .growable_attention import (
    AttentionDims,
    AttentionSite,
    attention_sites,
    install,
    layer_entry,
    new_parameters,
    projection_size,
)
from .size_record import entries, present_record, recorded_growths, recorded_sizes

# What travels with the checkpoints of every family.
COMMON_FILES = ("attached_growth.py", "growable_attention.py", "growable_model.py", "size_record.py")
GROWTH_FILE = "growth.json"
# The newest that can be read: with attached growth, or a learnable scale. All else is written as 1.
GROWTH_FORMAT = 2
STOCK_LOAD_REFUSED = (
    "this checkpoint was grown by hf-grow and the stock class would compute something else; "
    "load it with hf_grow.load_grown(path) or AutoModel….from_pretrained(path, trust_remote_code=True)"
)


class GrowableConfig:
    """Mixin over a stock config: `hf_grow` records the sizes of every attention module.

    growth_history  base model and growth events, as saved in growth.json, of what the projections hold
    growths         the same for each attached growth, by its name
    """

    hf_grow: dict | None
    growth_history: dict
    growths: dict[str, dict]

    def to_dict(self) -> dict[str, Any]:
        """As in transformers, without the histories, which have a file of their own."""
        content = super().to_dict()  # type: ignore[misc]
        for name in ("growth_history", "growths"):
            content.pop(name, None)
        return content

    def record(self, sites: list[AttentionSite]) -> None:
        """Write the sizes of all attention modules into `hf_grow`."""
        # A stock config class that reads this file finds its own model_type here, and stops at the next line.
        stock_type = type(self).model_type.removeprefix("growable_")  # type: ignore[attr-defined]
        self.hf_grow = {"model_type": stock_type, "vocab_size": STOCK_LOAD_REFUSED}
        self.hf_grow |= present_record(sites)
        # transformers then leaves static caches to be sized by the first keys and values they get.
        self.qk_head_dim = max(site.attention.query_key_dim for site in sites)


class GrowableModel:
    """Mixin over a stock model class. A direct subclass is a family; its subclasses are the task heads."""

    config_class: ClassVar[type[PreTrainedConfig]]
    stock_config_class: ClassVar[type[PreTrainedConfig]]
    attention_classes: ClassVar[dict[type, type]]
    # What holds the output projection where the attention module itself does not.
    output_classes: ClassVar[dict[type, type]] = {}
    model_classes: ClassVar[dict[type, type["GrowableModel"]]]
    auto_classes: ClassVar[tuple[str, ...]] = ()
    code_files: ClassVar[tuple[str, ...]]
    # The few weights that learn beside a base in half precision would lose small steps in it.
    _keep_in_fp32_modules_strict: set[str] | None = {"grown", "score_scale"}
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

    def _init_weights(self, module: nn.Module) -> None:
        """As in transformers; of what it does not know, growth starts so that it adds nothing."""
        super()._init_weights(module)  # type: ignore[misc]
        if isinstance(module, AttachedGrowth):
            module.reset_parameters()
        elif getattr(module, "score_scale", None) is not None:
            init.zeros_(module.score_scale)

    @property
    def is_quantized(self) -> bool:
        """As in transformers, which trains no model of quantised weights alone: attached growth is what it asks for."""
        return self.__dict__.get("is_quantized", False) and self.active_growth is None

    @is_quantized.setter
    def is_quantized(self, quantized: bool) -> None:
        self.__dict__["is_quantized"] = quantized

    @property
    def growth_history(self) -> dict:
        """Base model and growth events, as saved in growth.json: of the attached growth that is active, if one is."""
        return self.config.growths.get(self.active_growth, self.config.growth_history)

    @property
    def active_growth(self) -> str | None:
        """The name of the attached growth that the model computes with."""
        return next((site.attention.active_growth for site in attention_sites(self)), None)  # type: ignore[arg-type]

    def set_growth(self, name: str | None) -> None:
        """Compute with the attached growth of this name, or with none, which gives the base's outputs to the bit."""
        sites = attention_sites(self)  # type: ignore[arg-type]
        if name is not None and (not isinstance(name, str) or name not in self.config.growths):
            known = ", ".join(self.config.growths) or "none"
            raise ValueError(f"There is no attached growth of the name {name!r}; attached are: {known}.")
        if name is None and not self.config.growths and any(a.own_dims != a.base_dims for a in _attentions(sites)):
            raise ValueError(
                "The growth of this model is merged into its weights and cannot be switched off: call "
                "hf_grow.attach_growth(model) first."
            )
        for attention in _attentions(sites):
            activate(attention, name)
        self.config.record(sites)

    @contextmanager
    def growth_disabled(self) -> Iterator[None]:
        """Inside, the model computes what its base does, to the bit."""
        active = self.active_growth
        self.set_growth(None)
        try:
            yield
        finally:
            self.set_growth(active)

    def growth_summary(self) -> dict:
        """Sizes and parameters of every attention module, and what was grown so far; ready for JSON."""
        layers = [
            layer_entry(site.name, site.layer, site.attention_type, site.attention.dims)
            | {"parameters": _parameters(site)}
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
        let_gradients_pass(model)
        if history is not None:
            take_history(model.config, history)
        return loaded


def let_gradients_pass(model: nn.Module) -> None:
    """Keep bitsandbytes from packing 4-bit weights for inference on some CPUs, through which no gradient passes."""
    modules: Iterable[Any] = model.modules()
    for module in modules:
        if getattr(module, "support_avx512bf16_for_cpu", False):
            if getattr(module.weight.quant_state, "packing_format_for_cpu", False):
                # Writing its state unpacks a module.
                module.state_dict()
            module.support_avx512bf16_for_cpu = False


def own_config(model: Any, config: Any) -> None:
    """Give a model and all that is in it one config that no other model shares: growth will write to it."""
    stock_or_growable = (type(model.config), type(config))
    for module in model.modules():
        if isinstance(getattr(module, "config", None), stock_or_growable):
            module.config = config
    if not hasattr(config, "growth_history"):
        config.growth_history = new_history(config)
    if not hasattr(config, "growths"):
        config.growths = {}


def adopt(model: Any) -> None:
    """Turn a stock model whose config is already growable into a growable one, in place, and fit the sizes.

    Classes change, module objects do not: hooks that transformers or the user installed stay in force.
    """
    family = type(model)
    for module in model.modules():
        if attention_class := family.attention_class(module):
            module.__class__ = attention_class
            module.register_parameter("score_scale", None)
            module.base_dims = module.stock_dims()
            module.set_dims(module.base_dims)
        elif type(module) in family.output_classes:
            module.__class__ = family.output_classes[type(module)]
        elif type(module) in family.model_classes:
            set_model_class(module, family.model_classes[type(module)])
    if model.config.hf_grow is None:
        model.config.record(attention_sites(model))
    else:
        _fit(model, model.config.hf_grow)


def resize(model: Any, record: dict) -> None:
    """Give a growable model the sizes of another's `hf_grow` record; what changes its shape is still to be loaded."""
    _fit(model, record)
    for site in attention_sites(model):
        for module in (site.attention, *(projection for projection, _ in site.projections())):
            module._is_hf_initialized = True
    model.config.record(attention_sites(model))


def _fit(model: Any, record: dict) -> None:
    """Sizes of projections, attached growth and learnable scales as a record has them, nothing else."""
    own_sizes, attached = recorded_sizes(model, record), recorded_growths(model, record)
    scales = entries(record.get("scales"), [site for site, _ in own_sizes])
    for (site, dims), scale in zip(own_sizes, scales, strict=True):
        _resize(site, dims)
        _set_scale(site.attention, scale or 0)
        for name in [name for name in site.attention.attached if name not in attached]:
            detach(site.attention, name)
    for name, sizes in attached.items():
        for site, growth, scale in sizes:
            _fit_growth(site, name, growth, scale)
    for site, _ in own_sizes:
        activate(site.attention, record.get("active"))
    model.config.growths = {name: model.config.growths.get(name, model.config.growth_history) for name in attached}


def _fit_growth(site: AttentionSite, name: str, dims: AttentionDims, scale: int) -> None:
    """Attached growth of these sizes, if the module has not that already; none where there is nothing to add."""
    present = site.attention.attached
    shapes = attached_shapes(site, site.attention.own_dims, dims) | ({SCALE: (scale, 1)} if scale else {})
    if name in present and shapes == {key: tuple(weight.shape) for key, weight in present[name].named_parameters()}:
        return
    detach(site.attention, name)
    if shapes:
        attach_empty(site, name, dims, scale)


def _set_scale(attention: Any, size: int) -> None:
    present = attention.score_scale
    if size != (0 if present is None else present.numel()):
        device = next(attention.parameters()).device
        attention.score_scale = nn.Parameter(torch.empty(size, 1, device=device)) if size else None
        attention._is_hf_initialized = False


def _attentions(sites: list[AttentionSite]) -> list[Any]:
    return [site.attention for site in sites]


def _parameters(site: AttentionSite) -> int:
    """How many numbers an attention module computes with."""
    parts = [projection for projection, _ in site.projections()] + ([] if site.growth is None else [site.growth])
    return sum(parameter.numel() for part in parts for parameter in part.parameters())


def projection_shapes(site: AttentionSite, dims: AttentionDims) -> Iterator[tuple[Any, tuple[int, int]]]:
    """Each projection and the shape (out, in) that its weight has with these sizes."""
    for projection, roles in site.projections():
        width = sum(dims.heads(role) * dims.size(role) for role in roles)
        rows, columns = projection_size(projection)
        yield projection, (rows, width) if roles == ("output",) else (width, columns)


def _resize(site: AttentionSite, dims: AttentionDims) -> None:
    """Give the projections the shapes of `dims`, with weights that are still to be loaded or initialised."""
    for projection, shape in projection_shapes(site, dims):
        if shape == projection_size(projection):
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
        "format": 1,
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


def take_history(config: Any, history: dict) -> None:
    """What `read_history` gave, into the config of the model it belongs to."""
    config.growth_history = {name: value for name, value in history.items() if name != "growths"} | {"format": 1}
    config.growths |= {name: value for name, value in history.get("growths", {}).items() if name in config.growths}


def _write_companions(model: Any, folder: Path) -> None:
    here = Path(__file__).parent
    for name in model.code_files:
        shutil.copyfile(here / name, folder / name)
    history, record = model.config.growth_history, model.config.hf_grow
    if "attached" in record or "scales" in record:
        # hf-grow 0.1 would leave out what it does not know; it refuses this number.
        history = history | {"format": GROWTH_FORMAT, "growths": model.config.growths}
    (folder / GROWTH_FILE).write_text(json.dumps(history, indent=2) + "\n", encoding="utf-8")
