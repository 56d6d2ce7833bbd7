"""When a model grows during training and how large it may get; shared by the trainer and the callback."""

import logging
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass, replace
from math import inf, isfinite
from typing import Any

from hf_grow.collect import collect_statistics
from hf_grow.collector import place_of
from hf_grow.config import KINDS, CollectConfig, GrowthConfig, require, whole
from hf_grow.errors import HfGrowError, NothingToGain
from hf_grow.insert import agreed_plan, batches_to_search, collect_config, grow, insert_growth
from hf_grow.passes import Batch, growable_sites, read_batches
from hf_grow.plan import check_amounts
from hf_grow.report import GrowthReport
from hf_grow.statistics import Place

logger = logging.getLogger("hf_grow")

# What a limit of size is called in a sentence.
LIMITS = {"max_query_key_dim": "query/key columns", "max_value_dim": "value columns", "max_heads": "heads"}


@dataclass(frozen=True)
class GrowthSchedule:
    """When to grow, and how large the model may get. Steps are those of the optimizer.

    at               after these steps; 0 is before the first
    every            after every so many steps
    plateau          after so many evaluations in a row whose loss was not the lowest by `min_improvement`
    max_events       grow at most so often
    max_query_key_dim, max_value_dim, max_heads   of any layer
    max_parameters   of the model
    sequences        how many training sequences to measure on, over all processes
    """

    at: tuple[int, ...] = ()
    every: int | None = None
    plateau: int | None = None
    min_improvement: float = 0.0
    max_events: int | None = None
    max_query_key_dim: int | None = None
    max_value_dim: int | None = None
    max_heads: int | None = None
    max_parameters: int | None = None
    sequences: int = 256

    def __post_init__(self) -> None:
        steps = self.at if isinstance(self.at, (list, tuple)) else (self.at,)
        for step in steps:
            whole("at", step, 0)
        object.__setattr__(self, "at", tuple(sorted(set(steps))))
        for name in ("every", "plateau", "max_events", *LIMITS, "max_parameters"):
            if getattr(self, name) is not None:
                whole(name, getattr(self, name), 1)
        whole("sequences", self.sequences, 1)
        if not self.at and self.every is None and self.plateau is None:
            raise HfGrowError("Say when to grow: at=(steps, …), every=steps or plateau=evaluations.")
        least = self.min_improvement
        if isinstance(least, bool) or not isinstance(least, (int, float)) or not 0 <= least < inf:
            raise HfGrowError(f"min_improvement must be a number that is not negative, not {least!r}.")
        if least and self.plateau is None:
            raise HfGrowError("min_improvement says what a plateau is: give plateau=evaluations too.")


@dataclass
class GrowthState:
    """How far a schedule is: plain values, so that a run goes on where its checkpoint left off.

    events     how often the model grew
    last_step  when it last tried to; nothing happens twice at one step
    full       whether the next event would pass a limit, which ends growth
    best       the lowest evaluation loss
    waited     evaluations since then, or since the last event
    evaluated  the step of the last evaluation
    """

    schedule: GrowthSchedule
    events: int = 0
    last_step: int | None = None
    full: bool = False
    best: float | None = None
    waited: int = 0
    evaluated: int | None = None

    def to_dict(self) -> dict[str, Any]:
        """Plain values for JSON, without the schedule."""
        return {name: value for name, value in vars(self).items() if name != "schedule"}

    @classmethod
    def from_dict(cls, schedule: GrowthSchedule, values: Mapping[str, Any]) -> "GrowthState":
        """What `to_dict` wrote, going on with a schedule."""
        return cls(schedule, **values)

    def due_at_step(self, step: int) -> bool:
        """Whether to grow now, after so many steps."""
        every = self.schedule.every
        return self._may_grow(step) and (step in self.schedule.at or bool(every and step and step % every == 0))

    def note_evaluation(self, loss: float, step: int) -> bool:
        """Take in an evaluation; whether to grow now, as the last ones were no better."""
        if self.schedule.plateau is None or self.evaluated == step:
            return False
        self.evaluated = step
        if isfinite(loss) and (
            self.best is None or (self.best - loss >= self.schedule.min_improvement and loss < self.best)
        ):
            self.best, self.waited = loss, 0
        else:
            self.waited += 1
        return self._may_grow(step) and self.waited >= self.schedule.plateau

    def _may_grow(self, step: int) -> bool:
        most = self.schedule.max_events
        return not self.full and self.last_step != step and (most is None or self.events < most)


def check_first_event(model: Any, growth: GrowthConfig, schedule: GrowthSchedule) -> None:
    """Refuse, before any step, a growth of which already the first event cannot be carried out on a growable model."""
    require(growth, GrowthConfig)
    require(schedule, GrowthSchedule)
    if growth.budget is None:
        if reason := _excess_of_amounts(model, growth, schedule):
            raise HfGrowError(reason)
        return
    cheapest = _cheapest(model, growth)
    parameters, most = model.num_parameters(), schedule.max_parameters
    if growth.budget_for(parameters) < cheapest:
        raise HfGrowError(
            f"A budget of {growth.budget} is too small: the cheapest growth takes {cheapest:,} parameters."
        )
    if most is not None and parameters + cheapest > most:
        raise HfGrowError(_too_many(parameters + cheapest, most))


def check_steps(schedule: GrowthSchedule, steps: int) -> None:
    """Refuse events that training of so many steps never reaches, or after which nothing is left to train."""
    never = [step for step in (*schedule.at, schedule.every or 0) if step >= steps]
    if never:
        raise HfGrowError(f"There is nothing left to train after growth at step {never[0]} of {steps}.")


def grow_on_schedule(
    model: Any,
    batches: Iterable[Batch],
    growth: GrowthConfig,
    state: GrowthState,
    step: int,
    *,
    collect: CollectConfig | None = None,
    optimizer: Any = None,
    accelerator: Any = None,
) -> GrowthReport | None:
    """One event that is due: grow and note it in the state; None, with a warning, where there is no room or no gain."""
    state.last_step, state.waited = step, 0
    options = {"optimizer": optimizer, "accelerator": accelerator}
    if growth.budget is None:
        reason = _excess_of_amounts(model, growth, state.schedule)
        report = grow(model, batches, growth, collect=collect, **options)[1] if reason is None else None
        state.full = reason is not None
    else:
        report, reason = _grow_by_budget(model, batches, growth, state, collect, options)
    if report is None:
        logger.warning("No growth at step %d%s: %s", step, " and later" if state.full else "", reason)
    else:
        state.events += 1
    return report


def _grow_by_budget(
    model: Any,
    batches: Iterable[Batch],
    growth: GrowthConfig,
    state: GrowthState,
    collect: CollectConfig | None,
    options: dict[str, Any],
) -> tuple[GrowthReport | None, str | None]:
    """As `grow`, with a look at the plan before it is carried out: only that says what a budget buys."""
    collect = collect_config(growth, collect)
    found = read_batches(batches, collect.max_batches)
    statistics = collect_statistics(model, found, collect, accelerator=options["accelerator"])
    try:
        plan = agreed_plan(statistics, growth, options["accelerator"])
    except NothingToGain as error:
        # There may be something later.
        return None, str(error)
    amounts = [{kind: layer.growth.count(kind) for kind in KINDS} for layer in plan.layers]
    reason = _excess(model, [layer.place for layer in plan.layers], amounts, state.schedule)
    if reason is not None:
        state.full = True
        return None, reason
    searched = batches_to_search(model, found, collect, options["accelerator"])
    return insert_growth(model, plan, searched, **options), None


def _excess_of_amounts(model: Any, growth: GrowthConfig, schedule: GrowthSchedule) -> str | None:
    """Why fixed amounts are too much for a model, in one sentence."""
    places = [place_of(site) for site in growable_sites(model)]
    try:
        amounts = check_amounts(places, _aligned(model, growth))
    except HfGrowError as error:
        return str(error)
    return _excess(model, places, amounts, schedule)


def _aligned(model: Any, growth: GrowthConfig) -> GrowthConfig:
    # As plan_growth will choose it.
    return replace(growth, align=growth.align or (8 if model.device.type == "cuda" else 1))


def _excess(
    model: Any, places: Sequence[Place], amounts: Sequence[dict[str, int]], schedule: GrowthSchedule
) -> str | None:
    """Which limit these amounts would pass, in one sentence."""
    for place, amount in zip(places, amounts, strict=True):
        query_key, value = place.query_key_dim + amount["columns"], place.value_dim + amount["value_columns"]
        heads = place.n_heads + amount["heads"] * place.n_heads // place.n_kv_heads
        grown = {"max_query_key_dim": query_key, "max_value_dim": value, "max_heads": heads}
        present = (place.query_key_dim, place.value_dim, place.n_heads)
        for (name, size), now in zip(grown.items(), present, strict=True):
            most = getattr(schedule, name)
            if most is not None and size > max(most, now):
                return f"Layer {place.label} would have {size} {LIMITS[name]}, more than {name}={most}."
    most, added = schedule.max_parameters, sum(map(_cost, places, amounts))
    if most is not None and added > 0 and model.num_parameters() + added > most:
        return _too_many(model.num_parameters() + added, most)
    return None


def _too_many(parameters: int, most: int) -> str:
    return f"The model would have {parameters:,} parameters, more than max_parameters={most:,}."


def _cost(place: Place, amount: dict[str, int]) -> int:
    """How many parameters are added."""
    widths = place.query_key_dim + amount["columns"], place.value_dim + amount["value_columns"]
    return sum(count * place.cost(kind, *widths) for kind, count in amount.items())


def _cheapest(model: Any, growth: GrowthConfig) -> int:
    """The fewest parameters that any growth takes."""
    places = [place_of(site) for site in growable_sites(model)]
    costs = []
    for kind in KINDS:
        for place in places:
            one = GrowthConfig(**{kind: {place.name: 1}}, align=growth.align)  # type: ignore[arg-type]
            try:
                (amount,) = check_amounts([place], _aligned(model, one))
            except HfGrowError:
                continue
            costs.append(_cost(place, amount))
    return min(costs)
