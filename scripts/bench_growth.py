"""Does growth help training? A small GPT-2 whose one query/key column per head is the limit, on Python's help topics.

Part a, growth during training: from scratch, all weights, columns added at given steps with the optimizer going on,
against the same run without growth, against all columns from the start, and against random columns at the same steps.
All see equal batches and start from the same weights, as far as they have them.

Part b, the start of new columns: a trained small model gets columns whose start differs, then trains all weights, with
the optimizer going on, or only the new ones, attached to the frozen model, with an optimizer of their own; both at the
learning rate where its schedule ended.

"random, both sides" has the norms of what growth with its line search would insert, "random queries, zero keys" those
of the preserving form, each column of each head its own.

Losses are nats per token on whole topics that nothing else uses. Growth and its line search see training text only; the
learning rate was chosen for the small model without growth on other topics (`--judge validation`). "±" is the standard
deviation over seeds; differences are taken within a seed, so that what a seed has in common falls out.

    python scripts/bench_growth.py               everything, about a quarter of an hour on one core
    python scripts/bench_growth.py --read docs/bench_growth.json        the tables again
    python scripts/bench_growth.py --parts a --judge validation --learning-rate 1e-3
"""

import argparse
import copy
import json
import platform
import statistics
import sys
import time
from collections.abc import Iterable, Iterator
from pathlib import Path
from pydoc_data.topics import topics
from typing import Any

import torch
import transformers
from matplotlib.backends.backend_agg import FigureCanvasAgg
from matplotlib.figure import Figure
from rich.console import Console
from rich.table import Table
from torch import Tensor
from train_small_model import encode_stream, paragraph_key, random_batches
from transformers import AutoTokenizer, GPT2Config, GPT2LMHeadModel

import hf_grow
from hf_grow import GrowthConfig
from hf_grow.running.batches import Batch
from hf_grow.surgery.blocks import read_blocks
from hf_grow.surgery.patch import growable_sites

NOT_GROWN, LARGE = "no growth", "large from the start"
SVD, RANDOM, PRESERVING, RANDOM_QUERIES = (
    "SVD, line search",
    "random, both sides",
    "SVD queries, zero keys",
    "random queries, zero keys",
)
STARTS = (SVD, RANDOM, PRESERVING, RANDOM_QUERIES)
# Random starts and the one whose norms they have.
NORMS_OF = {RANDOM: SVD, RANDOM_QUERIES: PRESERVING}
GROWN = {"growth": SVD, "random growth, both sides": RANDOM, "random growth, zero keys": RANDOM_QUERIES}
# Okabe and Ito's colours, told apart with any eyes.
COLOURS = {SVD: "#0072B2", RANDOM: "#D55E00", PRESERVING: "#009E73", RANDOM_QUERIES: "#E69F00"}
MODES = {"all": "all weights train", "new": "only the new columns train"}
# What a run may depend on beside the seed, kept apart.
BATCHES, GROWTH_TEXT, CHANCE, LATER_BATCHES = range(4)

# Options that are no part of what is measured.
FILES = ("read", "json", "figure")

console = Console(width=120)


def build_parser() -> argparse.ArgumentParser:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--parts", nargs="+", choices=("a", "b"), default=["a", "b"])
    parser.add_argument("--seeds", type=int, default=3, help="how many")
    parser.add_argument("--layers", type=int, default=2)
    parser.add_argument("--width", type=int, default=64)
    parser.add_argument("--heads", type=int, default=4)
    parser.add_argument("--length", type=int, default=64, help="tokens of a sequence")
    parser.add_argument("--batch-size", type=int, default=8)
    parser.add_argument("--steps", type=int, default=1500, help="of training from scratch")
    parser.add_argument("--query-key", type=int, default=1, help="columns per head of the small model")
    parser.add_argument("--grow-at", type=int, nargs="+", default=[300, 600, 900], help="steps of growth in part a")
    parser.add_argument("--columns", type=int, default=4, help="new columns per head in part b")
    parser.add_argument("--checkpoints", type=int, nargs="+", default=[50, 200, 1000], help="steps in part b")
    parser.add_argument("--growth-sequences", type=int, default=256, help="of training text, for each growth")
    parser.add_argument("--learning-rate", type=float, default=3e-3, help="peak of the schedule")
    parser.add_argument("--warmup", type=int, default=100)
    parser.add_argument("--last-rate", type=float, default=0.1, help="end of the schedule, as a share of its peak")
    parser.add_argument("--weight-decay", type=float, default=0.1)
    parser.add_argument("--judge", choices=("evaluation", "validation"), default="evaluation", help="text of losses")
    parser.add_argument("--read", type=Path, help="run nothing: tables and figure of an earlier --json file")
    parser.add_argument("--json", type=Path, help="write all numbers to this file")
    parser.add_argument("--figure", type=Path, help="draw part b into this PNG file")
    return parser


def say(text: str) -> None:
    print(text, file=sys.stderr, flush=True)


def read_text(judge: str) -> tuple[Tensor, Tensor]:
    """Tokens to train on and tokens to judge on; no paragraph is in two parts."""
    names = sorted(topics)
    parts = {"evaluation": names[::10], "validation": names[5::10]}
    parts["train"] = [name for name in names if name not in parts["evaluation"] + parts["validation"]]
    texts: dict[str, list[str]] = {}
    seen: set[str] = set()
    # Topics quote each other: what one part has, the next ones do not get.
    for part, members in parts.items():
        for name in members:
            paragraphs = {paragraph_key(paragraph): paragraph for paragraph in topics[name].split("\n\n")}
            fresh = [paragraph for key, paragraph in paragraphs.items() if key not in seen]
            texts.setdefault(part, []).append("\n\n".join(fresh))
            seen |= paragraphs.keys()
    tokenizer = AutoTokenizer.from_pretrained(hf_grow.SMALL_MODEL)
    return encode_stream(tokenizer, texts["train"]), encode_stream(tokenizer, texts[judge])


def generator(seed: int, purpose: int, number: int = 0) -> torch.Generator:
    return torch.Generator().manual_seed(1_000_000 * purpose + 1000 * number + seed)


class Bench:
    """The text, and everything that is done with one seed."""

    def __init__(self, options: argparse.Namespace, seed: int) -> None:
        self.options, self.seed = options, seed
        self.train_tokens, self.judged_tokens = read_text(options.judge)
        self.full = options.width // options.heads

    def build(self, query_key: int) -> tuple[Any, torch.optim.Optimizer]:
        """A fresh model whose weights, as far as it has them, depend on the seed alone; values keep their width."""
        options = self.options
        torch.manual_seed(self.seed)
        config = GPT2Config(
            vocab_size=len(AutoTokenizer.from_pretrained(hf_grow.SMALL_MODEL)),
            n_positions=options.length,
            n_embd=options.width,
            n_layer=options.layers,
            n_head=options.heads,
            activation_function="gelu_pytorch_tanh",  # GPT-2's own, in one kernel
            resid_pdrop=0.0,
            embd_pdrop=0.0,
            attn_pdrop=0.0,
            bos_token_id=0,
            eos_token_id=0,
            use_cache=False,
        )
        model = hf_grow.make_growable(GPT2LMHeadModel(config))
        for site in growable_sites(model):
            if query_key < self.full:
                hf_grow.drop_query_key(model, site.layer, range(query_key, self.full))
            # New is what this model does not have, not what stock GPT-2 does not have.
            site.attention.base_dims = site.attention.dims
        return model.train(), self.optimizer(model.parameters())

    def optimizer(self, learning: Iterable[torch.nn.Parameter]) -> torch.optim.Optimizer:
        return torch.optim.AdamW(learning, betas=(0.9, 0.98), weight_decay=self.options.weight_decay, fused=True)

    def schedule(self) -> list[float]:
        """Linear warm-up, then linear decay."""
        options = self.options
        warm = min(options.warmup, options.steps // 2)
        rates = []
        for step in range(1, options.steps + 1):
            decay = 1 - (1 - options.last_rate) * max(0, step - warm) / (options.steps - warm)
            rates.append(options.learning_rate * min(1, step / warm) * decay)
        return rates

    def batches(self, purpose: int) -> Iterator[Tensor]:
        seed = generator(self.seed, purpose).initial_seed()
        return random_batches(self.train_tokens, self.options.batch_size, self.options.length, seed)

    def growth_text(self, number: int) -> list[Batch]:
        """Sequences of training text that do not overlap."""
        blocks = in_blocks(self.train_tokens, self.options.length)
        order = torch.randperm(len(blocks), generator=generator(self.seed, GROWTH_TEXT, number))
        chosen = blocks[order[: self.options.growth_sequences]]
        return [{"input_ids": part, "labels": part} for part in chosen.split(32)]

    @torch.no_grad()
    def loss(self, model: Any, tokens: Tensor | None = None) -> float:
        """Nats per token of the text that judges, in sequences as long as those of training."""
        model.eval()
        parts = in_blocks(self.judged_tokens if tokens is None else tokens, self.options.length).split(64)
        losses = [model(part, labels=part).loss.item() * len(part) for part in parts]
        model.train()
        return sum(losses) / sum(len(part) for part in parts)

    def from_scratch(self, case: str) -> tuple[Any, torch.optim.Optimizer, dict]:
        """One run of part a: model, optimizer and what is reported."""
        began, growing = time.process_time(), 0.0
        options, rates, batches = self.options, self.schedule(), self.batches(BATCHES)
        model, optimizer = self.build(self.full if case == LARGE else options.query_key)
        start = model.num_parameters()
        events = []
        stops = [*options.grow_at, options.steps] if case in GROWN else [options.steps]
        for number, (first, last) in enumerate(zip([0, *stops], stops, strict=False)):
            train(model, optimizer, batches, rates[first:last])
            if last < options.steps:
                grown = time.process_time()
                events.append(self.insert(GROWN[case], model, optimizer, self.columns_of(number), number))
                growing += time.process_time() - grown
        row = {
            "seed": self.seed,
            "loss": self.loss(model),
            "train_loss": self.loss(model, self.train_tokens[: len(self.judged_tokens)]),
            "steps": options.steps,
            "query_key": [options.query_key if case != LARGE else self.full, query_key_dim(model)],
            "parameters": [start, model.num_parameters()],
            "growth": events,
            "seconds": time.process_time() - began,
            "growth_seconds": growing,
        }
        say(f"seed {self.seed}, {case}: {row['loss']:.4f} in {row['seconds']:.0f} s")
        return model, optimizer, row

    def columns_of(self, number: int) -> int:
        """The part that one growth adds of the columns that the large model has more."""
        events, more = len(self.options.grow_at), self.full - self.options.query_key
        return more * (number + 1) // events - more * number // events

    def insert(self, start: str, model: Any, optimizer: Any, columns: int, number: int) -> dict:
        """Add columns that start in this way, and say what is known about them; `number` tells growths apart."""
        if start in (SVD, PRESERVING):
            config = GrowthConfig(columns=columns, step_size=None if start == SVD else 0)
            _, report = hf_grow.grow(model, self.growth_text(number), config, optimizer=optimizer)
            return {"columns": columns} | described(report)
        twin, chance = copy.deepcopy(model), generator(self.seed, CHANCE, number)
        known = self.insert(NORMS_OF[start], twin, None, columns, number)
        for site, like in zip(growable_sites(model), growable_sites(twin), strict=True):
            blocks = read_blocks(like)
            query, key = (of_same_norms(blocks[role][..., -columns:], chance) for role in ("query", "key"))
            hf_grow.widen_query_key(model, site.layer, columns, query=query, key=key, optimizer=optimizer)
        return {"columns": columns, "norms_of": known}

    def follow(self, model: Any, optimizer: torch.optim.Optimizer, mode: str) -> dict[str, float]:
        """Losses at insertion and at the checkpoints of part b."""
        if mode == "new":
            hf_grow.freeze_base(hf_grow.attach_growth(model))
            optimizer = self.optimizer(hf_grow.growth_parameters(model))
        losses, batches, rate = {"0": self.loss(model)}, self.batches(LATER_BATCHES), self.schedule()[-1]
        done = 0
        for checkpoint in self.options.checkpoints:
            train(model, optimizer, batches, [rate] * (checkpoint - done))
            losses[str(checkpoint)], done = self.loss(model), checkpoint
        return losses

    def starts_of_columns(self, model: Any, optimizer: torch.optim.Optimizer) -> list[dict]:
        """Part b for one trained small model."""
        rows = []
        for start in STARTS:
            for mode in MODES:
                copied, carried = copy.deepcopy((model, optimizer))
                known = self.insert(start, copied, carried, self.options.columns, len(self.options.grow_at))
                losses = self.follow(copied, carried, mode)
                rows.append({"seed": self.seed, "start": start, "mode": mode, "losses": losses, "growth": known})
                say(f"seed {self.seed}, {start}, {mode}: " + ", ".join(f"{loss:.4f}" for loss in losses.values()))
        losses = self.follow(*copy.deepcopy((model, optimizer)), "all")
        rows.append({"seed": self.seed, "start": NOT_GROWN, "mode": "all", "losses": losses, "growth": {}})
        # Where only new columns train, a model without any stays as it is.
        constant = dict.fromkeys(losses, losses["0"])
        rows.append({"seed": self.seed, "start": NOT_GROWN, "mode": "new", "losses": constant, "growth": {}})
        return rows


def train(model: Any, optimizer: torch.optim.Optimizer, batches: Iterator[Tensor], rates: Iterable[float]) -> None:
    """One step for each learning rate."""
    for rate in rates:
        for group in optimizer.param_groups:
            group["lr"] = rate
        ids = next(batches)
        model(ids, labels=ids).loss.backward()
        torch.nn.utils.clip_grad_norm_(model.parameters(), 1.0)
        optimizer.step()
        optimizer.zero_grad()


def in_blocks(tokens: Tensor, length: int) -> Tensor:
    """(sequences, length), one after the other."""
    return tokens[: len(tokens) // length * length].view(-1, length)


def query_key_dim(model: Any) -> int:
    return growable_sites(model)[0].attention.query_key_dim


def of_same_norms(columns: Tensor, chance: torch.Generator) -> Tensor:
    """Random columns, each as long as its counterpart; shape (heads, inputs, columns)."""
    random = torch.randn(columns.shape, generator=chance)
    return random * columns.norm(dim=1, keepdim=True) / random.norm(dim=1, keepdim=True)


def described(report: hf_grow.GrowthReport) -> dict:
    """What a growth did to the text of its line search."""
    sizes = [layer["column_size"] for layer in report.layers]
    kept = {"form": report.form, "step": report.step, "loss_before": report.loss_before}
    return kept | {"loss_after": report.loss_after, "column_sizes": sizes}


def mean_and_spread(values: list[float]) -> dict:
    """The spread is the standard deviation over seeds, None for a single one."""
    spread = statistics.stdev(values) if len(values) > 1 else None
    return {"mean": statistics.fmean(values), "spread": spread}


def compared(own: list[float], other: list[float]) -> dict:
    """Differences within seeds, and in how many the own loss is lower, and higher."""
    differences = [first - second for first, second in zip(own, other, strict=True)]
    counts = {"lower": sum(value < 0 for value in differences), "higher": sum(value > 0 for value in differences)}
    return mean_and_spread(differences) | counts


def shown(found: dict, form: str = "{:.4f}") -> str:
    spread = "" if found["spread"] is None else " ± " + form.replace("+", "").format(found["spread"])
    return form.format(found["mean"]) + spread


def summarise_runs(runs: dict[str, list[dict]]) -> dict[str, dict]:
    """By run of part a: loss, difference from no growth within seeds, and share of the gap to the large model."""
    small, large = ([row["loss"] for row in runs[case]] for case in (NOT_GROWN, LARGE))
    found = {}
    for case, rows in runs.items():
        losses = [row["loss"] for row in rows]
        found[case] = {"loss": mean_and_spread(losses), "difference": compared(losses, small)}
        if compared(large, small)["lower"] == len(rows):
            triples = zip(losses, small, large, strict=True)
            found[case]["gap_closed"] = mean_and_spread(
                [(first - own) / (first - last) for own, first, last in triples]
            )
    return found


def print_runs(runs: dict[str, list[dict]], summary: dict[str, dict], options: argparse.Namespace) -> None:
    shape = f"{options.layers} layers, {options.width} wide, {options.heads} heads, length {options.length}"
    table = Table(title=f"Part a, growth during training: {shape}, batch {options.batch_size}", title_justify="left")
    for name in ("", "d_k", "parameters", "steps", f"{options.judge} loss", "minus no growth", "better", "gap closed"):
        table.add_column(name, justify="right" if name else "left")
    for case, rows in runs.items():
        widths, sizes = (rows[0][name] for name in ("query_key", "parameters"))
        found = summary[case]
        closed = shown(found["gap_closed"], "{:.0%}") if "gap_closed" in found else "-"
        own = case == NOT_GROWN
        table.add_row(
            case,
            " → ".join(str(width) for width in sorted(set(widths))),
            " → ".join(f"{size:,}" for size in sorted(set(sizes))),
            str(rows[0]["steps"]),
            shown(found["loss"]),
            "" if own else shown(found["difference"], "{:+.4f}"),
            "" if own else f"{found['difference']['lower']} of {len(rows)}",
            "" if own else closed,
        )
    console.print(table)
    console.print("\n".join(judge_runs(runs, summary)))


def judge_runs(runs: dict[str, list[dict]], summary: dict[str, dict]) -> list[str]:
    """What the table says, in words; a win is a lower loss in every seed."""
    lines = []
    if "gap_closed" not in summary[LARGE]:
        lines.append("The large model is not better in every seed: d_k is not the limit here, and no share is given.")
    grown = runs["growth"]
    for other in (case for case in runs if case != "growth"):
        found = compared([row["loss"] for row in grown], [row["loss"] for row in runs[other]])
        verdict = {len(grown): "wins", 0: "does not win"}.get(found["lower"], "does not win in every seed")
        lines.append(f"Growth {verdict} against {other}: {shown(found, '{:+.4f}')} nats per token.")
    seconds = {case: statistics.fmean(row["seconds"] for row in rows) for case, rows in runs.items()}
    measuring = statistics.fmean(row["growth_seconds"] for row in grown)
    events = [event for row in grown for event in row["growth"]]
    preserving = sum(event["form"] == "preserving" for event in events)
    lines.append(
        f"Processor seconds of a run: {seconds[NOT_GROWN]:.0f} without growth, {seconds['growth']:.0f} with growth "
        f"({measuring:.0f} of them to measure and insert), {seconds[LARGE]:.0f} large from the start."
    )
    lines.append(f"The line search took no step in {preserving} of {len(events)} growths.")
    return lines


def losses_of(rows: list[dict], mode: str, start: str, checkpoint: str) -> list[float]:
    """One for each seed, in their order."""
    return [row["losses"][checkpoint] for row in rows if (row["mode"], row["start"]) == (mode, start)]


def summarise_starts(rows: list[dict]) -> dict[str, dict[str, dict[str, dict]]]:
    """By mode, start and checkpoint: the loss, and the difference from the SVD start within seeds."""
    found: dict = {}
    for mode in MODES:
        for start in (*STARTS, NOT_GROWN):
            for checkpoint in rows[0]["losses"]:
                losses, svd = (losses_of(rows, mode, name, checkpoint) for name in (start, SVD))
                cell = {"loss": mean_and_spread(losses)}
                cell["minus_svd"] = compared(losses, svd)
                found.setdefault(mode, {}).setdefault(start, {})[checkpoint] = cell
    return found


def print_starts(rows: list[dict], summary: dict, options: argparse.Namespace) -> None:
    growth = f"d_k {options.query_key} → {options.query_key + options.columns}"
    for mode, what in MODES.items():
        for name, title in (("loss", f"{options.judge} loss"), ("minus_svd", "loss minus that of the SVD start")):
            table = Table(title=f"Part b, start of new columns: {growth}, {what}, {title}", title_justify="left")
            for column in ("", "at insertion", *(f"after {steps}" for steps in options.checkpoints)):
                table.add_column(column, justify="right" if column else "left")
            for start, cells in summary[mode].items():
                if name == "loss" or start != SVD:
                    form = "{:.4f}" if name == "loss" else "{:+.4f}"
                    table.add_row(start, *(shown(cell[name], form) for cell in cells.values()))
            console.print(table)
    console.print("\n".join(judge_starts(rows, summary)))


def judge_starts(rows: list[dict], summary: dict) -> list[str]:
    """For each way of training, where the SVD start wins, and where not."""
    lines, seeds = [], len(losses_of(rows, "all", SVD, "0"))
    for mode, what in MODES.items():
        for start in STARTS[1:]:
            higher = {steps: cell["minus_svd"]["higher"] for steps, cell in summary[mode][start].items()}
            verdicts = {seeds: "wins", 0: "does not win"}
            parts = [f"{steps}: {verdicts.get(count, f'{count} of {seeds} seeds')}" for steps, count in higher.items()]
            lines.append(f"SVD with line search against {start}, {what}: {', '.join(parts)}.")
    known = [row["growth"] for row in rows if row["mode"] == "all" and row["start"] == SVD]
    searched = ", ".join(f"{one['loss_before']:.4f} → {one['loss_after']:.4f} ({one['form']})" for one in known)
    return [*lines, f"The line search on training text, by seed: {searched}."]


def draw_starts(rows: list[dict], options: argparse.Namespace) -> None:
    """Difference from no growth after as many steps, mean and spread over seeds; a panel for each way of training."""
    figure = Figure(figsize=(10, 4.2), layout="constrained")
    FigureCanvasAgg(figure)
    steps = [0, *options.checkpoints]
    for axes, (mode, what) in zip(figure.subplots(1, 2), MODES.items(), strict=True):
        axes.axhline(0, color="#777777", linestyle="--", linewidth=1.2)
        for number, start in enumerate(STARTS):
            pairs = [[losses_of(rows, mode, name, str(step)) for name in (start, NOT_GROWN)] for step in steps]
            changes = [compared(*pair) for pair in pairs]
            # Side by side, so that no bar hides another.
            places = [place + 0.06 * (number - 1.5) for place in range(len(steps))]
            means, spreads = ([change[name] or 0.0 for change in changes] for name in ("mean", "spread"))
            style = {"color": COLOURS[start], "marker": "o", "markersize": 4, "capsize": 2, "linewidth": 1.4}
            axes.errorbar(places, means, spreads, label=start, **style)
        axes.set_xticks(range(len(steps)), [str(step) for step in steps])
        axes.set_title(what, loc="left", fontsize=11)
        axes.set_xlabel("steps after insertion (not to scale)")
        axes.set_ylabel(f"{options.judge} loss minus no growth, nats")
        axes.spines[["top", "right"]].set_visible(False)
        axes.grid(axis="y", linewidth=0.4)
    figure.axes[0].legend(frameon=False, fontsize=9)
    figure.savefig(options.figure, dpi=110)


def measure(options: argparse.Namespace) -> dict[str, Any]:
    """All runs, ready for JSON."""
    began, worked = time.perf_counter(), time.process_time()
    runs: dict[str, list[dict]] = {}
    starts: list[dict] = []
    for seed in range(options.seeds):
        bench = Bench(options, seed)
        model, optimizer, row = bench.from_scratch(NOT_GROWN)
        runs.setdefault(NOT_GROWN, []).append(row)
        for case in (*GROWN, LARGE) if "a" in options.parts else ():
            runs.setdefault(case, []).append(bench.from_scratch(case)[2])
        if "b" in options.parts:
            starts += bench.starts_of_columns(model, optimizer)
    results: dict[str, Any] = {
        "options": {name: value for name, value in vars(options).items() if name not in FILES},
        "versions": {"python": platform.python_version(), "torch": torch.__version__}
        | {"transformers": transformers.__version__, "hf_grow": hf_grow.__version__},
        "seconds": {"wall": time.perf_counter() - began, "processor": time.process_time() - worked},
    }
    if "a" in options.parts:
        results["a"] = {"summary": summarise_runs(runs), "runs": runs}
    if "b" in options.parts:
        results["b"] = {"summary": summarise_starts(starts), "runs": starts}
    return results


def main() -> None:
    """Run or read, print, and write what was asked for."""
    options = build_parser().parse_args()
    torch.set_num_threads(1)
    if options.read:
        results = json.loads(options.read.read_text(encoding="utf-8"))
        vars(options).update(results["options"])
    else:
        results = measure(options)
    if options.json:
        options.json.write_text(json.dumps(results, indent=1), encoding="utf-8")
    if "a" in results:
        print_runs(results["a"]["runs"], results["a"]["summary"], options)
    if "b" in results:
        print_starts(results["b"]["runs"], results["b"]["summary"], options)
        if options.figure:
            draw_starts(results["b"]["runs"], options)
    console.print(f"{results['seconds']['wall']:.0f} s, of the processor {results['seconds']['processor']:.0f} s.")


if __name__ == "__main__":
    main()
