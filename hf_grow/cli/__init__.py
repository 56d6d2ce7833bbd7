"""The `hf-grow` command line: each command parses, calls one public function and prints what it returns."""

import logging
import sys
from collections.abc import Sequence

import typer
from rich.markup import escape

from hf_grow.cli import analyze, demo, finetune, grow, inspect, patch, push
from hf_grow.cli.output import errors
from hf_grow.errors import HfGrowError
from hf_grow.progress import libraries_quiet_unless_watched

app = typer.Typer(
    name="hf-grow",
    help="Grow the attention of pretrained Hugging Face models.",
    no_args_is_help=True,
    pretty_exceptions_enable=False,
)
app.command("patch")(patch.patch)
app.command("inspect")(inspect.inspect)
app.command("analyze")(analyze.analyze)
app.command("grow")(grow.grow)
app.command("finetune")(finetune.finetune)
app.command("push")(push.push)
app.command("demo")(demo.demo)


def main(words: Sequence[str] | None = None) -> None:
    """Run the command line, with these words or those it was given; bad input ends with a sentence and exit code 2."""
    logging.getLogger("transformers").setLevel(logging.ERROR)
    try:
        with libraries_quiet_unless_watched():
            app(words)
    except HfGrowError as error:
        errors.print(f"[red]Error:[/red] {escape(str(error))}", soft_wrap=True, highlight=False)
        sys.exit(2)
