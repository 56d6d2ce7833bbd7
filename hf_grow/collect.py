"""`collect_statistics`: run batches through a growable model and find where the loss wants other attention.

Collecting leaves the model as it was found: parameters, gradients, buffers, hooks, modes and random numbers.
"""

import hashlib
import time
from collections.abc import Iterable, Sequence
from dataclasses import replace
from typing import Any

import torch

from hf_grow.calibrate import calibrate
from hf_grow.config import CollectConfig, require
from hf_grow.exact import ExactCollector
from hf_grow.modeling.growable_attention import AttentionSite
from hf_grow.passes import Batch, Passes, growable_sites, read_batches, split_sequences
from hf_grow.patch import check_site
from hf_grow.sketch import SketchCollector
from hf_grow.statistics import Statistics


@torch.inference_mode(False)
def collect_statistics(
    model: Any,
    batches: Iterable[Batch],
    config: CollectConfig | None = None,
    *,
    accelerator: Any = None,
    progress: bool = False,
) -> Statistics:
    """Measure where the attention of a growable model lacks capacity, on batches that give `model(**batch)` a loss.

    With an `accelerator` every process brings its own batches and gets the statistics of all.
    """
    config = require(config or CollectConfig(), CollectConfig)
    sites = growable_sites(model)
    for site in sites:
        check_site(site)
    choosing, judging = split_batches(batches, config, accelerator)
    began = time.perf_counter()
    passes = Passes(model, accelerator, progress)
    form = ExactCollector if config.collection == "exact" else SketchCollector
    layers = form(passes, sites, choosing, judging, config).layers()
    judges, loss = passes.usable(judging if passes.count(judging) else choosing, what="loss")
    solved = time.perf_counter() - began - passes.seconds
    statistics = Statistics(
        layers=layers,
        config=config,
        model_type=model.config.model_type,
        parameters=model.num_parameters(),
        fingerprint=fingerprint(sites),
        sequences=passes.count([*choosing, *judging]),
        loss=loss,
        seconds={"passes": passes.seconds, "solving": solved},
    )
    measured = time.perf_counter()
    calibrations = calibrate(statistics, passes, sites, judges)
    seconds = {**statistics.seconds, "calibrating": time.perf_counter() - measured}
    return replace(statistics, calibrations=calibrations, seconds=seconds)


def split_batches(
    batches: Iterable[Batch], config: CollectConfig, accelerator: Any = None
) -> tuple[list[Batch], list[Batch]]:
    """The batches that choose and those that judge; a process with a single sequence lets it choose."""
    found = read_batches(batches, config.max_batches)
    places = (1, 0) if accelerator is None else (accelerator.num_processes, accelerator.process_index)
    choosing, judging = split_sequences(found, config.held_out, *places)
    return (choosing, judging) if choosing else (found, [])


def fingerprint(sites: Sequence[AttentionSite]) -> str:
    """A mark of the attention modules' names, sizes and weights: what was found for one model is not for another."""
    digest = hashlib.blake2b(digest_size=16)
    for site in sites:
        digest.update(f"{site.name} {site.attention.dims}".encode())
        for projection, _ in site.projections():
            for parameter in projection.parameters(recurse=False):
                weights = parameter.detach().to("cpu").contiguous()
                digest.update(weights.view(torch.uint8).numpy().data)
    return digest.hexdigest()
