"""Does a learnable softmax scale help where query/key columns grow? With a frozen base, and with all weights.

The small model grows four query/key columns per head on the source code of Python's library and trains on it; the scale
stays as it is, or learns from its present value on, one number for each layer or for each head. All see the same
batches; the loss is that on other modules, mean and spread over seeds.

    python scripts/bench_scale.py
"""

import argparse
import copy
import json
import statistics
from pathlib import Path

import torch
from bench_adapters import Task, growing_batches, loss_on, rows, small_task
from rich.console import Console
from rich.table import Table

import hf_grow
from hf_grow.growth.config import SCALINGS

STEPS = (0, 10, 50, 100, 200)
# Few weights want larger steps than all.
RATES = {"frozen base": 1e-2, "all weights": 3e-4}
COLUMNS = 4
console = Console(width=120)


def run(task: Task, base: str, scaling: str, seed: int, options: argparse.Namespace) -> dict[int, float]:
    """The loss on the reported text after some numbers of steps."""
    frozen = base == "frozen base"
    config = hf_grow.GrowthConfig(columns=COLUMNS, scaling=scaling, attach=frozen)
    model, _ = hf_grow.grow(copy.deepcopy(task.model), growing_batches(task, seed, options.sequences), config)
    if frozen:
        hf_grow.freeze_base(model)
    learning = [parameter for parameter in model.parameters() if parameter.requires_grad]
    optimizer = torch.optim.AdamW(learning, lr=RATES[base], weight_decay=0.0)
    generator = torch.Generator().manual_seed(seed)
    losses = {}
    for step in range(max(options.steps) + 1):
        if step in options.steps:
            losses[step] = loss_on(model, task.reported)
        places = torch.randint(len(task.training["labels"]), (options.batch,), generator=generator)
        model(**rows(task.training, places)).loss.backward()
        torch.nn.utils.clip_grad_norm_(learning, 1.0)
        optimizer.step()
        optimizer.zero_grad()
    return losses


def main() -> None:
    """Run all, print the table."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--seeds", type=int, default=3)
    parser.add_argument("--steps", type=int, nargs="+", default=list(STEPS))
    parser.add_argument("--sequences", type=int, default=112)
    parser.add_argument("--batch", type=int, default=8)
    parser.add_argument("--length", type=int, default=64)
    parser.add_argument("--blocks", type=int, default=448)
    parser.add_argument("--json", type=Path)
    options = parser.parse_args()
    task = small_task(options)
    result: dict[str, dict[str, dict[int, list[float]]]] = {}
    for base in RATES:
        table = Table("scale", *(f"{step} steps" for step in options.steps), title=base)
        for scaling in SCALINGS:
            seeds = [run(task, base, scaling, seed, options) for seed in range(options.seeds)]
            losses = {step: [seed[step] for seed in seeds] for step in options.steps}
            result.setdefault(base, {})[scaling] = losses
            table.add_row(scaling.replace("_", " "), *(_cell(values) for values in losses.values()))
        console.print(table)
    if options.json:
        options.json.write_text(json.dumps(result, indent=1) + "\n", encoding="utf-8")


def _cell(values: list[float]) -> str:
    spread = statistics.stdev(values) if len(values) > 1 else 0.0
    return f"{statistics.mean(values):.4f} ± {spread:.4f}"


if __name__ == "__main__":
    main()
