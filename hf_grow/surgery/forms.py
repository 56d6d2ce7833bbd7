"""Growth goes between its two forms: attached, in parameters beside the projections, and merged into these.

Outputs agree to rounding. Attached growth can be switched, trained alone and taken off; merged growth is one model with
what it grew on, for training all weights, for whole checkpoints and for speed.
"""

import copy
from typing import Any

import torch
from transformers import PreTrainedModel

from hf_grow.errors import HfGrowError
from hf_grow.files import first_line
from hf_grow.modeling.attached_growth import SCALE, AttachedGrowth, attach, detach
from hf_grow.modeling.growable_attention import ROLES, attention_sites
from hf_grow.surgery.base import Model, has_adapters, has_merged_growth
from hf_grow.surgery.blocks import (
    Blocks,
    divided,
    effective,
    leading,
    own_blocks,
    part_weights,
    query_factors,
    read_blocks,
)
from hf_grow.surgery.change import Change, new_weights
from hf_grow.surgery.patch import growable_inside, is_widenable
from hf_grow.surgery.structure import DEFAULT_NAME, check_name, check_whole

# How errors end that say why the base is not the leading part of a model's weights.
INSEPARABLE = "so the growth cannot be told from the base: use save_grown, which writes the whole model."


@torch.inference_mode(False)
@torch.no_grad()
def merge_growth(model: Model, *, dequantize: bool = False) -> Any:
    """Put the attached growth that is active into the projections, in place; returns the same model.

    Learnable scales, also those of a model whose growth is merged already, go into the query weights; then the base
    cannot be told from the growth any more. Quantised projections cannot take growth: with `dequantize` the whole model
    gets plain weights first.
    """
    target = growable_inside(model)
    name = target.active_growth
    sites = [site for site in attention_sites(target) if site.growth or site.attention.score_scale is not None]
    if name is None and (target.config.growths or not sites):
        raise HfGrowError("There is no attached growth that is active, so nothing is merged.")
    others = sorted(target.config.growths.keys() - {name})
    if others:
        raise HfGrowError(
            f"Growth that is attached beside {name!r} would lose its base: remove {', '.join(others)} first."
        )
    if has_adapters(target):
        raise HfGrowError("Adapters sit on the projections that would be widened: merge and unload them first.")
    if not is_widenable(target):
        _dequantize(target, dequantize)
    edits = [Change(site, effective(read_blocks(site), query_factors(site))).prepared() for site in sites]
    for site in attention_sites(target) if name is not None else ():
        detach(site.attention, name)
    for site, edit in zip(sites, edits, strict=True):
        edit.apply()
        site.attention.score_scale = None
    if name is not None:
        base, grown = target.config.growth_history, target.config.growths.pop(name)
        history = {**grown, "events": [*base["events"], *grown["events"]]}
        target.config.growth_history = history | {"base_hash": base.get("base_hash") or grown.get("base_hash")}
    target.config.record(attention_sites(target))
    return model


def merged_copy(model: PreTrainedModel) -> Any:
    """A model with its active growth merged and no other, which shares all its weights with the one that was given."""
    shared: dict[int, Any] = {id(tensor): tensor for tensor in (*model.parameters(), *model.buffers())}
    merged: Any = copy.deepcopy(model, shared)
    for name in merged.config.growths.keys() - {merged.active_growth}:
        for site in attention_sites(merged):
            detach(site.attention, name)
        del merged.config.growths[name]
    return merge_growth(merged)


@torch.inference_mode(False)
@torch.no_grad()
def attach_growth(model: Model, name: str = DEFAULT_NAME) -> Any:
    """Take merged growth out of the projections into parameters beside them, in place; returns the same model.

    What stays in the projections is their leading part as it is now, also where all weights were trained after growth.
    """
    target, name = growable_inside(model), check_name(name)
    if target.config.growths:
        raise HfGrowError(f"Growth is attached already: {', '.join(target.config.growths)}.")
    if not has_merged_growth(target):
        raise HfGrowError("No growth is merged into this model, so there is nothing to attach.")
    if has_adapters(target):
        raise HfGrowError(
            "Adapters sit on the projections that would be narrowed: merge and unload them, or call attach_growth "
            "before PEFT wraps the model."
        )
    check_divisible(target)
    ready = []
    for site in attention_sites(target):
        check_whole(site)
        blocks, base, dims = own_blocks(site), site.attention.base_dims, site.attention.own_dims
        if dims == base and site.attention.score_scale is None:
            continue
        weights = new_weights(part_weights(site, divided(blocks, base)))
        if site.attention.score_scale is not None:
            weights[SCALE] = site.attention.score_scale
        kept: Blocks = {role: leading(block, role, base).clone() for role, block in blocks.items()}
        change = Change(site, kept, kept=base, scaling=base.scaling)
        ready.append((site.attention, change.prepared(), AttachedGrowth(base, dims, weights)))
    history = target.config.growth_history
    for attention, edit, growth in ready:
        edit.apply()
        attention.score_scale = None
        attach(attention, name, growth)
    target.config.growth_history = {**history, "base_hash": None, "events": []}
    target.config.growths = {name: history}
    target.set_growth(name)
    return model


def check_divisible(model: PreTrainedModel) -> None:
    """Refuse a growable model whose base is not the leading part of its weights."""
    for site in attention_sites(model):
        now, base = site.attention.own_dims, site.attention.base_dims
        if any(now.heads(role) < base.heads(role) or now.size(role) < base.size(role) for role in ROLES):
            raise HfGrowError(f"Columns of the base were dropped in {site.name}, {INSEPARABLE}")
    for event in model.growth_history["events"]:
        strategy = event.get("config", {}).get("strategy", "append")
        if strategy != "append":
            raise HfGrowError(
                f"The model grew with strategy={strategy!r}, which changes the base's weights, {INSEPARABLE}"
            )


def _dequantize(model: Any, asked: bool) -> None:
    """Plain weights instead of quantised ones, where that is asked for and transformers can do it."""
    for site in attention_sites(model):
        check_whole(site)
    if not asked:
        raise HfGrowError(
            "The projections are quantised and cannot take growth: put the growth onto the plain base model with "
            "load_growth(…, check_base=False) and merge there, or ask for dequantize=True."
        )
    try:
        model.dequantize()
    except (NotImplementedError, RuntimeError, ValueError) as error:
        raise HfGrowError(
            f"transformers cannot dequantize this model ({first_line(error)}): put the growth onto the plain base "
            "model with load_growth(…, check_base=False) and merge there."
        ) from error
