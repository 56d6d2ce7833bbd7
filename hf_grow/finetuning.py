"""`finetune`: data, growth, training and saving in one call; what `hf-grow finetune` and the daily scripts run."""

import os
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any

from accelerate import Accelerator
from transformers import PreTrainedModel, PreTrainedTokenizerBase

from hf_grow.adapting.adapt import trainable_parameters
from hf_grow.adapting.budget import check_start, choose_amounts
from hf_grow.adapting.config import ADAPTER_LEARNING_RATE, AdaptConfig
from hf_grow.adapting.saved import adapt_or_resume, save_adapted
from hf_grow.data import DataConfig, load_sequences, split_rows
from hf_grow.errors import HfGrowError
from hf_grow.fields import require
from hf_grow.growth.config import GrowthConfig
from hf_grow.modeling.growable_model import GrowableModel
from hf_grow.running.passes import Passes
from hf_grow.saving.checkpoint import check_out_folder, save_grown
from hf_grow.surgery.base import growth_parameters
from hf_grow.surgery.patch import is_widenable, make_growable
from hf_grow.training.checks import check_batches, check_growth_and_schedule, labelled
from hf_grow.training.config import TrainConfig
from hf_grow.training.feed import Collate, Feed, evaluation_batches
from hf_grow.training.run_state import checkpoints as checkpoints_in
from hf_grow.training.schedule import GrowthSchedule, check_steps
from hf_grow.training.setup import make_accelerator
from hf_grow.training.trainer import GrowthTrainer, TrainResult

START = "start"


@dataclass(frozen=True)
class Evaluation:
    """What to evaluate on: other data, another split of the same, or else a share of it.

    data           other data to evaluate on; None: the same
    split          split to evaluate on; None: that of the training data
    held_out       if neither is given: the share of the training data to evaluate on; 0 for no evaluation
    max_sequences  evaluate on so many at most
    """

    data: str | None = None
    split: str | None = None
    held_out: float = 0.05
    max_sequences: int = 256


@dataclass(frozen=True)
class FinetuneResult:
    """What finetuning did; `model` is the trained one as it was saved, with LoRA merged unless that was saved alone."""

    model: PreTrainedModel
    parameters: int
    trainable_parameters: int
    growth: list[dict[str, Any]]
    loss: float | None
    eval_before: float | None
    eval_after: float | None
    steps: int
    seconds: float
    out: str
    checkpoints: str

    def summary(self) -> dict[str, Any]:
        """All but the model, ready for JSON."""
        return {name: value for name, value in vars(self).items() if name != "model"}

    def facts(self) -> dict[str, str]:
        """The same in a few lines."""
        share = self.trainable_parameters / self.parameters
        lines = {"trainable parameters": f"{self.trainable_parameters:,} of {self.parameters:,} ({share:.2%})"}
        for event in self.growth:
            losses = f"loss {event['loss_before']:.4f} → {event['loss_after']:.4f}"
            lines[f"growth at step {event['training_step']}"] = f"{event['parameters_added']:+,} parameters, {losses}"
        if self.loss is not None:
            lines["training loss at the end"] = f"{self.loss:.4f}"
        if self.eval_before is not None:
            lines["evaluation loss"] = f"{self.eval_before:.4f} → {self.eval_after:.4f}"
        return lines | {"steps": f"{self.steps:,} in {self.seconds:.1f} s"}

    def __str__(self) -> str:
        return "\n".join(f"{name}: {value}" for name, value in self.facts().items())


@dataclass(frozen=True)
class Rows:
    """Sequences to train on and to evaluate on, if any, and what makes batches of both."""

    training: Any
    evaluation: Any
    collate: Collate


def finetune(
    model: PreTrainedModel,
    tokenizer: PreTrainedTokenizerBase,
    data: str,
    out: str | os.PathLike,
    *,
    config: TrainConfig | None = None,
    recipe: AdaptConfig | None = None,
    growth: GrowthConfig | None = None,
    schedule: GrowthSchedule | None = None,
    growth_sequences: int = GrowthSchedule.sequences,
    data_config: DataConfig | None = None,
    evaluation: Evaluation | None = None,
    checkpoints: str | os.PathLike | None = None,
    resume: bool = False,
    overwrite: bool = False,
    growth_only: bool = False,
    progress: bool = True,
) -> FinetuneResult:
    """Train a model on files or a data set and save it in `out`; on many processes, all of them call this.

    config            of training; what learns follows from the recipe, and without a config the learning rate too
    recipe            the model stays frozen beside few new weights, for which it is measured on `growth_sequences`
    growth, schedule  without a recipe: how much to grow and when; neither: no growth
    data_config       what to make of the data; batches are those of `config`
    evaluation        what to evaluate on
    checkpoints       folder of the run, from which `resume` goes on; OUT-checkpoints
    growth_only       save new columns and LoRA alone (`save_adapted`), not one whole model (`save_grown`)
    """
    run = Finetuning(
        out=out,
        config=config,
        recipe=recipe,
        growth=growth,
        schedule=schedule,
        growth_sequences=growth_sequences,
        data_config=data_config,
        evaluation=evaluation,
        checkpoints=checkpoints,
        resume=resume,
        overwrite=overwrite,
        growth_only=growth_only,
        progress=progress,
    )
    return run.train(model, tokenizer, data)


@dataclass(kw_only=True)
class Finetuning:
    """All that the user says of a run of `finetune`, checked before any model or data is loaded."""

    out: str | os.PathLike
    config: TrainConfig | None = None
    recipe: AdaptConfig | None = None
    growth: GrowthConfig | None = None
    schedule: GrowthSchedule | None = None
    growth_sequences: int = GrowthSchedule.sequences
    data_config: DataConfig | None = None
    evaluation: Evaluation | None = None
    checkpoints: str | os.PathLike | None = None
    resume: bool = False
    overwrite: bool = False
    growth_only: bool = False
    progress: bool = True

    def __post_init__(self) -> None:
        self._check_growth()
        data_config = self.data_config or DataConfig()
        self.training = training_config(self.config, self.recipe, data_config)
        if self.growth_only and self.recipe is None and self.training.train != "new":
            raise HfGrowError("Only what is added to a frozen model can be saved alone: leave growth_only out.")
        self.data = replace(data_config, batch_size=self.training.batch_size)
        if self.schedule is not None:
            check_steps(self.schedule, self.training.steps)
        check_out_folder(self.out, self.overwrite)
        self.folder = Path(self.out)
        self.run_folder = Path(self.checkpoints or self.folder.with_name(f"{self.folder.name}-checkpoints"))
        check_checkpoints(self.run_folder, self.folder, self.resume, self.recipe)

    def _check_growth(self) -> None:
        if self.recipe is not None and (self.growth is not None or self.schedule is not None):
            raise HfGrowError("A recipe says itself how to grow: leave growth and schedule out, or the recipe.")
        check_growth_and_schedule(self.growth, self.schedule)

    def train(self, model: PreTrainedModel, tokenizer: PreTrainedTokenizerBase, data: str) -> FinetuneResult:
        """Load the data, adapt the model if there is a recipe, train it and save it."""
        accelerator = make_accelerator(self.training, self.run_folder)
        self.training.check_device(accelerator.device)
        self._make_ready(model, accelerator)
        rows = load_rows(data, self.data, self.evaluation or Evaluation(), tokenizer, model)
        loss_before = self._evaluated(model, rows, accelerator)
        if self.recipe is not None:
            model = self._adapted(model, self.recipe, rows, accelerator)
        trainer = GrowthTrainer(
            model,
            rows.training,
            rows.evaluation,
            collate=rows.collate,
            config=self.training,
            growth=self.growth,
            schedule=self.schedule,
            folder=self.run_folder,
            tokenizer=tokenizer,
            accelerator=accelerator,
            progress=self.progress,
        )
        done = trainer.train(resume=self.resume)
        result = self._result(trainer, done, loss_before)
        if not self.growth_only and trainer.model is not trainer.inner:
            result = replace(result, model=trainer.model.merge_and_unload())
        if accelerator.is_main_process:
            self._save(result.model, tokenizer)
        accelerator.wait_for_everyone()
        return result

    def _make_ready(self, model: PreTrainedModel, accelerator: Accelerator) -> None:
        """Growable and on its device; a budget that is too small is refused before data is read."""
        if not isinstance(model, GrowableModel):
            make_growable(model)
        if not self.growth_only and self.training.train == "new" and not is_widenable(model):
            raise HfGrowError("A quantised model cannot take its growth to be saved whole: ask for growth_only.")
        if self.recipe is not None:
            check_start(model, self.recipe)
            choose_amounts(model, self.recipe)
        model.to(accelerator.device)

    def _evaluated(self, model: PreTrainedModel, rows: Rows, accelerator: Accelerator) -> float | None:
        """The loss before anything is trained, over all processes."""
        if rows.evaluation is None:
            return None
        own = accelerator.num_processes, accelerator.process_index
        batches = evaluation_batches(rows.evaluation, rows.collate, self.training.batch_size, self.training.seed, *own)
        if batches:
            check_batches(model, batches, "evaluation")
        with accelerator.autocast():
            return Passes(model, accelerator).loss(labelled(model, batches))

    def _adapted(self, model: PreTrainedModel, recipe: AdaptConfig, rows: Rows, accelerator: Accelerator) -> Any:
        """The frozen model with its new weights, or those with which the run began that is taken up."""
        feed = Feed(
            rows.training,
            rows.collate,
            self.training.batch_size,
            processes=accelerator.num_processes,
            process=accelerator.process_index,
            seed=self.training.seed,
        )
        batches = feed.sample(self.growth_sequences, 0) if recipe.grows else []
        if batches:
            check_batches(model, batches, "training")
        return adapt_or_resume(
            model,
            batches,
            recipe,
            self.run_folder / START,
            resume=self.resume,
            accelerator=accelerator,
            progress=self.progress and accelerator.is_main_process,
        )

    def _result(self, trainer: GrowthTrainer, done: TrainResult, loss_before: float | None) -> FinetuneResult:
        events = done.reports
        if self.recipe is not None:
            # The model grew once, before the trainer got it.
            events = trainer.inner.growth_history["events"][-1:] if self.recipe.grows else []
        learning = trainable_parameters(trainer.model)
        if self.recipe is None and self.training.train == "new":
            learning = sum(parameter.numel() for parameter in growth_parameters(trainer.model))
        kept = ("training_step", "parameters_added", "loss_before", "loss_after", "form")
        return FinetuneResult(
            model=trainer.model,
            parameters=sum(parameter.numel() for parameter in trainer.model.parameters()),
            trainable_parameters=learning,
            growth=[{name: event.get(name, 0) for name in kept} for event in events],
            loss=done.loss,
            eval_before=loss_before,
            eval_after=done.eval_loss,
            steps=done.steps,
            seconds=done.seconds,
            out=str(self.folder),
            checkpoints=str(self.run_folder),
        )

    def _save(self, model: PreTrainedModel, tokenizer: PreTrainedTokenizerBase) -> None:
        if self.growth_only:
            save_adapted(model, self.folder, config=self.recipe, overwrite=self.overwrite)
        else:
            save_grown(model, self.folder, tokenizer=tokenizer, overwrite=self.overwrite)


def default_learning_rate(recipe: AdaptConfig | None) -> float:
    """Of all weights, or of the few that a recipe adds."""
    return TrainConfig.learning_rate if recipe is None else ADAPTER_LEARNING_RATE


def training_config(config: TrainConfig | None, recipe: AdaptConfig | None, data_config: DataConfig) -> TrainConfig:
    """The config with what follows from the recipe; refused where it says otherwise than the others."""
    if config is None:
        config = TrainConfig(learning_rate=default_learning_rate(recipe), batch_size=data_config.batch_size)
    require(config, TrainConfig)
    if data_config.batch_size not in (DataConfig.batch_size, config.batch_size):
        raise HfGrowError(
            f"The DataConfig has batch_size={data_config.batch_size}, the TrainConfig {config.batch_size}: "
            "give it to the TrainConfig alone."
        )
    if recipe is None:
        return config
    if config.train not in (TrainConfig.train, recipe.train):
        raise HfGrowError(f"train='{config.train}' has no meaning with method='{recipe.method}': leave it out.")
    return replace(config, train=recipe.train)


def check_checkpoints(folder: Path, out: Path, resume: bool, recipe: AdaptConfig | None) -> None:
    """Refuse a folder of checkpoints where the run cannot keep its own, or from which it cannot go on."""
    if out.resolve() in (folder.resolve(), *folder.resolve().parents):
        raise HfGrowError("The model and the checkpoints must go to different folders, none inside the other.")
    if not folder.exists():
        return
    if not folder.is_dir():
        raise HfGrowError(f"{folder} is a file; name a folder for checkpoints.")
    kept, started = checkpoints_in(folder), (folder / START).is_dir()
    if kept and not resume:
        raise HfGrowError(f"{folder} holds checkpoints of a run: resume it, or choose another folder for checkpoints.")
    if resume and (kept or started) and started != (recipe is not None):
        method = "full" if recipe is None else recipe.method
        raise HfGrowError(f"{folder} is not a whole run of the method {method}: choose the same, or start anew.")
    if resume and not kept and not started and any(place.is_file() for place in folder.iterdir()):
        raise HfGrowError(f"{folder} holds no run to resume: name the folder of its checkpoints.")


def load_rows(
    data: str, wanted: DataConfig, evaluation: Evaluation, tokenizer: PreTrainedTokenizerBase, model: PreTrainedModel
) -> Rows:
    """The sequences of the data, and those to evaluate on, as the user wants."""
    sequences = load_sequences(data, tokenizer, model, config=wanted)
    if evaluation.data or evaluation.split:
        split, most = evaluation.split or wanted.split, evaluation.max_sequences
        other = replace(wanted, split=split, max_sequences=most, shuffle_buffer=None)
        others = load_sequences(evaluation.data or data, tokenizer, model, config=other)
        return Rows(sequences.rows, others.rows, sequences.collate)
    if not evaluation.held_out:
        return Rows(sequences.rows, None, sequences.collate)
    training, held_out = split_rows(sequences.rows, evaluation.held_out, wanted.seed)
    judging = [held_out[number] for number in range(min(len(held_out), evaluation.max_sequences))]
    return Rows(training, judging, sequences.collate)
