"""What collecting growth statistics costs, beside training: GPT-2 at the shapes of the 124M model, batch 1.

Time: every round times one batch of each step one after the other; the table shows the median over rounds of the ratio
to the training step (forward and backward, no optimizer) within a round. "again" is the training step of a copy of the
model: how far it is from 1 is the noise of the run. There is no dropout, which would take the fast attention kernel
away from training alone. One thread by default: of several, one that waits for a core in use elsewhere stalls all.

Memory: the highest sum of live tensors over two batches in a row above what was there before, counted exactly from
every operation's results, what autograd keeps included, in a process of its own for each step. Workspaces inside a
kernel are not seen; "resident" is the growth of the whole process at the longest length, which has them, on Linux.
"order" is the power of n in the growth beside what stays constant: 1 where it is linear; exact collection is between
that and 2, as the logits of a large vocabulary are linear too.

Solving: all that collection computes outside the model, and the plan, for 12 layers and 8 columns, in training steps.

The whole (`--whole`): `collect_statistics` over some batches, with the search for steps, as a multiple of training
steps on the same batches before and after it; for query/key columns alone, and for all kinds. Memory is the peak of
live tensors beside that of a training step. With `--model real` on SmolLM2-135M instead. `--before FILE` shows the
numbers beside those of an earlier version, written by `--json`.
"""

import argparse
import copy
import json
import math
import multiprocessing
import os
import re
import statistics
import tempfile
import time
from collections.abc import Callable
from concurrent.futures import ProcessPoolExecutor
from functools import partial
from pathlib import Path
from typing import Any
from weakref import WeakSet, finalize

import torch
from bench_adapter_cost import write_base
from bench_attention import median_ratio, time_side_by_side
from rich.console import Console
from rich.table import Table
from torch.utils._python_dispatch import TorchDispatchMode
from torch.utils._pytree import tree_leaves
from tqdm import tqdm
from transformers import AutoModelForCausalLM, GPT2Config, GPT2LMHeadModel

from hf_grow import CollectConfig, GrowthConfig, collect_statistics, make_growable, plan_growth
from hf_grow.measuring import circuit_search
from hf_grow.measuring.exact import collect_sums
from hf_grow.measuring.probes import Question, ask
from hf_grow.measuring.score_search import ENERGY_PROBES
from hf_grow.running.batches import Batch
from hf_grow.running.passes import Passes
from hf_grow.surgery.patch import growable_sites
from hf_grow.surgery.place import input_sizes

COLUMNS = 8
SEARCHED = COLUMNS + CollectConfig().oversampling
# The limits hold for steps of this length, and solving is measured in training steps of it.
LENGTH = 1024
SOLVING_LAYERS = 12
# Exact collection is solved layer by layer, all alike, and slow: a few layers are timed and scaled up.
EXACT_LAYERS = 3
SKETCHES = ("first pass", "second pass", "last pass")

# What is collected as a whole; its memory does not depend on how many batches there are.
MEMORY_BATCHES = 4
WHOLE_KINDS = {"columns": ("columns",), "all kinds": ("columns", "value_columns", "heads")}

Run = Callable[[], object]


def over_limits(rows: list[dict], solving: list[dict]) -> list[str]:
    """What costs more than it may, in words."""
    limits = {"time": 1.1, "memory": 1.2, "growth": 2.2}
    sketches = [row for row in rows if row["step"] in SKETCHES and row["n"] == LENGTH]
    over = [
        f"{what} of {row['step']} at n = {row['n']} is {row[what]:.2f}, above {limit}"
        for row in sketches
        for what, limit in limits.items()
        # Growth has its limit for twice the length only.
        if row.get(what, 0) > limit and (what != "growth" or row["from"] == LENGTH // 2)
    ]
    slow = [row for row in solving if row["collection"] == "sketch" and row["training_steps"] >= 10]
    return over + [f"solving takes {row['training_steps']:.1f} training steps, not below 10" for row in slow]


def build_model(arguments: argparse.Namespace, layers: int) -> Any:
    """A growable model of the wanted shapes, ready for training."""
    torch.manual_seed(0)
    config = GPT2Config(
        n_layer=layers,
        n_embd=arguments.width,
        n_head=arguments.heads,
        vocab_size=arguments.vocabulary,
        n_positions=max(LENGTH, *arguments.lengths),
        resid_pdrop=0.0,
        embd_pdrop=0.0,
        attn_pdrop=0.0,
        bos_token_id=None,
        eos_token_id=None,
    )
    return make_growable(GPT2LMHeadModel(config)).train()


def make_batch(arguments: argparse.Namespace, length: int, seed: int = 0, vocabulary: int | None = None) -> Batch:
    """One sequence of random tokens."""
    generator = torch.Generator().manual_seed(seed)
    ids = torch.randint(vocabulary or arguments.vocabulary, (1, length), generator=generator)
    return {"input_ids": ids, "labels": ids}


def training(model: Any, batches: list[Batch]) -> Run:
    """Forward and backward with the gradients of all parameters."""

    def run() -> None:
        for batch in batches:
            model.zero_grad(set_to_none=True)
            model(**batch, use_cache=False).loss.backward()

    return run


def random_question(site: Any, columns: int, values: int, rows: int, **more: bool) -> Question:
    """Probes of these widths for an attention module, in the precision that collection uses."""
    sizes, dims = input_sizes(site), site.attention.dims
    heads, groups = dims.num_attention_heads, dims.num_key_value_heads

    def weights(*shape: int) -> torch.Tensor:
        return 0.02 * torch.randn(shape, dtype=torch.float64)

    return Question(
        key=weights(groups, sizes["key"], columns + (ENERGY_PROBES if more.pop("energies", False) else 0)),
        query=weights(heads, sizes["query"], columns) if columns else None,
        value=weights(groups + 1, sizes["value"], values),
        output=weights(heads + 1, rows, sizes["output"]) if rows else None,
        **more,
    )


def one_pass(columns: int, values: int, rows: int, **more: bool) -> Callable[[Any, list[Batch]], Run]:
    """A pass of the sketch for all kinds."""

    def probing(model: Any, batches: list[Batch]) -> Run:
        sites = growable_sites(model)
        questions = [random_question(site, columns, values, rows, **more) for site in sites]
        return lambda: ask(Passes(model), sites, batches, questions)

    return probing


def exact(model: Any, batches: list[Batch]) -> Run:
    """Scores held, and their gradient added up."""
    return lambda: collect_sums(Passes(model), growable_sites(model), batches, values=False)


STEPS: dict[str, Callable[[Any, list[Batch]], Run]] = {
    "training": training,
    "first pass": one_pass(
        SEARCHED,
        circuit_search.COLUMNS * SEARCHED,
        circuit_search.FIRST_ROWS * SEARCHED,
        grams=True,
        present=True,
        metric=True,
    ),
    "second pass": one_pass(SEARCHED, circuit_search.FIRST_ROWS * SEARCHED, SEARCHED, metric=True, energies=True),
    "last pass": one_pass(SEARCHED, circuit_search.COLUMNS * SEARCHED, 0),
    "exact": exact,
}


class LiveTensors(TorchDispatchMode):
    """Counts the bytes of all storages that operations make until they are freed; those from before count nothing."""

    def __init__(self) -> None:
        super().__init__()
        self.known: WeakSet = WeakSet()
        self.bytes = self.peak = 0

    def __torch_dispatch__(self, function: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        self.known.update(self._storages((args, kwargs)))
        results = function(*args, **(kwargs or {}))
        for storage in self._storages(results):
            if storage not in self.known:
                self.known.add(storage)
                self._add(storage.nbytes())
                finalize(storage, self._add, -storage.nbytes())
        return results

    @staticmethod
    def _storages(values: Any) -> list[torch.UntypedStorage]:
        return [value.untyped_storage() for value in tree_leaves(values) if isinstance(value, torch.Tensor)]

    def _add(self, size: int) -> None:
        self.bytes += size
        self.peak = max(self.peak, self.bytes)


def live_megabytes(run: Run) -> float:
    """The peak of live tensors above what was there before."""
    with LiveTensors() as tensors:
        run()
    return tensors.peak / 2**20


def resident_megabytes(run: Run) -> float | None:
    """The peak of the process's resident memory above what it was before; None where the system does not tell."""

    def status(name: str) -> int:
        return int(re.findall(rf"{name}:\s+(\d+) kB", Path("/proc/self/status").read_text(encoding="utf-8"))[0])

    try:
        # Forgets the highest mark so far. That of getrusage cannot be reset and starts at the parent's.
        Path("/proc/self/clear_refs").write_text("5", encoding="utf-8")
        before = status("VmRSS")
    except (OSError, IndexError):
        return None
    run()
    return (status("VmHWM") - before) / 2**10


def measure_memory_of(step: str, arguments: argparse.Namespace) -> dict:
    """In a process of its own: live megabytes by length, and resident ones at the longest."""
    torch.set_num_threads(arguments.threads)
    model = build_model(arguments, arguments.layers)
    warm_up = STEPS[step](model, [make_batch(arguments, 16)])
    warm_up()
    runs = {n: STEPS[step](model, [make_batch(arguments, n, seed) for seed in range(2)]) for n in arguments.lengths}
    # First, as what the allocator keeps of freed memory would hide some of it.
    model.zero_grad(set_to_none=True)
    found: dict[str, Any] = {"resident": resident_megabytes(runs[max(runs)]), "live": {}}
    for n, run in runs.items():
        model.zero_grad(set_to_none=True)
        found["live"][n] = live_megabytes(run)
    return found


def measure_memory(arguments: argparse.Namespace) -> dict[str, dict]:
    """What `measure_memory_of` finds for each step, in a fresh process that has run nothing else."""
    # Read by the C library when a process starts: what is freed goes back to the system at once, so that resident
    # memory is memory in use.
    os.environ["MALLOC_MMAP_THRESHOLD_"] = str(2**16)
    context = multiprocessing.get_context("forkserver")
    context.set_forkserver_preload(["hf_grow", "transformers.models.gpt2.modeling_gpt2"])
    found = {}
    for step in tqdm(STEPS, desc="memory"):
        with ProcessPoolExecutor(1, mp_context=context) as process:
            found[step] = process.submit(measure_memory_of, step, arguments).result()
    return found


def measure_steps(arguments: argparse.Namespace) -> list[dict]:
    """One row for every length and step."""
    memory = measure_memory(arguments)
    model = build_model(arguments, arguments.layers)
    control = copy.deepcopy(model)
    rows: list[dict] = []
    for n in tqdm(arguments.lengths, desc="time"):
        batches = [make_batch(arguments, n)]
        runs = {step: make(model, batches) for step, make in STEPS.items()} | {"again": training(control, batches)}
        seconds = time_side_by_side(runs, arguments.rounds)
        for step in runs:
            row = {"n": n, "step": step, "ms": 1000 * statistics.median(seconds[step])}
            row["time"] = median_ratio(seconds, step, "training")
            if step in memory:
                row |= memory_entries(memory, step, n, arguments.lengths)
            rows.append(row)
    return rows


def memory_entries(memory: dict[str, dict], step: str, n: int, lengths: list[int]) -> dict:
    """Megabytes, the ratio to training, and the growth from the length before."""
    megabytes = {name: found["live"][n] for name, found in memory.items()}
    entries = {"megabytes": megabytes[step], "memory": megabytes[step] / megabytes["training"]}
    if (place := lengths.index(n)) > 0:
        before = lengths[place - 1]
        entries |= {"from": before, "growth": megabytes[step] / memory[step]["live"][before]}
    if n == max(lengths):
        entries["resident_megabytes"] = memory[step]["resident"]
        # The peak of training moves, from the gradients of the embeddings at small n to the logits: it has no order.
        live = [memory[step]["live"][length] for length in lengths]
        entries["order"] = None if step == "training" else order(live, lengths)
    return entries


def order(megabytes: list[float], lengths: list[int]) -> float | None:
    """The power of n by which memory grows beside a constant, from three lengths that double."""
    if len(lengths) < 3 or not lengths[-1] == 2 * lengths[-2] == 4 * lengths[-3]:
        return None
    first, second = megabytes[-2] - megabytes[-3], megabytes[-1] - megabytes[-2]
    return math.log2(second / first) if first > 0 and second > 0 else None


def seconds_of(run: Run) -> float:
    """How long one run takes."""
    start = time.perf_counter()
    run()
    return time.perf_counter() - start


def solving_seconds(model: Any, batches: list[Batch], collection: str) -> float:
    """What a collection takes outside the model, and its plan."""
    collected = collect_statistics(model, batches, CollectConfig(collection=collection, columns=COLUMNS))
    return collected.seconds["solving"] + seconds_of(lambda: plan_growth(collected, GrowthConfig(columns=COLUMNS)))


def measure_solving(arguments: argparse.Namespace) -> list[dict]:
    """One row for each form of collection; training steps before, between and after."""
    model = build_model(arguments, SOLVING_LAYERS)
    step = training(model, [make_batch(arguments, LENGTH)])
    # Three choose and one judges; the three have more tokens than there are inputs, so no gram lacks rank.
    batches = [make_batch(arguments, 3 * arguments.width // 8, seed) for seed in range(4)]
    step()
    steps, solving = [seconds_of(step)], {}
    for collection, layers in tqdm({"sketch": SOLVING_LAYERS, "exact": EXACT_LAYERS}.items(), desc="solving"):
        collected = model if layers == SOLVING_LAYERS else build_model(arguments, layers)
        solving[collection] = solving_seconds(collected, batches, collection) * SOLVING_LAYERS / layers
        steps.append(seconds_of(step))
    training_step = statistics.median(steps)
    return [
        {"collection": name, "seconds": found, "training_step": training_step, "training_steps": found / training_step}
        for name, found in solving.items()
    ]


def smollm2() -> Any:
    """SmolLM2-135M, growable and ready for training."""
    with tempfile.TemporaryDirectory() as folder:
        write_base("real", Path(folder))
        return make_growable(AutoModelForCausalLM.from_pretrained(folder, dtype=torch.float32)).train()


def measure_whole(arguments: argparse.Namespace) -> list[dict]:
    """One row for every length and what is collected."""
    model = smollm2() if arguments.model == "real" else build_model(arguments, arguments.layers)
    vocabulary = model.config.vocab_size
    rows = []
    for n in arguments.lengths:
        batches = [make_batch(arguments, n, seed, vocabulary) for seed in range(arguments.batches)]
        train = training(model, batches)
        training(model, batches[:1])()
        peak = live_megabytes(training(model, batches[:1]))
        for name, kinds in tqdm(WHOLE_KINDS.items(), desc=f"whole, n = {n}"):
            model.zero_grad(set_to_none=True)
            collect = partial(collect_statistics, model, batches, CollectConfig(kinds=kinds, columns=COLUMNS))
            before, seconds, after = seconds_of(train), seconds_of(collect), seconds_of(train)
            model.zero_grad(set_to_none=True)
            few = partial(
                collect_statistics, model, batches[:MEMORY_BATCHES], CollectConfig(kinds=kinds, columns=COLUMNS)
            )
            memory = live_megabytes(few) / peak
            steps = 2 * seconds / (before + after)
            rows.append({"model": arguments.model, "n": n, "kinds": name, "steps": steps, "memory": memory})
    return rows


def print_whole(rows: list[dict], before: list[dict], arguments: argparse.Namespace) -> None:
    """The table of whole collections for people."""
    table = Table(
        title=f"Whole collection of {arguments.batches} batches of 1 × n, in training steps per batch",
        title_justify="left",
    )
    for name in ("model", "n", "kinds", "steps", "before", "peak memory / training", "before"):
        table.add_column(name, justify="right")
    for row in rows:
        place = [row[name] for name in ("model", "n", "kinds")]
        old = next((one for one in before if [one[name] for name in ("model", "n", "kinds")] == place), {})
        cells = [f"{one[what]:.2f}" if what in one else "" for what in ("steps", "memory") for one in (row, old)]
        table.add_row(place[0], str(place[1]), place[2], *cells)
    Console(width=120).print(table)


def print_steps(rows: list[dict], arguments: argparse.Namespace) -> None:
    """The tables of time and memory for people."""
    shapes = f"{arguments.layers} layers, {arguments.width} wide, {arguments.heads} heads, batch 1"
    by_length = {n: {row["step"]: row for row in rows if row["n"] == n} for n in arguments.lengths}
    others = [step for step in STEPS if step != "training"]

    times = Table(title=f"Time / training: {shapes}, {arguments.rounds} rounds", title_justify="left")
    for name in ("n", "training ms", "again", *others):
        times.add_column(name, justify="right")
    for n, steps in by_length.items():
        ratios = (f"{steps[name]['time']:.3f}" for name in ("again", *others))
        times.add_row(str(n), f"{steps['training']['ms']:.0f}", *ratios)

    memory = Table(title=f"Peak memory in MB, and / training: {shapes}", title_justify="left")
    for name in ("n", *STEPS):
        memory.add_column(name, justify="right")
    for n, steps in by_length.items():
        memory.add_row(str(n), *(f"{steps[name]['megabytes']:.0f}  {steps[name]['memory']:.2f}" for name in STEPS))
    longest = by_length[max(by_length)]
    if (base := longest["training"]["resident_megabytes"]) is not None:
        resident = [longest[name]["resident_megabytes"] for name in STEPS]
        cells = (f"{found:.0f}  {found / base:.2f}" for found in resident)
        memory.add_row(f"{max(by_length)} resident", *cells, end_section=True)
    for n, steps in by_length.items():
        if "growth" in steps["training"]:
            before = steps["training"]["from"]
            memory.add_row(f"{before} → {n}", *(f"× {steps[name]['growth']:.2f}" for name in STEPS))
    if any(longest[name]["order"] is not None for name in STEPS):
        orders = (longest[name]["order"] for name in STEPS)
        memory.add_row("order", *("-" if found is None else f"n^{found:.2f}" for found in orders))
    for table in (times, memory):
        Console(width=120).print(table)


def print_solving(solving: list[dict], arguments: argparse.Namespace) -> None:
    """The table of solving for people."""
    shapes = f"{SOLVING_LAYERS} layers, {arguments.width} wide, {arguments.heads} heads, {COLUMNS} columns"
    table = Table(title=f"Solving: {shapes}", title_justify="left")
    for name in ("", "seconds", "training steps"):
        table.add_column(name, justify="right")
    table.add_row(f"a training step of 1 × {LENGTH} tokens", f"{solving[0]['training_step']:.1f}", "1.00")
    for row in solving:
        scaled = f" ({EXACT_LAYERS} layers, scaled up)" if row["collection"] == "exact" else ""
        table.add_row(f"solving, {row['collection']}{scaled}", f"{row['seconds']:.1f}", f"{row['training_steps']:.2f}")
    Console(width=120).print(table)


def main() -> None:
    """Parse, measure, print."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--layers", type=int, default=2, help="of the model whose steps are measured")
    parser.add_argument("--lengths", type=int, nargs="+", default=[256, 512, 1024])
    parser.add_argument("--rounds", type=int, default=5)
    parser.add_argument("--width", type=int, default=768)
    parser.add_argument("--heads", type=int, default=12)
    parser.add_argument("--vocabulary", type=int, default=50257)
    parser.add_argument("--threads", type=int, default=1, help="more need cores that nobody else uses")
    parser.add_argument("--check", action="store_true", help="fail when something is over its limit")
    parser.add_argument("--json", help="write the rows to this file too")
    parser.add_argument("--whole", action="store_true", help="whole collections instead of single steps")
    parser.add_argument(
        "--model", choices=("shapes", "real"), default="shapes", help="with --whole; real: SmolLM2-135M"
    )
    parser.add_argument("--batches", type=int, default=8, help="with --whole")
    parser.add_argument("--before", type=Path, help="with --whole: rows of an earlier version")
    arguments = parser.parse_args()
    arguments.lengths.sort()
    torch.set_num_threads(arguments.threads)
    if arguments.whole:
        whole = measure_whole(arguments)
        before = json.loads(arguments.before.read_text(encoding="utf-8")) if arguments.before else []
        print_whole(whole, before, arguments)
        if arguments.json:
            Path(arguments.json).write_text(json.dumps(whole, indent=1) + "\n", encoding="utf-8")
        return
    rows = measure_steps(arguments)
    print_steps(rows, arguments)
    solving = measure_solving(arguments)
    print_solving(solving, arguments)
    if arguments.json:
        with open(arguments.json, "w", encoding="utf-8") as file:
            json.dump({"steps": rows, "solving": solving}, file, indent=2)
    over = over_limits(rows, solving)
    print("\n".join(f"Over the limit: {sentence}." for sentence in over) or "All within the limits.")
    if arguments.check and over:
        raise SystemExit(1)


if __name__ == "__main__":
    main()
