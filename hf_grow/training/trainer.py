"""`GrowthTrainer`: an Accelerate training loop in which the model grows, on one process or many."""

import time
from contextlib import ExitStack
from dataclasses import dataclass
from functools import partial
from pathlib import Path
from typing import Any

from accelerate import Accelerator
from peft import PeftModel
from transformers import PreTrainedTokenizerBase, default_data_collator

from hf_grow.errors import HfGrowError
from hf_grow.fields import former_attributes, require
from hf_grow.growth.config import GrowthConfig
from hf_grow.measuring.config import CollectConfig
from hf_grow.modeling.growable_model import GrowableModel
from hf_grow.running.batches import Batch
from hf_grow.surgery.base import Model, without_adapters
from hf_grow.surgery.patch import make_growable
from hf_grow.training.checks import check_accelerator
from hf_grow.training.config import TrainConfig
from hf_grow.training.feed import Collate, Feed, evaluation_batches
from hf_grow.training.learning import separate_growth
from hf_grow.training.prepared_run import MakeOptimizer, PreparedRun, Start
from hf_grow.training.run import Run, begin_run
from hf_grow.training.run_state import RunState, checkpoints, clear_remains
from hf_grow.training.schedule import GrowthSchedule, GrowthState
from hf_grow.training.setup import left_as_found, make_accelerator, make_optimizer
from hf_grow.training.wrapping import Shard

# What a trainer was given, and kept as its own until 0.2.
FORMER_PARTS = ("growth", "schedule", "collect", "folder", "tokenizer", "shard", "progress", "eval_batches")


@dataclass(frozen=True)
class TrainResult:
    """What training did: the losses as they came, the last evaluation, and the reports of growth."""

    steps: int
    loss: float | None
    eval_loss: float | None
    history: list[dict[str, Any]]
    reports: list[dict[str, Any]]
    seconds: float


@former_attributes(
    main="accelerator.is_main_process",
    optimizer="_stage.optimizer",
    scheduler="_stage.lr_scheduler",
    **{name: f"_prepared.{name}" for name in FORMER_PARTS},
)
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
        model: Model,
        rows: Any,
        eval_rows: Any = None,
        *,
        collate: Collate = default_data_collator,
        config: TrainConfig | None = None,
        growth: GrowthConfig | None = None,
        schedule: GrowthSchedule | None = None,
        collect: CollectConfig | None = None,
        folder: str | Path | None = None,
        tokenizer: PreTrainedTokenizerBase | None = None,
        optimizer: MakeOptimizer | None = None,
        shard: Shard | None = None,
        accelerator: Accelerator | None = None,
        progress: bool = True,
    ) -> None:
        self.config = config = require(config or TrainConfig(), TrainConfig)
        self.accelerator = accelerator = accelerator or make_accelerator(config, folder)
        check_accelerator(accelerator, config)
        own = (accelerator.num_processes, accelerator.process_index)
        self.feed = Feed(rows, collate, config.batch_size, config.accumulation, *own, config.seed)
        # Processes that share a sharded model must all take the same number of passes: each evaluates all.
        shares = own if shard is None else (1, 0)
        eval_batches: list[Batch] | None = None
        if eval_rows is not None:
            eval_batches = evaluation_batches(eval_rows, collate, config.batch_size, config.seed, *shares)
        # Growable unless it has adapters.
        if not isinstance(model, PeftModel) and not isinstance(model, GrowableModel):
            make_growable(model)
        model.to(accelerator.device)
        self._prepared = PreparedRun(
            model=model,
            feed=self.feed,
            eval_batches=eval_batches,
            config=config,
            growth=growth,
            schedule=schedule,
            collect=collect,
            folder=None if folder is None else Path(folder),
            tokenizer=tokenizer,
            make_optimizer=optimizer or partial(make_optimizer, config=config),
            shard=shard,
            accelerator=accelerator,
            progress=progress and accelerator.is_local_main_process,
        )
        self._stage: Start | Run = self._prepared.at_first_step(model)
        self._begun = False

    @property
    def model(self) -> Any:
        """The model as it is by now."""
        return self._stage.model

    @property
    def inner(self) -> Any:
        """The growable model, inside PEFT's wrapper if there is one."""
        return without_adapters(self.model)

    @property
    def state(self) -> RunState:
        """How far the run is, and what it remembers."""
        return self._stage.state

    @property
    def events(self) -> GrowthState | None:
        """How far the schedule of growth is, if there is one."""
        return self._stage.events

    def train(self, *, resume: bool = False) -> TrainResult:
        """Train to the last step; with `resume`, from the newest checkpoint in the folder, if there is one."""
        began = time.perf_counter()
        with left_as_found(lambda: self.model), ExitStack() as ends:
            self._begin(resume, ends).train()
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
        return self._prepared.evaluate(self.model)

    def _begin(self, resume: bool, ends: ExitStack) -> Run:
        # Another trainer may have changed Accelerate's precision since.
        check_accelerator(self.accelerator, self.config)
        # Shared by all of a process; another loop that stopped between two steps would have every step passed over.
        self.accelerator.gradient_state._set_sync_gradients(True)
        if self.config.train == "new":
            separate_growth(self.model)
        self._stage = start = self._take_up(resume)
        self._stage = run = begin_run(self._prepared, start, ends)
        return run

    def _take_up(self, resume: bool) -> Start:
        """The newest checkpoint, or the beginning; refused where that is not what the folder or the model are for."""
        prepared, folder = self._prepared, self._prepared.folder
        if resume and folder is None:
            raise HfGrowError("There is nothing to resume from: give the trainer the folder of the run.")
        saved = [] if folder is None else checkpoints(folder)
        if saved and not resume:
            raise HfGrowError(f"{folder} holds checkpoints of a run: resume it, or choose another folder.")
        if self._begun and not (saved and prepared.shard is None):
            raise HfGrowError("This trainer has trained before: make a new one, with a model as it was at the start.")
        start = prepared.at_checkpoint(saved[-1], self.model) if saved else prepared.at_first_step(self.model)
        self._begun = True
        if folder is not None and self.accelerator.is_main_process:
            clear_remains(folder, self.config.keep)
        self.accelerator.wait_for_everyone()
        return start
