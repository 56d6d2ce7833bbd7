"""How far to step along each kind of growth, tried in all layers at once when statistics are collected."""

from collections.abc import Sequence

from hf_grow.growth.config import GrowthConfig
from hf_grow.growth.kinds import KINDS, Kind, pieces_of
from hf_grow.growth.layer_growth import LayerGrowth
from hf_grow.growth.line_search import Trial, usual_step
from hf_grow.measuring.config import CollectConfig
from hf_grow.measuring.statistics import AttentionStatistics, Calibration, Statistics
from hf_grow.modeling.growable_attention import AttentionSite
from hf_grow.running.batches import Batch
from hf_grow.running.passes import Passes


def calibrate(
    statistics: Statistics, passes: Passes, sites: Sequence[AttentionSite], batches: Sequence[Batch]
) -> dict[str, Calibration]:
    """For each kind the step for all layers at once that lowers the loss most on these batches; 0 where none does."""
    calibrations: dict[str, Calibration] = {}
    for name in statistics.config.measured_kinds:
        growths = [_sample(layer, KINDS[name], statistics.config) for layer in statistics.layers]
        trial = Trial(passes, sites, growths, batches, what=f"step for {name.replace('_', ' ')}")
        calibrations |= _calibrate_kind(statistics, trial, KINDS[name])
    return calibrations


def _calibrate_kind(statistics: Statistics, trial: Trial, kind: Kind) -> dict[str, Calibration]:
    """The kind's own step first; then what else its pieces step along, as long as there was a step before."""
    names = {name for growth in trial.growths for piece in growth.pieces for name in piece.step_names}
    slope = sum(map(_slope, statistics.layers, trial.growths))
    loss, fixed = statistics.loss, dict[str, float]()
    calibrations = {}
    for name in kind.step_names:
        if fixed and (name not in names or not all(fixed.values())):
            break
        line = trial.search(name, fixed, usual_step(trial.growths, name), loss)
        # Gains are those of the kind's own step.
        calibrations[name] = Calibration(line.step, loss - line.loss, 0.0 if fixed else line.step * slope)
        loss, fixed = line.loss, fixed | {name: line.step}
    return calibrations


def _slope(layer: AttentionStatistics, growth: LayerGrowth) -> float:
    """First-order decrease for a step of one, on held-out data where there is any."""
    which = "held_out" if layer.judged else "gains"
    return sum(piece.slope(layer, which) for piece in growth.pieces)


def _sample(layer: AttentionStatistics, kind: Kind, collected: CollectConfig) -> LayerGrowth:
    """As much of one kind as was asked to be collected."""
    amounts = dict.fromkeys(KINDS, 0) | {kind.name: kind.sample(layer, collected)}
    return LayerGrowth(layer.place, tuple(pieces_of(layer, amounts, GrowthConfig(columns=1), collected)))
