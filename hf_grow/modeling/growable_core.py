"""What all growable families share: dimensions, attention call, conversion, saving.

This file travels with every checkpoint, so it imports torch and transformers only.
"""

import json
import shutil
from collections.abc import Callable, Iterator
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import Any, ClassVar

import torch
import transformers
from torch import nn
from torch.nn import functional as F
from transformers import PreTrainedConfig
from transformers.modeling_utils import ALL_ATTENTION_FUNCTIONS
from transformers.pytorch_utils import Conv1D
from transformers.utils import cached_file
from transformers.utils.output_capturing import _CAN_RECORD_REGISTRY

GROWTH_FILE = "growth.json"
GROWTH_FORMAT = 1
STOCK_LOAD_REFUSED = (
    "this checkpoint was grown by hf-grow and the stock class would compute something else; "
    "load it with hf_grow.load_grown(path) or AutoModel….from_pretrained(path, trust_remote_code=True)"
)


@dataclass(frozen=True)
class AttentionDims:
    """The sizes of one attention module; `scaling` multiplies the scores and never follows from the sizes."""

    num_attention_heads: int
    num_key_value_heads: int
    qk_head_dim: int
    v_head_dim: int
    scaling: float

    def __post_init__(self) -> None:
        for name in ("num_attention_heads", "num_key_value_heads", "qk_head_dim", "v_head_dim"):
            size = getattr(self, name)
            if not isinstance(size, int) or isinstance(size, bool) or size < 1:
                raise ValueError(f"{name} must be a positive integer, not {size!r}.")
        if self.num_attention_heads % self.num_key_value_heads:
            raise ValueError(
                f"{self.num_attention_heads} query heads cannot share {self.num_key_value_heads} key heads evenly."
            )

    def heads(self, role: str) -> int:
        """How many heads the query, key, value or output projection has."""
        return self.num_attention_heads if role in ("query", "output") else self.num_key_value_heads

    def size(self, role: str) -> int:
        """The width of one head in the query, key, value or output projection."""
        return self.qk_head_dim if role in ("query", "key") else self.v_head_dim


@dataclass(frozen=True)
class Layout:
    """Where an attention module keeps its projections.

    `inputs` names each input projection and the roles fused in it, in order. Paths start at the attention
    module, or at its parent when they begin with a dot. With `per_head` a fused projection holds query, key and
    value of the first head, then of the second (GPT-NeoX); otherwise all queries come first (GPT-2).
    """

    inputs: dict[str, tuple[str, ...]]
    output: str
    per_head: bool = False


class GrowableAttention:
    """Mixin over a stock attention class: independent sizes, set by `set_dims` and read everywhere."""

    layout: ClassVar[Layout]
    is_cross: bool = False
    n_heads: int
    n_kv_heads: int
    query_key_dim: int
    value_dim: int
    scaling: float

    def stock_dims(self) -> AttentionDims:
        """The sizes the stock module was built with."""
        raise NotImplementedError

    def set_dims(self, dims: AttentionDims) -> None:
        """Take new sizes; the projections must be given the matching weights by the caller."""
        self.n_heads = dims.num_attention_heads
        self.n_kv_heads = dims.num_key_value_heads
        self.query_key_dim = dims.qk_head_dim
        self.value_dim = dims.v_head_dim
        self.scaling = dims.scaling

    @property
    def dims(self) -> AttentionDims:
        return AttentionDims(self.n_heads, self.n_kv_heads, self.query_key_dim, self.value_dim, self.scaling)

    @property
    def rotary_dim(self) -> int:
        """How many leading query/key columns of a head are rotated."""
        return 0


def attend(
    attention: Any,
    eager: Callable,
    query: torch.Tensor,
    key: torch.Tensor,
    value: torch.Tensor,
    attention_mask: Any,
    **kwargs: Any,
) -> tuple[torch.Tensor, torch.Tensor | None]:
    """Call transformers' attention interface; q, k, v are (batch, heads, tokens, width).

    The fast kernels want one width, so the narrower side is padded with zeros: exact, as the scale is explicit.
    """
    implementation = attention.config._attn_implementation
    interface = ALL_ATTENTION_FUNCTIONS.get_interface(implementation, eager)
    missing = query.shape[-1] - value.shape[-1]
    # One new token against a long cache: padding would copy the whole cache to save nothing.
    decoding_with_sdpa = implementation == "sdpa" and query.shape[2] == 1
    if missing == 0 or implementation == "eager" or decoding_with_sdpa:
        return interface(attention, query, key, value, attention_mask, **kwargs)
    if missing > 0:
        padded_value = F.pad(value, (0, missing))
        output, weights = interface(attention, query, key, padded_value, attention_mask, **kwargs)
        return output[..., : value.shape[-1]], weights
    query, key = F.pad(query, (0, -missing)), F.pad(key, (0, -missing))
    return interface(attention, query, key, value, attention_mask, **kwargs)


@dataclass(frozen=True)
class AttentionSite:
    """One attention module, its place in the model and where its projections are."""

    name: str
    attention: Any
    parent: nn.Module
    layout: Layout

    @property
    def layer(self) -> int:
        return self.attention.layer_idx

    @property
    def kind(self) -> str:
        return "cross" if self.attention.is_cross else "self"

    def projection(self, path: str) -> Any:
        """The projection module at a path of the layout."""
        root = self.parent if path.startswith(".") else self.attention
        return root.get_submodule(path.removeprefix("."))

    def projections(self) -> Iterator[tuple[Any, tuple[str, ...]]]:
        """Each projection with its roles, the output projection last."""
        for path, roles in self.layout.inputs.items():
            yield self.projection(path), roles
        yield self.projection(self.layout.output), ("output",)


def attention_sites(model: nn.Module) -> list[AttentionSite]:
    """All growable attention modules of a model, in the order of its modules."""
    return [
        AttentionSite(name, module, model.get_submodule(name.rpartition(".")[0]), module.layout)
        for name, module in model.named_modules()
        if isinstance(module, GrowableAttention)
    ]


def set_projection(
    projection: Any, weight: torch.Tensor, bias: torch.Tensor | None, *, initialized: bool = True
) -> None:
    """Put new weights of any size into a Linear or Conv1D; `weight` is (out, in) for both."""
    projection.weight = _like(projection.weight, weight.T if isinstance(projection, Conv1D) else weight, initialized)
    if bias is not None:
        projection.bias = _like(projection.bias, bias, initialized)
    outputs, inputs = weight.shape
    if isinstance(projection, Conv1D):
        projection.nf, projection.nx = outputs, inputs
    else:
        projection.out_features, projection.in_features = outputs, inputs


def _like(old: nn.Parameter, values: torch.Tensor, initialized: bool) -> nn.Parameter:
    """A parameter that replaces `old`: same dtype, device, training flag, attributes and hooks."""
    values = values.detach().to(device=old.device, dtype=old.dtype).contiguous()
    new = nn.Parameter(values, requires_grad=old.requires_grad)
    new.__dict__.update(old.__dict__)
    # The handles that users hold keep working, because they point at these very dictionaries.
    for hooks in ("_backward_hooks", "_post_accumulate_grad_hooks"):
        if getattr(old, hooks, None):
            setattr(new, hooks, getattr(old, hooks))
    if not initialized:
        new.__dict__.pop("_is_hf_initialized", None)
    return new


def _resize(site: AttentionSite, dims: AttentionDims) -> None:
    """Give the projections the shapes of `dims`, with weights that are still to be loaded or initialised."""
    for projection, roles in site.projections():
        width = sum(dims.heads(role) * dims.size(role) for role in roles)
        rows, columns = weight_rows(projection).shape
        shape = (rows, width) if roles == ("output",) else (width, columns)
        if shape == (rows, columns):
            continue
        weight = projection.weight.new_empty(shape)
        bias = None if projection.bias is None else projection.bias.new_empty(shape[0])
        set_projection(projection, weight, bias, initialized=False)
        # transformers initialises a module once: ask it to do these again at their new size.
        projection._is_hf_initialized = site.attention._is_hf_initialized = False
    site.attention.set_dims(dims)


def weight_rows(projection: Any) -> torch.Tensor:
    """The weight as (out, in), for Linear and Conv1D alike."""
    return projection.weight.T if isinstance(projection, Conv1D) else projection.weight


class GrowableConfig:
    """Mixin over a stock config: `hf_grow` records the sizes of every attention module."""

    hf_grow: dict | None

    def record(self, sites: list[AttentionSite]) -> None:
        """Write the sizes of all attention modules into `hf_grow`."""
        layers: dict[str, list[dict]] = {"layers": [], "cross_layers": []}
        for site in sorted(sites, key=lambda site: site.layer):
            layers["cross_layers" if site.kind == "cross" else "layers"].append(asdict(site.attention.dims))
        # A stock config class that reads this file finds its own model_type here, and stops at the next line.
        stock_type = type(self).model_type.removeprefix("growable_")  # type: ignore[attr-defined]
        self.hf_grow = {"model_type": stock_type, "vocab_size": STOCK_LOAD_REFUSED}
        self.hf_grow |= {name: dims for name, dims in layers.items() if dims}
        # transformers then leaves static caches to be sized by the first keys and values they get.
        self.qk_head_dim = max(site.attention.query_key_dim for site in sites)

    def dims(self, site: AttentionSite) -> AttentionDims:
        """The recorded sizes of one attention module."""
        key = "cross_layers" if site.kind == "cross" else "layers"
        layers = (self.hf_grow or {}).get(key, [])
        if site.layer >= len(layers):
            raise ValueError(f"config.hf_grow['{key}'] has {len(layers)} entries and none for {site.name}.")
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
    growth_history: dict

    def __init_subclass__(cls, **kwargs: Any) -> None:
        super().__init_subclass__(**kwargs)
        if GrowableModel in cls.__bases__:
            cls.model_classes = {}
        elif "auto_classes" in cls.__dict__:
            cls.model_classes[cls.__bases__[1]] = cls
            for name in cls.auto_classes:
                getattr(transformers, name).register(cls.config_class, cls, exist_ok=True)

    @classmethod
    def attention_class(cls, module: nn.Module) -> Any:
        """The growable class of a stock attention module, None for any other module."""
        return cls.attention_classes.get(type(module))

    def post_init(self) -> None:
        """Become growable before transformers initialises or loads the weights."""
        adopt(self)
        self.growth_history = new_history(self.config)
        super().post_init()  # type: ignore[misc]

    def growth_summary(self) -> dict:
        """Sizes and parameters of every attention module, and what was grown so far; ready for JSON."""
        layers = [
            {
                "name": site.name,
                "layer": site.layer,
                "kind": site.kind,
                "n_heads": site.attention.n_heads,
                "n_kv_heads": site.attention.n_kv_heads,
                "query_key_dim": site.attention.query_key_dim,
                "value_dim": site.attention.value_dim,
                "scaling": site.attention.scaling,
                "parameters": sum(p.numel() for module, _ in site.projections() for p in module.parameters()),
            }
            for site in attention_sites(self)  # type: ignore[arg-type]
        ]
        return {
            "model_type": self.config.model_type,
            "parameters": self.num_parameters(),  # type: ignore[attr-defined]
            "layers": layers,
            **self.growth_history,
        }

    def save_pretrained(self, save_directory: Any, is_main_process: bool = True, **kwargs: Any) -> None:
        """As in transformers, with the modelling code and the growth history beside the weights."""
        kwargs.setdefault("save_original_format", False)
        self.config.record(attention_sites(self))  # type: ignore[arg-type]
        self.config.auto_map = auto_map(type(self))
        if is_main_process:
            Path(save_directory).mkdir(parents=True, exist_ok=True)
            _write_companions(self, Path(save_directory))
        super().save_pretrained(save_directory, is_main_process=is_main_process, **kwargs)  # type: ignore[misc]

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
            model.growth_history = history
        return loaded


def adopt(model: Any) -> None:
    """Turn a stock model whose config is already growable into a growable one, in place, and fit the sizes.

    Classes change, module objects do not: hooks that transformers or the user installed stay in force.
    """
    family = type(model)
    for module in model.modules():
        if attention_class := family.attention_class(module):
            module.__class__ = attention_class
            module.set_dims(module.stock_dims())
        elif type(module) in family.model_classes:
            set_model_class(module, family.model_classes[type(module)])
    sites = attention_sites(model)
    if model.config.hf_grow is None:
        model.config.record(sites)
    else:
        planned = [(site, model.config.dims(site)) for site in sites]
        for site, dims in planned:
            _resize(site, dims)


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


def read_history(name_or_path: Any, **kwargs: Any) -> dict | None:
    """The contents of growth.json in a folder or Hub repository, None where there is none."""
    if name_or_path is None:
        return None
    names = ("cache_dir", "force_download", "local_files_only", "token", "revision", "subfolder")
    hub = {name: kwargs[name] for name in names if kwargs.get(name) is not None}
    file = cached_file(name_or_path, GROWTH_FILE, _raise_exceptions_for_missing_entries=False, **hub)
    if file is None:
        return None
    try:
        history = json.loads(Path(file).read_text(encoding="utf-8"))
        format_number = int(history["format"])
    except (ValueError, KeyError, TypeError) as error:
        raise ValueError(f"{GROWTH_FILE} of {name_or_path} cannot be read: {error}") from error
    if format_number > GROWTH_FORMAT:
        raise ValueError(
            f"{GROWTH_FILE} of {name_or_path} has format {format_number}, newer than {GROWTH_FORMAT}: update hf-grow."
        )
    return history


def _write_companions(model: Any, folder: Path) -> None:
    here = Path(__file__).parent
    for name in model.code_files:
        shutil.copyfile(here / name, folder / name)
    history = json.dumps(model.growth_history, indent=2) + "\n"
    (folder / GROWTH_FILE).write_text(history, encoding="utf-8")
