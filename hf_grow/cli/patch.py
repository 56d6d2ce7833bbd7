"""`hf-grow patch`: make a model growable, check that it computes the same, put growth onto it if asked to, save it."""

from pathlib import Path
from typing import Annotated, Any

import torch
import typer
from peft import PeftModel
from transformers import PreTrainedModel

from hf_grow.adapting.saved import adapted_parts, load_adapted
from hf_grow.cli.loading import commit_of, load_model, load_stock, load_tokenizer
from hf_grow.cli.options import AsJson, Overwrite, Revision
from hf_grow.cli.output import print_json, print_summary, say
from hf_grow.errors import HfGrowError
from hf_grow.saving.checkpoint import check_out_folder, save_grown
from hf_grow.saving.growth_file import GROWTH_FOLDER, read_growth
from hf_grow.saving.growth_on_base import load_growth
from hf_grow.surgery.patch import make_growable


def patch(
    model: Annotated[str, typer.Argument(help="A Hub id or a local folder.")],
    out: Annotated[Path, typer.Option(help="Where to save the growable model.")],
    growth: Annotated[
        str | None, typer.Option(help="Growth of this model (and LoRA) to put onto it: a folder, or a Hub id.")
    ] = None,
    overwrite: Overwrite = False,
    revision: Revision = None,
    as_json: AsJson = False,
) -> None:
    """Make a pretrained model growable, checked against the stock model, or put --growth onto it, and save it."""
    check_out_folder(out, overwrite)
    if growth is not None:
        grown = with_growth(load_model(model, revision, "cpu"), growth)
        save_grown(grown, out, tokenizer=load_tokenizer(model, revision), overwrite=overwrite)
        show(grown.growth_summary(), as_json, f"{model}, grown", {"out": str(out)}, f"{growth} is in it")
        return
    stock = load_stock(model, revision)
    tokenizer = load_tokenizer(model, revision)
    example = example_inputs(stock)
    before = outputs(model, stock, example)
    growable = make_growable(stock)
    growable.growth_history["base_revision"] = commit_of(model, revision)
    difference = largest_difference(before, outputs(model, growable, example))
    if difference > 0:
        raise HfGrowError(f"The growable model's outputs differ from the stock model's by {difference:.3g}; not saved.")
    save_grown(growable, out, tokenizer=tokenizer, overwrite=overwrite)
    facts = {"out": str(out), "largest_output_difference": difference}
    equal = "outputs equal to the stock model's, bit for bit"
    show(growable.growth_summary(), as_json, f"{model} is growable", facts, equal)


def with_growth(model: PreTrainedModel, growth: str) -> Any:
    """The model with growth of its own, and with LoRA merged where there is some beside it."""
    parts = adapted_parts(growth)
    if not parts or GROWTH_FOLDER in parts:
        dtype = read_growth(Path(growth, GROWTH_FOLDER) if parts else growth).content["base_dtype"]
        # Growth fits the weights as they were when it was made; training casts them to float32 first.
        model = model.to(getattr(torch, dtype, model.dtype))
    if not parts:
        return load_growth(model, growth)
    adapted = load_adapted(model, growth)
    return adapted.merge_and_unload() if isinstance(adapted, PeftModel) else adapted


def show(summary: dict[str, Any], as_json: bool, title: str, facts: dict[str, Any], sentence: str) -> None:
    """What was saved."""
    if as_json:
        print_json({**summary, **facts})
        return
    print_summary(summary, title)
    say(f"{sentence}; saved in {facts['out']}")


def example_inputs(model: PreTrainedModel) -> dict[str, torch.Tensor]:
    """A few random tokens in the shape the model's task head takes."""
    choices = "MultipleChoice" in type(model).__name__ or "DoubleHeads" in type(model).__name__
    length = min(16, model.config.max_position_embeddings)
    shape = (1, 2, length) if choices else (1, length)
    generator = torch.Generator().manual_seed(0)
    ids = torch.randint(model.config.vocab_size, shape, generator=generator)
    return {"input_ids": ids.to(model.device), "attention_mask": torch.ones_like(ids).to(model.device)}


@torch.no_grad()
def outputs(name: str, model: PreTrainedModel, inputs: dict[str, torch.Tensor]) -> dict[str, torch.Tensor]:
    """All tensors a model returns, checked to be numbers."""
    tensors = {key: value for key, value in model(**inputs).items() if isinstance(value, torch.Tensor)}
    if not all(bool(torch.isfinite(value).all()) for value in tensors.values()):
        raise HfGrowError(f"{name} is damaged: its outputs are not finite.")
    return tensors


def largest_difference(before: dict[str, torch.Tensor], after: dict[str, torch.Tensor]) -> float:
    """The largest absolute difference over all outputs."""
    return max((float((before[name] - after[name]).abs().max()) for name in before), default=0.0)
