"""What an optimizer's state is worth over growth, and at which rate new columns should learn: the shipped small model.

The model meets the source of Python's library, which it never saw: all weights train with AdamW until the moments are
steady, eight query/key columns are added to every head, and training goes on. Every choice of a table sees the same
batches from the same weights. Losses are nats per token: the mean over the steps after growth and over the last fifth
of them, on training batches, before each is learned from; and on held-out modules, at every fifth of the way and at the
end. "±" is the standard deviation over seeds; differences are taken within a seed, so that what a seed has in common
falls out.

carry       the state carried by `optimizer=`, against a new optimizer at the same learning rate
variance    entries that are new start with a state of zero; Adam's second moment could start with the mean of the old
            ones instead. That matters most late in a run, when nothing corrects for moments that start at zero: here
            the steady moments are those of an optimizer that has made `--age` steps
multiplier  new columns, attached, learn in a group of the optimizer at a multiple of the learning rate, beside all
            other weights or alone

    python scripts/bench_optimizer_state.py      all tables, some minutes on one core
    python scripts/bench_optimizer_state.py --tables multiplier --seeds 1 --json rows.json
"""

import argparse
import copy
import json
import statistics
from collections.abc import Callable, Iterable, Iterator
from functools import partial
from typing import Any

import torch
from rich.console import Console
from rich.table import Table
from torch import Tensor
from transformers import AutoTokenizer

import hf_grow
from hf_grow import CollectConfig, GrowthConfig
from hf_grow.cli.demo import OTHER_MODULES, TRAINING_MODULES, loss_on, source_blocks
from hf_grow.modeling.growable_attention import AttentionSite, attention_sites, in_rows
from hf_grow.surgery.blocks import leading, own_blocks, write_blocks

TABLES = ("carry", "variance", "multiplier")
FORMS = {"stepped": None, "preserving": 0.0}
LOSSES = ("training", "training, end", "held out", "held out, end")
Pair = tuple[Any, torch.optim.Optimizer]
Way = Callable[[Pair], Pair]
Row = dict[str, Any]
console = Console(width=120)


def blocks_of(options: argparse.Namespace) -> tuple[Tensor, Tensor]:
    """Token ids to train on and held-out ones, (blocks, length); the latter spread over their modules."""
    tokenizer = AutoTokenizer.from_pretrained(hf_grow.SMALL_MODEL)
    training, other = (
        source_blocks(tokenizer, modules).view(-1, options.length) for modules in (TRAINING_MODULES, OTHER_MODULES)
    )
    return training, other[torch.arange(options.held_out) * len(other) // options.held_out]


def adamw(model: Any, rate: float) -> torch.optim.Optimizer:
    """The optimizer of all weights."""
    return torch.optim.AdamW(model.parameters(), lr=rate)


def learn(pair: Pair, batches: Iterable[Tensor]) -> list[float]:
    """Plain steps without dropout; the loss of each batch before its step."""
    model, optimizer = pair
    losses = []
    for batch in batches:
        loss = model(batch, labels=batch).loss
        loss.backward()
        torch.nn.utils.clip_grad_norm_(model.parameters(), 1.0)
        optimizer.step()
        optimizer.zero_grad()
        losses.append(float(loss.detach()))
    return losses


def grown(pair: Pair, form: str, blocks: Tensor, options: argparse.Namespace, seed: int, attach: bool) -> Pair:
    """A copy of model and optimizer with new columns in every head, in the projections or beside them."""
    model, optimizer = copy.deepcopy(pair)
    batches = [{"input_ids": part, "labels": part} for part in blocks[: options.sequences].split(options.batch)]
    config = GrowthConfig(columns=options.columns, step_size=FORMS[form], attach=attach)
    hf_grow.grow(model, batches, config, collect=CollectConfig(seed=seed), optimizer=optimizer)
    return model, optimizer


def fresh(pair: Pair) -> Pair:
    """The same model with a new optimizer."""
    return pair[0], adamw(pair[0], pair[1].param_groups[0]["lr"])


def aged(pair: Pair, age: int) -> Pair:
    """The state as after many steps with the same gradients: the correction for the first ones is part of it."""
    for group in pair[1].param_groups:
        for parameter in group["params"]:
            state = pair[1].state[parameter]
            for name, beta in zip(("exp_avg", "exp_avg_sq"), group["betas"], strict=True):
                state[name] *= (1 - beta**age) / (1 - beta ** float(state["step"]))
            state["step"].fill_(age)
    return pair


def with_mean_variance(pair: Pair) -> Pair:
    """New entries start with the mean second moment of the old ones of their parameter."""
    for site in attention_sites(pair[0]):
        for parameter, is_new in new_entries(site):
            variance = pair[1].state[parameter]["exp_avg_sq"]
            if bool(is_new.any()):
                variance[is_new] = variance[~is_new].mean()
    return pair


def new_entries(site: AttentionSite) -> Iterator[tuple[torch.nn.Parameter, Tensor]]:
    """The parameters of an attention module's projections, each with which of its entries were merged into it."""
    marks = {role: torch.ones(block.shape, dtype=torch.bool) for role, block in own_blocks(site).items()}
    for role, mark in marks.items():
        leading(mark, role, site.attention.base_dims).fill_(False)
    for projection, weight, bias in write_blocks(site, marks):
        yield projection.weight, in_rows(projection, weight)
        if bias is not None:
            yield projection.bias, bias


def with_multiplier(pair: Pair, train: str, multiplier: float) -> Pair:
    """New columns learn at another rate, all weights beside them or not."""
    model, optimizer = pair
    (group,), new = optimizer.param_groups, set(hf_grow.growth_parameters(model))
    if train == "new":
        hf_grow.freeze_base(model)
    moved = [parameter for parameter in group["params"] if parameter in new]
    group["params"] = [parameter for parameter in group["params"] if parameter not in new]
    optimizer.add_param_group({"params": moved, "lr": multiplier * group["lr"]})
    return pair


def measured(pair: Pair, batches: list[Tensor], held_out: Tensor) -> dict[str, float]:
    """Train on, and the losses by name."""
    part = max(len(batches) // 5, 1)
    training, other = [], []
    for start in range(0, len(batches), part):
        training += learn(pair, batches[start : start + part])
        other.append(loss_on(pair[0], held_out))
    found = statistics.mean(training), statistics.mean(training[-part:]), statistics.mean(other), other[-1]
    return dict(zip(LOSSES, found, strict=True))


def choices(options: argparse.Namespace, rate: float, form: str) -> dict[tuple[str, str, str], Way]:
    """By table, case and label: how training goes on. Of each case the first is what the others are compared with."""
    found: dict[tuple[str, str, str], Way] = {}
    if "carry" in options.tables:
        found |= {("carry", form, "carried"): lambda pair: pair, ("carry", form, "new optimizer"): fresh}
    if rate != options.rates[len(options.rates) // 2]:
        return found
    if "variance" in options.tables:
        found["variance", form, "zero"] = lambda pair: aged(pair, options.age)
        found["variance", form, "mean"] = lambda pair: with_mean_variance(aged(pair, options.age))
    if "multiplier" in options.tables and form == "stepped":
        for train in ("all", "new"):
            for multiple in sorted({1.0, *options.multipliers}, key=lambda multiple: (multiple != 1, multiple)):
                way = partial(with_multiplier, train=train, multiplier=multiple)
                found["multiplier", f"train={train!r}", f"× {multiple:g}"] = way
    return found


def run(options: argparse.Namespace) -> list[Row]:
    """The losses of every choice, for every seed, learning rate and form of growth."""
    training, held_out = blocks_of(options)
    rows: list[Row] = []
    for seed in range(options.seeds):
        blocks = training[torch.randperm(len(training), generator=torch.Generator().manual_seed(seed))]
        batches = list(blocks[: (options.warmup + options.steps) * options.batch].split(options.batch))
        for rate in options.rates:
            model = hf_grow.make_growable(hf_grow.small_model())
            pair = (model, adamw(model, rate))
            learn(pair, batches[: options.warmup])
            for form in FORMS:
                ways = choices(options, rate, form)
                forms = {table == "multiplier" for table, _, _ in ways}
                starts = {attach: grown(pair, form, blocks, options, seed, attach) for attach in forms}
                for (table, case, choice), way in ways.items():
                    start = copy.deepcopy(starts[table == "multiplier"])
                    losses = measured(way(start), batches[options.warmup :], held_out)
                    rows.append({"table": table, "rate": rate, "case": case, "choice": choice, "seed": seed} | losses)
    return rows


def spread(values: list[float], sign: str = "") -> str:
    """Mean and standard deviation."""
    deviation = f" ± {statistics.stdev(values):.4f}" if len(values) > 1 else ""
    return f"{statistics.mean(values):{sign}.4f}{deviation}"


def print_table(name: str, title: str, rows: list[Row]) -> None:
    """Losses of the first choice of each case and of the others the differences to it, over seeds."""
    table = Table(title=title, title_justify="left")
    for heading in ("rate", "", "choice", *LOSSES):
        table.add_column(heading, justify="right" if heading in LOSSES else "left")
    rows = [row for row in rows if row["table"] == name]
    for rate, case in sorted(dict.fromkeys((row["rate"], row["case"]) for row in rows), key=lambda pair: pair[0]):
        these = [row for row in rows if (row["rate"], row["case"]) == (rate, case)]
        labels = list(dict.fromkeys(row["choice"] for row in these))
        by_choice = [[row for row in these if row["choice"] == label] for label in labels]
        first = by_choice[0]
        cells = [spread([row[loss] for row in first]) for loss in LOSSES]
        table.add_row(f"{rate:g}", case, labels[0], *cells)
        for label, runs in zip(labels[1:], by_choice[1:], strict=True):
            cells = [spread([a[loss] - b[loss] for a, b in zip(runs, first, strict=True)], "+") for loss in LOSSES]
            table.add_row("", "", label, *cells)
        table.add_section()
    console.print(table)


def main() -> None:
    """Print the tables asked for."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--tables", nargs="+", choices=TABLES, default=TABLES)
    parser.add_argument("--seeds", type=int, default=3)
    parser.add_argument(
        "--rates", type=float, nargs="+", default=[1e-4, 3e-4, 1e-3], help="all for carry, else the middle"
    )
    parser.add_argument("--multipliers", type=float, nargs="+", default=[0.3, 1.0, 3.0, 10.0])
    parser.add_argument("--warmup", type=int, default=100, help="steps before growth")
    parser.add_argument("--steps", type=int, default=50, help="steps after growth")
    parser.add_argument("--age", type=int, default=10_000)
    parser.add_argument("--columns", type=int, default=8)
    parser.add_argument("--sequences", type=int, default=64, help="to measure and grow with")
    parser.add_argument("--held-out", type=int, default=32, help="blocks to judge with")
    parser.add_argument("--length", type=int, default=64)
    parser.add_argument("--batch", type=int, default=8)
    parser.add_argument("--json", help="write every run's losses to this file too")
    options = parser.parse_args()
    torch.set_num_threads(1)
    rows = run(options)
    titles = {
        "carry": "a new optimizer: difference to the carried state",
        "variance": f"second moments of new entries after {options.age:,} steps: difference to a start at zero",
        "multiplier": "learning-rate multiplier of new columns: difference to × 1",
    }
    for name in options.tables:
        print_table(name, titles[name], rows)
    if options.json:
        with open(options.json, "w", encoding="utf-8") as file:
            json.dump({"settings": vars(options), "rows": rows}, file, indent=2)


if __name__ == "__main__":
    main()
