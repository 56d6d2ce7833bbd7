"""What growable attention costs: stock, ungrown and grown GPT-2 at the shapes of the 124M model, side by side.

Every round times all models one after the other; the table shows the median over rounds of the ratio within a round,
so that what else the machine does falls on both sides alike. "again / stock" compares the stock model with a copy of
itself: how far it is from 1 is the noise of the run.
"""

import argparse
import copy
import json
import statistics
import time
from collections.abc import Callable

import torch
from rich.console import Console
from rich.table import Table
from tqdm import tqdm
from transformers import DynamicCache, GPT2Config, GPT2Model

from hf_grow import make_growable, widen_query_key

PAIRS = (("again", "stock"), ("ungrown", "stock"), ("grown", "ungrown"))


def over_limit(row: dict) -> bool:
    """Ungrown attention may cost 2 % more than stock, a grown training step at n = 1024 8 % more than ungrown."""
    grown_limit = 1.08 if row["task"] == "forward+backward" and row["n"] == 1024 else float("inf")
    return row["ungrown/stock"] > 1.02 or row["grown/ungrown"] > grown_limit


def build_models(layers: int, columns: int) -> dict[str, GPT2Model]:
    """The contestants, with the same weights where they share them."""
    torch.manual_seed(0)
    dropouts = {"resid_pdrop": 0.0, "embd_pdrop": 0.0, "attn_pdrop": 0.0}
    stock = GPT2Model(GPT2Config(n_layer=layers, **dropouts))
    ungrown = make_growable(copy.deepcopy(stock))
    grown = copy.deepcopy(ungrown)
    for layer in range(layers):
        widen_query_key(grown, layer, columns)
    return {"stock": stock, "again": copy.deepcopy(stock), "ungrown": ungrown, "grown": grown}


def forward(model: GPT2Model, ids: torch.Tensor) -> Callable[[], object]:
    """One forward pass without gradients."""

    def run() -> object:
        with torch.no_grad():
            return model(ids, use_cache=False)

    return run


def training_step(model: GPT2Model, ids: torch.Tensor) -> Callable[[], object]:
    """One forward and backward pass."""

    def run() -> object:
        model.zero_grad(set_to_none=True)
        return model(ids, use_cache=False).last_hidden_state.square().mean().backward()

    return run


def decoding(model: GPT2Model, ids: torch.Tensor, steps: int = 16) -> Callable[[], object]:
    """New tokens one by one behind a cached prompt."""
    with torch.no_grad():
        prompt = model(ids[:, :-steps], past_key_values=DynamicCache(config=model.config)).past_key_values

    def run() -> object:
        with torch.no_grad():
            for step in range(steps):
                model(ids[:, step : step + 1], past_key_values=prompt)
            prompt.crop(-steps)
        return None

    return run


TASKS = {"forward": forward, "forward+backward": training_step, "decoding": decoding}


def time_side_by_side(runs: dict[str, Callable[[], object]], rounds: int) -> dict[str, list[float]]:
    """Seconds of every run in every round; the order is turned by one each round."""
    for run in runs.values():
        run()
    seconds: dict[str, list[float]] = {name: [] for name in runs}
    names = list(runs)
    for turn in range(rounds):
        for name in names[turn % len(names) :] + names[: turn % len(names)]:
            start = time.perf_counter()
            runs[name]()
            seconds[name].append(time.perf_counter() - start)
    return seconds


def median_ratio(seconds: dict[str, list[float]], first: str, second: str) -> float:
    """The median over rounds of first / second."""
    return statistics.median(a / b for a, b in zip(seconds[first], seconds[second], strict=True))


def measure(arguments: argparse.Namespace) -> list[dict]:
    """One row for every task and length."""
    models = build_models(arguments.layers, arguments.columns)
    rows = []
    work = [(task, length) for length in arguments.lengths for task in TASKS]
    for task, length in tqdm(work, desc="measuring"):
        ids = torch.randint(50257, (1, length), generator=torch.Generator().manual_seed(0))
        runs = {name: TASKS[task](model, ids) for name, model in models.items()}
        seconds = time_side_by_side(runs, arguments.rounds)
        row = {"task": task, "n": length, "stock_ms": 1000 * statistics.median(seconds["stock"])}
        for first, second in PAIRS:
            row[f"{first}/{second}"] = median_ratio(seconds, first, second)
        rows.append(row)
    return rows


def print_table(rows: list[dict], arguments: argparse.Namespace) -> None:
    """The table for people."""
    shapes = f"{arguments.layers} layers, 768 wide, 12 heads, query/key 64 → {64 + arguments.columns}"
    table = Table(title=f"GPT-2 124M shapes: {shapes}, {arguments.rounds} rounds", title_justify="left")
    for name in ("task", "n", "stock ms", *(f"{first} / {second}" for first, second in PAIRS), "limits"):
        table.add_column(name, justify="right")
    for row in rows:
        ratios = (f"{row[f'{first}/{second}']:.3f}" for first, second in PAIRS)
        verdict = "over" if over_limit(row) else "ok"
        table.add_row(row["task"], str(row["n"]), f"{row['stock_ms']:.0f}", *ratios, verdict)
    Console(width=100).print(table)


def main() -> None:
    """Parse, measure, print."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--layers", type=int, default=2)
    parser.add_argument("--columns", type=int, default=8, help="query/key columns added to every head")
    parser.add_argument("--lengths", type=int, nargs="+", default=[512, 1024])
    parser.add_argument("--rounds", type=int, default=21)
    parser.add_argument("--threads", type=int, default=torch.get_num_threads())
    parser.add_argument("--check", action="store_true", help="fail when a ratio is over its limit")
    parser.add_argument("--json", help="write the rows to this file too")
    arguments = parser.parse_args()
    torch.set_num_threads(arguments.threads)
    rows = measure(arguments)
    print_table(rows, arguments)
    if arguments.json:
        with open(arguments.json, "w", encoding="utf-8") as file:
            json.dump(rows, file, indent=2)
    if arguments.check and any(over_limit(row) for row in rows):
        raise SystemExit("A ratio is over its limit.")


if __name__ == "__main__":
    main()
