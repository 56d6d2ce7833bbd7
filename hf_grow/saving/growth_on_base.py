"""Growth as an adapter: saved without its base, put onto it, and taken off again.

The files are those of `growth_file`.
"""

import copy
import os
from collections.abc import Callable, Iterable
from pathlib import Path
from typing import Any

import torch
from transformers import PreTrainedModel

from hf_grow.errors import HfGrowError
from hf_grow.files import check_out_folder, replacing
from hf_grow.modeling.attached_growth import attach, detach
from hf_grow.modeling.growable_attention import attention_sites
from hf_grow.modeling.growable_model import GrowableModel
from hf_grow.saving.growth_file import present_hash, read_growth, write_growth
from hf_grow.surgery.base import Model, attached_parameters, has_grown, without_adapters
from hf_grow.surgery.blocks import leading, own_blocks
from hf_grow.surgery.change import Change
from hf_grow.surgery.forms import INSEPARABLE, check_divisible
from hf_grow.surgery.optimizer_state import Added, carry_state, drop_parameters, plain_optimizer
from hf_grow.surgery.patch import growable_inside, make_growable
from hf_grow.surgery.structure import DEFAULT_NAME, check_name, check_whole


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
    grown = growable_inside(model)
    folder = check_out_folder(path, overwrite)
    check_base(grown)
    with replacing(folder) as aside:
        write_growth(grown, aside)
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
    if optimizer is not None:
        plain_optimizer(optimizer)
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
    carried = None
    if optimizer is not None:
        added = [Added(weight, None) for _, module in ready if module is not None for weight in module.parameters()]
        kin = [parameter for _, parameter in attached_parameters(target)]
        carried = carry_state(optimizer, [], added, present=target.parameters(), kin=kin)
    if name is None or not on_projections:
        _take_off(target, optimizer, merged=not on_projections)
    for attention, module in ready:
        if module is not None:
            attach(attention, name or DEFAULT_NAME, module)
    target.config.growths[name or DEFAULT_NAME] = growth.history
    target.set_growth(name or DEFAULT_NAME)
    if carried is not None:
        carried.apply(target.parameters())
    return model


@torch.inference_mode(False)
@torch.no_grad()
def remove_growth(model: Model, *, optimizer: torch.optim.Optimizer | None = None, name: str | None = None) -> Any:
    """Take growth off a model, in place, which leaves the base bit for bit; returns the same model.

    Of attached growth that of a name, or all; without any, growth that is merged into the projections, if these still
    hold the base's weights.
    """
    target = growable_inside(model)
    if name is not None:
        if not isinstance(name, str) or name not in target.config.growths:
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
    recorded = model.growth_history.get("base_hash")
    if recorded is None and (model.growth_history["events"] or has_grown(model)):
        raise HfGrowError(f"The history does not say what the base's weights were at the first growth, {INSEPARABLE}")
    if recorded is not None and recorded != present_hash(model):
        raise HfGrowError(
            "The base's weights are not those of the first growth any more (all weights were trained, an adapter was "
            f"merged, or the dtype changed), {INSEPARABLE}"
        )


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
        scales = (site.attention.score_scale for site in attention_sites(model))
        dropped |= {scale for scale in scales if scale is not None}
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
