"""`hf-grow grow`: measure, plan, insert and save, with a report of what happened."""

from collections.abc import Callable
from pathlib import Path
from typing import Annotated, Any

import typer

from hf_grow.cli import options
from hf_grow.cli.config_options import Fields, configs_as_options
from hf_grow.cli.loading import load_model, load_tokenizer, short_name
from hf_grow.cli.output import print_facts, print_json, print_table, say, to_json
from hf_grow.data import DataConfig, load_batches
from hf_grow.errors import HfGrowError
from hf_grow.files import write_bytes
from hf_grow.growth.config import GrowthConfig
from hf_grow.growth.kinds import COLUMN_KINDS
from hf_grow.growth.pipeline import PreparedGrowth, check_growth, prepare_growth
from hf_grow.growth.report import GrowthReport
from hf_grow.measuring.config import CollectConfig
from hf_grow.reporting.html_report import HTML_FILE, plan_table, report_facts, write_report
from hf_grow.saving.checkpoint import check_out_folder, save_grown
from hf_grow.saving.growth_on_base import check_base, save_growth

REPORT_FILE = "growth_report.json"


@configs_as_options
def grow(
    model: options.Model,
    data: options.Data,
    config: Annotated[GrowthConfig, Fields(hide=("attach",))],
    measuring: Annotated[CollectConfig, Fields(hide=("kinds", *COLUMN_KINDS, "max_batches"))],
    data_config: Annotated[DataConfig, options.MEASURED_DATA],
    out: Annotated[Path | None, typer.Option(help="Where to save the grown model.")] = None,
    overwrite: options.Overwrite = False,
    growth_only: Annotated[
        bool, typer.Option("--growth-only", help="Save only what is new, to be put onto the model again.")
    ] = False,
    dry_run: Annotated[bool, typer.Option("--dry-run", help="Try everything, change and save nothing.")] = False,
    save_plan: Annotated[Path | None, typer.Option(help="Write the plan to this file, also in a dry run.")] = None,
    as_json: options.AsJson = False,
    revision: options.Revision = None,
    device: options.Device = None,
) -> None:
    """Grow the attention of a model where some data asks for it, and save it with a report."""
    folder = check_destination(out, overwrite, dry_run)
    if growth_only and config.strategy != "append":
        raise HfGrowError(
            f"--growth-only saves what is added, and --strategy {config.strategy} changes the present weights."
        )

    growable = load_model(model, revision, device)
    check_growth(growable, config)
    if growth_only:
        check_base(growable)
    tokenizer = load_tokenizer(model, revision)
    batches = load_batches(data, tokenizer, growable, config=data_config)
    prepared = prepare_growth(growable, batches, config, collect=measuring, progress=True)
    assert prepared.plan is not None
    if save_plan is not None:
        prepared.plan.save(save_plan)
    if not as_json:
        print_table(plan_table(prepared.plan.summary()), f"{model} on {data}: the plan, decreases in sample → held out")
    summary = summary_of(prepared.insert(dry_run=dry_run), prepared)
    if folder is not None:
        files = report_files(prepared, summary, f"How {short_name(model)} grew for {short_name(data)}")
        if growth_only:
            save_growth(growable, folder, overwrite=overwrite, extras=files)
        else:
            save_grown(growable, folder, tokenizer=tokenizer, overwrite=overwrite, extras=files)
    if as_json:
        print_json(summary | {"model": model, "data": data, "out": None if folder is None else str(out)})
        return
    print_facts(report_facts(summary))
    say("a dry run: nothing was changed or saved" if folder is None else f"saved in {out}; open {out}/{HTML_FILE}")


def summary_of(report: GrowthReport, prepared: PreparedGrowth) -> dict[str, Any]:
    """The report for JSON, with the number of sequences that its losses are means over."""
    return report.summary() | {"line_search_sequences": prepared.search_sequences}


def report_files(prepared: PreparedGrowth, report: dict[str, Any], title: str) -> Callable[[Path], None]:
    """What writes the report and its figures into the folder of a checkpoint."""
    assert prepared.plan is not None
    plan, statistics = prepared.plan.summary(), prepared.statistics.summary()

    def write(folder: Path) -> None:
        write_bytes(folder / REPORT_FILE, (to_json(report) + "\n").encode())
        write_report(folder, statistics, plan, report, title=title)

    return write


def check_destination(out: Path | None, overwrite: bool, dry_run: bool) -> Path | None:
    """The folder to save in, None for a dry run."""
    if dry_run:
        return None
    if out is None:
        raise HfGrowError("Say where to save the grown model with --out, or only try with --dry-run.")
    return check_out_folder(out, overwrite)
