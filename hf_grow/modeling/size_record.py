"""The sizes of all attention modules as `hf_grow` in config.json has them, written and read.

This file travels with every checkpoint, so it imports torch and transformers only.
"""

from collections.abc import Iterable
from dataclasses import asdict
from typing import Any

from torch import nn

from .growable_attention import AttentionDims, AttentionSite, attention_sites

# Where the sizes of each type of attention are in a record of sizes, layer by layer.
RECORD_KEYS = {"self": "layers", "cross": "cross_layers"}


def present_record(sites: list[AttentionSite]) -> dict[str, Any]:
    """The sizes of attention modules as they are: of the projections, of learnable scales, of each attached growth."""
    record: dict[str, Any] = size_record((site, site.attention.own_dims) for site in sites)
    if any(site.attention.score_scale is not None for site in sites):
        record["scales"] = by_layer((site, _numel(site.attention.score_scale)) for site in sites)
    names = dict.fromkeys(name for site in sites for name in site.attention.attached)
    if names:
        record["attached"] = {name: _growth_record(sites, name) for name in names}
        record["active"] = sites[0].attention.active_growth
    return record


def _growth_record(sites: list[AttentionSite], name: str) -> dict[str, Any]:
    growths = [(site, site.attention.attached.get(name)) for site in sites]
    sizes = size_record((site, site.attention.own_dims if growth is None else growth.dims) for site, growth in growths)
    return sizes | {"scales": by_layer((site, growth and _numel(growth.scale)) for site, growth in growths)}


def size_record(sizes: Iterable[tuple[AttentionSite, AttentionDims]]) -> dict[str, list[dict]]:
    """Sizes of attention modules as `hf_grow` in config.json and growth files have them."""
    return by_layer((site, asdict(dims)) for site, dims in sizes)


def by_layer(values: Iterable[tuple[AttentionSite, Any]]) -> dict[str, list]:
    """What is said of each attention module, by its type and in the order of layers."""
    record: dict[str, list] = {}
    for site, value in sorted(values, key=lambda pair: pair[0].layer):
        record.setdefault(RECORD_KEYS[site.attention_type], []).append(value)
    return record


def entries(record: dict[str, list] | None, sites: list[AttentionSite]) -> list[Any]:
    """The inverse of `by_layer`; nothing for all where there is no record."""
    if record is None:
        return [None] * len(sites)
    for attention_type, key in RECORD_KEYS.items():
        modules = sum(site.attention_type == attention_type for site in sites)
        count = len(record.get(key, []))
        if count != modules:
            raise ValueError(
                f"config.hf_grow['{key}'] has {count} entries for {modules} {attention_type}-attention modules."
            )
    return [record[RECORD_KEYS[site.attention_type]][site.layer] for site in sites]


def recorded_sizes(model: Any, record: dict) -> list[tuple[AttentionSite, AttentionDims]]:
    """The attention modules of a model, each with its sizes in an `hf_grow` record that must fit it."""
    sites = attention_sites(model)
    return [(site, _read_dims(site, entry)) for site, entry in zip(sites, entries(record, sites), strict=True)]


def recorded_growths(model: Any, record: dict) -> dict[str, list[tuple[AttentionSite, AttentionDims, int]]]:
    """Of each attached growth in a record: the attention modules, their sizes with it, and the size of its scale."""
    growths = {}
    for name, growth in record.get("attached", {}).items():
        scales = entries(growth.get("scales"), attention_sites(model))
        sizes = recorded_sizes(model, growth)
        growths[name] = [(site, dims, scale or 0) for (site, dims), scale in zip(sizes, scales, strict=True)]
    return growths


def _read_dims(site: AttentionSite, entry: dict) -> AttentionDims:
    try:
        dims = AttentionDims(**entry)
    except (TypeError, ValueError) as error:
        key = RECORD_KEYS[site.attention_type]
        raise ValueError(f"config.hf_grow['{key}'][{site.layer}] is not valid: {error}") from error
    if dims.qk_head_dim < site.attention.rotary_dim:
        raise ValueError(f"{site.name} rotates {site.attention.rotary_dim} columns but has {dims.qk_head_dim}.")
    return dims


def _numel(parameter: nn.Parameter | None) -> int:
    return 0 if parameter is None else parameter.numel()
