"""What the commands print: tables for people, JSON for machines."""

import json

from rich.console import Console
from rich.markup import escape
from rich.table import Table

from hf_grow.model_card import describe_event

console = Console()
errors = Console(stderr=True)


def print_json(value: dict) -> None:
    """One JSON document on standard output."""
    print(json.dumps(value, indent=2))


def print_summary(summary: dict, title: str) -> None:
    """A table of layers and sizes, then the history."""
    table = Table(title=escape(title), title_justify="left")
    for name in ("layer", "kind", "heads", "key heads", "query/key", "value", "scale"):
        table.add_column(name, justify="right")
    table.add_column("parameters", justify="right")
    for layer in summary["layers"]:
        sizes = (layer[key] for key in ("n_heads", "n_kv_heads", "query_key_dim", "value_dim"))
        cells = (layer["layer"], layer["kind"], *sizes, f"{layer['scaling']:.4g}", f"{layer['parameters']:,}")
        table.add_row(*(str(cell) for cell in cells))
    console.print(table)
    console.print(f"{summary['parameters']:,} parameters, base model {summary['base_model'] or 'not named'}")
    for event in summary["events"]:
        console.print(f"  {describe_event(event)}")
