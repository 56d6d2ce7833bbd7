"""`collect_statistics`: run batches through a growable model and find where the loss wants other attention.

Collecting leaves the model as it was found: parameters, gradients, buffers, hooks, modes and random numbers.
"""

import time
from collections.abc import Iterable, Iterator, Sequence
from dataclasses import replace
from math import nan
from typing import NamedTuple

import torch
from torch import Tensor
from transformers import PreTrainedModel

from hf_grow.fields import require
from hf_grow.files import digest
from hf_grow.growth.calibrate import calibrate
from hf_grow.growth.line_search import USUAL_TRIES
from hf_grow.measuring.config import CollectConfig
from hf_grow.measuring.exact import ExactCollector
from hf_grow.measuring.sketch import SketchCollector
from hf_grow.measuring.statistics import Statistics
from hf_grow.modeling.growable_attention import AttentionSite
from hf_grow.running.batches import Batch, batch_size, read_batches, split_sequences
from hf_grow.running.passes import FORWARD, GRADIENTS, Passes, Processes
from hf_grow.surgery.base import without_adapters
from hf_grow.surgery.patch import growable_sites
from hf_grow.surgery.quantized import values


class SplitBatches(NamedTuple):
    """Batches of the sequences that choose new weights, and of those that judge them."""

    choosing: list[Batch]
    judging: list[Batch]

    def to_search(self, passes: Passes) -> list[Batch]:
        """Those that did not choose, where any process has some; else those that did."""
        return self.judging if passes.count(self.judging) else self.choosing


def collect_statistics(
    model: PreTrainedModel,
    batches: Iterable[Batch],
    config: CollectConfig | None = None,
    *,
    accelerator: Processes | None = None,
    progress: bool = False,
) -> Statistics:
    """Measure where the attention of a growable model lacks capacity, on batches that give `model(**batch)` a loss.

    With an `accelerator` every process brings its own batches and gets the statistics of all.
    """
    config = require(config or CollectConfig(), CollectConfig)
    model = without_adapters(model)
    growable_sites(model)
    return collect_from(Passes(model, accelerator, progress), split_batches(batches, config, accelerator), config)


def split_batches(
    batches: Iterable[Batch], config: CollectConfig, accelerator: Processes | None = None
) -> SplitBatches:
    """The batches that choose and those that judge; a process with a single sequence lets it choose."""
    kept_batches = read_batches(batches, config.max_batches)
    places = (1, 0) if accelerator is None else (accelerator.num_processes, accelerator.process_index)
    choosing, judging = split_sequences(kept_batches, config.held_out, *places)
    return SplitBatches(choosing, judging) if choosing else SplitBatches(kept_batches, [])


class Interrupted(KeyboardInterrupt):
    """Measuring was interrupted; `statistics` have what was known by then. Kinds without a step lack a calibration."""

    def __init__(self, statistics: Statistics) -> None:
        super().__init__()
        self.statistics = statistics


@torch.inference_mode(False)
def collect_from(passes: Passes, batches: SplitBatches, config: CollectConfig) -> Statistics:
    """The statistics of a model on batches that are split already: measured in every layer, then the steps found."""
    sites = growable_sites(passes.model)
    began = time.perf_counter()
    with passes.progress.work(_work(passes, batches, config)):
        collection = collector(passes, sites, batches, config)
        statistics = Statistics(
            layers=collection.layers(),
            config=config,
            model_type=passes.model.config.model_type,
            parameters=passes.model.num_parameters(),
            fingerprint=fingerprint(sites),
            sequences=passes.count([*batches.choosing, *batches.judging]),
            loss=nan,
            seconds={"passes": passes.seconds, "solving": time.perf_counter() - began - passes.seconds},
        )
        if collection.interrupted:
            raise Interrupted(statistics)
        measured = time.perf_counter()
        try:
            judges = passes.usable(batches.to_search(passes), what="loss")
            statistics = replace(statistics, loss=judges.loss)
            for name, calibration in calibrate(statistics, passes, sites, judges):
                passes.progress.tell(f"{name.replace('_', ' ')}: {calibration}")
                statistics = replace(statistics, calibrations={**statistics.calibrations, name: calibration})
        except KeyboardInterrupt:
            raise Interrupted(statistics) from None
    return replace(statistics, seconds={**statistics.seconds, "calibrating": time.perf_counter() - measured})


def _work(passes: Passes, batches: SplitBatches, config: CollectConfig) -> float:
    """About how much work a collection is for this process."""
    choosing, judging, searched = (
        sum(map(batch_size, part)) for part in (batches.choosing, batches.judging, batches.to_search(passes))
    )
    often = 1 if config.collection == "exact" else config.passes
    tries = 1 + USUAL_TRIES * len(config.measured_kinds)
    return GRADIENTS * (often * choosing + judging) + FORWARD * tries * searched


def collector(
    passes: Passes, sites: list[AttentionSite], batches: SplitBatches, config: CollectConfig
) -> ExactCollector | SketchCollector:
    """A collection in these attention modules, in the form that the config wants."""
    form = ExactCollector if config.collection == "exact" else SketchCollector
    return form(passes, sites, batches.choosing, batches.judging, config)


def fingerprint(sites: Sequence[AttentionSite]) -> str:
    """A mark of the attention modules' names, sizes and weights: what was found for one model is not for another."""
    return digest(_marks(sites))


def _marks(sites: Sequence[AttentionSite]) -> Iterator[str | Tensor]:
    for site in sites:
        yield f"{site.name} {site.attention.dims}"
        growth = [] if site.growth is None else [site.growth]
        for module in (*(projection for projection, _ in site.projections()), *growth):
            yield from (values(module, name) for name, _ in module.named_parameters(recurse=False))
        if site.attention.score_scale is not None:
            yield site.attention.score_scale
