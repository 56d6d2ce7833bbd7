"""`insert_growth`: carry out a plan, with a line search for how far to step; `grow`: everything in one call."""

import hashlib
import time
from collections.abc import Iterable
from dataclasses import replace
from typing import Any

import torch
from accelerate.utils import broadcast_object_list, gather_object

from hf_grow.blocks import read_blocks
from hf_grow.collect import collect_statistics, fingerprint, split_batches
from hf_grow.collector import place_of
from hf_grow.config import CollectConfig, GrowthConfig, as_dict, largest, require
from hf_grow.errors import HfGrowError
from hf_grow.growth import Steps
from hf_grow.line_search import LineSearch, Trial, scaled, search
from hf_grow.modeling.growable_attention import AttentionSite
from hf_grow.modeling.growable_model import GrowableModel
from hf_grow.optimizer_state import plain_optimizer
from hf_grow.passes import Batch, Passes, growable_sites, read_batches
from hf_grow.patch import make_growable
from hf_grow.plan import GrowthPlan, check_amounts, plan_growth
from hf_grow.report import GrowthReport
from hf_grow.statistics import Statistics
from hf_grow.structure import Change, commit, find_site


def grow(
    model: Any,
    batches: Iterable[Batch],
    config: GrowthConfig,
    *,
    collect: CollectConfig | None = None,
    line_search_batches: Iterable[Batch] | None = None,
    optimizer: Any = None,
    accelerator: Any = None,
    progress: bool = False,
) -> tuple[Any, GrowthReport]:
    """Make a model growable if it is not, measure, plan and insert; returns the same model and what happened.

    A model that was made growable stays so when a later part fails; its outputs are the same. The line search runs on
    the sequences that did not choose the new weights, or on batches of its own. An `optimizer` of the model goes on
    with its state. With an `accelerator` every process brings its own batches, and all grow alike.
    """
    collect = collect_config(config, collect)
    if optimizer is not None:
        plain_optimizer(optimizer)
    found = read_batches(batches, collect.max_batches)
    searched = None if line_search_batches is None else read_batches(line_search_batches)
    if not isinstance(model, GrowableModel):
        make_growable(model)
    check_growth(model, config)
    began = time.perf_counter()
    statistics = collect_statistics(model, found, collect, accelerator=accelerator, progress=progress)
    collected = time.perf_counter()
    plan = agreed_plan(statistics, config, accelerator)
    planned = time.perf_counter()
    searched = searched or batches_to_search(model, found, collect, accelerator)
    report = insert_growth(model, plan, searched, optimizer=optimizer, accelerator=accelerator, progress=progress)
    seconds = {"collecting": collected - began, "planning": planned - collected, **report.seconds}
    return model, replace(report, seconds=seconds)


def batches_to_search(model: Any, batches: list[Batch], collect: CollectConfig, accelerator: Any) -> list[Batch]:
    """Those that did not choose the new weights, where any process has some; else those that did."""
    choosing, judging = split_batches(batches, collect, accelerator)
    return judging if Passes(model, accelerator).count(judging) else choosing


def agreed_plan(statistics: Statistics, config: GrowthConfig, accelerator: Any = None) -> GrowthPlan:
    """As `plan_growth`, on the first process for all: a last bit of a solver may decide what is planned."""
    if accelerator is None or accelerator.num_processes == 1:
        return plan_growth(statistics, config)
    found: GrowthPlan | HfGrowError | None = None
    if accelerator.process_index == 0:
        try:
            found = plan_growth(statistics, config)
        except HfGrowError as error:
            found = error
    (agreed,) = broadcast_object_list([found])
    if isinstance(agreed, HfGrowError):
        raise agreed
    return agreed


def check_growth(model: Any, config: GrowthConfig) -> None:
    """Refuse amounts that the layers of a growable model have no room for, before anything is measured."""
    check_amounts([place_of(site) for site in growable_sites(model)], config)


def collect_config(config: GrowthConfig, collect: CollectConfig | None = None) -> CollectConfig:
    """A collection that finds what a growth config asks for; amounts and kinds are taken from there."""
    require(config, GrowthConfig)
    collect = require(collect or CollectConfig(), CollectConfig)
    if config.budget is None:
        columns, value_columns = (max(largest(amount), 1) for amount in (config.columns, config.value_columns))
        collect = replace(collect, kinds=config.kinds, columns=columns, value_columns=value_columns)
    elif collect.kinds is None:
        collect = replace(collect, kinds=config.kinds)
    if config.strategy != "append" and collect.target is None:
        collect = replace(collect, target="gradient")
    return collect


@torch.inference_mode(False)
def insert_growth(
    model: Any,
    plan: GrowthPlan,
    batches: Iterable[Batch] | None = None,
    *,
    optimizer: Any = None,
    accelerator: Any = None,
    progress: bool = False,
    dry_run: bool = False,
) -> GrowthReport:
    """Carry out a plan: the step that lowers the loss most on the batches, or nothing changes until training.

    Without batches, and without a step size in the plan's config, growth takes the form that preserves the function.
    An `optimizer` of the model goes on: its groups get the new parameters, its state is carried for the old entries.
    With `dry_run` everything is tried and nothing inserted.
    """
    began = time.perf_counter()
    sites = growable_sites(model)
    _check_plan(model, plan, sites)
    if optimizer is not None:
        plain_optimizer(optimizer)
    # Of many processes some may have none.
    many = accelerator is not None and accelerator.num_processes > 1
    found = None if batches is None else read_batches(batches, least=0 if many else 1)
    passes = Passes(model, accelerator, progress)
    insertion = _Insertion(model, plan, sites, passes, found)
    steps = insertion.choose_steps()
    searched = time.perf_counter()
    changes = insertion.changes(steps)
    report = insertion.report(steps)
    if dry_run:
        expected = insertion.trial_loss(steps)
        return replace(report, dry_run=True, loss_after=expected, seconds={"line search": searched - began})
    _check_agreement(changes, accelerator)
    carried = commit(model, changes, insertion.event(report), optimizer)
    report = replace(insertion.measured(report), optimizer=None if carried is None else str(carried))
    seconds = {"line search": searched - began, "inserting": time.perf_counter() - searched}
    return replace(report, parameters_after=model.num_parameters(), seconds=seconds)


def _check_plan(model: Any, plan: GrowthPlan, sites: list[AttentionSite]) -> None:
    if not isinstance(plan, GrowthPlan):
        raise HfGrowError(f"plan must be a GrowthPlan from plan_growth, not {type(plan).__name__}.")
    if plan.model_type != model.config.model_type or plan.fingerprint != fingerprint(sites):
        raise HfGrowError(
            "The plan was made for another model, or for this one before its attention weights changed: "
            "collect statistics and plan again."
        )
    for layer in plan.layers:
        find_site(model, layer.place.layer, layer.place.kind)


def _check_agreement(changes: list[Change], accelerator: Any) -> None:
    """All processes are about to insert the same weights, to the bit."""
    if accelerator is None or accelerator.num_processes == 1:
        return
    digest = hashlib.blake2b(digest_size=16)
    for change in changes:
        for block in change.blocks.values():
            digest.update(block.detach().to("cpu").contiguous().view(torch.uint8).numpy().data)
    if len(set(gather_object([digest.hexdigest()]))) > 1:
        raise HfGrowError(
            "The processes found different new weights, so none grew: they must hold the same model and run on "
            "machines of one kind."
        )


class _Insertion:
    """A plan about to be carried out."""

    def __init__(
        self, model: Any, plan: GrowthPlan, sites: list[AttentionSite], passes: Passes, batches: list[Batch] | None
    ) -> None:
        self.model, self.plan, self.passes, self.batches = model, plan, passes, batches
        self.growths = [layer.growth for layer in plan.layers]
        by_name = {site.name: site for site in sites}
        self.sites = [by_name[growth.place.name] for growth in self.growths]
        self.found = LineSearch()
        self.loss_before: float | None = None
        self.multiples = [0.0] * len(self.growths)

    def choose_steps(self) -> list[Steps]:
        """The steps of every layer: given, searched for, or none."""
        config = self.plan.config
        if self.batches is not None:
            self.batches, self.loss_before = self.passes.usable(self.batches, what="loss before")
            # A model that shrinks changes even without a step.
            shrinks = any(growth.shrinks for growth in self.growths)
            self.found.curve[0.0] = self._trial().loss(self._steps(self.multiples)) if shrinks else self.loss_before
        if config.step_size is not None:
            self.multiples = [float(config.step_size)] * len(self.growths)
        elif self.batches is not None and any(self.plan.steps.values()):
            self._search(config.line_search == "full_rank", config.steps == "per_layer")
        return self._steps(self.multiples)

    def _steps(self, multiples: list[float]) -> list[Steps]:
        kinds = ("columns", "value_columns", "heads", "head_scores")
        planned = dict.fromkeys(kinds, 0.0) | self.plan.steps
        return [scaled(planned, multiple) for multiple in multiples]

    def _search(self, full_rank: bool, per_layer: bool) -> None:
        trial = self._trial()
        before = self.found.curve[0.0]
        count = len(self.growths)
        searched = replace(trial, full_rank=full_rank)
        self.found = search(lambda multiple: searched.loss(self._steps([multiple] * count)), 1.0, before)
        self.multiples = [self.found.step] * count
        best = self._shorten(trial, before) if full_rank and self.found.step > 0 else self.found.loss
        for index in range(count if per_layer else 0):
            best = self._search_layer(trial, index, best)

    def _trial(self) -> Trial:
        assert self.batches is not None
        return Trial(self.passes, self.sites, self.growths, self.batches)

    def _shorten(self, trial: Trial, before: float) -> float:
        """The loss with what is inserted, fewer columns than were searched with: its steps must lower the loss too."""
        for _ in range(12):
            loss = trial.loss(self._steps(self.multiples))
            if loss < before:
                return loss
            self.multiples = [multiple / 3 for multiple in self.multiples]
        self.multiples = [0.0] * len(self.multiples)
        return before

    def _search_layer(self, trial: Trial, index: int, best: float) -> float:
        """One layer's own multiple, the others staying as they are; returns the loss with it."""

        def loss_at(multiple: float) -> float:
            return trial.loss(self._steps([*self.multiples[:index], multiple, *self.multiples[index + 1 :]]))

        present = self.multiples[index]
        found = search(loss_at, present or 1.0, best if present == 0 else None)
        if found.loss < best:
            self.multiples[index] = found.step
            return found.loss
        return best

    def changes(self, steps: list[Steps]) -> list[Change]:
        """The new weights of every layer, in memory, before anything changes."""
        generator = torch.Generator().manual_seed(int(self.plan.collected.get("seed", 0)))
        changes = []
        for site, growth, step in zip(self.sites, self.growths, steps, strict=True):
            blocks = growth.built(step, read_blocks(site), generator)
            changes.append(Change(site, blocks, remade=("query", "key") if growth.strategy == "refactor" else ()))
        return changes

    def report(self, steps: list[Steps]) -> GrowthReport:
        """What is about to happen."""
        parameters = self.model.num_parameters()
        shared = len(set(self.multiples)) <= 1
        layers = [self._layer(index, steps[index]) for index in range(len(self.growths))]
        predicted: dict[str, float | None] = {"in_sample": sum(layer["predicted"]["in_sample"] for layer in layers)}
        held_out = [layer["predicted"]["held_out"] for layer in layers]
        predicted["held_out"] = None if None in held_out else sum(held_out)
        return GrowthReport(
            form=self._form(),
            loss_before=self.loss_before,
            loss_after=None,
            step=(self.multiples or [0.0])[0] if shared else list(self.multiples),
            steps=dict(steps[0]) if shared and steps else {},
            curve=sorted(self.found.curve.items()),
            predicted=predicted,
            parameters_before=parameters,
            parameters_after=parameters + self.plan.parameters_added,
            layers=layers,
            config=as_dict(self.plan.config),
            collected=self.plan.collected,
        )

    def _form(self) -> str:
        if any(self.multiples):
            return "stepped"
        return "shrunk" if any(growth.shrinks for growth in self.growths) else "preserving"

    def _layer(self, index: int, steps: Steps) -> dict[str, Any]:
        plan, growth = self.plan.layers[index], self.growths[index]
        multiple = self.multiples[index]
        held_out = None if plan.held_out is None else multiple * sum(plan.held_out.values())
        return plan.summary() | {
            "step": multiple,
            "predicted": {"in_sample": multiple * sum(plan.in_sample.values()), "held_out": held_out},
            "new_query_key_dim": growth.query_key_dim,
            "new_value_dim": growth.value_dim,
            "new_n_heads": growth.place.n_heads + len(growth.heads) * growth.place.n_heads // growth.place.n_kv_heads,
            "column_size": growth.column_size(steps["columns"]),
        }

    def event(self, report: GrowthReport) -> dict[str, Any]:
        """What the model's history keeps."""
        kept = ("layer", "kind", "columns", "value_columns", "heads", "head_patterns", "expected_decrease", "step")
        return {
            "kind": "growth",
            "form": report.form,
            "config": report.config,
            "collected": report.collected,
            "steps": report.steps,
            "loss_before": report.loss_before,
            "parameters_added": self.plan.parameters_added,
            "layers": [{name: layer[name] for name in kept} for layer in report.layers],
        }

    def trial_loss(self, steps: list[Steps]) -> float | None:
        """The loss with these steps, tried beside the model's own weights."""
        return None if self.batches is None else self._trial().loss(steps)

    def measured(self, report: GrowthReport) -> GrowthReport:
        """The report with the loss of the grown model itself, also in its history."""
        if self.batches is None:
            return report
        report = replace(report, loss_after=self.passes.loss(self.batches, what="loss after"))
        self.model.growth_history["events"][-1]["loss_after"] = report.loss_after
        return report
