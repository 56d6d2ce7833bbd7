"""`plan_growth`: from statistics to what will be added where, as a value to print, save, try and insert."""

import os
from dataclasses import dataclass
from typing import Any

from hf_grow.errors import HfGrowError, NothingToGain
from hf_grow.fields import former_fields, from_dict, require, to_dict
from hf_grow.growth.amounts import check_amounts, fitting_amounts, with_alignment
from hf_grow.growth.config import GrowthConfig
from hf_grow.growth.kinds import KINDS, REPLACED_COLUMNS, Amounts, pieces_of
from hf_grow.growth.layer_growth import LayerGrowth, read_layer_growth
from hf_grow.measuring.statistics import AttentionStatistics, Statistics
from hf_grow.measuring.tensor_file import read_tensors, write_tensors
from hf_grow.surgery.place import Place


@dataclass(frozen=True)
class LayerPlan:
    """What one attention module gets and what that promises.

    in_sample        by kind, first-order decrease of the loss at the planned steps, on the data that chose
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
        return sum(self.realised_shares.get(name, 0.0) * decrease for name, decrease in first_order.items())

    @property
    def likely(self) -> float:
        """That decrease by the most honest gains there are."""
        expected = self.expected(self.in_sample if self.held_out is None else self.held_out)
        assert expected is not None
        return expected

    def summary(self) -> dict[str, Any]:
        """Plain values for JSON."""
        growth = self.growth
        return {
            **self.place.entry(),
            **growth.amounts,
            "head_patterns": growth.head_patterns,
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


@former_fields(steps="step_sizes")
@dataclass(frozen=True)
class GrowthPlan:
    """What will be added where. `insert_growth` carries it out; nothing else changes a model."""

    config: GrowthConfig
    collected: dict[str, Any]
    model_type: str
    fingerprint: str
    parameters: int
    loss: float
    step_sizes: dict[str, float]
    layers: list[LayerPlan]

    @property
    def parameters_added(self) -> int:
        """New parameters in all layers."""
        return sum(layer.growth.parameters for layer in self.layers)

    def summary(self) -> dict[str, Any]:
        """Plain values for JSON."""
        return {
            "config": to_dict(self.config),
            "collected": self.collected,
            "model_type": self.model_type,
            "parameters": self.parameters,
            "parameters_added": self.parameters_added,
            "loss": self.loss,
            "step_sizes": self.step_sizes,
            "layers": [layer.summary() for layer in self.layers],
        }

    def __str__(self) -> str:
        names = [name.replace("_", " ") for name in KINDS]
        titles = "  ".join(["layer", *names, "parameters", "expected decrease", "held out", "reachable without growth"])
        lines = [titles]
        for row in (layer.summary() for layer in self.layers):
            expected = row["expected_decrease"]
            held_out = "-" if expected["held_out"] is None else f"{expected['held_out']:.2e}"
            share = "-" if row["reachable_share"] is None else f"{row['reachable_share']:.0%}"
            amounts = "  ".join(f"{row[name]:>{len(name)}}" for name in KINDS)
            lines.append(
                f"{row['layer']:>5}  {amounts}  {row['parameters_added']:>10,}  {expected['in_sample']:>17.2e}  "
                f"{held_out:>8}  {share:>24}"
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
        content["layers"] = [
            LayerPlan(**layer | {"growth": read_layer_growth(layer["growth"])}) for layer in content["layers"]
        ]
        if "steps" in content:  # as files of 0.1 call them
            content["step_sizes"] = content.pop("steps")
        return cls(**content)


def plan_growth(statistics: Statistics, config: GrowthConfig) -> GrowthPlan:
    """Decide what to add where: the amounts the config names, or its budget spent where it promises most."""
    require(statistics, Statistics)
    require(config, GrowthConfig)
    config = with_alignment(config, statistics.layers[0].query.device)
    _check_collected(statistics, config)
    planner = _Planner(statistics, config)
    amounts = planner.by_budget() if config.budget is not None else planner.by_amount()
    layers = [planner.layer(layer, amount) for layer, amount in zip(statistics.layers, amounts, strict=True)]
    return GrowthPlan(
        config=config,
        collected=to_dict(statistics.config) | {"sequences": statistics.sequences},
        model_type=statistics.model_type,
        fingerprint=statistics.fingerprint,
        parameters=statistics.parameters,
        loss=statistics.loss,
        step_sizes=planner.step_sizes,
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


@dataclass(frozen=True)
class _Offer:
    """One more of a kind in a layer: the decrease it is likely to add, its parameters, and all amounts with it."""

    index: int
    amounts: Amounts
    decrease: float
    parameters: int


class _Planner:
    """Statistics and config together, asked layer by layer."""

    def __init__(self, statistics: Statistics, config: GrowthConfig) -> None:
        self.statistics, self.config = statistics, config
        # A plain step has a length of its own, whose best value only the line search can tell.
        plain = dict.fromkeys(REPLACED_COLUMNS.step_names, 1.0)
        self.step_sizes = plain if config.strategy == "step" else statistics.step_sizes

    def by_amount(self) -> list[Amounts]:
        """The amounts the config names for each layer, checked."""
        amounts = check_amounts([layer.place for layer in self.statistics.layers], self.config)
        for layer, amount in zip(self.statistics.layers, amounts, strict=True):
            self._check_collected(layer, amount)
        return amounts

    def _check_collected(self, layer: AttentionStatistics, amounts: Amounts) -> None:
        for name, kind in KINDS.items():
            known = kind.known(layer)
            if known is not None and amounts[name] > known and self.config.strategy == "append":
                asked = f"{amounts[name]} {name.replace('_', ' ')} were asked for in layer {layer.place.label}"
                raise HfGrowError(f"{asked}, but {known} were collected: use CollectConfig({name}={amounts[name]}).")

    def by_budget(self) -> list[Amounts]:
        """The budget spent step by step on the best held-out gain per parameter."""
        left = self.config.budget_for(self.statistics.parameters)
        amounts = [dict.fromkeys(KINDS, 0) for _ in self.statistics.layers]
        offers = [self._offers(index, amount) for index, amount in enumerate(amounts)]
        cheapest = min((offer.parameters for own in offers for offer in own), default=0)
        while good := [offer for own in offers for offer in own if offer.parameters <= left and offer.decrease > 0]:
            best = max(good, key=lambda offer: offer.decrease / offer.parameters)
            amounts[best.index], offers[best.index] = best.amounts, self._offers(best.index, best.amounts)
            left -= best.parameters
        if any(any(amount.values()) for amount in amounts):
            return amounts
        if left < cheapest:
            raise HfGrowError(f"A budget of {left:,} parameters is too small: the cheapest growth takes {cheapest:,}.")
        raise NothingToGain("Nothing that could grow promises to lower the loss on held-out data.")

    def _offers(self, index: int, amounts: Amounts) -> list[_Offer]:
        """One more of each measured kind in a layer, where there is room."""
        layer = self.statistics.layers[index]
        now = self.layer(layer, amounts)
        offers = []
        for name in (name for name in KINDS if name in self.statistics.config.measured_kinds):
            more = self._one_more(layer, amounts, name)
            if more is None or not KINDS[name].may_join(() if now is None else now.growth.pieces):
                continue
            then = self.layer(layer, more)
            assert then is not None
            decrease = then.likely - (0.0 if now is None else now.likely)
            parameters = then.growth.parameters - (0 if now is None else now.growth.parameters)
            offers.append(_Offer(index, more, decrease, parameters))
        return offers

    def _one_more(self, layer: AttentionStatistics, amounts: Amounts, name: str) -> Amounts | None:
        """The amounts with one more of a kind; None where there is no room, or no more was collected."""
        try:
            more = fitting_amounts(layer.place, amounts | {name: amounts[name] + 1}, self.config.align or 1)
            self._check_collected(layer, more)
        except HfGrowError:
            return None
        return more

    def layer(self, layer: AttentionStatistics, amounts: Amounts) -> LayerPlan | None:
        """The plan of one layer; None where nothing happens."""
        if not any(amounts.values()) and self.config.strategy == "append":
            return None
        pieces = tuple(pieces_of(layer, amounts, self.config, self.statistics.config))
        growth = LayerGrowth(layer.place, pieces)
        judged = all(piece.judged(layer) for piece in pieces)
        calibrations = self.statistics.calibrations
        return LayerPlan(
            growth=growth,
            in_sample=self._decreases(layer, growth, "gains"),
            held_out=self._decreases(layer, growth, "held_out") if judged else None,
            realised_shares={name: calibration.realised_share for name, calibration in calibrations.items()},
            head_gains=self._head_gains(layer, growth),
            reachable_share=layer.reachable_share,
        )

    def _head_gains(self, layer: AttentionStatistics, growth: LayerGrowth) -> list[float]:
        gains = ((self._step(piece.kind.name), piece.head_gains(layer)) for piece in growth.pieces)
        return next(((step * known).tolist() for step, known in gains if known is not None), [])

    def _decreases(self, layer: AttentionStatistics, growth: LayerGrowth, which: str) -> dict[str, float]:
        """First-order decrease at the planned steps, by kind."""
        return {piece.kind.name: piece.decrease(layer, self._step(piece.kind.name), which) for piece in growth.pieces}

    def _step(self, name: str) -> float:
        return self.step_sizes.get(name, 0.0)
