"""A training run before its first step: all that it needs, checked, and where it starts from."""

from collections.abc import Callable
from dataclasses import InitVar, dataclass, field, replace
from pathlib import Path
from typing import Any

import torch
from accelerate import Accelerator
from transformers import PreTrainedModel, PreTrainedTokenizerBase

from hf_grow.errors import HfGrowError
from hf_grow.fields import to_dict
from hf_grow.growth.config import GrowthConfig
from hf_grow.growth.report import GrowthReport
from hf_grow.measuring.config import CollectConfig
from hf_grow.running.batches import Batch
from hf_grow.running.passes import Passes
from hf_grow.surgery.base import base_hash, without_adapters
from hf_grow.training.checks import check_batches, check_length, check_model, check_schedule, labelled
from hf_grow.training.config import FREE_ON_RESUME, TrainConfig
from hf_grow.training.feed import Feed
from hf_grow.training.learning import attached
from hf_grow.training.run_state import RunState, load_run
from hf_grow.training.schedule import GrowthSchedule, GrowthState, grow_on_schedule
from hf_grow.training.sharding import reshard
from hf_grow.training.wrapping import Shard

MakeOptimizer = Callable[[list[torch.nn.Parameter]], torch.optim.Optimizer]


@dataclass(kw_only=True)
class PreparedRun:
    """All that a run needs beside its model, checked with it when made.

    feed            the training data: which batches each step sees
    eval_batches    this process's share of the evaluation data
    make_optimizer  out of the parameters that learn
    shard           applies FSDP2's `fully_shard` to the model
    settings        what must be the same when the run is taken up again
    base            a mark of the weights it starts from, for the same purpose
    """

    model: InitVar[Any]
    feed: Feed
    eval_batches: list[Batch] | None
    config: TrainConfig
    growth: GrowthConfig | None
    schedule: GrowthSchedule | None
    collect: CollectConfig | None
    folder: Path | None
    tokenizer: PreTrainedTokenizerBase | None
    make_optimizer: MakeOptimizer
    shard: Shard | None
    accelerator: Accelerator
    progress: bool
    settings: dict[str, Any] = field(init=False)
    base: str | None = field(init=False)

    def __post_init__(self, model: PreTrainedModel) -> None:
        inner, evaluates = without_adapters(model), self.eval_batches is not None
        check_model(model, self.config, self.shard)
        check_schedule(model, self.config, self.growth, self.schedule, evaluates=evaluates)
        check_batches(inner, (batch for step in range(10) for batch in self.feed.batches(step)), "training")
        if self.eval_batches:
            check_batches(inner, self.eval_batches, "evaluation")
            for batch in self.eval_batches:
                check_length(inner, batch)
            self.eval_batches = labelled(inner, self.eval_batches)
        self.base = None if self.folder is None else base_hash(inner, growth=True)
        self.settings = {
            "model": {"model_type": inner.config.model_type, "sizes": inner.config.hf_grow},
            "data": self.feed.mark(),
            "train": {**to_dict(self.config), "sequences_per_step": self.feed.sequences_per_step},
            "growth": None if self.growth is None else to_dict(self.growth),
            "schedule": None if self.schedule is None else to_dict(self.schedule),
            "collect": None if self.collect is None else to_dict(self.collect),
        }

    def evaluate(self, model: PreTrainedModel) -> float:
        """The mean loss of the model, as it is by now, on the evaluation data of all processes."""
        if self.eval_batches is None:
            raise HfGrowError("There is no evaluation data: give eval_rows.")
        # Processes that share a sharded model all evaluate all.
        accelerator = None if self.shard is not None else self.accelerator
        with self.accelerator.autocast():
            loss = Passes(without_adapters(model), accelerator).loss(self.eval_batches)
        reshard(model)
        return loss

    def grow(
        self, model: Any, events: GrowthState, step: int, optimizer: torch.optim.Optimizer | None
    ) -> GrowthReport | None:
        """Grow now, on sequences of the training data; None where there is no room or nothing to gain."""
        assert self.growth is not None
        sample = self.feed.sample(events.schedule.sequences, step)
        return grow_on_schedule(
            model,
            labelled(model, sample) or sample,
            attached(self.growth) if self.config.train == "new" else self.growth,
            events,
            step,
            collect=self.collect,
            optimizer=optimizer,
            accelerator=self.accelerator,
        )

    def at_first_step(self, model: PreTrainedModel) -> "Start":
        """The beginning, with a model as it was given."""
        events = None if self.schedule is None else GrowthState(self.schedule)
        return Start(model, RunState(self.settings, self.base), events, None)

    def at_checkpoint(self, place: Path, model: PreTrainedModel) -> "Start":
        """A checkpoint, whose weights the model gets; refused if it is of another run."""
        state, saved = load_run(place, model, RunState(self.settings, self.base), FREE_ON_RESUME)
        events = None if self.schedule is None else GrowthState.from_dict(self.schedule, state.growth)
        return Start(model, replace(state, settings=self.settings), events, saved)


@dataclass(frozen=True)
class Start:
    """Where a run starts from.

    saved  of a checkpoint: the states of its optimizer, the schedule of its learning rate, and its gradients' scaler
    """

    model: PreTrainedModel
    state: RunState
    events: GrowthState | None
    saved: dict[str, Any] | None

    @property
    def grows_first(self) -> bool:
        """Whether growth is due before the first step."""
        return self.saved is None and self.events is not None and self.events.due_at_step(0)
