"""Adapting a frozen pretrained model by few new weights: grown columns, LoRA, or both."""

from collections.abc import Iterable
from typing import Any

import torch
from peft import LoraConfig, PeftModel, get_peft_model
from peft.utils.constants import DUMMY_TARGET_MODULES
from transformers import PreTrainedModel
from transformers.pytorch_utils import Conv1D

from hf_grow.adapting.budget import check_start, choose_amounts
from hf_grow.adapting.config import AdaptConfig
from hf_grow.adapting.targets import lora_targets, whole_modules
from hf_grow.fields import require
from hf_grow.growth.config import GrowthConfig
from hf_grow.growth.pipeline import grow
from hf_grow.growth.report import GrowthReport
from hf_grow.measuring.config import CollectConfig
from hf_grow.modeling.growable_attention import attention_sites
from hf_grow.modeling.growable_model import GrowableModel
from hf_grow.running.batches import Batch
from hf_grow.running.passes import Processes
from hf_grow.surgery.base import without_adapters
from hf_grow.surgery.patch import make_growable
from hf_grow.training.feed import random_numbers
from hf_grow.training.learning import freeze_base, freeze_growth


def adapt(
    model: PreTrainedModel,
    batches: Iterable[Batch],
    config: AdaptConfig,
    *,
    accelerator: Processes | None = None,
    progress: bool = False,
) -> tuple[Any, GrowthReport | None]:
    """Give a pretrained model few new weights to learn with and freeze the others; returns it and how it grew.

    It grows on the batches first, in parameters beside its projections, then PEFT wraps it. GPT-2 keeps query, key and
    value in one projection (c_attn), so there LoRA on one of them changes all.

    Train what learns with any trainer or loop: the base is frozen. With an `accelerator` every process brings its own
    batches.
    """
    require(config, AdaptConfig)
    check_start(model, config)
    inner = without_adapters(model)
    if not isinstance(inner, GrowableModel):
        make_growable(inner)
    if accelerator is not None:
        model.to(accelerator.device)
    amounts, rank = choose_amounts(inner, config)
    learning_modules = [] if isinstance(model, PeftModel) else whole_modules(inner, config)
    report = None
    if config.grows:
        growth = GrowthConfig(
            **amounts,  # type: ignore[arg-type]
            step_size=config.step_size,
            align=1,
            scaling=config.scaling,
            attach=True,
        )
        _, report = grow(model, batches, growth, collect=config.collect, accelerator=accelerator, progress=progress)
    if config.has_lora or learning_modules:
        model = _wrapped(model, config, rank, learning_modules)
    return freeze_base(model) if config.grows else freeze_growth(model), report


def trainable_parameters(model: torch.nn.Module) -> int:
    """How many numbers learn in a model."""
    return sum(parameter.numel() for parameter in model.parameters() if parameter.requires_grad)


def _wrapped(model: PreTrainedModel, config: AdaptConfig, rank: int, learning_modules: list[str]) -> PeftModel:
    """The model with LoRA on its projections, and a copy of every module that learns whole."""
    targets = [target for site in attention_sites(model) for target in lora_targets(site, config.lora_on)]
    lora = LoraConfig(
        r=rank or 1,
        lora_alpha=config.lora_alpha or 2 * (rank or 1),  # type: ignore[arg-type]
        lora_dropout=config.lora_dropout,
        target_modules=[target.name for target in targets] if config.has_lora else DUMMY_TARGET_MODULES,
        fan_in_fan_out=isinstance(targets[0].projection, Conv1D),
        modules_to_save=learning_modules or None,
    )
    with random_numbers((config.collect or CollectConfig()).seed):
        return get_peft_model(model, lora).train(model.training)
