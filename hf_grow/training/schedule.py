"""When a model grows during training and how large it may get; shared by the trainer and the callback."""

import logging
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass
from math import isfinite
from typing import Any

import torch
from transformers import PreTrainedModel

from hf_grow.errors import HfGrowError, NothingToGain
from hf_grow.fields import is_number, require, to_dict, whole
from hf_grow.growth.amounts import check_amounts, fitting_amounts, grown_dims, parameters_added, with_alignment
from hf_grow.growth.config import GrowthConfig
from hf_grow.growth.kinds import KINDS, Amounts
from hf_grow.growth.pipeline import prepare_growth
from hf_grow.growth.report import GrowthReport
from hf_grow.measuring.config import CollectConfig
from hf_grow.running.batches import Batch
from hf_grow.running.passes import Processes
from hf_grow.surgery.optimizer_state import plain_optimizer
from hf_grow.surgery.patch import growable_sites
from hf_grow.surgery.place import Place, place_of

logger = logging.getLogger("hf_grow")

LIMITS = {kind.limit: kind for kind in KINDS.values() if kind.limit is not None}


@dataclass(frozen=True)
class GrowthSchedule:
    """When to grow, and how large the model may get. Steps are those of the optimizer.

    at                 grow after these steps; 0 is before the first (and what the command does if nothing is said)
    every              grow after every so many steps
    plateau            grow after so many evaluations in a row whose loss was not the lowest by `min_improvement`
    min_improvement    by how much a loss must be the lowest to count
    max_events         grow at most so often
    max_query_key_dim  most query/key columns of any head
    max_value_dim      most value columns of any head
    max_heads          most heads of any layer
    max_parameters     most parameters of the model
    sequences          how many training sequences to measure on, over all processes
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
        if not is_number(least) or least < 0:
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
        return {name: value for name, value in to_dict(self).items() if name != "schedule"}

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


def check_first_event(model: PreTrainedModel, growth: GrowthConfig, schedule: GrowthSchedule) -> None:
    """Refuse, before any step, a growth of which already the first event cannot be carried out on a growable model."""
    require(growth, GrowthConfig)
    require(schedule, GrowthSchedule)
    _check_limits(model, growth, schedule)
    if growth.budget is None:
        return
    cheapest, parameters = _cheapest(model, growth), model.num_parameters()
    if growth.budget_for(parameters) < cheapest:
        raise HfGrowError(
            f"A budget of {growth.budget} is too small: the cheapest growth takes {cheapest:,} parameters."
        )
    _check_parameters(parameters + cheapest, schedule)


def check_steps(schedule: GrowthSchedule, steps: int) -> None:
    """Refuse events that training of so many steps never reaches, or after which nothing is left to train."""
    never = [step for step in (*schedule.at, schedule.every or 0) if step >= steps]
    if never:
        raise HfGrowError(f"There is nothing left to train after growth at step {never[0]} of {steps}.")


def grow_on_schedule(
    model: PreTrainedModel,
    batches: Iterable[Batch],
    growth: GrowthConfig,
    state: GrowthState,
    step: int,
    *,
    collect: CollectConfig | None = None,
    optimizer: torch.optim.Optimizer | None = None,
    accelerator: Processes | None = None,
) -> GrowthReport | None:
    """One event that is due: grow and note it in the state; None, with a warning, where there is no room or no gain."""
    if optimizer is not None:
        plain_optimizer(optimizer)
    state.last_step, state.waited = step, 0
    try:
        # Fixed amounts are known to be too much before anything is measured; what a budget buys, only a plan says.
        _check_limits(model, growth, state.schedule)
        prepared = prepare_growth(model, batches, growth, collect=collect, accelerator=accelerator)
        assert prepared.plan is not None
        layers = prepared.plan.layers
        _check_excess(model, [(layer.place, layer.growth.amounts) for layer in layers], state.schedule)
    except (NoRoom, NothingToGain) as error:
        # There may be something to gain later, but not more room.
        state.full = isinstance(error, NoRoom)
        logger.warning("No growth at step %d%s: %s", step, " and later" if state.full else "", error)
        return None
    report = prepared.insert(optimizer=optimizer)
    state.events += 1
    return report


class NoRoom(HfGrowError):
    """Growth would pass a limit of the schedule, or of what a layer can hold."""


def _check_limits(model: PreTrainedModel, growth: GrowthConfig, schedule: GrowthSchedule) -> None:
    """Refuse fixed amounts that are too much for a model."""
    if growth.budget is not None:
        return
    places = [place_of(site) for site in growable_sites(model)]
    try:
        amounts = check_amounts(places, with_alignment(growth, model.device))
    except HfGrowError as error:
        raise NoRoom(str(error)) from error
    _check_excess(model, list(zip(places, amounts, strict=True)), schedule)


def _check_excess(model: PreTrainedModel, grown: Sequence[tuple[Place, Amounts]], schedule: GrowthSchedule) -> None:
    """Refuse amounts that would pass a limit."""
    for place, amounts in grown:
        for limit, kind in LIMITS.items():
            most, size = getattr(schedule, limit), kind.size(grown_dims(place, amounts))
            if most is not None and size > max(most, kind.size(place.dims)):
                raise NoRoom(f"Layer {place.label} would have {size} {kind.units}, more than {limit}={most}.")
    added = sum(parameters_added(place, amounts) for place, amounts in grown)
    if added > 0:
        _check_parameters(model.num_parameters() + added, schedule)


def _check_parameters(parameters: int, schedule: GrowthSchedule) -> None:
    most = schedule.max_parameters
    if most is not None and parameters > most:
        raise NoRoom(f"The model would have {parameters:,} parameters, more than max_parameters={most:,}.")


def _cheapest(model: PreTrainedModel, growth: GrowthConfig) -> int:
    """The fewest parameters that any growth takes."""
    align = with_alignment(growth, model.device).align or 1
    costs = []
    for place in (place_of(site) for site in growable_sites(model)):
        for name in KINDS:
            try:
                amounts = fitting_amounts(place, dict.fromkeys(KINDS, 0) | {name: 1}, align)
            except HfGrowError:
                continue
            costs.append(parameters_added(place, amounts))
    return min(costs)
