"""Where the defaults of collection come from: sketch against exact, ridges, metrics and estimators, on the small model.

Text that the model never saw: held-out help topics, and the source of a module of Python's library. Every row grows
four query/key columns per head (or what it says) and is judged on text that neither chose them nor their step.

    python scripts/compare_choices.py            all tables, some minutes on one core
    python scripts/compare_choices.py --tables sketch ridge
"""

import argparse
import inspect
import re
from collections.abc import Callable
from pydoc_data.topics import topics
from typing import Any

import torch
from rich.console import Console
from rich.table import Table
from transformers import AutoTokenizer

import hf_grow
from hf_grow import CollectConfig, GrowthConfig
from hf_grow.running.passes import Passes

Batches = list[dict[str, torch.Tensor]]
console = Console()


def texts(length: int, sequences: int) -> dict[str, tuple[Batches, Batches]]:
    """By source: batches to grow with and fresh ones."""
    card = (hf_grow.SMALL_MODEL / "README.md").read_text(encoding="utf-8")
    held_out = re.search(r"is held out:\s+([\w, ]+)\.", card)[1].split(", ")  # type: ignore[index]
    sources = {
        "held-out topics": "\n\n".join(topics[name] for name in held_out if name in topics),
        "argparse.py": inspect.getsource(argparse),
    }
    tokenizer = AutoTokenizer.from_pretrained(hf_grow.SMALL_MODEL)
    found = {}
    for name, text in sources.items():
        ids = torch.tensor(tokenizer(text, verbose=False)["input_ids"])
        blocks = ids[: len(ids) // length * length].view(-1, length)
        blocks = blocks[torch.randperm(len(blocks), generator=torch.Generator().manual_seed(0))]
        batches = [{"input_ids": part, "labels": part} for part in blocks.split(8)]
        count = min(sequences // 8, len(batches) * 2 // 3)
        found[name] = batches[:count], batches[count : 2 * count]
    return found


def growable() -> Any:
    """The small model."""
    return hf_grow.make_growable(hf_grow.small_model())


def print_rows(title: str, rows: dict[str, Callable[[Batches, Batches], str]], data: dict) -> None:
    """One table: a row for each choice, a column for each source."""
    table = Table(title=title, title_justify="left")
    for name in ("", *data):
        table.add_column(name, justify="right" if name else "left")
    for label, row in rows.items():
        table.add_row(label, *(row(*pair) for pair in data.values()))
    console.print(table)


def sketch_share(chosen: Batches, exact: list[float], **changes: Any) -> str:
    """The held-out gain of the sketch as a share of the exact one's, mean over layers."""
    shares = [found / best for found, best in zip(gains(chosen, **changes), exact, strict=True)]
    return f"{sum(shares) / len(shares):.3f}"


def gains(chosen: Batches, **changes: Any) -> list[float]:
    """Held-out gain of four columns in each layer."""
    layers = hf_grow.collect_statistics(growable(), chosen, CollectConfig(columns=4, **changes)).layers
    return [layer.columns.held_out[:, :4].sum().item() for layer in layers]  # type: ignore[union-attr, index]


def fresh_loss(chosen: Batches, fresh: Batches, amount: dict[str, int], **changes: Any) -> str:
    """The loss on fresh text after growth."""
    model, _ = hf_grow.grow(growable(), chosen, GrowthConfig(**amount), collect=CollectConfig(**changes))  # type: ignore[arg-type]
    return f"{Passes(model).loss(fresh):.4f}"


def main() -> None:
    """Print the tables asked for."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    names = ("sketch", "ridge", "metric", "estimator")
    parser.add_argument("--tables", nargs="+", choices=names, default=names)
    parser.add_argument("--length", type=int, default=64)
    parser.add_argument("--sequences", type=int, default=112)
    options = parser.parse_args()
    torch.set_num_threads(1)
    data = texts(options.length, options.sequences)

    def row(amount: dict[str, int], **changes: Any) -> Callable[[Batches, Batches], str]:
        return lambda chosen, fresh: fresh_loss(chosen, fresh, amount, **changes)

    ungrown = {"not grown": lambda _, fresh: f"{Passes(growable()).loss(fresh):.4f}"}
    columns = {"columns": 4}
    if "sketch" in options.tables:
        exact = {id(chosen): gains(chosen, collection="exact") for chosen, _ in data.values()}
        rows = {}
        for passes in (2, 3, 4):
            rows[f"{passes} passes"] = lambda chosen, _, passes=passes: sketch_share(
                chosen, exact[id(chosen)], passes=passes
            )
        print_rows("held-out gain of the sketch / exact, 4 columns, k = 12", rows, data)
    if "ridge" in options.tables:
        rows = dict(ungrown)
        for amount in (columns, {"value_columns": 4}, {"heads": 1}):
            for ridge in (0.0, 0.01, 0.03, 0.1):
                rows[f"{amount}, ridge {ridge}"] = row(amount, ridge=ridge, collection="exact")
        print_rows("loss on fresh text by ridge", rows, data)
    if "metric" in options.tables:
        rows = dict(ungrown)
        for metric in ("whitened", "euclidean", "none"):
            for ridge in (0.0, 0.03):
                rows[f"{metric}, ridge {ridge}"] = row(columns, collection="exact", metric=metric, ridge=ridge)
        print_rows("loss on fresh text by metric", rows, data)
    if "estimator" in options.tables:
        rows = dict(ungrown)
        for estimator in ("pooled", "per_sequence", "mean_input", "exact"):
            rows[estimator] = row(columns, collection="exact", estimator=estimator)
        print_rows("loss on fresh text by estimator", rows, data)


if __name__ == "__main__":
    main()
