"""`insert_growth`: carry out a plan, with a line search for how far to step."""

import time
from collections.abc import Iterable
from dataclasses import replace
from typing import Any

import torch
from accelerate.utils import gather_object
from torch import Tensor
from transformers import PreTrainedModel

from hf_grow.errors import HfGrowError
from hf_grow.fields import to_dict
from hf_grow.files import digest
from hf_grow.growth.collect import fingerprint
from hf_grow.growth.kinds import KINDS, StepSizes
from hf_grow.growth.layer_growth import STEP_NAMES
from hf_grow.growth.line_search import LineSearch, Trial, scaled, search
from hf_grow.growth.plan import GrowthPlan
from hf_grow.growth.report import GrowthReport
from hf_grow.modeling.growable_attention import AttentionSite
from hf_grow.running.batches import Batch, read_batches
from hf_grow.running.passes import Passes, Processes
from hf_grow.surgery.base import without_adapters
from hf_grow.surgery.blocks import effective, query_factors, read_blocks
from hf_grow.surgery.change import Change, longer_scale
from hf_grow.surgery.optimizer_state import plain_optimizer
from hf_grow.surgery.patch import growable_sites
from hf_grow.surgery.structure import attachment_name, commit, find_site


def insert_growth(
    model: PreTrainedModel,
    plan: GrowthPlan,
    batches: Iterable[Batch] | None = None,
    *,
    optimizer: torch.optim.Optimizer | None = None,
    accelerator: Processes | None = None,
    progress: bool = False,
    dry_run: bool = False,
) -> GrowthReport:
    """Carry out a plan: the step that lowers the loss most on the batches, or nothing changes until training.

    Without batches, and without a step size in the plan's config, growth takes the form that preserves the function.
    An `optimizer` of the model goes on: its groups get the new parameters, its state is carried for the old entries.
    With `dry_run` everything is tried and nothing inserted.
    """
    model = without_adapters(model)
    check_plan(model, plan)
    if optimizer is not None:
        plain_optimizer(optimizer)
    # Of many processes some may have none.
    many = accelerator is not None and accelerator.num_processes > 1
    searched = None if batches is None else read_batches(batches, least=0 if many else 1)
    return carry_out(plan, Passes(model, accelerator, progress), searched, optimizer=optimizer, dry_run=dry_run)


@torch.inference_mode(False)
def carry_out(
    plan: GrowthPlan,
    passes: Passes,
    batches: list[Batch] | None,
    *,
    optimizer: torch.optim.Optimizer | None = None,
    dry_run: bool = False,
) -> GrowthReport:
    """As `insert_growth`, for a model that is known to be the one that was planned for."""
    began = time.perf_counter()
    model = passes.model
    for layer in plan.layers:
        find_site(model, layer.place.layer, layer.place.attention_type)
    insertion = _Insertion(plan, passes, batches)
    step_sizes = insertion.choose_steps()
    searched = time.perf_counter()
    changes = insertion.changes(step_sizes)
    report = insertion.report(step_sizes)
    if dry_run:
        expected = insertion.trial_loss(step_sizes)
        return replace(report, dry_run=True, loss_after=expected, seconds={"line search": searched - began})
    _check_agreement(changes, passes.accelerator)
    carried = commit(model, changes, insertion.event(report), optimizer)
    report = replace(insertion.measured(report), optimizer=None if carried is None else str(carried))
    seconds = {"line search": searched - began, "inserting": time.perf_counter() - searched}
    return replace(report, parameters_after=model.num_parameters(), seconds=seconds)


def check_plan(model: PreTrainedModel, plan: GrowthPlan) -> None:
    """Refuse a plan that was not made for the model as it is."""
    sites = growable_sites(model)
    if not isinstance(plan, GrowthPlan):
        raise HfGrowError(f"plan must be a GrowthPlan from plan_growth, not {type(plan).__name__}.")
    if plan.model_type != model.config.model_type or plan.fingerprint != fingerprint(sites):
        raise HfGrowError(
            "The plan was made for another model, or for this one before its attention weights changed: "
            "collect statistics and plan again."
        )


def _check_agreement(changes: list[Change], accelerator: Processes | None) -> None:
    """All processes are about to insert the same weights, to the bit."""
    if accelerator is None or accelerator.num_processes == 1:
        return
    own = digest(block for change in changes for block in change.blocks.values())
    if len(set(gather_object([own]))) > 1:
        raise HfGrowError(
            "The processes found different new weights, so none grew: they must hold the same model and run on "
            "machines of one kind."
        )


def _without_factors(query: Tensor, factors: Tensor, present: Tensor | None) -> Tensor:
    """Queries to be multiplied by learnt factors, of such that already are; the present ones stay to the bit."""
    query = query / factors.to(query)[:, None, None]
    if present is not None:
        heads, _, columns = present.shape
        query[:heads, :, :columns] = present
    return query


def _scale(site: AttentionSite, attach: str | None, scaling: str, query: Tensor) -> Tensor | None:
    """The learnable scale for these queries (heads, inputs, columns); None where it stays as it is, if there is one."""
    present = site.attention.score_scale if attach is None else getattr(site.growth, "scale", None)
    if present is None:
        sizes = {"frozen": None, "learnable": 1, "learnable_per_head": query.shape[0]}
        size = sizes[scaling]
        dtype = torch.promote_types(query.dtype, torch.float32)
        return None if size is None else query.new_zeros(size, 1, dtype=dtype)
    return longer_scale(present, query.shape[0])


class _Insertion:
    """A plan about to be carried out."""

    def __init__(self, plan: GrowthPlan, passes: Passes, batches: list[Batch] | None) -> None:
        self.plan, self.passes, self.batches = plan, passes, batches
        self.model = passes.model
        self.growths = [layer.growth for layer in plan.layers]
        by_name = {site.name: site for site in growable_sites(self.model)}
        self.sites = [by_name[growth.place.name] for growth in self.growths]
        self.line = LineSearch()
        self.loss_before: float | None = None
        self.multiples = [0.0] * len(self.growths)

    def choose_steps(self) -> list[StepSizes]:
        """The steps of every layer: given, searched for, or none."""
        config = self.plan.config
        if self.batches is not None:
            self.batches, _, self.loss_before = self.passes.usable(self.batches, what="loss before")
            # A model that shrinks changes even without a step.
            shrinks = any(growth.shrinks for growth in self.growths)
            self.line.curve[0.0] = self._trial().loss(self._steps(self.multiples)) if shrinks else self.loss_before
        if config.step_size is not None:
            self.multiples = [float(config.step_size)] * len(self.growths)
        elif self.batches is not None and any(self.plan.step_sizes.values()):
            self._search(config.line_search == "full_rank", config.step_scope == "per_layer")
        return self._steps(self.multiples)

    def _steps(self, multiples: list[float]) -> list[StepSizes]:
        planned = dict.fromkeys(STEP_NAMES, 0.0) | self.plan.step_sizes
        return [scaled(planned, multiple) for multiple in multiples]

    def _search(self, full_rank: bool, per_layer: bool) -> None:
        trial = self._trial()
        before = self.line.curve[0.0]
        count = len(self.growths)
        searched = self._trial(full_rank)
        slope = None if full_rank or self.plan.config.strategy != "append" else self._slope()
        self.line = search(lambda multiple: searched.loss(self._steps([multiple] * count)), 1.0, before, slope)
        self.multiples = [self.line.step] * count
        best = self._shorten(trial, before) if full_rank and self.line.step > 0 else self.line.loss
        for index in range(count if per_layer else 0):
            best = self._search_layer(trial, index, best)

    def _slope(self) -> float:
        """First-order decrease for the planned steps, by the most honest gains there are."""
        return sum(
            sum((layer.in_sample if layer.held_out is None else layer.held_out).values()) for layer in self.plan.layers
        )

    def _trial(self, full_rank: bool = False) -> Trial:
        assert self.batches is not None
        return Trial(self.passes, self.sites, self.growths, self.batches, full_rank)

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
        line = search(loss_at, present or 1.0, best if present == 0 else None)
        if line.loss < best:
            self.multiples[index] = line.step
            return line.loss
        return best

    def changes(self, step_sizes: list[StepSizes]) -> list[Change]:
        """The new weights of every layer, in memory, before anything changes."""
        generator = torch.Generator().manual_seed(int(self.plan.collected.get("seed", 0)))
        attach = attachment_name(self.model, self.plan.config.attach)
        changes = []
        for site, growth, sizes in zip(self.sites, self.growths, step_sizes, strict=True):
            blocks = read_blocks(site)
            if attach is not None:
                # Where the base is in half precision, what stands beside it is not.
                blocks = {
                    role: block.to(torch.promote_types(block.dtype, torch.float32)) for role, block in blocks.items()
                }
            built = growth.built(sizes, effective(blocks, query_factors(site)), generator)
            if (factors := query_factors(site, built["query"].shape[0])) is not None:
                built["query"] = _without_factors(built["query"], factors, None if growth.remade else blocks["query"])
            scale = _scale(site, attach, self.plan.config.scaling, built["query"])
            changes.append(Change(site, built, attach=attach, scale=scale, remade=growth.remade))
        return changes

    def report(self, step_sizes: list[StepSizes]) -> GrowthReport:
        """What is about to happen."""
        parameters = self.model.num_parameters()
        shared = len(set(self.multiples)) <= 1
        layers = [self._layer(index, step_sizes[index]) for index in range(len(self.growths))]
        predicted: dict[str, float | None] = {"in_sample": sum(layer["predicted"]["in_sample"] for layer in layers)}
        held_out = [layer["predicted"]["held_out"] for layer in layers]
        predicted["held_out"] = None if None in held_out else sum(held_out)
        return GrowthReport(
            form=self._form(),
            loss_before=self.loss_before,
            loss_after=None,
            step=(self.multiples or [0.0])[0] if shared else list(self.multiples),
            step_sizes=dict(step_sizes[0]) if shared and step_sizes else {},
            curve=sorted(self.line.curve.items()),
            predicted=predicted,
            parameters_before=parameters,
            parameters_after=parameters + self.plan.parameters_added,
            layers=layers,
            config=to_dict(self.plan.config),
            collected=self.plan.collected,
        )

    def _form(self) -> str:
        if any(self.multiples):
            return "stepped"
        return "shrunk" if any(growth.shrinks for growth in self.growths) else "preserving"

    def _layer(self, index: int, step_sizes: StepSizes) -> dict[str, Any]:
        plan, growth = self.plan.layers[index], self.growths[index]
        multiple = self.multiples[index]
        held_out = None if plan.held_out is None else multiple * sum(plan.held_out.values())
        return plan.summary() | {
            "step": multiple,
            "predicted": {"in_sample": multiple * sum(plan.in_sample.values()), "held_out": held_out},
            "new_query_key_dim": growth.dims.qk_head_dim,
            "new_value_dim": growth.dims.v_head_dim,
            "new_n_heads": growth.dims.num_attention_heads,
            "column_size": growth.column_size(step_sizes),
        }

    def event(self, report: GrowthReport) -> dict[str, Any]:
        """What the model's history keeps."""
        kept = ("layer", "kind", *KINDS, "head_patterns", "expected_decrease", "step")
        return {
            "kind": "growth",
            "form": report.form,
            "config": report.config,
            "collected": report.collected,
            # Its name in files since 0.1.
            "steps": report.step_sizes,
            "loss_before": report.loss_before,
            "parameters_added": self.plan.parameters_added,
            "layers": [{name: layer[name] for name in kept} for layer in report.layers],
        }

    def trial_loss(self, step_sizes: list[StepSizes]) -> float | None:
        """The loss with these steps, tried beside the model's own weights."""
        return None if self.batches is None else self._trial().loss(step_sizes)

    def measured(self, report: GrowthReport) -> GrowthReport:
        """The report with the loss of the grown model itself, also in its history."""
        if self.batches is None:
            return report
        report = replace(report, loss_after=self.passes.loss(self.batches, what="loss after"))
        self.model.growth_history["events"][-1]["loss_after"] = report.loss_after
        return report
