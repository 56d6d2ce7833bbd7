"""`finetune`: data, growth, training and saving in one call; what `hf-grow finetune` and the daily scripts run."""

import os
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any

from hf_grow.adapt_config import LEARNING_RATE, AdaptConfig
from hf_grow.checkpoint import check_out_folder, save_grown
from hf_grow.config import GrowthConfig
from hf_grow.data import DataConfig, Sequences, load_sequences, split_rows
from hf_grow.errors import HfGrowError
from hf_grow.modeling.growable_model import GrowableModel
from hf_grow.patch import make_growable
from hf_grow.recipe import adapt_or_resume, choose_amounts, save_adapted, trainable_parameters
from hf_grow.run_state import checkpoints as checkpoints_in
from hf_grow.schedule import GrowthSchedule
from hf_grow.train_config import TrainConfig
from hf_grow.trainer import GrowthTrainer, TrainResult
from hf_grow.training_setup import make_accelerator

START = "start"


@dataclass(frozen=True)
class Evaluation:
    """What to evaluate on: other data, another split of the same, or else a share of it; 0 for nothing."""

    data: str | None = None
    split: str | None = None
    held_out: float = 0.05
    max_sequences: int = 256


@dataclass(frozen=True)
class FinetuneResult:
    """What finetuning did; `model` is the trained one as it was saved, with LoRA merged unless that was saved alone."""

    model: Any
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


def finetune(
    model: Any,
    tokenizer: Any,
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
    recipe            the model stays frozen beside few new weights, for which it is measured on `growth_sequences`;
                      None: all weights learn
    growth, schedule  without a recipe: how much to grow and when; neither: no growth
    data_config, evaluation   what to make of the data, and what to evaluate on
    checkpoints       folder of the run, from which `resume` goes on; OUT-checkpoints
    growth_only       save new columns and LoRA alone (`save_adapted`), not one whole model (`save_grown`)
    """
    wanted, evaluation = data_config or DataConfig(), evaluation or Evaluation()
    config = config or TrainConfig(learning_rate=default_learning_rate(recipe))
    config = replace(config, train="all" if recipe is None else recipe.train)
    wanted = replace(wanted, batch_size=config.batch_size)
    if recipe is not None and (growth is not None or schedule is not None):
        raise HfGrowError("A recipe says itself how to grow: leave growth and schedule out, or the recipe.")
    run = check_folders(out, checkpoints, recipe, resume=resume, overwrite=overwrite, growth_only=growth_only)
    accelerator = make_accelerator(config, run)
    config.check_device(accelerator.device)
    if not isinstance(model, GrowableModel):
        make_growable(model)
    if recipe is not None:
        choose_amounts(model, recipe)
    sequences, eval_rows = load_rows(data, wanted, evaluation, tokenizer, model)
    shared: dict[str, Any] = {"collate": sequences.collate, "accelerator": accelerator, "progress": progress}
    untouched = GrowthTrainer(model, sequences.rows, eval_rows, config=replace(config, train="all"), **shared)
    before = None if eval_rows is None else untouched.evaluate()
    if recipe is not None:
        batches = untouched.feed.sample(growth_sequences, 0) if recipe.grows else []
        start = {"resume": resume, "accelerator": accelerator, "progress": progress and accelerator.is_main_process}
        model = adapt_or_resume(model, batches, recipe, run / START, **start)
    shared |= {"folder": run, "tokenizer": tokenizer, "growth": growth, "schedule": schedule}
    trainer = GrowthTrainer(model, sequences.rows, eval_rows, config=config, **shared)
    done = trainer.train(resume=resume)
    result = _result(trainer, done, recipe, before, Path(out), run)
    if not growth_only and trainer.model is not trainer.inner:
        result = replace(result, model=trainer.model.merge_and_unload())
    if accelerator.is_main_process and growth_only:
        save_adapted(result.model, out, config=recipe, overwrite=overwrite)
    elif accelerator.is_main_process:
        save_grown(result.model, out, tokenizer=tokenizer, overwrite=overwrite)
    accelerator.wait_for_everyone()
    return result


def default_learning_rate(recipe: AdaptConfig | None) -> float:
    """Of all weights, or of the few that a recipe adds."""
    return TrainConfig.learning_rate if recipe is None else LEARNING_RATE


def check_folders(
    out: str | os.PathLike,
    checkpoints: str | os.PathLike | None,
    recipe: AdaptConfig | None,
    *,
    resume: bool,
    overwrite: bool,
    growth_only: bool,
) -> Path:
    """The folder of checkpoints; refused with `out` where the run cannot save in them or go on from them."""
    if growth_only and recipe is None:
        raise HfGrowError("Only what a recipe adds to a frozen model can be saved alone: leave growth_only out.")
    check_out_folder(out, overwrite)
    run = Path(checkpoints) if checkpoints is not None else Path(out).with_name(f"{Path(out).name}-checkpoints")
    _check_run(run, Path(out), resume, recipe)
    return run


def _check_run(folder: Path, out: Path, resume: bool, recipe: AdaptConfig | None) -> None:
    if out.resolve() in (folder.resolve(), *folder.resolve().parents):
        raise HfGrowError("The model and the checkpoints must go to different folders, none inside the other.")
    if not folder.exists():
        return
    if not folder.is_dir():
        raise HfGrowError(f"{folder} is a file; name a folder for checkpoints.")
    found, started = checkpoints_in(folder), (folder / START).is_dir()
    if found and not resume:
        raise HfGrowError(f"{folder} holds checkpoints of a run: resume it, or choose another folder for checkpoints.")
    if resume and (found or started) and started != (recipe is not None):
        method = "full" if recipe is None else recipe.method
        raise HfGrowError(f"{folder} is not a whole run of the method {method}: choose the same, or start anew.")
    if resume and not found and not started and any(place.is_file() for place in folder.iterdir()):
        raise HfGrowError(f"{folder} holds no run to resume: name the folder of its checkpoints.")


def load_rows(
    data: str, wanted: DataConfig, evaluation: Evaluation, tokenizer: Any, model: Any
) -> tuple[Sequences, Any]:
    """Sequences to train on, and rows to evaluate on, if any."""
    sequences = load_sequences(data, tokenizer, model, config=wanted)
    if evaluation.data or evaluation.split:
        split, most = evaluation.split or wanted.split, evaluation.max_sequences
        other = replace(wanted, split=split, max_sequences=most, shuffle_buffer=None)
        return sequences, load_sequences(evaluation.data or data, tokenizer, model, config=other).rows
    if not evaluation.held_out:
        return sequences, None
    rows, held_out = split_rows(sequences.rows, evaluation.held_out, wanted.seed)
    kept = [held_out[number] for number in range(min(len(held_out), evaluation.max_sequences))]
    return replace(sequences, rows=rows), kept


def _result(
    trainer: GrowthTrainer, done: TrainResult, recipe: AdaptConfig | None, before: float | None, out: Path, run: Path
) -> FinetuneResult:
    learning = sum(parameter.numel() for parameter in trainer.model.parameters() if parameter.requires_grad)
    events = done.reports
    if recipe is not None:
        # The model grew once, before the trainer got it.
        learning = trainable_parameters(trainer.model)
        events = trainer.inner.growth_history["events"][-1:] if recipe.grows else []
    kept = ("training_step", "parameters_added", "loss_before", "loss_after", "form")
    return FinetuneResult(
        model=trainer.model,
        parameters=sum(parameter.numel() for parameter in trainer.model.parameters()),
        trainable_parameters=learning,
        growth=[{name: event.get(name, 0) for name in kept} for event in events],
        loss=done.loss,
        eval_before=before,
        eval_after=done.eval_loss,
        steps=done.steps,
        seconds=done.seconds,
        out=str(out),
        checkpoints=str(run),
    )
