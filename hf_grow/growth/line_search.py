"""How far to step: forward passes with growth tried beside the model's own weights, which stay untouched."""

from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field
from math import inf, isfinite
from statistics import median
from typing import NamedTuple

from hf_grow.growth.kinds import StepSizes
from hf_grow.growth.layer_growth import LayerGrowth
from hf_grow.measuring.statistics import Calibration
from hf_grow.modeling.growable_attention import AttentionSite
from hf_grow.running.batches import Batch
from hf_grow.running.observe import Attachment
from hf_grow.running.passes import Passes
from hf_grow.surgery.blocks import effective, query_factors, read_blocks

# A try goes this much further or less far; so many tries in all, and so many of them between two others.
FACTOR = 3.0
TRIES = 12
REFINEMENTS = 2
# For the time left: a search tries about so many steps.
USUAL_TRIES = 4
# The search begins no further out than where a loss that fell on as it does at first would lose this share.
FAR = 0.3
# A parabola that promises less than this share of what was reached is not followed.
WORTHWHILE = 0.01


@dataclass
class LineSearch:
    """All steps tried with their losses; step 0 is always among them."""

    curve: dict[float, float] = field(default_factory=dict)

    @property
    def step(self) -> float:
        """The step with the lowest loss; 0 unless another is lower."""
        return min(sorted(self.curve), key=lambda step: self.curve[step])

    @property
    def loss(self) -> float:
        """The loss at that step."""
        return self.curve[self.step]


def search(
    loss_at: Callable[[float], float], start: float, loss_at_zero: float | None = None, slope: float | None = None
) -> LineSearch:
    """Look for the step with the lowest loss: outwards while it falls, inwards until it does, then between.

    The `slope`, how much a small step of one lowers the loss, says how far.
    """
    tried = LineSearch({0.0: loss_at(0.0) if loss_at_zero is None else loss_at_zero})
    curve, refined = tried.curve, 0
    slope = slope if slope and slope > 0 else None
    step: float | None = start
    if slope is not None and 0 < curve[0.0] < inf:
        # No step lowers the loss below zero, and to first order a good one goes about this far.
        step = min(start, FAR * curve[0.0] / slope)
    while step is not None and len(curve) <= TRIES:
        curve[step] = loss_at(step)
        best = tried.step
        if 0 < best < max(curve):
            # The first parabola is a rough one, unless the slope is known, and its word is not taken for it.
            promise = 0.0 if refined == 0 and slope is None else WORTHWHILE * (curve[0.0] - tried.loss)
            step, refined = _between(curve, best, slope, promise) if refined < REFINEMENTS else None, refined + 1
        elif best > 0:
            far = best if slope is None else _with_slope(curve, best, slope).lowest
            step = min(max(far, best * FACTOR), best * FACTOR**2)
        else:
            least = min(step for step in curve if step > 0)
            near = least if slope is None else _with_slope(curve, least, slope).lowest
            step = max(min(near, least / FACTOR), least / FACTOR**2)
    return tried


class _Parabola(NamedTuple):
    """Where a parabola is lowest, and how much lower it is there than at a step that was tried."""

    lowest: float
    promise: float


def _between(curve: Mapping[float, float], best: float, slope: float | None, promise: float) -> float | None:
    """Where a parabola through the best step is lowest, between its neighbours; None where it promises no more."""
    steps = sorted(curve)
    place = steps.index(best)
    left, right = steps[place - 1], steps[place + 1]
    if not isfinite(curve[right]):
        return (best + right) / 2
    parabolas = [_through(curve, left, best, right)]
    if left == 0 and slope is not None:
        parabolas.append(_with_slope(curve, best, slope))
    promising = [parabola for parabola in parabolas if left < parabola.lowest < right and parabola.promise > promise]
    return max(promising, key=lambda parabola: parabola.promise).lowest if promising else None


def _with_slope(curve: Mapping[float, float], step: float, slope: float) -> _Parabola:
    """With the slope at zero, through a step that was tried."""
    bend = (curve[step] - curve[0.0] + slope * step) / step**2
    if bend <= 0 or not isfinite(bend):
        return _Parabola(step, 0.0)
    return _Parabola(slope / (2 * bend), bend * (step - slope / (2 * bend)) ** 2)


def _through(curve: Mapping[float, float], left: float, middle: float, right: float) -> _Parabola:
    """Through three steps of which the middle one is best."""
    rises = [(curve[other] - curve[middle]) / (other - middle) for other in (left, right)]
    bend = (rises[1] - rises[0]) / (right - left)
    if bend <= 0:
        return _Parabola(middle, 0.0)
    away = -(rises[0] - bend * (left - middle)) / (2 * bend)
    return _Parabola(middle + away, bend * away**2)


class Trial:
    """Growth of a whole model tried on batches; with `full_rank` all of the wanted change of the scores is tried."""

    def __init__(
        self,
        passes: Passes,
        sites: Sequence[AttentionSite],
        growths: Sequence[LayerGrowth],
        batches: Sequence[Batch],
        full_rank: bool = False,
        what: str = "line search",
    ) -> None:
        by_name = {site.name: site for site in sites}
        self.passes, self.growths, self.batches = passes, growths, batches
        self.full_rank, self.what = full_rank, what
        self.sites = [by_name[growth.place.name] for growth in growths]
        self.blocks = [effective(read_blocks(site), query_factors(site)) for site in self.sites]

    def loss(self, step_sizes: Sequence[StepSizes]) -> float:
        """The loss with these steps, one entry for each layer's growth."""
        return self.passes.mean(self.batches, self.losses(step_sizes))

    def losses(self, step_sizes: Sequence[StepSizes]) -> list[float]:
        """That of every batch."""
        attachments = [
            Attachment(site, growth.extra(sizes, blocks, self.full_rank))
            for site, growth, blocks, sizes in zip(self.sites, self.growths, self.blocks, step_sizes, strict=True)
            if any(sizes.values()) or growth.shrinks
        ]
        return self.passes.losses(self.batches, attachments, self.what)

    def calibrate(
        self, name: str, fixed: StepSizes, before: Sequence[float] | None = None, slope: float | None = None
    ) -> Calibration:
        """The best step along something for all layers, others being fixed.

        `before` are the losses of the batches without it, `slope` the first-order decrease for a step of one.
        """
        zero = self.losses([fixed] * len(self.growths)) if before is None else before
        tried: dict[float, Sequence[float]] = {0.0: zero}

        def loss_at(step: float) -> float:
            tried[step] = self.losses([{**fixed, name: step}] * len(self.growths))
            return self.passes.mean(self.batches, tried[step])

        line = search(loss_at, usual_step(self.growths, name), self.passes.mean(self.batches, zero), slope)
        decreases = [old - new for old, new in zip(zero, tried[line.step], strict=True)]
        error = self.passes.standard_error(self.batches, decreases) if line.step else None
        return Calibration(line.step, line.curve[0.0] - line.loss, line.step * (slope or 0.0), error)


def scaled(step_sizes: StepSizes, multiple: float) -> dict[str, float]:
    """All steps of a layer times one number."""
    return {name: step * multiple for name, step in step_sizes.items()}


def usual_step(growths: Sequence[LayerGrowth], name: str) -> float:
    """The step that makes new columns as large as the present ones, in a middling layer."""
    steps = [step for growth in growths if (step := growth.usual_step(name)) > 0]
    return median(steps) if steps else 1.0
