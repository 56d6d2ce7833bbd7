"""`hf-grow inspect`: sizes, parameters and history of a grown checkpoint."""

from pathlib import Path
from typing import Annotated

import typer

from hf_grow.cli.options import AsJson
from hf_grow.cli.output import print_json, print_summary
from hf_grow.saving.checkpoint import inspect_checkpoint


def inspect(
    folder: Annotated[Path, typer.Argument(help="A folder written by hf-grow.")],
    as_json: AsJson = False,
) -> None:
    """Show the sizes, parameters and history of a grown checkpoint or of growth alone; check that it is whole."""
    summary = inspect_checkpoint(folder)
    if as_json:
        print_json(summary)
    else:
        print_summary(summary, str(folder))
