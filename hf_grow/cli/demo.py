"""`hf-grow demo`: the main job on the model that comes with the package."""

import subprocess
import sys
from pathlib import Path
from pydoc_data.topics import topics
from typing import Annotated, Any

import torch
import typer
from safetensors.torch import load_file, save_file
from transformers import AutoModelForCausalLM, AutoTokenizer

from hf_grow.assets import SMALL_MODEL
from hf_grow.checkpoint import check_out_folder, save_grown
from hf_grow.cli.output import console, print_summary
from hf_grow.errors import HfGrowError
from hf_grow.patch import make_growable
from hf_grow.structure import add_heads, widen_query_key, widen_value

PROMPT = "The statement"

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
    overwrite: Annotated[bool, typer.Option("--overwrite", help="Replace what is in --out.")] = False,
) -> None:
    """Patch the small model, grow it without changing it, save, reload in a fresh process, generate."""
    out = check_out_folder(out, overwrite)
    console.rule("1. patch")
    tokenizer = AutoTokenizer.from_pretrained(SMALL_MODEL)
    model = AutoModelForCausalLM.from_pretrained(SMALL_MODEL).eval()
    # A help topic that the small model was not trained on.
    input_ids = tokenizer(topics["assert"], return_tensors="pt")["input_ids"][:, :200]
    stock = logits(model, input_ids)
    make_growable(model)
    console.print(f"growable and stock logits are equal: {torch.equal(stock, logits(model, input_ids))}")

    console.rule("2. grow in the form that changes no output")
    widen_query_key(model, layer=0, columns=8)
    widen_value(model, layer=1, columns=8)
    add_heads(model, layer=2, heads=1)
    grown = logits(model, input_ids)
    change = float((grown - stock).abs().max() / stock.abs().max())
    print_summary(model.growth_summary(), "grown model")
    console.print(f"largest change of a logit: {change:.1e} of the largest logit")

    console.rule("3. save, and reload where hf-grow is not installed")
    save_grown(model, out, tokenizer=tokenizer, overwrite=overwrite)
    console.print(f"saved in {out}", soft_wrap=True, markup=False)
    text, reloaded = reload_elsewhere(out, input_ids)
    console.print(f"reloaded logits are equal, bit for bit: {torch.equal(grown, reloaded)}")
    console.rule("4. generate")
    console.print(text, highlight=False, markup=False)
    if change > 1e-5 or not torch.equal(grown, reloaded):
        raise HfGrowError("The grown or the reloaded model does not compute what the stock model does.")


@torch.no_grad()
def logits(model: Any, input_ids: torch.Tensor) -> torch.Tensor:
    """The logits of a batch of tokens."""
    return model(input_ids).logits


def reload_elsewhere(folder: Path, input_ids: torch.Tensor) -> tuple[str, torch.Tensor]:
    """Generated text and logits of the saved model, from a process in which `import hf_grow` fails."""
    exchange = folder.with_name(f".{folder.name}.exchange")
    logits_file = Path(f"{exchange}.logits")
    try:
        save_file({"input_ids": input_ids}, exchange)
        command = [sys.executable, "-c", FRESH_PROCESS, str(folder), str(exchange), PROMPT]
        done = subprocess.run(command, capture_output=True, text=True, timeout=300, stdin=subprocess.DEVNULL)
        if done.returncode:
            raise HfGrowError(f"The fresh process failed: {done.stderr.strip().splitlines()[-1]}")
        return done.stdout, load_file(logits_file)["logits"]
    finally:
        exchange.unlink(missing_ok=True)
        logits_file.unlink(missing_ok=True)
