"""`GrowthTrainer`: an Accelerate training loop in which the model grows, on one process or many."""

import json
import sys
import time
from collections.abc import Callable
from contextlib import nullcontext
from dataclasses import asdict, dataclass, replace
from functools import partial
from math import inf
from pathlib import Path
from typing import Any

import torch
from accelerate import Accelerator
from peft import PeftModel
from torch.distributed.tensor import DTensor
from tqdm import tqdm
from transformers import default_data_collator, get_scheduler

from hf_grow.base import base_hash, has_grown, without_adapters
from hf_grow.config import CollectConfig, GrowthConfig, as_dict, require
from hf_grow.distributed import rewrap
from hf_grow.errors import HfGrowError
from hf_grow.feed import Collate, Feed, evaluation_batches, mixed
from hf_grow.folders import clear_errors
from hf_grow.modeling.growable_model import GrowableModel
from hf_grow.new_weights import NewWeights
from hf_grow.passes import Batch, Passes
from hf_grow.patch import make_growable
from hf_grow.report import GrowthReport
from hf_grow.run_state import RunState, checkpoints, clear_remains, load_run, save_run
from hf_grow.schedule import GrowthSchedule, GrowthState, grow_on_schedule
from hf_grow.sharding import gather, reshard, spread, whole_copy, whole_state
from hf_grow.train_config import FREE_ON_RESUME, TrainConfig
from hf_grow.training_setup import (
    check_accelerator,
    check_batches,
    check_length,
    check_model,
    check_schedule,
    labelled,
    learning_parameters,
    left_as_found,
    make_accelerator,
    make_optimizer,
    newest_values,
)

MakeOptimizer = Callable[[list[torch.nn.Parameter]], torch.optim.Optimizer]


@dataclass(frozen=True)
class TrainResult:
    """What training did: the losses as they came, the last evaluation, and the reports of growth."""

    steps: int
    loss: float | None
    eval_loss: float | None
    history: list[dict[str, Any]]
    reports: list[dict[str, Any]]
    seconds: float


class GrowthTrainer:
    """Trains a model and lets it grow on the way.

    rows, eval_rows   data sets of rows (numbered, or to be iterated over), which `collate` makes into batches that give
                      `model(**batch)` a loss
    growth, schedule  how much to grow at each event, and when; neither: no growth
    folder            for checkpoints, from which `train(resume=True)` goes on
    optimizer         makes one out of parameters, instead of the config's
    shard             applies FSDP2's `fully_shard` to a model; the trained model is then `trainer.model`
    """

    def __init__(
        self,
        model: Any,
        rows: Any,
        eval_rows: Any = None,
        *,
        collate: Collate = default_data_collator,
        config: TrainConfig | None = None,
        growth: GrowthConfig | None = None,
        schedule: GrowthSchedule | None = None,
        collect: CollectConfig | None = None,
        folder: str | Path | None = None,
        tokenizer: Any = None,
        optimizer: MakeOptimizer | None = None,
        shard: Callable[[Any], Any] | None = None,
        accelerator: Accelerator | None = None,
        progress: bool = True,
    ) -> None:
        self.config = config = require(config or TrainConfig(), TrainConfig)
        self.growth, self.schedule, self.collect = growth, schedule, collect
        self.accelerator = accelerator or make_accelerator(config, folder)
        check_accelerator(self.accelerator, config)
        self.main = self.accelerator.is_main_process
        self.progress = progress and self.accelerator.is_local_main_process
        self.folder = None if folder is None else Path(folder)
        self.tokenizer, self.shard = tokenizer, shard
        self._make_optimizer = optimizer or partial(make_optimizer, config=config)
        self.feed = Feed(
            rows,
            collate,
            config.batch_size,
            config.accumulation,
            self.accelerator.num_processes,
            self.accelerator.process_index,
            config.seed,
        )
        self.eval_batches: list[Batch] | None = None
        if eval_rows is not None:
            # Processes that share a sharded model must all take the same number of passes: each evaluates all.
            own = (1, 0) if shard is not None else (self.accelerator.num_processes, self.accelerator.process_index)
            self.eval_batches = evaluation_batches(eval_rows, collate, config.batch_size, config.seed, *own)
        self.model = self._prepared(model)
        check_model(self.model, config, shard)
        check_schedule(self.model, config, growth, schedule, evaluates=eval_rows is not None)
        check_batches(self.inner, (batch for step in range(10) for batch in self.feed.batches(step)), "training")
        if self.eval_batches:
            check_batches(self.inner, self.eval_batches, "evaluation")
            for batch in self.eval_batches:
                check_length(self.inner, batch)
            self.eval_batches = labelled(self.inner, self.eval_batches)
        mark = None if self.folder is None else base_hash(self.inner, growth=True)
        self.state = RunState(self._settings(), mark)
        self.events = None if schedule is None else GrowthState(schedule)
        self.new_weights: NewWeights | None = None
        self._wrapped: Any = None
        self._skeleton: Any = None
        self._begun = False

    @property
    def inner(self) -> Any:
        """The growable model, inside PEFT's wrapper if there is one."""
        return without_adapters(self.model)

    def train(self, *, resume: bool = False) -> TrainResult:
        """Train to the last step; with `resume`, from the newest checkpoint in the folder, if there is one."""
        began = time.perf_counter()
        with left_as_found(lambda: self.model):
            try:
                self._begin(resume)
                with self._bar() as bar:
                    while self.state.step < self.config.steps:
                        self._train_step()
                        self.state.step += 1
                        self._look_around()
                        self._show(bar)
            finally:
                self._end()
        losses = [entry["loss"] for entry in self.state.history if "loss" in entry]
        evaluations = [entry["eval_loss"] for entry in self.state.history if "eval_loss" in entry]
        return TrainResult(
            steps=self.state.step,
            loss=losses[-1] if losses else None,
            eval_loss=evaluations[-1] if evaluations else None,
            history=self.state.history,
            reports=self.state.reports,
            seconds=time.perf_counter() - began,
        )

    def evaluate(self) -> float:
        """The mean loss on the evaluation data, over all processes."""
        if self.eval_batches is None:
            raise HfGrowError("There is no evaluation data: give eval_rows.")
        accelerator = None if self.shard is not None else self.accelerator
        with self.accelerator.autocast():
            loss = Passes(self.inner, accelerator).loss(self.eval_batches)
        reshard(self.model)
        return loss

    def _begin(self, resume: bool) -> None:
        """Everything in place for the next step: weights, optimizer, growth before the first step, wrappers."""
        # Another trainer may have changed Accelerate's precision since.
        check_accelerator(self.accelerator, self.config)
        # Shared by all of a process; another loop that stopped between two steps would have every step passed over.
        self.accelerator.gradient_state._set_sync_gradients(True)
        config, training = self.config, self._take_up(resume)
        self.model.train()
        self.model.zero_grad()
        self.optimizer = self._make_optimizer(learning_parameters(self.model, config.train))
        self.scheduler = get_scheduler(config.scheduler_type, self.optimizer, config.warmup_steps, config.steps)
        if training is not None:
            with clear_errors(f"The optimizer's state in {self.folder}"):
                self.optimizer.load_state_dict(training["optimizer"])
                self.scheduler.load_state_dict(training["scheduler"])
        grows = training is None and self.events is not None and self.events.due_at_step(0)
        if not grows:
            self._watch_new_weights()
        elif config.train == "new":
            # What will learn, so that wrappers see that something does; the rest is frozen after growth.
            for parameter in learning_parameters(self.model, config.train):
                parameter.requires_grad_(True)
        self._wrap()
        self.stepper = self.accelerator.prepare_optimizer(self.optimizer)
        if training is not None and training["scaler"] is not None and self.accelerator.scaler is not None:
            self.accelerator.scaler.load_state_dict(training["scaler"])
        if config.tracker is not None:
            self.accelerator.init_trackers("hf_grow", {name: str(value) for name, value in config.as_dict().items()})
        if grows:
            self._grow()

    def _take_up(self, resume: bool) -> dict[str, Any] | None:
        """The newest checkpoint's state of optimizer and schedule; the model and the run get theirs."""
        if resume and self.folder is None:
            raise HfGrowError("There is nothing to resume from: give the trainer the folder of the run.")
        found = [] if self.folder is None else checkpoints(self.folder)
        if found and not resume:
            raise HfGrowError(f"{self.folder} holds checkpoints of a run: resume it, or choose another folder.")
        if self._begun and not (found and self.shard is None):
            raise HfGrowError("This trainer has trained before: make a new one, with a model as it was at the start.")
        training = None
        if found:
            state, training = load_run(found[-1], self.model, self.state, FREE_ON_RESUME)
            self.state = replace(state, settings=self.state.settings)
            if self.schedule is not None:
                self.events = GrowthState.from_dict(self.schedule, state.growth)
        self._begun = True
        if self.folder is not None and self.main:
            clear_remains(self.folder, self.config.keep)
        self.accelerator.wait_for_everyone()
        return training

    def _wrap(self) -> None:
        if self.config.gradient_checkpointing and not self.inner.is_gradient_checkpointing:
            self.inner.gradient_checkpointing_enable(gradient_checkpointing_kwargs={"use_reentrant": False})
            # transformers hooks the embeddings for the reentrant form, and would leave the hooks there.
            self.inner.disable_input_require_grads()
        if self.shard is None:
            self._wrapped = self.accelerator.prepare_model(self.model)
            return
        self._skeleton = spread(self.model, self.shard, self.optimizer)
        self._wrapped = self.model
        if self.new_weights is not None:
            self._watch_new_weights()

    def _end(self) -> None:
        """Take hooks off the model and let go of wrappers."""
        if self.new_weights is not None:
            self.new_weights.detach()
            self.new_weights = None
        if self._wrapped is not None:
            self.accelerator._models = [model for model in self.accelerator._models if model is not self._wrapped]
            self.accelerator._optimizers = [
                known for known in self.accelerator._optimizers if known.optimizer is not self.optimizer
            ]
            self._wrapped = None
        # Accelerate's own end of training would also take the processes apart.
        for tracker in self.accelerator.trackers:
            tracker.finish()
        self.accelerator.trackers = []

    def _train_step(self) -> None:
        """One step of the optimizer, on batches that weigh by what their losses are means over."""
        batches = self.feed.batches(self.state.step)
        passes = Passes(self.inner, self.accelerator)
        weights = [passes.weight(batch) for batch in batches]
        (total,) = passes.reduce([torch.tensor(sum(weights), dtype=torch.float64)])
        found = torch.zeros((), dtype=torch.float64)
        for number, (batch, weight) in enumerate(zip(batches, weights, strict=True)):
            torch.manual_seed(mixed(self.config.seed, self.state.step, number, self.accelerator.process_index))
            share = weight / float(total) if weight else 0.0
            with self._synchronised(last=number == len(batches) - 1):
                # A batch without labels has no loss, but the processes wait for its gradients.
                loss = self._loss(batch) if weight else self._loss(batch).nan_to_num(0.0)
                # Gradients are averaged over processes, so each counts as many times as there are.
                self.accelerator.backward(loss * (share * self.accelerator.num_processes))
            found += float(loss.detach()) * share
        (found,) = passes.reduce([found])
        self._require_finite(found, "loss")
        if total > 0:
            self.state.recent.append(float(found))
        self._clip()
        self.stepper.step()
        self.scheduler.step()
        self.model.zero_grad()

    def _clip(self) -> None:
        if self.new_weights is not None and self.shard is not None:
            self.new_weights.mask_gradients()
        learning = [parameter for group in self.optimizer.param_groups for parameter in group["params"]]
        norm = self.accelerator.clip_grad_norm_(learning, self.config.clip or inf)
        if norm is not None and self.accelerator.scaler is None:
            self._require_finite(norm.full_tensor() if isinstance(norm, DTensor) else norm, "gradient")

    def _require_finite(self, value: torch.Tensor, what: str) -> None:
        if not bool(torch.isfinite(value)):
            raise HfGrowError(
                f"The {what} is not finite in step {self.state.step}: lower the learning rate or look at the data. "
                "The last checkpoint stands."
            )

    def _loss(self, batch: Batch) -> torch.Tensor:
        check_length(self.inner, batch)
        device = self.accelerator.device
        inputs = {name: value.to(device) if torch.is_tensor(value) else value for name, value in batch.items()}
        with self.accelerator.autocast():
            return self._wrapped(**inputs).loss

    def _synchronised(self, last: bool) -> Any:
        """Gradients travel between processes once a step."""
        return nullcontext() if last or self.shard is not None else self.accelerator.no_sync(self._wrapped)

    def _look_around(self) -> None:
        """What is due between steps: to log, evaluate, grow and save, in this order."""
        config, step = self.config, self.state.step
        last = step == config.steps
        if self.state.recent and (step % config.log_every == 0 or last):
            mean = sum(self.state.recent) / len(self.state.recent)
            self._log({"loss": mean, "learning_rate": self.scheduler.get_last_lr()[0]})
            self.state.recent.clear()
        due = self.events is not None and self.events.due_at_step(step)
        if self.eval_batches is not None and (last or _is_time(config.eval_every, step)):
            loss = self.evaluate()
            self._log({"eval_loss": loss})
            due |= self.events is not None and self.events.note_evaluation(loss, step)
        grown = due and not last and self._grow()
        if last or grown or _is_time(config.save_every, step):
            self._save()

    def _log(self, values: dict[str, Any]) -> None:
        self.state.history.append({"step": self.state.step, **values})
        if self.config.tracker is not None:
            numbers = {name: value for name, value in values.items() if isinstance(value, (int, float))}
            self.accelerator.log(numbers, step=self.state.step)

    def _grow(self) -> bool:
        """Grow now, on sequences of the training data; False where there is no room or nothing to gain."""
        assert self.growth is not None and self.schedule is not None and self.events is not None
        if self.shard is not None:
            self.model = gather(self.model, self._skeleton, self.optimizer)
        sample = self.feed.sample(self.schedule.sequences, self.state.step)
        report = grow_on_schedule(
            self.model,
            labelled(self.inner, sample) or sample,
            self.growth,
            self.events,
            self.state.step,
            collect=self.collect,
            optimizer=self.optimizer,
            accelerator=self.accelerator,
        )
        self._watch_new_weights()
        if self.shard is not None:
            self._wrap()
        elif self._wrapped is not self.model:
            rewrap(self._wrapped)
        if report is not None:
            self._report(report)
        return report is not None

    def _report(self, report: GrowthReport) -> None:
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
        if self.progress:
            tqdm.write(f"step {self.state.step}: {report}", file=sys.stderr)

    def _watch_new_weights(self) -> None:
        """Let new weights, if there are any, learn as the config says."""
        if self.config.train == "all" and self.config.new_learning_rate_multiplier == 1:
            return
        if self.new_weights is not None:
            # A sharded model was gathered into another one.
            self.new_weights.model = self.model
            self.new_weights.refresh()
        elif self.config.train == "new" or has_grown(self.model):
            multiplier = self.config.new_learning_rate_multiplier
            self.new_weights = NewWeights(self.model, train=self.config.train, learning_rate_multiplier=multiplier)
            self.new_weights.attach(self.optimizer)

    def _save(self) -> None:
        if self.folder is None:
            return
        model = self.model if self.shard is None else whole_copy(self.model, self._skeleton)
        scaler = self.accelerator.scaler
        training = {
            "optimizer": whole_state(self.optimizer),
            "scheduler": self.scheduler.state_dict(),
            "scaler": None if scaler is None else scaler.state_dict(),
        }
        self.state.growth = {} if self.events is None else self.events.to_dict()
        if self.main:
            save_run(self.folder, model, self.state, training, tokenizer=self.tokenizer, keep=self.config.keep)
        self.accelerator.wait_for_everyone()

    def _bar(self) -> Any:
        return tqdm(
            total=self.config.steps, initial=self.state.step, disable=not self.progress, desc="training", unit="step"
        )

    def _show(self, bar: Any) -> None:
        if self.progress:
            bar.update()
            bar.set_postfix(
                newest_values(self.inner, self.state.history, events=len(self.state.reports)), refresh=False
            )

    def _prepared(self, model: Any) -> Any:
        """The model on its device, growable unless it has adapters."""
        if not isinstance(model, PeftModel) and not isinstance(model, GrowableModel):
            make_growable(model)
        model.to(self.accelerator.device)
        return model

    def _settings(self) -> dict[str, Any]:
        """What must be the same when the run is taken up again."""
        return {
            "model": {"model_type": self.inner.config.model_type, "sizes": self.inner.config.hf_grow},
            "data": self.feed.mark(),
            "train": {**self.config.as_dict(), "sequences_per_step": self.feed.sequences_per_step},
            "growth": None if self.growth is None else as_dict(self.growth),
            "schedule": None if self.schedule is None else asdict(self.schedule),
            "collect": None if self.collect is None else as_dict(self.collect),
        }


def _is_time(every: int | None, step: int) -> bool:
    return every is not None and step % every == 0
