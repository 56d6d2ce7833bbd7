"""`hf-grow finetune`: train all weights of a model that grows on the way, or few new ones beside a frozen model."""

from dataclasses import replace
from pathlib import Path
from typing import Annotated, Any

import typer
from accelerate import PartialState

from hf_grow import finetuning
from hf_grow.adapt_config import LEARNING_RATE, METHODS, AdaptConfig
from hf_grow.cli import options
from hf_grow.cli.grow import AMOUNT, amounts
from hf_grow.cli.loading import load_model, load_tokenizer
from hf_grow.cli.output import print_facts, print_json, say
from hf_grow.config import KINDS, GrowthConfig, one_of
from hf_grow.data import DataConfig
from hf_grow.errors import HfGrowError
from hf_grow.finetuning import Evaluation, check_folders, default_learning_rate
from hf_grow.schedule import GrowthSchedule
from hf_grow.train_config import OPTIMIZERS, PRECISIONS, SCHEDULES, TrainConfig

BY_LAYER = "with full also by layer (0:8,3:4)"
TRAINING, EVENTS, EVALUATION = "Training", "When to grow (method full)", "Evaluation"


def finetune(
    model: options.Model,
    data: options.Data,
    out: Annotated[Path, typer.Option(help="Where to save the trained model.")],
    method: Annotated[
        str,
        typer.Option(help=f"All weights (full), or a frozen model and few new ones: {', '.join(METHODS)}."),
    ] = "full",
    overwrite: options.Overwrite = False,
    growth_only: Annotated[
        bool, typer.Option("--growth-only", help="Save only the growth and LoRA, to be put onto the model again.")
    ] = False,
    folder: Annotated[
        Path | None, typer.Option("--checkpoints", help="Where the run is kept on the way; OUT-checkpoints.")
    ] = None,
    resume: Annotated[
        bool, typer.Option("--resume", help="Go on from the newest checkpoint, if there is one.")
    ] = False,
    as_json: options.AsJson = False,
    revision: options.Revision = None,
    budget: Annotated[
        str | None,
        typer.Option(help="New parameters, 250000 or 1%; per event, or of all that learns.", rich_help_panel=AMOUNT),
    ] = None,
    columns: Annotated[
        str | None, typer.Option(help=f"New query/key columns per head, {BY_LAYER}.", rich_help_panel=AMOUNT)
    ] = None,
    value_columns: Annotated[
        str | None, typer.Option(help=f"New value columns per head, {BY_LAYER}.", rich_help_panel=AMOUNT)
    ] = None,
    heads: Annotated[str | None, typer.Option(help="New heads, only with full.", rich_help_panel=AMOUNT)] = None,
    rank: Annotated[
        int | None, typer.Option(help="LoRA's rank, instead of what the budget allows.", rich_help_panel=AMOUNT)
    ] = None,
    kinds: Annotated[
        str | None,
        typer.Option(help=f"What the budget buys, in turn: {','.join(AdaptConfig.kinds)}.", rich_help_panel=AMOUNT),
    ] = None,
    lora_on: Annotated[
        str | None,
        typer.Option(help="Whose projections get LoRA: query,key unless value,output too.", rich_help_panel=AMOUNT),
    ] = None,
    share: Annotated[
        float | None,
        typer.Option(help=f"Of the budget, for growth in grow+lora; {AdaptConfig.share}.", rich_help_panel=AMOUNT),
    ] = None,
    step_size: Annotated[
        float | None,
        typer.Option(help="This step; 0 preserves; a line search, with a method 0.", rich_help_panel=AMOUNT),
    ] = None,
    also_train: Annotated[
        str | None,
        typer.Option(help="Modules that learn whole beside a frozen model: a,b.", rich_help_panel=AMOUNT),
    ] = None,
    growth_sequences: Annotated[
        int, typer.Option(help="Training sequences to measure growth on.", rich_help_panel=AMOUNT)
    ] = GrowthSchedule.sequences,
    grow_at: Annotated[
        str | None, typer.Option(help="After these steps: 0,100; 0 if nothing is said.", rich_help_panel=EVENTS)
    ] = None,
    grow_every: Annotated[int | None, typer.Option(help="After every so many steps.", rich_help_panel=EVENTS)] = None,
    grow_on_plateau: Annotated[
        int | None, typer.Option(help="After so many evaluations without improvement.", rich_help_panel=EVENTS)
    ] = None,
    min_improvement: Annotated[
        float, typer.Option(help="What counts as one.", rich_help_panel=EVENTS)
    ] = GrowthSchedule.min_improvement,
    max_events: Annotated[int | None, typer.Option(help="Grow at most so often.", rich_help_panel=EVENTS)] = None,
    max_query_key_dim: Annotated[int | None, typer.Option(help="Of any head.", rich_help_panel=EVENTS)] = None,
    max_value_dim: Annotated[int | None, typer.Option(help="Of any head.", rich_help_panel=EVENTS)] = None,
    max_heads: Annotated[int | None, typer.Option(help="Of any layer.", rich_help_panel=EVENTS)] = None,
    max_parameters: Annotated[int | None, typer.Option(help="Of the model.", rich_help_panel=EVENTS)] = None,
    steps: Annotated[int, typer.Option(help="Of the optimizer.", rich_help_panel=TRAINING)] = TrainConfig.steps,
    batch_size: Annotated[
        int, typer.Option(help="Sequences at once on each process.", rich_help_panel=TRAINING)
    ] = TrainConfig.batch_size,
    accumulation: Annotated[
        int, typer.Option(help="Batches that make a step.", rich_help_panel=TRAINING)
    ] = TrainConfig.accumulation,
    learning_rate: Annotated[
        float | None,
        typer.Option(
            "--learning-rate",
            "--lr",
            help=f"At its highest; {TrainConfig.learning_rate:g}, beside a frozen model {LEARNING_RATE:g}.",
            rich_help_panel=TRAINING,
        ),
    ] = None,
    warmup: Annotated[
        float, typer.Option(help="Steps of warm-up, or a share of all.", rich_help_panel=TRAINING)
    ] = TrainConfig.warmup,
    schedule: Annotated[str, options.one_of(SCHEDULES, "How the rate decays.", TRAINING)] = TrainConfig.lr_schedule,
    optimizer: Annotated[str, options.one_of(OPTIMIZERS, "What steps.", TRAINING)] = TrainConfig.optimizer,
    weight_decay: Annotated[float, typer.Option(help="Of matrices.", rich_help_panel=TRAINING)] = 0.0,
    clip: Annotated[
        float, typer.Option(help="Largest norm of the gradient; 0 for any.", rich_help_panel=TRAINING)
    ] = 1.0,
    precision: Annotated[str, options.one_of(PRECISIONS, "Autocast.", TRAINING)] = TrainConfig.precision,
    gradient_checkpointing: Annotated[
        bool, typer.Option("--gradient-checkpointing", help="Less memory, more time.", rich_help_panel=TRAINING)
    ] = False,
    save_every: Annotated[
        int | None, typer.Option(help="Steps between checkpoints; the end only.", rich_help_panel=TRAINING)
    ] = None,
    log_every: Annotated[int, typer.Option(help="In steps.", rich_help_panel=TRAINING)] = TrainConfig.log_every,
    tracker: Annotated[
        str | None, typer.Option(help="Of Accelerate, such as tensorboard.", rich_help_panel=TRAINING)
    ] = None,
    seed: Annotated[int, typer.Option(help="Of order, dropout, masking, held-out data.", rich_help_panel=TRAINING)] = 0,
    eval_data: Annotated[
        str | None, typer.Option(help="Data to evaluate on; else some of --data.", rich_help_panel=EVALUATION)
    ] = None,
    eval_split: Annotated[
        str | None, typer.Option(help="Split to evaluate on; of --data if alone.", rich_help_panel=EVALUATION)
    ] = None,
    held_out: Annotated[
        float, typer.Option(help="Else: share of --data to evaluate on; 0 for none.", rich_help_panel=EVALUATION)
    ] = Evaluation.held_out,
    max_eval_sequences: Annotated[
        int, typer.Option(help="Evaluate on so many at most.", rich_help_panel=EVALUATION)
    ] = Evaluation.max_sequences,
    eval_every: Annotated[
        int | None, typer.Option(help="Steps between evaluations; the end only.", rich_help_panel=EVALUATION)
    ] = None,
    split: options.Split = DataConfig.split,
    text_column: options.TextColumn = None,
    label_column: options.LabelColumn = None,
    length: options.Length = None,
    max_sequences: Annotated[
        int | None, typer.Option(help="Read so many sequences at most.", rich_help_panel=options.DATA)
    ] = None,
    streaming: Annotated[
        bool, typer.Option("--streaming", help="Read on the way, not all before.", rich_help_panel=options.DATA)
    ] = False,
    shuffle_buffer: Annotated[
        int | None, typer.Option(help="Rows of a stream to draw from.", rich_help_panel=options.DATA)
    ] = None,
    processes: Annotated[
        int | None, typer.Option(help="Processes that tokenise.", rich_help_panel=options.DATA)
    ] = None,
) -> None:
    """Finetune a model with growth: all weights, or only new columns and LoRA beside a frozen model."""
    one_of("--method", method, ("full", *METHODS))
    grown = {"columns": columns, "value_columns": value_columns, "heads": heads, "budget": budget}
    limits: dict[str, Any] = {
        "max_events": max_events,
        "max_query_key_dim": max_query_key_dim,
        "max_value_dim": max_value_dim,
    }
    limits |= {"max_heads": max_heads, "max_parameters": max_parameters, "min_improvement": min_improvement or None}
    events = {"at": grow_at, "every": grow_every, "plateau": grow_on_plateau, **limits}
    growth, when, recipe = None, None, None
    if method == "full":
        frozen = {"rank": rank, "also_train": also_train, "growth_only": growth_only or None}
        refuse(f"--method {method}", frozen | {"share": share, "kinds": kinds, "lora_on": lora_on})
        growth, when = growth_events(grown, events, step_size, growth_sequences)
    else:
        when_options = {"grow_at": grow_at, "grow_every": grow_every, "grow_on_plateau": grow_on_plateau}
        refuse(f"--method {method}", {"heads": heads, **when_options, **limits})
        recipe = recipe_of(
            method,
            {
                "budget": budget,
                "share": share,
                "kinds": None if kinds is None else _names(kinds),
                "lora_on": None if lora_on is None else _names(lora_on),
                "columns": None if columns is None else _whole("--columns", columns),
                "value_columns": None if value_columns is None else _whole("--value-columns", value_columns),
                "rank": rank,
                "step_size": step_size,
                "also_train": None if also_train is None else _names(also_train),
            },
        )
    config = TrainConfig(
        steps=steps,
        batch_size=batch_size,
        accumulation=accumulation,
        learning_rate=default_learning_rate(recipe) if learning_rate is None else learning_rate,
        weight_decay=weight_decay,
        optimizer=optimizer,
        lr_schedule=schedule,
        warmup=warmup,
        clip=clip or None,
        precision=precision,
        gradient_checkpointing=gradient_checkpointing,
        eval_every=eval_every,
        log_every=log_every,
        save_every=save_every,
        tracker=tracker,
        seed=seed,
    )
    wanted = DataConfig(split, text_column, label_column, length, batch_size, max_sequences, seed, streaming, processes)
    run = check_folders(out, folder, recipe, resume=resume, overwrite=overwrite, growth_only=growth_only)
    # Weights in half precision would lose small steps; --precision is for speed.
    growable = load_model(model, revision, "cpu").float()
    result = finetuning.finetune(
        growable,
        load_tokenizer(model, revision),
        data,
        out,
        config=config,
        recipe=recipe,
        growth=growth,
        schedule=when,
        growth_sequences=growth_sequences,
        data_config=replace(wanted, shuffle_buffer=shuffle_buffer),
        evaluation=Evaluation(eval_data, eval_split, held_out, max_eval_sequences),
        checkpoints=run,
        resume=resume,
        overwrite=overwrite,
        growth_only=growth_only,
    )
    if PartialState().is_main_process and as_json:
        print_json({"method": method, "model": model, "data": data, **result.summary()})
    elif PartialState().is_main_process:
        print_facts(result.facts())
        say(f"saved in {out}; the checkpoints in {run} can be removed")
    # Threads of a process group that is still there may abort the process when it ends.
    PartialState().destroy_process_group()


def growth_events(
    how_much: dict[str, str | None], when: dict[str, Any], step_size: float | None, sequences: int
) -> tuple[GrowthConfig | None, GrowthSchedule | None]:
    """What to grow at each event, and when; neither where nothing is asked for."""
    how_much, when = ({name: value for name, value in given.items() if value is not None} for given in (how_much, when))
    if not how_much and not when:
        refuse("a run without growth", {"step_size": step_size})
        return None, None
    found: dict[str, Any] = {kind: amounts(_option(kind), how_much.get(kind)) for kind in KINDS}
    growth = GrowthConfig(**found, budget=how_much.get("budget"), step_size=step_size)
    if not when.keys() & {"at", "every", "plateau"}:
        when["at"] = "0"
    if "at" in when:
        when["at"] = tuple(_whole("--grow-at", part) for part in when["at"].split(","))
    return growth, GrowthSchedule(**when, sequences=sequences)


def recipe_of(method: str, given: dict[str, Any]) -> AdaptConfig:
    """The recipe of a method, of whose options only those that it uses may be given."""
    by_method = {"grow": ("lora_on",), "lora": ("kinds", "step_size")}
    unused = {name: given[name] for name in by_method.get(method, ())}
    if method != "grow+lora":
        unused["share"] = given["share"]
    refuse(f"--method {method}", unused)
    recipe = AdaptConfig(method=method, **{name: value for name, value in given.items() if value is not None})
    if recipe.growth is not None and (recipe.rank is not None or not recipe.has_lora):
        refuse("all amounts given", {"budget": given["budget"], "share": given["share"]})
    return recipe


def refuse(where: str, given: dict[str, Any]) -> None:
    """Options that would do nothing are mistakes."""
    for name, value in given.items():
        if value is not None:
            raise HfGrowError(f"{_option(name)} has no meaning with {where}: leave it out.")


def _names(text: str) -> tuple[str, ...]:
    return tuple(name.strip() for name in text.split(","))


def _option(name: str) -> str:
    return f"--{name.replace('_', '-')}"


def _whole(option: str, text: str) -> int:
    if not text.strip().isdecimal():
        raise HfGrowError(f"{option} must be made of whole numbers, not {text!r}.")
    return int(text)
