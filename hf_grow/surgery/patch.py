"""`make_growable`: a stock transformers model becomes growable, in place, with the same outputs."""

import copy
import logging
import sys
from dataclasses import asdict
from types import MethodType
from typing import Any, TypeVar

from peft import PeftModel
from torch import nn
from transformers import PreTrainedModel
from transformers.pytorch_utils import Conv1D

from hf_grow.errors import HfGrowError
from hf_grow.modeling.attached_growth import AttachedGrowth
from hf_grow.modeling.growable_attention import AttentionDims, AttentionSite, attention_sites
from hf_grow.modeling.growable_model import GrowableModel, adopt, let_gradients_pass, own_config, set_model_class
from hf_grow.surgery.base import without_adapters
from hf_grow.surgery.families import family_of
from hf_grow.surgery.quantized import is_plain

logger = logging.getLogger("hf_grow")

Model = TypeVar("Model", bound=Any)


def make_growable(model: Model) -> Model:
    """Make every attention module of a transformers model growable and return the same model.

    Logits, state-dict keys, hooks, dtype, device and training mode stay as they are; the class and the config
    become the growable ones, so that `save_pretrained` records what is grown later. Quantised weights stay so, and a
    model that PEFT has wrapped stays wrapped.
    """
    if isinstance(model, PeftModel):
        make_growable(without_adapters(model))
        return model
    if isinstance(model, GrowableModel):
        logger.warning("This %s is growable already; nothing was changed.", type(model).__name__)
        return model
    if not isinstance(model, PreTrainedModel):
        raise HfGrowError(
            f"make_growable takes a transformers PreTrainedModel, not {type(model).__name__}. "
            "Give it the model inside a wrapper, before torch.compile or DDP."
        )
    family = family_of(model.config.model_type)
    if model.config.model_type == family.config_class.model_type:
        return _adopt_remote_code(model, family)
    growable_class = family.model_classes.get(type(model))
    if growable_class is None:
        known = ", ".join(sorted(cls.__name__ for cls in family.model_classes))
        raise HfGrowError(
            f"{type(model).__name__} is not one of transformers' own classes for '{model.config.model_type}' "
            f"({known}), so its checkpoints could not be loaded again. Load the weights with one of these."
        )
    _check_stock_attention(model, family)
    _change_config(model, family)
    set_model_class(model, growable_class)
    adopt(model)
    _rebind_wrapped_forwards(model)
    let_gradients_pass(model)
    return model


def require_growable(model: Any) -> None:
    """Refuse a model that was not made growable."""
    if not isinstance(model, GrowableModel):
        raise HfGrowError(f"{type(model).__name__} is not growable: call hf_grow.make_growable(model) first.")


def growable_inside(model: Any) -> Any:
    """The growable model itself, also where PEFT has wrapped it."""
    inside = without_adapters(model)
    require_growable(inside)
    return inside


def growable_sites(model: PreTrainedModel) -> list[AttentionSite]:
    """The attention modules of a growable model, checked to have scores that can do something."""
    require_growable(model)
    sites = attention_sites(model)
    for site in sites:
        if site.attention.scaling == 0:
            raise HfGrowError(f"The softmax scale of {site.name} is 0, so its scores can do nothing.")
    return sites


def check_site(site: AttentionSite) -> None:
    """All projections of an attention module can take new columns themselves."""
    for path, roles in (*site.layout.inputs.items(), (site.layout.output, ("output",))):
        projection = site.projection(path)
        if not is_plain(projection):
            weight = getattr(projection, "weight", None)
            raise HfGrowError(
                f"The {'/'.join(roles)} projection of {site.name} is a {type(projection).__name__} with "
                f"{_describe(weight)} and cannot be widened. Attach growth beside it, or load the model without "
                "quantisation, or merge and unload its adapters first."
            )


def is_widenable(model: PreTrainedModel) -> bool:
    """Whether all projections of attention can take new columns themselves, so that growth need not stay beside."""
    paths = ((site, path) for site in attention_sites(model) for path in (*site.layout.inputs, site.layout.output))
    return all(is_plain(site.projection(path)) for site, path in paths)


def _check_projection(name: str, projection: Any, roles: tuple[str, ...]) -> None:
    """Only linear projections, plain or quantised, are understood."""
    weight = getattr(projection, "weight", None)
    packed = isinstance(projection, (nn.Linear, Conv1D)) and type(weight) is not nn.Parameter
    if not is_plain(projection) and not packed:
        kind = f"{type(projection).__module__}.{type(projection).__name__}"
        raise HfGrowError(
            f"The {'/'.join(roles)} projection of {name} is a {kind} with {_describe(weight)}, beside which nothing "
            "can grow: load the model without quantisation, or with one that transformers knows."
        )


def _describe(weight: Any) -> str:
    if weight is None:
        return "no weight"
    return f"{type(weight).__name__} weights of {getattr(weight, 'dtype', 'unknown dtype')}"


def _check_stock_attention(model: PreTrainedModel, family: type[GrowableModel]) -> None:
    modules = [(name, module) for name, module in model.named_modules() if family.attention_class(module)]
    if not modules:
        raise HfGrowError(f"{type(model).__name__} has no stock attention module to make growable.")
    for name, module in modules:
        parent = model.get_submodule(name.rpartition(".")[0])
        site = AttentionSite(name, module, parent, family.attention_class(module).layout)
        for projection, roles in site.projections():
            _check_projection(name, projection, roles)
        wrapped = module.__dict__.get("_old_forward", module.__dict__.get("forward"))
        if wrapped is not None and getattr(wrapped, "__func__", None) is not type(module).forward:
            raise HfGrowError(
                f"The forward of {name} was replaced by hand, so it would ignore growth. Make the model growable first."
            )


def _change_config(model: PreTrainedModel, family: type[GrowableModel]) -> None:
    """Give the model a growable config of its own: the stock object may be shared with other models."""
    config = copy.deepcopy(model.config)
    config.__class__ = family.config_class
    # from_pretrained leaves the stock type on the object, in front of the class's own.
    config.__dict__.pop("model_type", None)
    config.hf_grow = None
    own_config(model, config)


def _rebind_wrapped_forwards(model: nn.Module) -> None:
    """accelerate's hooks keep the bound forward they wrapped; let them call the growable one."""
    for site in attention_sites(model):
        for name in ("_old_forward", "forward"):
            bound = site.attention.__dict__.get(name)
            if isinstance(bound, MethodType):
                site.attention.__dict__[name] = MethodType(type(site.attention).forward, site.attention)


def _adopt_remote_code(model: PreTrainedModel, family: type[GrowableModel]) -> Any:
    """A model loaded with trust_remote_code has classes of the same names, from the checkpoint's copy of the code."""
    local = {**vars(sys.modules[family.__module__]), AttachedGrowth.__name__: AttachedGrowth}
    for module in model.modules():
        if isinstance(local.get(type(module).__name__), type):
            module.__class__ = local[type(module).__name__]
        if isinstance(module, GrowableModel):
            set_model_class(module, type(module))
    for site in attention_sites(model):
        attention = site.attention
        attention.base_dims, own = (_local(dims) for dims in (attention.base_dims, attention._projection_dims))
        for growth in attention.attached.values():
            growth.own, growth.dims = _local(growth.own), _local(growth.dims)
        attention.set_dims(own)
    model.config.__class__ = family.config_class
    return model


def _local(dims: Any) -> AttentionDims:
    return AttentionDims(**asdict(dims))
