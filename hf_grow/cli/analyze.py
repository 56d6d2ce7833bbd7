"""`hf-grow analyze`: where growth would help, as a table, JSON, figures and a page to read."""

from dataclasses import replace
from pathlib import Path
from typing import Annotated

import typer

from hf_grow.cli import options
from hf_grow.cli.config_options import Fields, configs_as_options
from hf_grow.cli.loading import load_model, load_tokenizer, short_name
from hf_grow.cli.output import console, print_facts, print_json, print_table, say, to_json
from hf_grow.data import DataConfig, load_batches
from hf_grow.errors import HfGrowError
from hf_grow.files import write_bytes
from hf_grow.growth.collect import Interrupted
from hf_grow.growth.kinds import KINDS
from hf_grow.growth.pipeline import prepare_growth
from hf_grow.measuring.config import CollectConfig
from hf_grow.measuring.statistics import Statistics
from hf_grow.reporting.html_report import HTML_FILE, reading, statistics_facts, statistics_table, write_report
from hf_grow.saving.checkpoint import check_out_folder

QUICK_PASSES, QUICK_SEQUENCES = 2, 32
QUICK_HELP = f"At most {QUICK_SEQUENCES} sequences and {QUICK_PASSES} passes: a first look."
# What shells say of a command that Ctrl-C ended.
INTERRUPTED = 130


@configs_as_options
def analyze(
    model: options.Model,
    data: options.Data,
    collect: Annotated[CollectConfig, Fields(hide=("max_batches",), defaults={"kinds": tuple(KINDS)})],
    data_config: Annotated[DataConfig, options.MEASURED_DATA],
    out: Annotated[Path | None, typer.Option(help="Write the numbers, figures and report.html to this folder.")] = None,
    quick: Annotated[bool, typer.Option("--quick", help=QUICK_HELP)] = False,
    overwrite: options.Overwrite = False,
    as_json: options.AsJson = False,
    revision: options.Revision = None,
    device: options.Device = None,
) -> None:
    """Measure where the attention of a model lacks capacity for some data, and what growth there promises.

    Ctrl-C ends with what is known by then.
    """
    folder = None if out is None else check_analysis_folder(out, overwrite)
    if quick:
        collect = replace(collect, passes=min(collect.passes, QUICK_PASSES))
        data_config = replace(
            data_config, max_sequences=min(data_config.max_sequences or QUICK_SEQUENCES, QUICK_SEQUENCES)
        )
    growable = load_model(model, revision, device)
    batches = load_batches(data, load_tokenizer(model, revision), growable, config=data_config)
    try:
        statistics = prepare_growth(growable, batches, collect=collect, progress=True).statistics
    except Interrupted as interrupted:
        print_analysis(interrupted.statistics.summary(), f"{model} on {data}, interrupted")
        say("Interrupted: this is what was known; nothing was written.")
        raise typer.Exit(INTERRUPTED) from None
    if folder is not None:
        write_analysis(folder, statistics, f"Where {short_name(model)} could grow for {short_name(data)}")
    if as_json:
        print_json(statistics.summary() | {"model": model, "data": data, "out": None if out is None else str(out)})
    else:
        print_analysis(statistics.summary(), f"{model} on {data}: expected decrease of the loss, in sample → held out")
        if out is not None:
            say(f"written to {out}; open {out / HTML_FILE}")


def check_analysis_folder(out: Path, overwrite: bool) -> Path:
    """The folder to write to; with `overwrite`, files of the same names in it are replaced and others stay."""
    if not overwrite or not out.is_dir():
        return check_out_folder(out, overwrite)
    return out.resolve()


def write_analysis(folder: Path, statistics: Statistics, title: str) -> None:
    """Write the statistics for machines and for people."""
    try:
        folder.mkdir(parents=True, exist_ok=True)
    except OSError as error:
        raise HfGrowError(f"{folder} cannot be written: {error}") from error
    summary = statistics.summary()
    statistics.save(folder / "statistics.safetensors")
    write_bytes(folder / "statistics.json", (to_json(summary) + "\n").encode())
    write_report(folder, summary, title=title)


def print_analysis(summary: dict, title: str) -> None:
    """The table, what it says, and what was measured with."""
    print_table(statistics_table(summary), title)
    console.print(reading(summary), markup=False, highlight=False)
    console.print()
    print_facts(statistics_facts(summary))
