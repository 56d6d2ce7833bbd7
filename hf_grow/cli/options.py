"""Options that several commands have and no config knows of, each declared once."""

from typing import Annotated

import typer

from hf_grow.cli.config_options import PANELS, Fields

Model = Annotated[str, typer.Argument(help="A Hub id or a local folder; stock, or grown already.")]
Revision = Annotated[str | None, typer.Option(help="Branch, tag or commit of the model.")]
Device = Annotated[str | None, typer.Option(help="Where to compute; a GPU if there is one, else cpu.")]
AsJson = Annotated[bool, typer.Option("--json", help="Print one JSON document instead of tables.")]
Overwrite = Annotated[bool, typer.Option("--overwrite", help="Replace what is in --out.")]

Data = Annotated[
    str,
    typer.Option(
        help="A text, JSONL, CSV or Parquet file, a folder of them, or a data set of the Hub, name or "
        "name:configuration.",
        rich_help_panel=PANELS["DataConfig"],
    ),
]
# Measuring takes many passes, so it does not read all of the data unless it is asked to.
MEASURED_DATA = Fields(defaults={"max_sequences": 256})
