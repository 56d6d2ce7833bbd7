"""Models and tokenizers that commands are given by name: a Hub id or a local folder."""

from pathlib import Path
from typing import Any

import torch
from transformers import (
    AutoConfig,
    AutoModelForCausalLM,
    AutoModelForMaskedLM,
    AutoModelForSequenceClassification,
    AutoTokenizer,
)
from transformers.utils import CONFIG_NAME, cached_file
from transformers.utils.hub import extract_commit_hash

from hf_grow.errors import HfGrowError
from hf_grow.fields import one_of
from hf_grow.modeling.growable_model import GrowableModel
from hf_grow.saving.checkpoint import check_loading, clear_errors, load_grown
from hf_grow.surgery.families import FAMILIES, family_of
from hf_grow.surgery.patch import make_growable

# The tasks for which data can be read, see `data.sequences`.
TASKS = {
    "causal": AutoModelForCausalLM,
    "masked": AutoModelForMaskedLM,
    "classification": AutoModelForSequenceClassification,
}


def load_model(name: str, revision: str | None = None, device: str | None = None) -> Any:
    """A growable model, from a stock checkpoint or one that is growable already."""
    with clear_errors(name):
        model_type = AutoConfig.from_pretrained(name, revision=revision).model_type
    if model_type in FAMILIES:
        model = make_growable(load_stock(name, revision))
        model.growth_history["base_revision"] = commit_of(name, revision)
    else:
        model = load_grown(name, revision=revision).eval()
    device = device or ("cuda" if torch.cuda.is_available() else "cpu")
    try:
        return model.to(device)
    except (RuntimeError, AssertionError) as error:
        raise HfGrowError(f"There is no device {device!r} here: use cpu, or leave --device away.") from error


def load_for_task(
    name: str, task: str, *, revision: str | None = None, labels: int | None = None, seed: int = 0
) -> Any:
    """A growable model in float32 with the head of a task, which is new where the checkpoint has another or none."""
    one_of("--task", task, tuple(TASKS))
    classes = {} if labels is None else {"num_labels": labels}
    # A new head is random: all processes, and a run that is resumed, must begin with the same.
    with clear_errors(name), torch.random.fork_rng(devices=[]):
        torch.manual_seed(seed)
        model = TASKS[task].from_pretrained(name, revision=revision, dtype=torch.float32, **classes)
    if not isinstance(model, GrowableModel):
        make_growable(model)
        model.growth_history["base_revision"] = commit_of(name, revision)
    return model


def short_name(name: str) -> str:
    """A Hub id as it is, a local path without its folders, which are nobody's business in files that travel."""
    return Path(name).name if Path(name).exists() else name


def load_stock(name: str, revision: str | None) -> Any:
    """The stock model with the task head it was saved with, float32 or as saved."""
    with clear_errors(name):
        config = AutoConfig.from_pretrained(name, revision=revision)
        family: Any = family_of(config.model_type)
        if config.model_type not in FAMILIES:
            raise HfGrowError(f"{name} is growable already: see it with 'hf-grow inspect'.")
        known = {stock.__name__: stock for stock in family.model_classes}
        architecture = (config.architectures or [None])[0]
        if architecture not in known:
            raise HfGrowError(f"{name} was saved as {architecture!r}; known classes are {', '.join(sorted(known))}.")
        model, info = known[architecture].from_pretrained(name, revision=revision, output_loading_info=True)
    check_loading(name, info, config.num_hidden_layers)
    return model.eval()


def commit_of(name: str, revision: str | None) -> str | None:
    """The commit of a model that came from the Hub, None for a local folder."""
    return extract_commit_hash(cached_file(name, CONFIG_NAME, revision=revision), None)


def load_tokenizer(name: str, revision: str | None) -> Any:
    """The model's tokenizer, None where it has none."""
    files = ("tokenizer_config.json", "tokenizer.json", "tokenizer.model", "vocab.json", "vocab.txt")
    present = (
        cached_file(name, file, revision=revision, _raise_exceptions_for_missing_entries=False) for file in files
    )
    if not any(present):
        return None
    with clear_errors(f"The tokenizer of {name}"):
        return AutoTokenizer.from_pretrained(name, revision=revision)
