"""How far to step: forward passes with growth tried beside the model's own weights, which stay untouched."""

from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field
from statistics import median

from hf_grow.blocks import read_blocks
from hf_grow.growth import HeadGrowth, LayerGrowth, Steps
from hf_grow.modeling.growable_attention import AttentionSite
from hf_grow.observe import Attachment
from hf_grow.passes import Batch, Passes

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
    found = LineSearch({0.0: loss_at(0.0) if loss_at_zero is None else loss_at_zero})
    curve = found.curve

    def attempt(step: float) -> None:
        if step not in curve:
            curve[step] = loss_at(step)

    attempt(start)
    for tries in range(1, TRIES):
        best = found.step
        if best == max(curve):
            attempt(best * FACTOR)
        elif best == 0:
            attempt(start / FACTOR**tries)
        else:
            break
    for _ in range(REFINEMENTS):
        if found.step in (0.0, max(curve)):
            break
        attempt(_parabola(curve, found.step))
    return found


def _parabola(curve: Mapping[float, float], best: float) -> float:
    """Where a parabola through the best step and its neighbours is lowest."""
    steps = sorted(curve)
    place = steps.index(best)
    left, right = steps[place - 1], steps[place + 1]
    first, second = (best - left) * (curve[best] - curve[right]), (best - right) * (curve[best] - curve[left])
    denominator = first - second
    lowest = best - 0.5 * ((best - left) * first - (best - right) * second) / denominator if denominator else best
    return lowest if left < lowest < right and lowest != best else (best + right) / 2


@dataclass
class Trial:
    """Growth of a whole model tried on batches; with `full_rank` all of the wanted change of the scores is tried."""

    passes: Passes
    sites: Sequence[AttentionSite]
    growths: Sequence[LayerGrowth]
    batches: Sequence[Batch]
    full_rank: bool = False
    what: str = "line search"

    def __post_init__(self) -> None:
        by_name = {site.name: site for site in self.sites}
        self.sites = [by_name[growth.place.name] for growth in self.growths]
        self.blocks = [read_blocks(site) for site in self.sites]

    def loss(self, steps: Sequence[Steps]) -> float:
        """The loss with these steps, one entry for each layer's growth."""
        attachments = [
            Attachment(site, growth.extra(step, blocks, self.full_rank))
            for site, growth, blocks, step in zip(self.sites, self.growths, self.blocks, steps, strict=True)
            if any(step.values()) or growth.shrinks
        ]
        return self.passes.loss(self.batches, attachments, self.what)

    def search(self, kind: str, fixed: Steps, start: float, loss_at_zero: float) -> LineSearch:
        """The best step of one kind for all layers, others being fixed."""
        return search(lambda step: self.loss([{**fixed, kind: step}] * len(self.growths)), start, loss_at_zero)


def scaled(steps: Steps, multiplier: float) -> dict[str, float]:
    """All steps of a layer times one number."""
    return {kind: step * multiplier for kind, step in steps.items()}


def usual_step(growths: Sequence[LayerGrowth], kind: str) -> float:
    """The step that makes new columns as large as the present ones, in a middling layer."""
    steps = [step for growth in growths if (step := _usual_step(growth, kind)) > 0]
    return median(steps) if steps else 1.0


def _usual_step(growth: LayerGrowth, kind: str) -> float:
    place = growth.place
    holders: Sequence[LayerGrowth | HeadGrowth] = growth.heads if kind.startswith("head") else [growth]
    if kind in ("columns", "head_scores"):
        pairs = [(holder.query, holder.key) for holder in holders]
        present = abs(place.scaling) * place.norms["query"] * place.norms["key"]
    else:
        pairs = [(holder.value, None if holder.output is None else holder.output.mT) for holder in holders]
        present = place.norms["value"] * place.norms["output"]
    sizes = [
        float(first.norm(dim=1).mean() * second.norm(dim=1).mean())
        for first, second in pairs
        if first is not None and second is not None
    ]
    return present / max(sizes) if sizes and max(sizes) > 0 else 0.0
