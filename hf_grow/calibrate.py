"""How far to step along each kind of growth, tried in all layers at once when statistics are collected."""

from collections.abc import Sequence

from hf_grow.config import KINDS, CollectConfig, GrowthConfig
from hf_grow.growth import LayerGrowth
from hf_grow.line_search import Trial, usual_step
from hf_grow.modeling.growable_attention import AttentionSite
from hf_grow.passes import Batch, Passes
from hf_grow.proposal import propose, slopes
from hf_grow.statistics import AttentionStatistics, Calibration, Statistics


def calibrate(
    statistics: Statistics, passes: Passes, sites: Sequence[AttentionSite], batches: Sequence[Batch]
) -> dict[str, Calibration]:
    """For each kind the step for all layers at once that lowers the loss most on these batches; 0 where none does."""
    found: dict[str, Calibration] = {}
    for kind in statistics.config.measured_kinds:
        growths = [_sample(layer, kind, statistics.config) for layer in statistics.layers]
        trial = Trial(passes, sites, growths, batches, what=f"step for {kind.replace('_', ' ')}")
        line = trial.search(kind, {}, usual_step(growths, kind), statistics.loss)
        slope = sum(_slope(layer, growth) for layer, growth in zip(statistics.layers, growths, strict=True))
        found[kind] = Calibration(line.step, statistics.loss - line.loss, line.step * slope)
        if kind == "heads" and line.step > 0 and any(head.query is not None for g in growths for head in g.heads):
            start = usual_step(growths, "head_scores")
            scores = trial.search("head_scores", {"heads": line.step}, start, line.loss)
            found["head_scores"] = Calibration(scores.step, line.loss - scores.loss, 0.0)
    return found


def _slope(layer: AttentionStatistics, growth: LayerGrowth) -> float:
    """First-order decrease for a step of one, on held-out data where there is any."""
    judged = [part for part in (layer.columns, layer.values, layer.uniform) if part is not None]
    which = "held_out" if all(part.held_out is not None for part in judged) else "gains"
    return sum(slopes(layer, growth, which).values())


def _sample(layer: AttentionStatistics, kind: str, collected: CollectConfig) -> LayerGrowth:
    """As much of one kind as was asked to be collected."""
    known = {"columns": layer.columns, "value_columns": layer.values}.get(kind)
    amount = 1 if known is None else min(getattr(collected, kind), known.rank)
    return propose(layer, dict.fromkeys(KINDS, 0) | {kind: amount}, GrowthConfig(columns=1), collected)
