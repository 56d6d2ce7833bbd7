"""Options that several commands have, each declared once."""

from typing import Annotated

import typer

from hf_grow.config import COLLECTIONS, ESTIMATORS, PHASES, TARGETS
from hf_grow.linalg import METRICS

DATA, MEASURING = "Data", "Measuring"
MAX_SEQUENCES = 256


def one_of(values: tuple[str, ...], help: str, panel: str) -> typer.models.OptionInfo:
    """An option that lists its values; the config refuses others with one sentence."""
    return typer.Option(help=f"{help} One of {', '.join(values)}.", rich_help_panel=panel)


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
        rich_help_panel=DATA,
    ),
]
Split = Annotated[str, typer.Option(help="Split of the data.", rich_help_panel=DATA)]
TextColumn = Annotated[
    str | None, typer.Option(help="Column with the text, or two for pairs: a,b.", rich_help_panel=DATA)
]
LabelColumn = Annotated[str | None, typer.Option(help="Column with the label, for classifiers.", rich_help_panel=DATA)]
Length = Annotated[
    int | None, typer.Option(help="Tokens per sequence; all positions of the model, at most 256.", rich_help_panel=DATA)
]
BatchSize = Annotated[int, typer.Option(help="Sequences at once.", rich_help_panel=DATA)]
MaxSequences = Annotated[int, typer.Option(help="Read so many sequences at most.", rich_help_panel=DATA)]

Collection = Annotated[
    str, one_of(COLLECTIONS, "Through the model's own attention kernel, or with all scores in memory.", MEASURING)
]
Target = Annotated[
    str | None,
    one_of(TARGETS, "Look for what the present columns cannot express, or for everything wanted.", MEASURING),
]
Metric = Annotated[
    str, one_of(METRICS, "Where few columns are the best few; others need --collection exact.", MEASURING)
]
Estimator = Annotated[
    str, one_of(ESTIMATORS, "How many sequences make one step; others need --collection exact.", MEASURING)
]
Phases = Annotated[
    str, one_of(PHASES, "Whether each product of the sketch sees all batches or its own part.", MEASURING)
]
Ridge = Annotated[
    float,
    typer.Option(
        help="Added to the grams before they are inverted, relative to their mean.", rich_help_panel=MEASURING
    ),
]
Seed = Annotated[
    int, typer.Option(help="Of the sketch, of masking and of preserving growth.", rich_help_panel=MEASURING)
]
