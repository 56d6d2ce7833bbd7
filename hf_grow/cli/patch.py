"""`hf-grow patch`: make a model growable, check that it computes the same, put growth onto it if asked to, save it."""

from pathlib import Path
from typing import Annotated, Any

import torch
import typer

from hf_grow.checkpoint import check_out_folder, save_grown
from hf_grow.cli.loading import commit_of, load_stock, load_tokenizer
from hf_grow.cli.options import AsJson, Overwrite, Revision
from hf_grow.cli.output import print_json, print_summary, say
from hf_grow.errors import HfGrowError
from hf_grow.growth_file import load_growth
from hf_grow.patch import make_growable


def patch(
    model: Annotated[str, typer.Argument(help="A Hub id or a local folder.")],
    out: Annotated[Path, typer.Option(help="Where to save the growable model.")],
    growth: Annotated[
        str | None, typer.Option(help="Growth of this model to put onto it: a folder or a Hub id.")
    ] = None,
    overwrite: Overwrite = False,
    revision: Revision = None,
    as_json: AsJson = False,
) -> None:
    """Make a pretrained model growable, with --growth also grown, and save it, checked against the stock model."""
    check_out_folder(out, overwrite)
    stock = load_stock(model, revision)
    tokenizer = load_tokenizer(model, revision)
    example = example_inputs(stock)
    before = outputs(model, stock, example)
    growable = make_growable(stock)
    growable.growth_history["base_revision"] = commit_of(model, revision)
    difference = largest_difference(before, outputs(model, growable, example))
    if difference > 0:
        raise HfGrowError(f"The growable model's outputs differ from the stock model's by {difference:.3g}; not saved.")
    if growth is not None:
        load_growth(growable, growth)
    save_grown(growable, out, tokenizer=tokenizer, overwrite=overwrite)
    summary = growable.growth_summary()
    if as_json:
        print_json({**summary, "out": str(out), "largest_output_difference": difference})
        return
    print_summary(summary, f"{model} is growable" if growth is None else f"{model}, grown")
    equal = "outputs equal to the stock model's, bit for bit" + ("" if growth is None else f", before {growth}")
    say(f"{equal}; saved in {out}")


def example_inputs(model: Any) -> dict[str, torch.Tensor]:
    """A few random tokens in the shape the model's task head takes."""
    choices = "MultipleChoice" in type(model).__name__ or "DoubleHeads" in type(model).__name__
    length = min(16, model.config.max_position_embeddings)
    shape = (1, 2, length) if choices else (1, length)
    generator = torch.Generator().manual_seed(0)
    ids = torch.randint(model.config.vocab_size, shape, generator=generator)
    return {"input_ids": ids.to(model.device), "attention_mask": torch.ones_like(ids).to(model.device)}


@torch.no_grad()
def outputs(name: str, model: Any, inputs: dict[str, torch.Tensor]) -> dict[str, torch.Tensor]:
    """All tensors a model returns, checked to be numbers."""
    found = {key: value for key, value in model(**inputs).items() if isinstance(value, torch.Tensor)}
    if not all(bool(torch.isfinite(value).all()) for value in found.values()):
        raise HfGrowError(f"{name} is damaged: its outputs are not finite.")
    return found


def largest_difference(before: dict[str, torch.Tensor], after: dict[str, torch.Tensor]) -> float:
    """The largest absolute difference over all outputs."""
    return max((float((before[name] - after[name]).abs().max()) for name in before), default=0.0)
