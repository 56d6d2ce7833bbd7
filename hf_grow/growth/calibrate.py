"""How far to step along each kind of growth, tried in all layers at once when statistics are collected."""

from collections.abc import Iterator, Sequence

from hf_grow.growth.config import GrowthConfig
from hf_grow.growth.kinds import KINDS, Kind, pieces_of
from hf_grow.growth.layer_growth import LayerGrowth
from hf_grow.growth.line_search import Trial
from hf_grow.measuring.config import CollectConfig
from hf_grow.measuring.statistics import AttentionStatistics, Calibration, Statistics
from hf_grow.modeling.growable_attention import AttentionSite
from hf_grow.running.passes import Passes, Usable


def calibrate(
    statistics: Statistics, passes: Passes, sites: Sequence[AttentionSite], judges: Usable
) -> Iterator[tuple[str, Calibration]]:
    """For each kind the step for all layers at once that lowers the loss most on these batches; 0 where none does."""
    for name in statistics.config.measured_kinds:
        growths = [_sample(layer, KINDS[name], statistics.config) for layer in statistics.layers]
        slope = sum(map(_slope, statistics.layers, growths))
        # Otherwise even the smallest step would raise the loss.
        if slope > 0:
            trial = Trial(passes, sites, growths, judges.batches, what=f"step for {name.replace('_', ' ')}")
            yield name, trial.calibrate(name, {}, judges.losses, slope)
        else:
            yield name, Calibration(0.0, 0.0, 0.0)


def _slope(layer: AttentionStatistics, growth: LayerGrowth) -> float:
    """First-order decrease for a step of one, on held-out data where there is any."""
    which = "held_out" if layer.judged else "gains"
    return sum(piece.slope(layer, which) for piece in growth.pieces)


def _sample(layer: AttentionStatistics, kind: Kind, collected: CollectConfig) -> LayerGrowth:
    """As much of one kind as was asked to be collected."""
    amounts = dict.fromkeys(KINDS, 0) | {kind.name: kind.sample(layer, collected)}
    return LayerGrowth(layer.place, tuple(pieces_of(layer, amounts, GrowthConfig(columns=1), collected)))
