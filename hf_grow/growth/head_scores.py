"""What new heads that start uniform should attend to: measured only where such a head is planned."""

from collections.abc import Iterable
from dataclasses import replace

import torch
from transformers import PreTrainedModel

from hf_grow.growth.collect import SplitBatches, collector, split_batches
from hf_grow.growth.insert import check_plan
from hf_grow.growth.kinds.head import SCORES
from hf_grow.growth.kinds.value import UNIFORM
from hf_grow.growth.line_search import Trial
from hf_grow.growth.plan import GrowthPlan, plan_growth
from hf_grow.measuring.collector import uniform_heads
from hf_grow.measuring.statistics import Statistics
from hf_grow.running.batches import Batch
from hf_grow.running.passes import Passes, Processes
from hf_grow.surgery.base import without_adapters
from hf_grow.surgery.patch import growable_sites


def collect_head_scores(
    model: PreTrainedModel,
    batches: Iterable[Batch],
    statistics: Statistics,
    plan: GrowthPlan,
    *,
    accelerator: Processes | None = None,
    progress: bool = False,
) -> Statistics:
    """Statistics with query/key columns for the new heads of a plan that start uniform; plan with them again.

    `grow` does this by itself. Without, such heads start to tell tokens apart only when they are trained.
    """
    model = without_adapters(model)
    check_plan(model, plan)
    split = split_batches(batches, statistics.config, accelerator)
    return with_head_scores(Passes(model, accelerator, progress), split, statistics, plan)


def lacks_head_scores(plan: GrowthPlan) -> list[str]:
    """The attention modules that are to get a uniform head whose scores nothing is known of.

    Rotated columns cannot take any, so there must be others.
    """
    return [
        layer.place.name
        for layer in plan.layers
        if UNIFORM in layer.growth.head_patterns
        and not layer.growth.steps_along(SCORES)
        and layer.growth.dims.qk_head_dim > layer.place.rotary_dim
    ]


@torch.inference_mode(False)
def with_head_scores(passes: Passes, batches: SplitBatches, statistics: Statistics, plan: GrowthPlan) -> Statistics:
    """As `collect_head_scores`, for a model that is known to be the one that was planned for."""
    names = lacks_head_scores(plan)
    if not names:
        return statistics
    sites = [site for site in growable_sites(passes.model) if site.name in names]
    wanted = [layer for layer in statistics.layers if layer.place.name in names]
    found = collector(passes, sites, batches, statistics.config).head_scores(wanted, uniform_heads(wanted))
    scores = dict(zip(names, found, strict=True))
    layers = [replace(layer, uniform_scores=scores.get(layer.place.name)) for layer in statistics.layers]
    statistics = replace(statistics, layers=layers)
    # The step is searched for beside all else that is planned.
    growths = [layer.growth for layer in plan_growth(statistics, plan.config).layers]
    judges = passes.usable(batches.to_search(passes)).batches
    trial = Trial(passes, growable_sites(passes.model), growths, judges, what="step for the scores of new heads")
    planned = {name: step for name, step in plan.step_sizes.items() if name != SCORES}
    calibration = trial.calibrate(SCORES, planned)
    return replace(statistics, calibrations={**statistics.calibrations, SCORES: calibration})
