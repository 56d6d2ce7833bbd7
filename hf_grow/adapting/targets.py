"""What of a model adapters are put on: projections by role, and modules that learn whole."""

from collections.abc import Collection, Iterator
from dataclasses import dataclass
from typing import Any

from transformers import PreTrainedModel

from hf_grow.adapting.config import AdaptConfig
from hf_grow.errors import HfGrowError
from hf_grow.modeling.growable_attention import AttentionSite

# What transformers calls the task heads that finetuning makes anew: PEFT lets them learn beside LoRA too.
TASK_HEADS = ("classifier", "score", "qa_outputs")


@dataclass(frozen=True)
class Target:
    """A projection that gets LoRA, its name in the model and the roles it holds."""

    name: str
    projection: Any
    roles: tuple[str, ...]


def lora_targets(site: AttentionSite, wanted: Collection[str]) -> Iterator[Target]:
    """The projections of an attention module that hold a wanted role."""
    for path, roles in (*site.layout.inputs.items(), (site.layout.output, ("output",))):
        if set(wanted) & set(roles):
            root = site.name.rpartition(".")[0] if path.startswith(".") else site.name
            yield Target(f"{root}.{path.removeprefix('.')}", site.projection(path), roles)


def whole_modules(model: PreTrainedModel, config: AdaptConfig) -> list[str]:
    """The names of the modules that learn whole, which the model has."""
    if config.also_train is None:
        return [name for name, _ in model.named_children() if name in TASK_HEADS]
    for name in config.also_train:
        named_module(model, name)
    return list(config.also_train)


def named_module(model: PreTrainedModel, name: str) -> Any:
    """A module that is to learn whole."""
    module = dict(model.named_modules()).get(name) if name else None
    if module is None:
        known = ", ".join(child for child, _ in model.named_children())
        raise HfGrowError(f"also_train names {name!r}, which the model does not have; it has {known}.")
    return module
