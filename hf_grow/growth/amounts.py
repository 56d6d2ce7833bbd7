"""How much of each kind a layer gets: as configs name it, aligned and within its room; what that makes and costs."""

from collections.abc import Mapping, Sequence
from dataclasses import replace
from typing import Any

import torch

from hf_grow.errors import HfGrowError
from hf_grow.growth.config import GrowthConfig
from hf_grow.growth.kinds import KINDS, Amounts
from hf_grow.modeling.growable_attention import AttentionDims
from hf_grow.surgery.place import Place


def with_alignment(config: GrowthConfig, device: torch.device) -> GrowthConfig:
    """The config with the alignment that the device wants, unless one is given."""
    # Half precision on CUDA wants multiples of eight.
    return replace(config, align=config.align or (8 if device.type == "cuda" else 1))


def check_amounts(places: Sequence[Place], config: GrowthConfig) -> list[Amounts]:
    """The amounts that a config names for each layer, refused where a layer is unknown or has no room."""
    for name in KINDS:
        _check_layers(getattr(config, name), name, places)
    return [
        fitting_amounts(place, {name: _amount(getattr(config, name), place) for name in KINDS}, config.align or 1)
        for place in places
    ]


def fitting_amounts(place: Place, amounts: Amounts, align: int) -> Amounts:
    """Amounts rounded up to aligned widths; refused where there is no room for them."""
    aligned = {name: kind.aligned(place, amounts[name], align) for name, kind in KINDS.items()}
    for name, kind in KINDS.items():
        kind.check_room(place, aligned[name])
    return aligned


def grown_dims(place: Place, amounts: Mapping[str, int]) -> AttentionDims:
    """The sizes of a layer with so much more."""
    dims = place.dims
    for name, amount in amounts.items():
        dims = KINDS[name].grown(dims, amount)
    return dims


def parameters_added(place: Place, amounts: Mapping[str, int]) -> int:
    """How many parameters a layer gets; heads are as wide as it is afterwards."""
    dims = grown_dims(place, amounts)
    return sum(amount * KINDS[name].cost(place, dims) for name, amount in amounts.items())


def _amount(amount: Any, place: Place) -> int:
    if not isinstance(amount, Mapping):
        return amount or 0
    named = amount.get(place.name)
    if named is None and place.attention_type == "self":
        named = amount.get(place.layer)
    return named or 0


def _check_layers(amount: Any, name: str, places: Sequence[Place]) -> None:
    if not isinstance(amount, Mapping):
        return
    numbers = {place.layer for place in places if place.attention_type == "self"}
    known = {place.name for place in places} | numbers
    if unknown := [key for key in amount if key not in known]:
        raise HfGrowError(f"{name} names layer {unknown[0]!r}; the model has layers {min(numbers)} to {max(numbers)}.")
