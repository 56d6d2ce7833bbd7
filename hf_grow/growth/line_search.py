"""How far to step: forward passes with growth tried beside the model's own weights, which stay untouched."""

from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field
from statistics import median

from hf_grow.growth.kinds import StepSizes
from hf_grow.growth.layer_growth import LayerGrowth
from hf_grow.modeling.growable_attention import AttentionSite
from hf_grow.running.batches import Batch
from hf_grow.running.observe import Attachment
from hf_grow.running.passes import Passes
from hf_grow.surgery.blocks import effective, query_factors, read_blocks

# Each try goes this much further or less far; then a parabola through the best three is followed so many times.
FACTOR = 3.0
TRIES = 12
REFINEMENTS = 2


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


def search(loss_at: Callable[[float], float], start: float, loss_at_zero: float | None = None) -> LineSearch:
    """Look for the step with the lowest loss: outwards while it falls, inwards until it does, then between."""
    tried = LineSearch({0.0: loss_at(0.0) if loss_at_zero is None else loss_at_zero})
    curve = tried.curve

    def attempt(step: float) -> None:
        if step not in curve:
            curve[step] = loss_at(step)

    attempt(start)
    for tries in range(1, TRIES):
        best = tried.step
        if best == max(curve):
            attempt(best * FACTOR)
        elif best == 0:
            attempt(start / FACTOR**tries)
        else:
            break
    for _ in range(REFINEMENTS):
        if tried.step in (0.0, max(curve)):
            break
        attempt(_parabola(curve, tried.step))
    return tried


def _parabola(curve: Mapping[float, float], best: float) -> float:
    """Where a parabola through the best step and its neighbours is lowest."""
    steps = sorted(curve)
    place = steps.index(best)
    left, right = steps[place - 1], steps[place + 1]
    first, second = (best - left) * (curve[best] - curve[right]), (best - right) * (curve[best] - curve[left])
    denominator = first - second
    lowest = best - 0.5 * ((best - left) * first - (best - right) * second) / denominator if denominator else best
    return lowest if left < lowest < right and lowest != best else (best + right) / 2


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
        attachments = [
            Attachment(site, growth.extra(sizes, blocks, self.full_rank))
            for site, growth, blocks, sizes in zip(self.sites, self.growths, self.blocks, step_sizes, strict=True)
            if any(sizes.values()) or growth.shrinks
        ]
        return self.passes.loss(self.batches, attachments, self.what)

    def search(self, name: str, fixed: StepSizes, start: float, loss_at_zero: float) -> LineSearch:
        """The best step along something for all layers, others being fixed."""
        return search(lambda step: self.loss([{**fixed, name: step}] * len(self.growths)), start, loss_at_zero)


def scaled(step_sizes: StepSizes, multiple: float) -> dict[str, float]:
    """All steps of a layer times one number."""
    return {name: step * multiple for name, step in step_sizes.items()}


def usual_step(growths: Sequence[LayerGrowth], name: str) -> float:
    """The step that makes new columns as large as the present ones, in a middling layer."""
    steps = [step for growth in growths if (step := growth.usual_step(name)) > 0]
    return median(steps) if steps else 1.0
