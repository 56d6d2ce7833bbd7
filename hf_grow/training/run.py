"""A training run on its way from step to step, with all its parts from its making to its end."""

import json
import sys
from contextlib import ExitStack
from dataclasses import dataclass
from math import inf
from typing import Any

import torch
from accelerate import Accelerator
from torch.distributed.tensor import DTensor
from tqdm import tqdm
from transformers import get_scheduler

from hf_grow.errors import HfGrowError
from hf_grow.fields import to_dict
from hf_grow.files import clear_errors
from hf_grow.growth.report import GrowthReport
from hf_grow.progress import bar
from hf_grow.running.batches import Batch
from hf_grow.running.passes import Passes
from hf_grow.surgery.base import without_adapters
from hf_grow.training.checks import check_length
from hf_grow.training.feed import mixed
from hf_grow.training.learning import learning_parameters
from hf_grow.training.prepared_run import PreparedRun, Start
from hf_grow.training.run_state import RunState, save_run
from hf_grow.training.schedule import GrowthState
from hf_grow.training.setup import checkpoint_gradients, newest_values
from hf_grow.training.sharding import whole_state
from hf_grow.training.wrapping import Wrapper, wrap


def begin_run(prepared: PreparedRun, start: Start, ends: ExitStack) -> "Run":
    """A run with all its parts, ready for its next step; in the end these let go of model and accelerator."""
    config, accelerator, model = prepared.config, prepared.accelerator, start.model
    ends.callback(_finish_trackers, accelerator)
    model.train()
    model.zero_grad()
    first_event = None
    if start.grows_first and start.events is not None and config.train == "new":
        # What learns comes with growth, so an optimizer can only be made then.
        first_event = prepared.grow(without_adapters(model), start.events, start.state.step, None)
    optimizer = prepared.make_optimizer(learning_parameters(model, config.train))
    lr_scheduler = get_scheduler(config.lr_scheduler_type, optimizer, config.warmup_steps, config.steps)
    if start.saved is not None:
        with clear_errors(f"The optimizer's state in {prepared.folder}"):
            _restore(start.saved, optimizer, lr_scheduler, accelerator.scaler)
    if config.gradient_checkpointing:
        checkpoint_gradients(without_adapters(model))
    wrapper = wrap(model, prepared.shard, optimizer, accelerator)
    ends.callback(wrapper.let_go)
    stepper = accelerator.prepare_optimizer(optimizer)
    ends.callback(_forget, accelerator, stepper)
    if config.tracker is not None:
        accelerator.init_trackers("hf_grow", {name: str(value) for name, value in to_dict(config).items()})
    run = Run(
        prepared=prepared,
        wrapper=wrapper,
        optimizer=optimizer,
        stepper=stepper,
        lr_scheduler=lr_scheduler,
        state=start.state,
        events=start.events,
        grows_first=start.grows_first and config.train == "all",
    )
    if first_event is not None:
        run.report(first_event)
    return run


def _restore(saved: dict[str, Any], optimizer: torch.optim.Optimizer, lr_scheduler: Any, scaler: Any) -> None:
    optimizer.load_state_dict(saved["optimizer"])
    lr_scheduler.load_state_dict(saved["scheduler"])
    if saved["scaler"] is not None and scaler is not None:
        scaler.load_state_dict(saved["scaler"])


def _forget(accelerator: Accelerator, stepper: Any) -> None:
    accelerator._optimizers = [known for known in accelerator._optimizers if known is not stepper]


def _finish_trackers(accelerator: Accelerator) -> None:
    # Accelerate's own end of training would also take the processes apart.
    for tracker in accelerator.trackers:
        tracker.finish()
    accelerator.trackers = []


@dataclass(kw_only=True)
class Run:
    """What trains, and how far it is.

    prepared     what was given and checked, and stays the same
    wrapper      the model in the form it trains in
    stepper      the optimizer as Accelerate steps it
    events       how far the schedule of growth is
    grows_first  whether growth is due before the next step
    """

    prepared: PreparedRun
    wrapper: Wrapper
    optimizer: torch.optim.Optimizer
    stepper: Any
    lr_scheduler: Any
    state: RunState
    events: GrowthState | None
    grows_first: bool

    @property
    def model(self) -> Any:
        """The model that learns; a sharded one is another after growth."""
        return self.wrapper.model

    @property
    def inner(self) -> Any:
        """The growable model, inside PEFT's wrapper if there is one."""
        return without_adapters(self.model)

    def train(self) -> None:
        """All steps that are left, and what is due between them."""
        if self.grows_first:
            self.grow()
        with self._bar() as shown:
            while self.state.step < self.prepared.config.steps:
                self.take_step()
                self.state.step += 1
                self.look_around()
                self._show(shown)

    def take_step(self) -> None:
        """One step of the optimizer, on batches that weigh by what their losses are means over."""
        accelerator = self.prepared.accelerator
        batches = self.prepared.feed.batches(self.state.step)
        passes = Passes(self.inner, accelerator)
        weights = [passes.weight(batch) for batch in batches]
        (total,) = passes.reduce([torch.tensor(sum(weights), dtype=torch.float64)])
        mean = torch.zeros((), dtype=torch.float64)
        for number, (batch, weight) in enumerate(zip(batches, weights, strict=True)):
            torch.manual_seed(mixed(self.prepared.config.seed, self.state.step, number, accelerator.process_index))
            share = weight / float(total) if weight else 0.0
            with self.wrapper.synchronised(last=number == len(batches) - 1):
                # A batch without labels has no loss, but the processes wait for its gradients.
                loss = self.loss(batch) if weight else self.loss(batch).nan_to_num(0.0)
                # Gradients are averaged over processes, so each counts as many times as there are.
                accelerator.backward(loss * (share * accelerator.num_processes))
            mean += float(loss.detach()) * share
        (mean,) = passes.reduce([mean])
        self._require_finite(mean, "loss")
        if total > 0:
            self.state.recent.append(float(mean))
        self.clip()
        self.stepper.step()
        self.lr_scheduler.step()
        self.model.zero_grad()

    def loss(self, batch: Batch) -> torch.Tensor:
        """That of a batch on this process, with its graph."""
        check_length(self.inner, batch)
        device = self.prepared.accelerator.device
        inputs = {name: value.to(device) if torch.is_tensor(value) else value for name, value in batch.items()}
        with self.prepared.accelerator.autocast():
            return self.wrapper(**inputs).loss

    def clip(self) -> None:
        """Shorten the gradient of what learns to the longest that is allowed."""
        accelerator = self.prepared.accelerator
        learning = [parameter for group in self.optimizer.param_groups for parameter in group["params"]]
        norm = accelerator.clip_grad_norm_(learning, self.prepared.config.clip or inf)
        if norm is not None and accelerator.scaler is None:
            self._require_finite(norm.full_tensor() if isinstance(norm, DTensor) else norm, "gradient")

    def _require_finite(self, value: torch.Tensor, what: str) -> None:
        if not bool(torch.isfinite(value)):
            raise HfGrowError(
                f"The {what} is not finite in step {self.state.step}: lower the learning rate or look at the data. "
                "The last checkpoint stands."
            )

    def look_around(self) -> None:
        """What is due between steps: to log, evaluate, grow and save, in this order."""
        config, step = self.prepared.config, self.state.step
        last = step == config.steps
        if self.state.recent and (step % config.log_every == 0 or last):
            mean = sum(self.state.recent) / len(self.state.recent)
            self._log({"loss": mean, "learning_rate": self.lr_scheduler.get_last_lr()[0]})
            self.state.recent.clear()
        due = self.events is not None and self.events.due_at_step(step)
        if self.prepared.eval_batches is not None and (last or _is_time(config.eval_every, step)):
            loss = self.prepared.evaluate(self.model)
            self._log({"eval_loss": loss})
            due |= self.events is not None and self.events.note_evaluation(loss, step)
        grown = due and not last and self.grow()
        if last or grown or _is_time(config.save_every, step):
            self.save()

    def _log(self, values: dict[str, Any]) -> None:
        self.state.history.append({"step": self.state.step, **values})
        if self.prepared.config.tracker is not None:
            numbers = {name: value for name, value in values.items() if isinstance(value, (int, float))}
            self.prepared.accelerator.log(numbers, step=self.state.step)

    def grow(self) -> bool:
        """Grow now, on sequences of the training data; False where there is no room or nothing to gain."""
        assert self.events is not None
        with self.wrapper.growing() as model:
            report = self.prepared.grow(without_adapters(model), self.events, self.state.step, self.optimizer)
        if report is not None:
            self.report(report)
        return report is not None

    def report(self, report: GrowthReport) -> None:
        """Take note of growth."""
        self.state.reports.append({"training_step": self.state.step, **json.loads(report.to_json())})
        self._log(
            {
                "event": "growth",
                "form": report.form,
                "parameters": report.parameters_after,
                "loss_before_growth": report.loss_before,
                "loss_after_growth": report.loss_after,
            }
        )
        if self.prepared.progress:
            tqdm.write(f"step {self.state.step}: {report}", file=sys.stderr)

    def save(self) -> None:
        """Write a checkpoint, if there is a folder for them."""
        prepared, scaler = self.prepared, self.prepared.accelerator.scaler
        if prepared.folder is None:
            return
        model = self.wrapper.whole()
        training = {
            "optimizer": whole_state(self.optimizer),
            "scheduler": self.lr_scheduler.state_dict(),
            "scaler": None if scaler is None else scaler.state_dict(),
        }
        self.state.growth = {} if self.events is None else self.events.to_dict()
        if prepared.accelerator.is_main_process:
            save_run(
                prepared.folder, model, self.state, training, tokenizer=prepared.tokenizer, keep=prepared.config.keep
            )
        prepared.accelerator.wait_for_everyone()

    def _bar(self) -> Any:
        steps, shown = self.prepared.config.steps, self.prepared.progress
        return bar(shown, total=steps, initial=self.state.step, desc="training", unit="step")

    def _show(self, shown: Any) -> None:
        if self.prepared.progress:
            shown.update()
            shown.set_postfix(
                newest_values(self.inner, self.state.history, events=len(self.state.reports)), refresh=False
            )


def _is_time(every: int | None, step: int) -> bool:
    return every is not None and step % every == 0
