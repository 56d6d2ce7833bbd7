"""`hf-grow finetune`: train all weights of a model that grows on the way, or few new ones beside a frozen model."""

from collections.abc import Iterable
from pathlib import Path
from typing import Annotated, Any

import typer
from accelerate import PartialState

from hf_grow.adapting.config import METHODS, AdaptConfig
from hf_grow.cli import options
from hf_grow.cli.config_options import Fields, Given, configs_as_options
from hf_grow.cli.loading import TASKS, load_for_task, load_model, load_tokenizer
from hf_grow.cli.output import print_facts, print_json, say
from hf_grow.data import DataConfig
from hf_grow.errors import HfGrowError
from hf_grow.fields import one_of
from hf_grow.finetuning import Evaluation, FinetuneResult, Finetuning, default_learning_rate
from hf_grow.growth.config import GrowthConfig
from hf_grow.growth.kinds import KINDS
from hf_grow.training.config import TrainConfig
from hf_grow.training.schedule import GrowthSchedule

# Of how to grow, what makes sense at every event.
GROWTH = Fields(only=(*KINDS, "budget", "strategy", "align", "step_size", "line_search", "scaling"))
# The fields that say that and when the model is to grow.
AMOUNTS, EVENTS = (*KINDS, "budget", "strategy"), ("at", "every", "plateau")
# The fields of a recipe that mean nothing to a method.
UNUSED = {"grow": ("lora_on", "lora_alpha", "lora_dropout", "share"), "lora": ("kinds", "step_size", "share")}


@configs_as_options
def finetune(
    model: options.Model,
    data: options.Data,
    growth: Annotated[Given[GrowthConfig], GROWTH],
    schedule: Given[GrowthSchedule],
    adapting: Annotated[Given[AdaptConfig], Fields(hide=("method", "collect"))],
    training: Annotated[Given[TrainConfig], Fields(hide=("train",))],
    data_config: Annotated[DataConfig, Fields(hide=("batch_size",))],
    evaluation: Evaluation,
    out: Annotated[Path, typer.Option(help="Where to save the trained model.")],
    method: Annotated[
        str, typer.Option(help=f"All weights (full), or a frozen model and few new ones: {', '.join(METHODS)}.")
    ] = "full",
    task: Annotated[
        str | None, typer.Option(help=f"Load the model for {', '.join(TASKS)}; left out: as it was saved.")
    ] = None,
    labels: Annotated[int | None, typer.Option(help="How many classes --task classification has.")] = None,
    overwrite: options.Overwrite = False,
    growth_only: Annotated[
        bool, typer.Option("--growth-only", help="Save only the growth and LoRA, to be put onto the model again.")
    ] = False,
    checkpoints: Annotated[
        Path | None, typer.Option(help="Where the run is kept on the way; OUT-checkpoints if left out.")
    ] = None,
    resume: Annotated[
        bool, typer.Option("--resume", help="Go on from the newest checkpoint, if there is one.")
    ] = False,
    as_json: options.AsJson = False,
    revision: options.Revision = None,
) -> None:
    """Finetune a model with growth: all weights, or only new columns and LoRA beside a frozen model."""
    one_of("--method", method, ("full", *METHODS))
    if labels is not None and task != "classification":
        refuse(f"--task {task}" if task else "the model as it was saved", ["--labels"])
    recipe = growth_config = growth_schedule = None
    if method == "full":
        refuse("--method full", only_of(adapting, growth) + ["--growth-only"] * growth_only)
        growth_config, growth_schedule = growth_events(growth, schedule)
    else:
        refuse(f"--method {method}", only_of(growth, adapting) + options_of(schedule, besides=["sequences"]))
        recipe = recipe_of(method, adapting)
    config = training.make(learning_rate=default_learning_rate(recipe))
    run = Finetuning(
        out=out,
        config=config,
        recipe=recipe,
        growth=growth_config,
        schedule=growth_schedule,
        growth_sequences=schedule.values.get("sequences", GrowthSchedule.sequences),
        data_config=data_config,
        evaluation=evaluation,
        checkpoints=checkpoints,
        resume=resume,
        overwrite=overwrite,
        growth_only=growth_only,
    )
    if task is None:
        # Weights in half precision would lose small steps; --precision is for speed.
        growable = load_model(model, revision, "cpu").float()
    else:
        growable = load_for_task(model, task, revision=revision, labels=labels, seed=config.seed)
    result = run.train(growable, load_tokenizer(model, revision), data)
    if PartialState().is_main_process:
        show(result, {"method": method, "model": model, "data": data} if as_json else None)
    # Threads of a process group that is still there may abort the process when it ends.
    PartialState().destroy_process_group()


def growth_events(
    growth: Given[GrowthConfig], schedule: Given[GrowthSchedule]
) -> tuple[GrowthConfig | None, GrowthSchedule | None]:
    """How much to grow at each event, and when; neither where nothing is asked for."""
    if not growth.options.keys() & {*AMOUNTS} and not options_of(schedule, besides=["sequences"]):
        refuse("a run without growth", growth.options.values())
        return None, None
    return growth.make(), schedule.make() if schedule.options.keys() & {*EVENTS} else schedule.make(at=(0,))


def recipe_of(method: str, given: Given[AdaptConfig]) -> AdaptConfig:
    """The recipe of a method, of whose options only those that it uses may be given."""
    refuse(f"--method {method}", (given.options[name] for name in UNUSED.get(method, ()) if name in given.options))
    recipe = given.make(method=method)
    if recipe.growth is not None and (recipe.rank is not None or not recipe.has_lora):
        refuse("all amounts given", (given.options[name] for name in ("budget", "share") if name in given.options))
    return recipe


def only_of(given: Given[Any], other: Given[Any]) -> list[str]:
    """The options that were given for one config and do not concern another."""
    return options_of(given, besides=other.options)


def options_of(given: Given[Any], besides: Iterable[str]) -> list[str]:
    """The options that were given for a config, but for some of its fields."""
    return [option for name, option in given.options.items() if name not in {*besides}]


def refuse(where: str, given: Iterable[str]) -> None:
    """Options that would do nothing are mistakes."""
    for option in given:
        raise HfGrowError(f"{option} has no meaning with {where}: leave it out.")


def show(result: FinetuneResult, asked: dict[str, str] | None) -> None:
    """What was done: as JSON with what was asked for, or in a few lines."""
    if asked is not None:
        print_json({**asked, **result.summary()})
        return
    print_facts(result.facts())
    say(f"saved in {result.out}; the checkpoints in {result.checkpoints} can be removed")
