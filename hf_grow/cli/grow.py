"""`hf-grow grow`: measure, plan, insert and save, with a report of what happened."""

import re
from collections.abc import Callable, Sequence
from dataclasses import replace
from pathlib import Path
from typing import Annotated, Any

import typer

from hf_grow.checkpoint import check_out_folder, save_grown
from hf_grow.cli import options
from hf_grow.cli.loading import load_model, load_tokenizer, short_name
from hf_grow.cli.output import print_facts, print_json, print_table, say, to_json
from hf_grow.collect import collect_statistics, split_batches
from hf_grow.config import LINE_SEARCHES, STEPS, STRATEGIES, CollectConfig, GrowthConfig
from hf_grow.data import DataConfig, load_batches
from hf_grow.errors import HfGrowError
from hf_grow.growth_file import check_base, save_growth
from hf_grow.html_report import HTML_FILE, plan_table, report_facts, write_bytes, write_report
from hf_grow.insert import check_growth, collect_config, insert_growth
from hf_grow.passes import Batch
from hf_grow.passes import batch_size as count_sequences
from hf_grow.plan import GrowthPlan, plan_growth
from hf_grow.report import GrowthReport
from hf_grow.statistics import Statistics

AMOUNT, GROWING = "How much", "Growing"
REPORT_FILE = "growth_report.json"
EACH_LAYER = "for every layer (8) or by layer (0:8,3:4)"


def grow(
    model: options.Model,
    data: options.Data,
    out: Annotated[Path | None, typer.Option(help="Where to save the grown model.")] = None,
    overwrite: options.Overwrite = False,
    growth_only: Annotated[
        bool, typer.Option("--growth-only", help="Save only what is new, to be put onto the model again.")
    ] = False,
    columns: Annotated[
        str | None, typer.Option(help=f"New query/key columns per head, {EACH_LAYER}.", rich_help_panel=AMOUNT)
    ] = None,
    value_columns: Annotated[
        str | None, typer.Option(help=f"New value columns per head, {EACH_LAYER}.", rich_help_panel=AMOUNT)
    ] = None,
    heads: Annotated[str | None, typer.Option(help=f"New heads, {EACH_LAYER}.", rich_help_panel=AMOUNT)] = None,
    budget: Annotated[
        str | None,
        typer.Option(help="Instead: new parameters, 250000 or 1%, where they promise most.", rich_help_panel=AMOUNT),
    ] = None,
    dry_run: Annotated[bool, typer.Option("--dry-run", help="Try everything, change and save nothing.")] = False,
    save_plan: Annotated[Path | None, typer.Option(help="Write the plan to this file, also in a dry run.")] = None,
    as_json: options.AsJson = False,
    revision: options.Revision = None,
    device: options.Device = None,
    strategy: Annotated[
        str, options.one_of(STRATEGIES, "Add columns, factor all of them anew, or only move them.", GROWING)
    ] = GrowthConfig.strategy,
    align: Annotated[
        int | None, typer.Option(help="Round widths up to a multiple; 8 on a GPU, else 1.", rich_help_panel=GROWING)
    ] = None,
    step_size: Annotated[
        float | None,
        typer.Option(help="No line search: this multiple of the planned step; 0 preserves.", rich_help_panel=GROWING),
    ] = None,
    steps: Annotated[
        str, options.one_of(STEPS, "One step for all layers, or one for each.", GROWING)
    ] = GrowthConfig.steps,
    line_search: Annotated[
        str, options.one_of(LINE_SEARCHES, "Search with what is inserted, or with all that is wanted.", GROWING)
    ] = GrowthConfig.line_search,
    split: options.Split = DataConfig.split,
    text_column: options.TextColumn = None,
    label_column: options.LabelColumn = None,
    length: options.Length = None,
    batch_size: options.BatchSize = DataConfig.batch_size,
    max_sequences: options.MaxSequences = options.MAX_SEQUENCES,
    collection: options.Collection = CollectConfig.collection,
    target: options.Target = CollectConfig.target,
    metric: options.Metric = CollectConfig.metric,
    estimator: options.Estimator = CollectConfig.estimator,
    phases: options.Phases = CollectConfig.phases,
    ridge: options.Ridge = CollectConfig.ridge,
    seed: options.Seed = CollectConfig.seed,
) -> None:
    """Grow the attention of a model where some data asks for it, and save it with a report."""
    config = GrowthConfig(
        columns=amounts("--columns", columns),
        value_columns=amounts("--value-columns", value_columns),
        heads=amounts("--heads", heads),
        budget=budget,
        strategy=strategy,
        align=align,
        step_size=step_size,
        steps=steps,
        line_search=line_search,
    )
    measuring = CollectConfig(
        collection=collection,
        phases=phases,
        target=target,
        metric=metric,
        estimator=estimator,
        ridge=ridge,
        seed=seed,
    )
    collect = collect_config(config, measuring)
    wanted = DataConfig(split, text_column, label_column, length, batch_size, max_sequences, seed)
    folder = check_destination(out, overwrite, dry_run)
    if growth_only and strategy != "append":
        raise HfGrowError(f"--growth-only saves what is added, and --strategy {strategy} changes the present weights.")

    growable = load_model(model, revision, device)
    check_growth(growable, config)
    if growth_only:
        check_base(growable)
    tokenizer = load_tokenizer(model, revision)
    batches = load_batches(data, tokenizer, growable, config=wanted)
    statistics = collect_statistics(growable, batches, collect, progress=True)
    plan = plan_growth(statistics, config)
    if save_plan is not None:
        plan.save(save_plan)
    if not as_json:
        print_table(plan_table(plan.summary()), f"{model} on {data}: the plan, decreases in sample → held out")
    choosing, judging = split_batches(batches, collect)
    searched = judging or choosing
    report = insert_growth(growable, plan, searched, progress=True, dry_run=dry_run)
    summary = summary_of(report, statistics, searched)
    if folder is not None:
        files = report_files(statistics, plan, summary, f"How {short_name(model)} grew for {short_name(data)}")
        if growth_only:
            save_growth(growable, folder, overwrite=overwrite, extras=files)
        else:
            save_grown(growable, folder, tokenizer=tokenizer, overwrite=overwrite, extras=files)
    if as_json:
        print_json(summary | {"model": model, "data": data, "out": None if folder is None else str(out)})
        return
    print_facts(report_facts(summary))
    say("a dry run: nothing was changed or saved" if folder is None else f"saved in {out}; open {out}/{HTML_FILE}")


def summary_of(report: GrowthReport, statistics: Statistics, searched: Sequence[Batch]) -> dict[str, Any]:
    """The report for JSON, with the time of measuring and the number of sequences that its losses are means over."""
    seconds = {"collecting": sum(statistics.seconds.values()), **report.seconds}
    sequences = sum(count_sequences(batch) for batch in searched)
    return replace(report, seconds=seconds).summary() | {"line_search_sequences": sequences}


def report_files(
    statistics: Statistics, plan: GrowthPlan, report: dict[str, Any], title: str
) -> Callable[[Path], None]:
    """What writes the report and its figures into the folder of a checkpoint."""

    def write(folder: Path) -> None:
        write_bytes(folder / REPORT_FILE, (to_json(report) + "\n").encode())
        write_report(folder, statistics.summary(), plan.summary(), report, title=title)

    return write


def check_destination(out: Path | None, overwrite: bool, dry_run: bool) -> Path | None:
    """The folder to save in, None for a dry run."""
    if dry_run:
        return None
    if out is None:
        raise HfGrowError("Say where to save the grown model with --out, or only try with --dry-run.")
    return check_out_folder(out, overwrite)


def amounts(option: str, text: str | None) -> Any:
    """A number for every layer, or numbers by layer."""
    if text is None:
        return None
    if re.fullmatch(r"[+-]?\d+", text.strip()):
        return int(text)
    pairs = [re.fullmatch(r"\s*(\d+)\s*:\s*([+-]?\d+)\s*", part) for part in text.split(",")]
    found = {int(pair[1]): int(pair[2]) for pair in pairs if pair}
    if len(found) < len(pairs):
        raise HfGrowError(f"{option} must be a whole number or numbers by layer like 0:8,3:4, not {text!r}.")
    return found
