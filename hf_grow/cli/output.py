"""What the commands print: tables for people, JSON for machines."""

import json
import math
import os
import sys
from typing import Any

from rich import box
from rich.console import Console
from rich.markup import escape
from rich.table import Table

from hf_grow.reporting.html_report import TextTable
from hf_grow.saving.model_card import describe_event

# Files and pipes have no width: wide tables stay whole there.
console = Console(width=None if sys.stdout.isatty() or "COLUMNS" in os.environ else 120)
errors = Console(stderr=True)
# Between columns of a table.
GAP = 2


def to_json(value: dict) -> str:
    """The text of a JSON document; numbers that JSON cannot hold become null."""
    return json.dumps(_plain(value), indent=2, allow_nan=False)


def _plain(value: Any) -> Any:
    if isinstance(value, dict):
        return {str(key): _plain(part) for key, part in value.items()}
    if isinstance(value, (list, tuple)):
        return [_plain(part) for part in value]
    return None if isinstance(value, float) and not math.isfinite(value) else value


def print_json(value: dict) -> None:
    """One JSON document on standard output."""
    print(to_json(value))


def say(text: str, **options: Any) -> None:
    """A sentence as it is: no markup, no colours, no broken paths."""
    console.print(text, soft_wrap=True, markup=False, highlight=False, **options)


def print_table(table: TextTable, title: str) -> None:
    """A table of finished text; where the terminal is too narrow, in several parts that all begin with the layer."""
    columns = list(zip(table.headers, *table.rows, strict=True))
    for part in _fitting(columns[1:], console.width - _width(columns[0])):
        shown = Table(title=escape(title) or None, title_justify="left", box=box.SIMPLE_HEAD, padding=(0, 1, 0, 0))
        for column in (columns[0], *part):
            shown.add_column(escape(column[0]), justify="right", width=_width(column) - GAP)
        for row in zip(*(column[1:] for column in (columns[0], *part)), strict=True):
            shown.add_row(*(escape(cell) for cell in row))
        console.print(shown)
        title = ""


def _width(column: tuple[str, ...]) -> int:
    """What a column takes when its name is broken between words and its cells are whole."""
    return max(len(text) for text in (*column[0].split(), *column[1:])) + GAP


def _fitting(columns: list[tuple[str, ...]], room: int) -> list[list[tuple[str, ...]]]:
    """The columns in groups that fit into the room."""
    parts: list[list[tuple[str, ...]]] = [[]]
    for column in columns:
        if parts[-1] and sum(map(_width, (*parts[-1], column))) > room - 2 * GAP:
            parts.append([])
        parts[-1].append(column)
    return parts


def print_facts(facts: dict[str, str]) -> None:
    """Names and values, one in a line."""
    width = max(len(name) for name in facts)
    for name, value in facts.items():
        say(f"  {name:<{width}}  {value}")


def print_summary(summary: dict, title: str) -> None:
    """A table of layers and sizes, then the history."""
    table = Table(title=escape(title), title_justify="left")
    for name in ("layer", "attention", "heads", "key heads", "query/key", "value", "scale"):
        table.add_column(name, justify="right")
    table.add_column("parameters", justify="right")
    for layer in summary["layers"]:
        sizes = (layer[key] for key in ("n_heads", "n_kv_heads", "query_key_dim", "value_dim"))
        cells = (layer["layer"], layer["kind"], *sizes, f"{layer['scaling']:.4g}", f"{layer['parameters']:,}")
        table.add_row(*(str(cell) for cell in cells))
    console.print(table)
    new = "new " if summary.get("growth_only") else ""
    console.print(f"{summary['parameters']:,} {new}parameters, base model {summary['base_model'] or 'not named'}")
    for event in summary["events"]:
        say(f"  {describe_event(event)}")
