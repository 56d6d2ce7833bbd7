"""`hf-grow demo`: the whole story on the model that comes with the package."""

import copy
import importlib
import inspect
import subprocess
import sys
from collections.abc import Iterator
from pathlib import Path
from typing import Annotated, Any

import torch
import typer
from safetensors.torch import load_file, save_file
from torch import Tensor
from transformers import AutoModelForCausalLM, AutoTokenizer, PreTrainedModel, PreTrainedTokenizerBase

from hf_grow.assets import SMALL_MODEL
from hf_grow.cli.analyze import print_analysis
from hf_grow.cli.grow import report_files, summary_of
from hf_grow.cli.options import Overwrite
from hf_grow.cli.output import console, print_facts, print_table, say
from hf_grow.errors import HfGrowError
from hf_grow.growth.config import GrowthConfig
from hf_grow.growth.pipeline import prepare_growth
from hf_grow.reporting.html_report import HTML_FILE, TextTable, plan_table, report_facts
from hf_grow.saving.checkpoint import check_out_folder, save_grown
from hf_grow.surgery.patch import make_growable

PROMPT = "def "
# The small model learned from Python's help topics; this is the source of Python's library, which it never saw.
TRAINING_MODULES = ("argparse", "dataclasses", "textwrap", "shutil", "tempfile")
OTHER_MODULES = ("configparser", "string")
LENGTH, BATCH, OTHER_SEQUENCES = 128, 8, 64
LEARNING_RATE = 3e-4

# Runs where hf-grow cannot be imported: the checkpoint's own code must be enough.
FRESH_PROCESS = """
import sys
sys.modules["hf_grow"] = None
import torch
from safetensors.torch import load_file, save_file
from transformers import AutoModelForCausalLM, AutoTokenizer
folder, exchange, prompt = sys.argv[1:]
model = AutoModelForCausalLM.from_pretrained(folder, trust_remote_code=True).eval()
tokenizer = AutoTokenizer.from_pretrained(folder, trust_remote_code=True)
with torch.no_grad():
    logits = model(load_file(exchange)["input_ids"]).logits
save_file({"logits": logits}, exchange + ".logits")
ids = tokenizer(prompt, return_tensors="pt")
print(tokenizer.decode(model.generate(**ids, max_new_tokens=60, do_sample=False, repetition_penalty=1.3)[0]))
"""


def demo(
    out: Annotated[Path, typer.Option(help="Where to save the grown model.")] = Path("demo"),
    overwrite: Overwrite = False,
    sequences: Annotated[int, typer.Option(help="How many sequences to measure on.", min=4)] = 64,
    steps: Annotated[int, typer.Option(help="How many steps to finetune.", min=1)] = 60,
) -> None:
    """Patch the small model, measure, grow, finetune, save, reload in a fresh process, generate."""
    out = check_out_folder(out, overwrite)
    console.rule("1. patch: the same outputs, bit for bit")
    tokenizer = AutoTokenizer.from_pretrained(SMALL_MODEL)
    training, other = (
        source_blocks(tokenizer, TRAINING_MODULES),
        source_blocks(tokenizer, OTHER_MODULES)[:OTHER_SEQUENCES],
    )
    model = patched_model(other[:1])
    ungrown, losses = copy.deepcopy(model), {"before growth": loss_on(model, other)}

    console.rule("2. measure: where does attention lack capacity for Python source code?")
    config = GrowthConfig(budget="3%")
    chosen = training[torch.arange(sequences) * len(training) // sequences]
    batches = [{"input_ids": part, "labels": part} for part in chosen.split(BATCH)]
    prepared = prepare_growth(model, batches, config, progress=True)
    assert prepared.plan is not None
    print_analysis(prepared.statistics.summary(), "expected decrease of the loss, in sample → held out")

    console.rule("3. grow: 3% more parameters where they promise most")
    print_table(plan_table(prepared.plan.summary()), "the plan, decreases in sample → held out")
    summary = summary_of(prepared.insert(), prepared)
    print_facts(report_facts(summary))
    losses["after growth"] = loss_on(model, other)

    console.rule(f"4. finetune all weights for {steps} steps, and the ungrown model likewise")
    finetune_both(ungrown, model, training, steps)
    losses["after finetuning"], without = loss_on(model, other), loss_on(ungrown, other)
    print_comparison(losses, without)

    console.rule("5. save, and reload where hf-grow is not installed")
    files = report_files(prepared, summary, "How the small model grew for Python source code")
    save_grown(model, out, tokenizer=tokenizer, overwrite=overwrite, extras=files)
    text, reloaded = reload_elsewhere(out, other[:1])
    check_equal("reloaded logits are equal, bit for bit", logits(model, other[:1]), reloaded)
    console.rule("6. generate")
    say(text)
    say(f"The model, {HTML_FILE} and its figures are in {out}")


def patched_model(input_ids: Tensor) -> Any:
    """The small model, growable, checked to compute what it did."""
    model = AutoModelForCausalLM.from_pretrained(SMALL_MODEL).eval()
    stock = logits(model, input_ids)
    make_growable(model)
    check_equal("growable and stock logits are equal", stock, logits(model, input_ids))
    return model


def check_equal(what: str, first: Tensor, second: Tensor) -> None:
    """Say whether the logits of two models are equal; if not, that is the end."""
    equal = torch.equal(first, second)
    say(f"{what}: {equal}")
    if not equal:
        raise HfGrowError("The model does not compute what it did before.")


def source_blocks(tokenizer: PreTrainedTokenizerBase, modules: tuple[str, ...]) -> Tensor:
    """The source of some modules of Python's library in blocks of tokens (blocks, tokens)."""
    try:
        text = "\n\n".join(inspect.getsource(importlib.import_module(name)) for name in modules)
    except OSError as error:
        raise HfGrowError(f"This Python comes without the source of its library: {error}") from error
    ids = tokenizer(text, verbose=False)["input_ids"]
    return torch.tensor(ids[: len(ids) // LENGTH * LENGTH]).view(-1, LENGTH)


@torch.no_grad()
def logits(model: PreTrainedModel, input_ids: Tensor) -> Tensor:
    """The logits of a batch of tokens."""
    return model(input_ids).logits


@torch.no_grad()
def loss_on(model: PreTrainedModel, blocks: Tensor) -> float:
    """The mean loss over blocks."""
    return sum(float(model(part, labels=part).loss) * len(part) for part in blocks.split(BATCH)) / len(blocks)


def train(model: PreTrainedModel, blocks: Tensor, steps: int) -> Iterator[tuple[int, float]]:
    """A plain training loop; every ten steps, their number and the mean loss since the last time."""
    optimizer = torch.optim.AdamW(model.parameters(), lr=LEARNING_RATE)
    order = torch.randperm(len(blocks), generator=torch.Generator().manual_seed(0))
    recent: list[float] = []
    for step in range(1, steps + 1):
        batch = blocks[order.roll(-BATCH * step)[:BATCH]]
        # The model stays in evaluation mode: without dropout both models see the same.
        loss = model(batch, labels=batch).loss
        loss.backward()
        torch.nn.utils.clip_grad_norm_(model.parameters(), 1.0)
        optimizer.step()
        optimizer.zero_grad()
        recent.append(float(loss.detach()))
        if step % 10 == 0 or step == steps:
            yield step, sum(recent) / len(recent)
            recent.clear()


def finetune_both(ungrown: Any, grown: Any, blocks: Tensor, steps: int) -> None:
    """Train both on the same batches, side by side, and print their training losses as they come."""
    say("step   training loss, ungrown   grown")
    runs = train(ungrown, blocks, steps), train(grown, blocks, steps)
    for (step, plain), (_, more) in zip(*runs, strict=True):
        say(f"{step:>4}   {plain:>22.4f}   {more:.4f}")


def print_comparison(losses: dict[str, float], without: float) -> None:
    """The loss on text that nothing was chosen or trained on, with and without growth."""
    before, after, finetuned = losses.values()
    rows = [[name, f"{value:.4f}"] for name, value in losses.items()]
    rows.append(["the ungrown model after the same finetuning", f"{without:.4f}"])
    print_table(TextTable(["on other source code", "loss (nats)"], rows), "")
    difference = without - finetuned
    says = "lower" if difference > 0 else "higher"
    say(
        f"Growth alone took {before - after:.3f} nats off the loss. After finetuning the grown model's is "
        f"{abs(difference):.3f} nats {says} than the ungrown one's: one short run of a small model, not a benchmark."
    )


def reload_elsewhere(folder: Path, input_ids: Tensor) -> tuple[str, Tensor]:
    """Generated text and logits of the saved model, from a process in which `import hf_grow` fails."""
    exchange = folder.with_name(f".{folder.name}.exchange")
    logits_file = Path(f"{exchange}.logits")
    try:
        save_file({"input_ids": input_ids.contiguous()}, exchange)
        command = [sys.executable, "-c", FRESH_PROCESS, str(folder), str(exchange), PROMPT]
        done = subprocess.run(command, capture_output=True, text=True, timeout=300, stdin=subprocess.DEVNULL)
        if done.returncode:
            raise HfGrowError(f"The fresh process failed: {done.stderr.strip().splitlines()[-1]}")
        return done.stdout, load_file(logits_file)["logits"]
    finally:
        exchange.unlink(missing_ok=True)
        logits_file.unlink(missing_ok=True)
