"""From a model and batches to growth that is measured and planned, in one place; `grow` carries it out at once."""

import time
from collections.abc import Iterable
from dataclasses import dataclass, replace
from typing import Any

import torch
from accelerate.utils import broadcast_object_list
from transformers import PreTrainedModel

from hf_grow.errors import HfGrowError
from hf_grow.fields import require
from hf_grow.growth.amounts import check_amounts
from hf_grow.growth.collect import collect_from, split_batches
from hf_grow.growth.config import GrowthConfig, largest
from hf_grow.growth.head_scores import lacks_head_scores, with_head_scores
from hf_grow.growth.insert import carry_out
from hf_grow.growth.kinds import COLUMN_KINDS
from hf_grow.growth.plan import GrowthPlan, plan_growth
from hf_grow.growth.report import GrowthReport
from hf_grow.measuring.config import CollectConfig
from hf_grow.measuring.statistics import Statistics
from hf_grow.modeling.growable_model import GrowableModel
from hf_grow.running.batches import Batch, batch_size, read_batches
from hf_grow.running.passes import Passes, Processes
from hf_grow.surgery.base import without_adapters
from hf_grow.surgery.optimizer_state import plain_optimizer
from hf_grow.surgery.patch import growable_sites, make_growable
from hf_grow.surgery.place import place_of
from hf_grow.surgery.structure import attachment_name


@dataclass(frozen=True)
class PreparedGrowth:
    """A growable model that was measured, and what is planned for it.

    plan            None where nothing was to be planned
    search_batches  what the step is searched for on: those that did not choose the new weights, where there are any
    seconds         by part of the work
    """

    passes: Passes
    statistics: Statistics
    plan: GrowthPlan | None
    search_batches: list[Batch]
    seconds: dict[str, float]

    @property
    def search_sequences(self) -> int:
        """How many sequences the losses of the report are means over, on this process."""
        return sum(batch_size(batch) for batch in self.search_batches)

    def insert(self, *, optimizer: torch.optim.Optimizer | None = None, dry_run: bool = False) -> GrowthReport:
        """Carry out the plan on the model, which must be as it was measured: it is not looked at again."""
        if self.plan is None:
            raise HfGrowError("Nothing was planned: prepare growth with a GrowthConfig.")
        report = carry_out(self.plan, self.passes, self.search_batches, optimizer=optimizer, dry_run=dry_run)
        return replace(report, seconds={**self.seconds, **report.seconds})


def grow(
    model: PreTrainedModel,
    batches: Iterable[Batch],
    config: GrowthConfig,
    *,
    collect: CollectConfig | None = None,
    line_search_batches: Iterable[Batch] | None = None,
    optimizer: torch.optim.Optimizer | None = None,
    accelerator: Processes | None = None,
    progress: bool = False,
) -> tuple[Any, GrowthReport]:
    """Make a model growable if it is not, measure, plan and insert; returns the same model and what happened.

    A model that was made growable stays so when a later part fails; its outputs are the same. The line search runs on
    the sequences that did not choose the new weights, or on batches of its own. An `optimizer` of the model goes on
    with its state. With an `accelerator` every process brings its own batches, and all grow alike.
    """
    require(config, GrowthConfig)
    if optimizer is not None:
        plain_optimizer(optimizer)
    prepared = prepare_growth(
        model,
        batches,
        config,
        collect=collect,
        line_search_batches=line_search_batches,
        accelerator=accelerator,
        progress=progress,
    )
    return model, prepared.insert(optimizer=optimizer)


def prepare_growth(
    model: PreTrainedModel,
    batches: Iterable[Batch],
    config: GrowthConfig | None = None,
    *,
    collect: CollectConfig | None = None,
    line_search_batches: Iterable[Batch] | None = None,
    accelerator: Processes | None = None,
    progress: bool = False,
) -> PreparedGrowth:
    """Measure a model and plan its growth; nothing is inserted yet. Without a `config` nothing is planned.

    All that can be refused is, before the first batch goes through the model.
    """
    collect = require(collect or CollectConfig(), CollectConfig) if config is None else collect_config(config, collect)
    split = split_batches(batches, collect, accelerator)
    searched = None if line_search_batches is None else read_batches(line_search_batches)
    model = without_adapters(model)
    if not isinstance(model, GrowableModel):
        make_growable(model)
    if config is not None:
        check_growth(model, config)
    growable_sites(model)
    passes = Passes(model, accelerator, progress)
    began = time.perf_counter()
    statistics = collect_from(passes, split, collect)
    collected = time.perf_counter()
    plan = None if config is None else agreed_plan(statistics, config, accelerator)
    if config is not None and plan is not None and lacks_head_scores(plan):
        statistics = with_head_scores(passes, split, statistics, plan)
        plan = agreed_plan(statistics, config, accelerator)
    seconds = {"collecting": collected - began, "planning": time.perf_counter() - collected}
    return PreparedGrowth(passes, statistics, plan, searched or split.to_search(passes), seconds)


def check_growth(model: PreTrainedModel, config: GrowthConfig) -> None:
    """Refuse amounts that the layers of a growable model have no room for, before anything is measured."""
    check_amounts([place_of(site) for site in growable_sites(model)], config)
    if attachment_name(model, config.attach) is not None and config.strategy != "append":
        raise HfGrowError(
            f"strategy='{config.strategy}' makes present columns anew, but growth of this model is attached beside "
            "them: merge_growth(model) first, or grow the plain base."
        )


def collect_config(config: GrowthConfig, collect: CollectConfig | None = None) -> CollectConfig:
    """A collection that finds what a growth config asks for; amounts and kinds are taken from there."""
    require(config, GrowthConfig)
    collect = require(collect or CollectConfig(), CollectConfig)
    if config.budget is None:
        amounts: dict[str, Any] = {name: max(largest(getattr(config, name)), 1) for name in COLUMN_KINDS}
        collect = replace(collect, kinds=config.kinds, **amounts)
    elif collect.kinds is None:
        collect = replace(collect, kinds=config.kinds)
    if config.strategy != "append" and collect.target is None:
        collect = replace(collect, target="gradient")
    return collect


def agreed_plan(statistics: Statistics, config: GrowthConfig, accelerator: Processes | None = None) -> GrowthPlan:
    """As `plan_growth`, on the first process for all: a last bit of a solver may decide what is planned."""
    if accelerator is None or accelerator.num_processes == 1:
        return plan_growth(statistics, config)
    plan: GrowthPlan | HfGrowError | None = None
    if accelerator.process_index == 0:
        try:
            plan = plan_growth(statistics, config)
        except HfGrowError as error:
            plan = error
    (agreed,) = broadcast_object_list([plan])
    if isinstance(agreed, HfGrowError):
        raise agreed
    return agreed
