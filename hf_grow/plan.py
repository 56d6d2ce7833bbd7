"""`plan_growth`: from statistics to what will be added where, as a value to print, save, try and insert."""

import os
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, replace
from typing import Any

from hf_grow import linalg
from hf_grow.config import KINDS, GrowthConfig, as_dict, from_dict, require
from hf_grow.errors import HfGrowError, NothingToGain
from hf_grow.growth import HeadGrowth, LayerGrowth
from hf_grow.proposal import propose, slopes
from hf_grow.statistics import AttentionStatistics, Place, Statistics, read_tensors, write_tensors


@dataclass(frozen=True)
class LayerPlan:
    """What one attention module gets and what that promises, by kind.

    in_sample        first-order decrease of the loss at the planned steps, on the data that chose
    held_out         the same on other data; None where there was none
    realised_shares  the share of such a decrease that was realised when the steps were found
    head_gains       by head, the held-out (or else in-sample) part of the columns' first-order decrease
    reachable_share  the share of the wanted change of the scores that the present columns could express by training
    """

    growth: LayerGrowth
    in_sample: dict[str, float]
    held_out: dict[str, float] | None
    realised_shares: dict[str, float]
    head_gains: list[float]
    reachable_share: float | None

    @property
    def place(self) -> Place:
        """The attention module."""
        return self.growth.place

    def expected(self, first_order: dict[str, float] | None) -> float | None:
        """The decrease that the planned steps are likely to realise."""
        if first_order is None:
            return None
        return sum(self.realised_shares.get(kind, 0.0) * decrease for kind, decrease in first_order.items())

    def summary(self) -> dict[str, Any]:
        """Plain values for JSON."""
        place, growth = self.place, self.growth
        return {
            "name": place.name,
            "layer": place.layer,
            "kind": place.kind,
            "n_heads": place.n_heads,
            "query_key_dim": place.query_key_dim,
            "value_dim": place.value_dim,
            **{kind: growth.count(kind) for kind in KINDS},
            "head_patterns": ["uniform" if head.copy is None else f"head {head.copy}" for head in growth.heads],
            "parameters_added": growth.parameters,
            "expected_decrease": {
                "in_sample": self.expected(self.in_sample),
                "held_out": self.expected(self.held_out),
            },
            "first_order_decrease": {"in_sample": self.in_sample, "held_out": self.held_out},
            "head_gains": self.head_gains,
            "reachable_share": self.reachable_share,
            "growth_share": None if self.reachable_share is None else 1 - self.reachable_share,
        }


@dataclass(frozen=True)
class GrowthPlan:
    """What will be added where. `insert_growth` carries it out; nothing else changes a model."""

    config: GrowthConfig
    collected: dict[str, Any]
    model_type: str
    fingerprint: str
    parameters: int
    loss: float
    steps: dict[str, float]
    layers: list[LayerPlan]

    @property
    def parameters_added(self) -> int:
        """New parameters in all layers."""
        return sum(layer.growth.parameters for layer in self.layers)

    def summary(self) -> dict[str, Any]:
        """Plain values for JSON."""
        return {
            "config": as_dict(self.config),
            "collected": self.collected,
            "model_type": self.model_type,
            "parameters": self.parameters,
            "parameters_added": self.parameters_added,
            "loss": self.loss,
            "steps": self.steps,
            "layers": [layer.summary() for layer in self.layers],
        }

    def __str__(self) -> str:
        lines = ["layer  columns  values  heads  parameters  expected decrease  held out  reachable without growth"]
        for row in (layer.summary() for layer in self.layers):
            expected = row["expected_decrease"]
            held_out = "-" if expected["held_out"] is None else f"{expected['held_out']:.2e}"
            share = "-" if row["reachable_share"] is None else f"{row['reachable_share']:.0%}"
            lines.append(
                f"{row['layer']:>5}  {row['columns']:>7}  {row['value_columns']:>6}  {row['heads']:>5}  "
                f"{row['parameters_added']:>10,}  {expected['in_sample']:>17.2e}  {held_out:>8}  {share:>24}"
            )
        lines.append(f"{self.parameters_added:,} new parameters, {self.parameters_added / self.parameters:.2%}")
        return "\n".join(lines)

    def save(self, path: str | os.PathLike) -> None:
        """Write one safetensors file, all at once."""
        write_tensors(self, path, "plan")

    @classmethod
    def load(cls, path: str | os.PathLike) -> "GrowthPlan":
        """Read what `save` wrote."""
        content = read_tensors(path, "plan")
        content["config"] = from_dict(GrowthConfig, content["config"])
        content["layers"] = [_layer_plan(layer) for layer in content["layers"]]
        return cls(**content)


def plan_growth(statistics: Statistics, config: GrowthConfig) -> GrowthPlan:
    """Decide what to add where: the amounts the config names, or its budget spent where it promises most."""
    require(statistics, Statistics)
    require(config, GrowthConfig)
    device = statistics.layers[0].query.device
    # Half precision on CUDA wants multiples of eight.
    config = replace(config, align=config.align or (8 if device.type == "cuda" else 1))
    _check_collected(statistics, config)
    planner = _Planner(statistics, config)
    amounts = planner.by_budget() if config.budget is not None else planner.by_amount()
    layers = [planner.layer(layer, amount) for layer, amount in zip(statistics.layers, amounts, strict=True)]
    return GrowthPlan(
        config=config,
        collected=as_dict(statistics.config) | {"sequences": statistics.sequences},
        model_type=statistics.model_type,
        fingerprint=statistics.fingerprint,
        parameters=statistics.parameters,
        loss=statistics.loss,
        steps=planner.steps,
        layers=[layer for layer in layers if layer is not None],
    )


def _check_collected(statistics: Statistics, config: GrowthConfig) -> None:
    if config.budget is None and (missing := set(config.kinds) - set(statistics.config.measured_kinds)):
        raise HfGrowError(
            f"The statistics know nothing of {', '.join(sorted(missing))}: collect with "
            f"CollectConfig(kinds={(*statistics.config.measured_kinds, *sorted(missing))})."
        )
    rotary = any(layer.place.rotary_dim for layer in statistics.layers)
    if config.strategy != "append" and rotary:
        raise HfGrowError(f"strategy='{config.strategy}' cannot replace rotated query/key columns: use 'append'.")
    whole = statistics.config.collection == "exact" or statistics.config.target == "gradient"
    if config.strategy != "append" and not whole:
        raise HfGrowError(
            f"strategy='{config.strategy}' needs the whole wanted change: collect with collection='exact' or "
            "target='gradient'."
        )


Amounts = dict[str, int]


class _Planner:
    """Statistics and config together, asked layer by layer."""

    def __init__(self, statistics: Statistics, config: GrowthConfig) -> None:
        self.statistics, self.config = statistics, config
        # A plain step has a length of its own, whose best value only the line search can tell.
        self.steps = {"columns": 1.0} if config.strategy == "step" else statistics.steps

    def by_amount(self) -> list[Amounts]:
        """The amounts the config names for each layer, checked."""
        amounts = check_amounts([layer.place for layer in self.statistics.layers], self.config)
        for layer, amount in zip(self.statistics.layers, amounts, strict=True):
            self._check_collected(layer, amount)
        return amounts

    def _check_collected(self, layer: AttentionStatistics, amount: Amounts) -> None:
        for kind, candidates in {"columns": layer.columns, "value_columns": layer.values}.items():
            known = 0 if candidates is None else candidates.rank
            if amount[kind] > known and self.config.strategy == "append":
                raise HfGrowError(
                    f"{amount[kind]} {kind.replace('_', ' ')} were asked for in layer {layer.place.label}, but {known} "
                    f"were collected: use CollectConfig({kind}={amount[kind]})."
                )

    def by_budget(self) -> list[Amounts]:
        """The budget spent step by step on the best held-out gain per parameter."""
        left = self.config.budget_for(self.statistics.parameters)
        amounts = [dict.fromkeys(KINDS, 0) for _ in self.statistics.layers]
        offers = [self._offers(index, amount) for index, amount in enumerate(amounts)]
        cheapest = min((cost for own in offers for _, cost, _, _ in own), default=0)
        while good := [offer for own in offers for offer in own if offer[1] <= left and offer[0] > 0]:
            _, cost, index, wanted = max(good, key=lambda offer: offer[0] / offer[1])
            amounts[index], offers[index] = wanted, self._offers(index, wanted)
            left -= cost
        if any(any(amount.values()) for amount in amounts):
            return amounts
        if left < cheapest:
            raise HfGrowError(f"A budget of {left:,} parameters is too small: the cheapest growth takes {cheapest:,}.")
        raise NothingToGain("Nothing that could grow promises to lower the loss on held-out data.")

    def _offers(self, index: int, amount: Amounts) -> list[tuple[float, int, int, Amounts]]:
        """One more of each kind in a layer: expected decrease, parameters, layer, and the amounts with it."""
        layer = self.statistics.layers[index]
        now = self.layer(layer, amount)
        found = []
        for kind in (kind for kind in KINDS if kind in self.statistics.config.measured_kinds):
            more = dict(amount) | {kind: amount[kind] + 1}
            _align(layer.place, more, self.config.align or 1)
            # A head that copies a pattern takes over its value columns; more of them would be the same again.
            if kind == "value_columns" and now is not None and any(head.copy is not None for head in now.growth.heads):
                continue
            try:
                _check_room(layer.place, more)
                self._check_collected(layer, more)
            except HfGrowError:
                continue
            then = self.layer(layer, more)
            assert then is not None
            gain = _expected(then) - (0.0 if now is None else _expected(now))
            cost = then.growth.parameters - (0 if now is None else now.growth.parameters)
            found.append((gain, cost, index, more))
        return found

    def layer(self, layer: AttentionStatistics, amount: Amounts) -> LayerPlan | None:
        """The plan of one layer; None where nothing happens."""
        if not any(amount.values()) and self.config.strategy == "append":
            return None
        growth = propose(layer, amount, self.config, self.statistics.config)
        in_sample = self._decreases(layer, growth, "gains")
        judged = growth.strategy == "append" and all(
            part is None or part.held_out is not None for part in (layer.columns, layer.values, layer.uniform)
        )
        return LayerPlan(
            growth=growth,
            in_sample=in_sample,
            held_out=self._decreases(layer, growth, "held_out") if judged else None,
            realised_shares={kind: found.realised_share for kind, found in self.statistics.calibrations.items()},
            head_gains=self._head_gains(layer, amount["columns"]),
            reachable_share=layer.reachable_share,
        )

    def _head_gains(self, layer: AttentionStatistics, columns: int) -> list[float]:
        if layer.columns is None or columns <= 0:
            return []
        return (self.steps.get("columns", 0.0) * layer.columns.expected[:, :columns].sum(1)).tolist()

    def _decreases(self, layer: AttentionStatistics, growth: LayerGrowth, which: str) -> dict[str, float]:
        """First-order decrease at the planned steps, by kind."""
        if growth.strategy != "append":
            return {"columns": _replacing_decrease(layer, growth, self.steps.get("columns", 0.0))}
        return {kind: self.steps.get(kind, 0.0) * slope for kind, slope in slopes(layer, growth, which).items()}


def _replacing_decrease(layer: AttentionStatistics, growth: LayerGrowth, step: float) -> float:
    """−⟨T, D⟩ for columns that are all replaced."""
    query, key = growth.replaced(step, {"query": layer.query, "key": layer.key})
    heads = query.shape[0]
    change = query @ linalg.repeat_groups(key, heads).mT - layer.query @ linalg.repeat_groups(layer.key, heads).mT
    assert growth.gradient is not None
    return -layer.place.scaling * float((growth.gradient * change).sum())


def _expected(plan: LayerPlan) -> float:
    """The decrease that a step is likely to realise, by the most honest gains there are."""
    expected = plan.expected(plan.in_sample if plan.held_out is None else plan.held_out)
    assert expected is not None
    return expected


def _layer_plan(content: dict) -> LayerPlan:
    growth = content["growth"]
    growth["place"] = Place(**growth["place"])
    growth["heads"] = tuple(HeadGrowth(**head) for head in growth["heads"])
    return LayerPlan(**content | {"growth": LayerGrowth(**growth)})


def check_amounts(places: Sequence[Place], config: GrowthConfig) -> list[Amounts]:
    """The amounts that a config names for each layer, refused where a layer is unknown or has no room."""
    for kind in KINDS:
        _check_layers(getattr(config, kind), kind, places)
    amounts = [{kind: _amount(getattr(config, kind), place) for kind in KINDS} for place in places]
    for place, amount in zip(places, amounts, strict=True):
        _align(place, amount, config.align or 1)
        _check_room(place, amount)
    return amounts


def _align(place: Place, amount: Amounts, align: int) -> None:
    for kind, width in (("columns", place.query_key_dim), ("value_columns", place.value_dim)):
        if amount[kind] > 0:
            amount[kind] = -(-(width + amount[kind]) // align) * align - width


def _check_room(place: Place, amount: Amounts) -> None:
    columns = amount["columns"]
    inputs = min(place.inputs["query"], place.inputs["key"])
    room = inputs - (0 if place.rotary_dim else place.query_key_dim)
    if columns > room:
        raise HfGrowError(
            f"Layer {place.label} has room for {max(room, 0)} more query/key columns: its heads read {inputs} "
            f"inputs and have {place.query_key_dim} columns. {columns} were asked for."
        )
    if place.query_key_dim + columns < 1:
        raise HfGrowError(f"Layer {place.label} has {place.query_key_dim} query/key columns: {-columns} are too many.")
    if amount["heads"] > place.n_kv_heads + 1:
        raise HfGrowError(
            f"At most {place.n_kv_heads + 1} heads can be added to layer {place.label} at once: one for each "
            "present pattern and one for the uniform one."
        )


def _amount(amount: Any, place: Place) -> int:
    if not isinstance(amount, Mapping):
        return amount or 0
    named = amount.get(place.name)
    if named is None and place.kind == "self":
        named = amount.get(place.layer)
    return named or 0


def _check_layers(amount: Any, kind: str, places: Sequence[Place]) -> None:
    if not isinstance(amount, Mapping):
        return
    known = {place.name for place in places} | {place.layer for place in places if place.kind == "self"}
    if unknown := [key for key in amount if key not in known]:
        numbers = sorted(key for key in known if isinstance(key, int))
        raise HfGrowError(f"{kind} names layer {unknown[0]!r}; the model has layers {numbers[0]} to {numbers[-1]}.")
