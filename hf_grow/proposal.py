"""From the statistics of one layer to the growth of that layer by given amounts."""

from collections.abc import Mapping
from dataclasses import replace

import torch
from torch import Tensor

from hf_grow import linalg
from hf_grow.config import CollectConfig, GrowthConfig
from hf_grow.errors import HfGrowError
from hf_grow.growth import HeadGrowth, LayerGrowth, uniform_circuit
from hf_grow.statistics import AttentionStatistics


def propose(
    layer: AttentionStatistics, amount: Mapping[str, int], config: GrowthConfig, collected: CollectConfig
) -> LayerGrowth:
    """The growth of one layer by these amounts."""
    place, columns = layer.place, amount["columns"]
    growth = LayerGrowth(place, config.strategy, query_key_dim=place.query_key_dim + columns)
    if config.strategy != "append" or config.line_search == "full_rank":
        query, key = _whole_change(layer)
        growth = replace(growth, change_query=query, change_key=key)
    if config.strategy != "append":
        gradient = _score_gradient(layer, collected)
        return replace(growth, query_gram=layer.query_gram, key_gram=layer.key_gram, gradient=gradient)
    if columns > 0 and layer.columns is not None:
        query, key = layer.columns.first[..., :columns], layer.columns.second[..., :columns]
        growth = replace(growth, query=query, key=key)
    if (values := amount["value_columns"]) > 0 and layer.values is not None:
        growth = replace(growth, value=layer.values.first[..., :values], output=layer.values.second[:, :values])
    return replace(growth, heads=_best_heads(layer, amount["heads"], values, growth.query_key_dim))


def _whole_change(layer: AttentionStatistics) -> tuple[Tensor, Tensor]:
    """The whole wanted change as query and key columns: itself and the identity, or all that the sketch has."""
    if layer.change is None:
        if layer.columns is None:
            raise HfGrowError("The statistics know nothing of columns: collect with kinds=('columns',).")
        return layer.columns.first, layer.columns.second
    inputs = layer.place.inputs["key"]
    identity = torch.eye(inputs, dtype=layer.change.dtype, device=layer.change.device)
    return layer.change, identity.expand(layer.place.n_kv_heads, -1, -1)


def _score_gradient(layer: AttentionStatistics, collected: CollectConfig) -> Tensor:
    """T, or what the sketch knows of it."""
    if layer.sums is not None:
        return layer.sums[0].mean().gradient
    query, key = _whole_change(layer)
    grams = [linalg.ridged(gram, collected.ridge) for gram in (layer.query_gram, layer.key_gram)]
    return grams[0] @ query @ linalg.repeat_groups(key, query.shape[0]).mT @ grams[1]


def _best_heads(
    layer: AttentionStatistics, count: int, value_columns: int, query_key_dim: int
) -> tuple[HeadGrowth, ...]:
    """The new heads whose patterns promise most."""
    if count == 0 or layer.values is None:
        return ()
    return tuple(_head(layer, copy, value_columns, query_key_dim) for copy in layer.patterns(value_columns)[:count])


def _head(layer: AttentionStatistics, copy: int | None, skipped: int, query_key_dim: int) -> HeadGrowth:
    assert layer.values is not None and layer.uniform is not None
    place, scores = layer.place, layer.uniform_scores
    if copy is not None:
        group, taken = place.n_heads // place.n_kv_heads, slice(skipped, skipped + place.value_dim)
        output = layer.values.second[copy * group : (copy + 1) * group, taken]
        return HeadGrowth(copy, layer.values.first[copy : copy + 1, :, taken], output)
    head = HeadGrowth(None, *uniform_circuit(layer.uniform, place))
    width = query_key_dim - place.rotary_dim
    if scores is None or width == 0:
        return head
    return replace(head, query=scores.first[..., :width], key=scores.second[..., :width])


def slopes(layer: AttentionStatistics, growth: LayerGrowth, which: str) -> dict[str, float]:
    """First-order decrease for a step of one, by kind: of the "gains" or of the "held_out" ones."""
    found = {}
    values = growth.count("value_columns")
    if layer.columns is not None and growth.query is not None:
        found["columns"] = layer.columns.total(which, growth.count("columns"))
    if layer.values is not None and growth.value is not None:
        found["value_columns"] = layer.values.total(which, values)
    if growth.heads:
        found["heads"] = sum(layer.head_gain(head.copy, which, values) for head in growth.heads)
    return found
