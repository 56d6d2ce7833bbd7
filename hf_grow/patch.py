"""`make_growable`: a stock transformers model becomes growable, in place, with the same outputs."""

import copy
import logging
from types import MethodType
from typing import Any, TypeVar

import torch
from torch import nn
from transformers import PreTrainedModel
from transformers.pytorch_utils import Conv1D

from hf_grow.errors import HfGrowError
from hf_grow.families import family_of
from hf_grow.modeling.growable_core import (
    AttentionSite,
    GrowableModel,
    adopt,
    attention_sites,
    new_history,
    set_model_class,
)

logger = logging.getLogger("hf_grow")

WIDENABLE_DTYPES = (torch.float16, torch.bfloat16, torch.float32, torch.float64)
Model = TypeVar("Model", bound=Any)


def make_growable(model: Model) -> Model:
    """Make every attention module of a transformers model growable and return the same model.

    Logits, state-dict keys, hooks, dtype, device and training mode stay as they are; the class and the config
    become the growable ones, so that `save_pretrained` records what is grown later.
    """
    if isinstance(model, GrowableModel):
        logger.warning("This %s is growable already; nothing was changed.", type(model).__name__)
        return model  # type: ignore[return-value]
    if not isinstance(model, PreTrainedModel):
        raise HfGrowError(
            f"make_growable takes a transformers PreTrainedModel, not {type(model).__name__}. "
            "Give it the model inside a wrapper, before PEFT, torch.compile or DDP."
        )
    family = family_of(model.config.model_type)
    if model.config.model_type == family.config_class.model_type:
        return _adopt_remote_code(model, family)  # type: ignore[return-value]
    growable_class = family.model_classes.get(type(model))
    if growable_class is None:
        known = ", ".join(sorted(cls.__name__ for cls in family.model_classes))
        raise HfGrowError(
            f"{type(model).__name__} is not a transformers class for '{model.config.model_type}' ({known}). "
            f"Make the model inside it growable: make_growable(model.{model.base_model_prefix})."
        )
    _check_stock_attention(model, family)
    _change_config(model, family)
    set_model_class(model, growable_class)
    adopt(model)
    _rebind_wrapped_forwards(model)
    model.growth_history = new_history(model.config)
    return model  # type: ignore[return-value]


def check_widenable(name: str, projection: Any) -> None:
    """Only plain float projections can take new columns."""
    weight = getattr(projection, "weight", None)
    plain = type(projection) in (nn.Linear, Conv1D) and type(weight) is nn.Parameter
    if not plain or weight.dtype not in WIDENABLE_DTYPES:
        raise HfGrowError(
            f"{name} is a {type(projection).__name__} with {_describe(weight)} and cannot be widened. "
            "Load the model without quantisation, or merge and unload its adapters first."
        )


def check_site(site: AttentionSite) -> None:
    """All projections of an attention module can take new columns."""
    for projection, roles in site.projections():
        check_widenable(f"The {'/'.join(roles)} projection of {site.name}", projection)


def _describe(weight: Any) -> str:
    if weight is None:
        return "no weight"
    return f"{type(weight).__name__} weights of {getattr(weight, 'dtype', 'unknown dtype')}"


def _check_stock_attention(model: PreTrainedModel, family: type[GrowableModel]) -> None:
    found = False
    for name, module in model.named_modules():
        growable_class = family.attention_classes.get(type(module))
        if growable_class is None:
            continue
        found = True
        wrapped = module.__dict__.get("_old_forward", module.__dict__.get("forward"))
        if wrapped is not None and getattr(wrapped, "__func__", None) is not type(module).forward:
            raise HfGrowError(
                f"The forward of {name} was replaced by hand, so it would ignore growth. Make the model growable first."
            )
        _check_projections(model, name, module, growable_class)
    if not found:
        raise HfGrowError(f"{type(model).__name__} has no stock attention module to make growable.")


def _check_projections(model: nn.Module, name: str, module: nn.Module, growable_class: type) -> None:
    parent = model.get_submodule(name.rpartition(".")[0])
    # The layout may depend on the instance, so ask a bare object of the growable class that shares its attributes.
    view = growable_class.__new__(growable_class)
    view.__dict__ = module.__dict__
    check_site(AttentionSite(name, view, parent))


def _change_config(model: PreTrainedModel, family: type[GrowableModel]) -> None:
    """Give the model a growable config of its own: the stock object may be shared with other models."""
    stock = model.config
    config = copy.deepcopy(stock)
    config.__class__ = family.config_class
    config.hf_grow = None
    for module in model.modules():
        if getattr(module, "config", None) is stock:
            module.config = config


def _rebind_wrapped_forwards(model: nn.Module) -> None:
    """accelerate's hooks keep the bound forward they wrapped; let them call the growable one."""
    for site in attention_sites(model):
        for name in ("_old_forward", "forward"):
            bound = site.attention.__dict__.get(name)
            if isinstance(bound, MethodType):
                site.attention.__dict__[name] = MethodType(type(site.attention).forward, site.attention)


def _adopt_remote_code(model: Any, family: type[GrowableModel]) -> Any:
    """A model loaded with trust_remote_code has classes of the same names from the checkpoint's own copy of the code."""
    local = [*family.model_classes.values(), *family.attention_classes.values(), family.config_class]
    by_name = {cls.__name__: cls for cls in local}
    for module in [model, *model.modules()]:
        if type(module).__name__ in by_name:
            module.__class__ = by_name[type(module).__name__]
        if isinstance(module, GrowableModel):
            set_model_class(module, type(module))
    model.config.__class__ = family.config_class
    return model
