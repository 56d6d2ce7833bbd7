"""`GrowthCallback`: a model grows while transformers' Trainer, or one built on it, trains it."""

import copy
import logging
import random
from collections.abc import Iterable, Iterator, Mapping
from typing import Any

import torch
from accelerate.state import AcceleratorState, is_initialized
from transformers import PreTrainedModel, TrainerCallback
from transformers.trainer_callback import ExportableState

from hf_grow.errors import HfGrowError
from hf_grow.fields import completed, from_dict, gone, one_of, require, to_dict
from hf_grow.growth.config import GrowthConfig
from hf_grow.growth.report import GrowthReport
from hf_grow.measuring.config import CollectConfig
from hf_grow.modeling.growable_attention import attention_sites
from hf_grow.modeling.growable_model import GrowableModel
from hf_grow.running.batches import Batch, read_batches
from hf_grow.running.passes import Passes
from hf_grow.surgery.base import growth_parameters, has_grown
from hf_grow.surgery.optimizer_state import drop_parameters, plain_optimizer
from hf_grow.surgery.patch import make_growable
from hf_grow.training.checks import labelled
from hf_grow.training.config import OWN_RATE, TRAIN
from hf_grow.training.distributed import LaunchedProcesses, rewrap, wrappers_of
from hf_grow.training.feed import random_numbers
from hf_grow.training.learning import attached, freeze_base, let_growth_learn, separate_growth
from hf_grow.training.resume import WatchedModel
from hf_grow.training.schedule import GrowthSchedule, GrowthState, check_first_event, check_steps, grow_on_schedule

logger = logging.getLogger("hf_grow")


@gone(OWN_RATE, learning_rate_multiplier=1.0)
class GrowthCallback(TrainerCallback, ExportableState):
    """Grows the model of a transformers Trainer when a schedule says so; optimizer and learning rate go on.

    growth, schedule          how much to grow at each event; when, and how large the model may get
    collect                   how to measure where growth helps
    batches                   what to measure on, on each process its own, for all events; by default sequences drawn
                              from the training set, others at every event
    train                     "all", or "new": only what growth adds beside a frozen base learns; it must grow before
                              the first step then

    Give it to the Trainer's `callbacks`; then `resume_from_checkpoint` works on the model that the run began with, from
    checkpoints in the Trainer's `output_dir`, unless it makes its model by `model_init`.
    `reports` says what happened, `progress` how far the schedule is.
    """

    def __init__(
        self,
        growth: GrowthConfig,
        schedule: GrowthSchedule,
        *,
        collect: CollectConfig | None = None,
        batches: Iterable[Batch] | None = None,
        train: str = "all",
    ) -> None:
        one_of("train", train, TRAIN)
        self.growth: GrowthConfig = _config(growth, GrowthConfig)
        self.schedule: GrowthSchedule = _config(schedule, GrowthSchedule)
        self.collect: CollectConfig | None = None if collect is None else _config(collect, CollectConfig)
        if isinstance(batches, Iterator):
            raise HfGrowError("batches are read at every event: give a list, not an iterator.")
        if train == "new" and self.growth.strategy != "append":
            raise HfGrowError(
                f"train='new' keeps the base as it is, which strategy='{self.growth.strategy}' would change."
            )
        if train == "new":
            self.growth = attached(self.growth)
        self.batches, self.train = batches, train
        self.progress = GrowthState(self.schedule)
        self.reports: list[GrowthReport] = []
        self._saved: dict[str, Any] = {}
        self._training = False
        self._watched: WatchedModel | None = None

    def state(self) -> dict[str, Any]:
        """What the Trainer writes into trainer_state.json."""
        arguments = {
            "growth": to_dict(self.growth),
            "schedule": to_dict(self.schedule),
            "collect": None if self.collect is None else to_dict(self.collect),
            "train": self.train,
        }
        saved = {"progress": self.progress.to_dict(), "own_batches": self.batches is not None}
        if self._watched is not None:
            saved["history"] = copy.deepcopy(self._watched.model.config.growth_history)
        return {"args": arguments, "attributes": {"_saved": saved}}

    def on_init_end(self, args: Any, state: Any, control: Any, **kwargs: Any) -> None:
        """Refuse what cannot grow; make the model growable, and ready to take the sizes of a checkpoint."""
        self._make_ready(args, kwargs["model"])
        if self.train == "new":
            separate_growth(kwargs["model"])
            freeze_base(kwargs["model"])
            if not has_grown(kwargs["model"]):
                # Optimizers and wrappers are made of what learns now; it gets frozen when there is growth.
                attention_sites(kwargs["model"])[0].attention.requires_grad_(True)

    def on_train_begin(self, args: Any, state: Any, control: Any, **kwargs: Any) -> None:
        """Go on where a checkpoint left off, check all that can be, and grow if that is due before the first step."""
        model, optimizer = kwargs["model"], kwargs["optimizer"]
        watched = self._make_ready(args, model)
        self._restore(state, model)
        if watched.exchange(optimizer):
            self._rewrap(model)
        self._check_run(args, state, model, optimizer, kwargs["train_dataloader"])
        self._training = True
        due = state.global_step == 0 and self.progress.due_at_step(0)
        if not (due and self._grow(args, state, **kwargs)):
            self._follow(model, optimizer)
            if self.train == "new":
                # Wrappers know which parameters learnt when they were made.
                self._rewrap(model)

    def on_step_begin(self, args: Any, state: Any, control: Any, **kwargs: Any) -> None:
        """Evaluations count between steps only: a step may be the last one, by an error or an interrupt."""
        self._training = False

    def on_step_end(self, args: Any, state: Any, control: Any, **kwargs: Any) -> None:
        """Grow if that is due after this step."""
        self._training = True
        if self.progress.due_at_step(state.global_step) and state.global_step < state.max_steps:
            self._grow(args, state, **kwargs)

    def on_evaluate(self, args: Any, state: Any, control: Any, metrics: Mapping[str, float], **kwargs: Any) -> None:
        """Grow if the evaluation loss has stopped falling."""
        if not self._training or self.schedule.plateau is None:
            return
        if "eval_loss" not in metrics:
            raise HfGrowError(f"A plateau is one of eval_loss, but the evaluation gave only {', '.join(metrics)}.")
        due = self.progress.note_evaluation(metrics["eval_loss"], state.global_step)
        if due and state.global_step < state.max_steps:
            self._grow(args, state, **kwargs)

    def on_train_end(self, args: Any, state: Any, control: Any, **kwargs: Any) -> None:
        """Let the optimizer be as it is."""
        self._training = False

    def _make_ready(self, args: Any, model: PreTrainedModel) -> WatchedModel:
        _check_supported(args, model)
        if self.schedule.plateau is not None and str(getattr(args.eval_strategy, "value", args.eval_strategy)) == "no":
            raise HfGrowError("A plateau is one of the evaluation loss: set eval_strategy and give an eval_dataset.")
        if not isinstance(model, GrowableModel):
            make_growable(model)
        if self._watched is None or self._watched.model is not model:
            folders = (args.resume_from_checkpoint, args.output_dir)
            self._watched = WatchedModel.watch(model, *folders, freezes=self.train == "new")
        return self._watched

    def _restore(self, state: Any, model: PreTrainedModel) -> None:
        """Take over how far the schedule was at a checkpoint; a run from the start begins anew."""
        self.progress = GrowthState(self.schedule)
        if self._saved.get("own_batches") and self.batches is None:
            raise HfGrowError(
                "A Trainer cannot restore a GrowthCallback with batches of its own: leave "
                "restore_callback_states_from_checkpoint off, as the callback finds its state by itself."
            )
        # Without an entry the Trainer could not save a checkpoint.
        entries = state.stateful_callbacks.setdefault(type(self).__name__, self.state())
        if state.global_step > 0:
            own = self.state()["args"]
            if isinstance(entries, list):
                entries = next((entry for entry in reversed(entries) if _arguments(entry) == own), self.state())
            saved = entries["attributes"]["_saved"]
            self.progress = GrowthState.from_dict(self.schedule, saved["progress"])
            model.config.growth_history = saved.get("history") or model.config.growth_history

    def _check_run(
        self, args: Any, state: Any, model: PreTrainedModel, optimizer: torch.optim.Optimizer, dataloader: Any
    ) -> None:
        plain = plain_optimizer(optimizer)
        present = set(model.parameters())
        if not all(parameter in present for group in plain.param_groups for parameter in group["params"]):
            raise HfGrowError("The optimizer holds parameters that are not the model's: make a new Trainer for it.")
        if self.progress.events == 0:
            check_first_event(model, self.growth, self.schedule)
        check_steps(self.schedule, state.max_steps)
        if self.train == "new" and not has_grown(model) and not self.progress.due_at_step(state.global_step):
            raise HfGrowError(
                "With train='new' the model must grow before the first step: put 0 into the schedule's at."
            )
        # What cannot be measured on is told now and not hours later.
        first = read_batches(self._draw(args, dataloader, 0, 1) if self.batches is None else self.batches, 1)
        Passes(model).loss(first)

    def _grow(self, args: Any, state: Any, **kwargs: Any) -> bool:
        """Grow now; False where there is no room or nothing to gain."""
        model, optimizer = kwargs["model"], kwargs["optimizer"]
        step = state.global_step
        batches = None if self.batches is None else read_batches(self.batches)
        if batches is None:
            batches = self._draw(args, kwargs["train_dataloader"], step, self.schedule.sequences)
        report = grow_on_schedule(
            model,
            labelled(model, batches) or batches,
            self.growth,
            self.progress,
            step,
            collect=self.collect,
            optimizer=optimizer,
            accelerator=LaunchedProcesses(),
        )
        if report is None:
            return False
        self.reports.append(report)
        self._follow(model, optimizer)
        self._rewrap(model)
        state.log_history.append(_log_entry(report, state))
        if state.is_world_process_zero:
            logger.info("Grown at step %d: %s", step, report)
        return True

    def _follow(self, model: PreTrainedModel, optimizer: torch.optim.Optimizer) -> None:
        """With train="new", let growth alone learn; refused where the optimizer does not have it."""
        if self.train == "new":
            let_growth_learn(model)
            drop_parameters(optimizer, [parameter for parameter in model.parameters() if not parameter.requires_grad])
            held = {parameter for group in optimizer.param_groups for parameter in group["params"]}
            if not held.issuperset(growth_parameters(model)):
                raise HfGrowError(
                    "The optimizer lacks what is to learn: give the callback to the Trainer's callbacks=[…]."
                )

    def _rewrap(self, model: PreTrainedModel) -> None:
        if LaunchedProcesses().num_processes > 1:
            for wrapper in wrappers_of(model):
                rewrap(wrapper)

    def _draw(self, args: Any, dataloader: Any, step: int, sequences: int) -> list[Batch]:
        """This process's share of sequences drawn from the training set; the same for the same seed and step.

        The dataloader itself is not touched: its order is part of the run.
        """
        dataset, processes = dataloader.dataset, LaunchedProcesses()
        if not hasattr(dataset, "__len__") or not hasattr(dataset, "__getitem__"):
            raise HfGrowError("A streamed training set cannot be drawn from: give the GrowthCallback batches=[…].")
        if len(dataset) < processes.num_processes:
            raise HfGrowError(f"The training set has {len(dataset)} sequences, fewer than there are processes.")
        count = min(len(dataset), max(sequences, processes.num_processes))
        mark = f"{args.data_seed or args.seed} {step}"
        rows = random.Random(mark).sample(range(len(dataset)), count)[
            processes.process_index :: processes.num_processes
        ]
        size = args.per_device_train_batch_size
        with random_numbers(args.data_seed or args.seed, step, processes.process_index):
            examples = [dataset[row] for row in rows]
            return [dataloader.collate_fn(examples[start : start + size]) for start in range(0, len(rows), size)]


def _config(value: Any, cls: type) -> Any:
    """A config, also as the plain values that a Trainer keeps of it."""
    return from_dict(cls, value) if isinstance(value, Mapping) else require(value, cls)


def _arguments(entry: dict[str, Any]) -> dict[str, Any]:
    """The arguments of a callback that a Trainer has saved; its growth perhaps with fields of other names."""
    arguments = {
        name: value for name, value in entry["args"].items() if (name, value) != ("learning_rate_multiplier", 1.0)
    }
    return arguments | {"growth": completed(GrowthConfig, arguments["growth"])}


def _check_supported(args: Any, model: PreTrainedModel) -> None:
    """Refuse what would train without its growth, in one sentence each."""
    accelerator = AcceleratorState() if is_initialized() else None
    if args.fsdp or getattr(accelerator, "fsdp_plugin", None) is not None:
        raise HfGrowError("A model cannot grow inside a Trainer that shards it with FSDP: use DDP.")
    if args.deepspeed or getattr(accelerator, "deepspeed_plugin", None) is not None:
        raise HfGrowError("A model cannot grow inside a Trainer that uses DeepSpeed: use DDP.")
    if args.parallelism_config is not None:
        raise HfGrowError("A model cannot grow inside a Trainer with a parallelism_config: use DDP.")
    if args.torch_compile or isinstance(model, torch._dynamo.OptimizedModule) or model._compiled_call_impl is not None:
        raise HfGrowError("A compiled model would be compiled again for every size: train it without torch.compile.")
    if hasattr(model, "peft_config"):
        raise HfGrowError("A model with adapters cannot grow inside a Trainer: grow it before, or use GrowthTrainer.")
    if args.auto_find_batch_size:
        raise HfGrowError("auto_find_batch_size starts a run again on a model that has grown: set the batch size.")


def _log_entry(report: GrowthReport, state: Any) -> dict[str, Any]:
    return {
        "growth_loss_before": report.loss_before,
        "growth_loss_after": report.loss_after,
        "parameters_added": report.parameters_added,
        "parameters": report.parameters_after,
        "epoch": state.epoch,
        "step": state.global_step,
    }
