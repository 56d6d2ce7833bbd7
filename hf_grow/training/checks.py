"""What training refuses before its first step, in one sentence each."""

import logging
from collections.abc import Iterable
from math import isfinite
from typing import Any

import torch
from accelerate import Accelerator
from accelerate.utils import DynamoBackend
from peft import PeftModel
from transformers import PreTrainedModel

from hf_grow.errors import HfGrowError
from hf_grow.growth.config import GrowthConfig
from hf_grow.modeling.growable_attention import attention_sites
from hf_grow.modeling.growable_model import GrowableModel
from hf_grow.running.batches import Batch
from hf_grow.running.passes import Passes
from hf_grow.surgery.base import Model, has_adapters, has_grown, without_adapters
from hf_grow.surgery.structure import attachment_name
from hf_grow.training.config import TrainConfig
from hf_grow.training.schedule import GrowthSchedule, check_first_event, check_steps

logger = logging.getLogger("hf_grow")


def check_accelerator(accelerator: Accelerator, config: TrainConfig) -> None:
    """Refuse what the device lacks, and an accelerator that was made for another way of training."""
    config.check_device(accelerator.device)
    way = accelerator.distributed_type.value
    if way != "NO" and not way.startswith("MULTI_"):
        raise HfGrowError(f"GrowthTrainer does not train with Accelerate's {way}: use DDP, or shard=… for FSDP2.")
    if accelerator.state.dynamo_plugin.backend != DynamoBackend.NO:
        raise HfGrowError("A compiled model would be compiled again for every size: train without dynamo.")
    if accelerator.gradient_accumulation_steps != 1:
        raise HfGrowError("The accelerator accumulates gradients: leave that to accumulation of the TrainConfig.")
    if accelerator.mixed_precision != config.precision:
        raise HfGrowError(
            f"The accelerator's mixed precision is {accelerator.mixed_precision}, but precision of the TrainConfig is "
            f"{config.precision}: give both the same."
        )


def check_model(model: Model, config: TrainConfig, shard: Any) -> None:
    """Refuse a model that cannot be trained like this."""
    if isinstance(model, PeftModel) and not isinstance(model.get_base_model(), GrowableModel):
        raise HfGrowError("Make the model growable before PEFT wraps it.")
    if getattr(getattr(model, "active_peft_config", None), "is_prompt_learning", False):
        raise HfGrowError("Prompts of PEFT are not trained here: use LoRA, or transformers' Trainer.")
    magnitudes = [vector for name, vector in model.named_parameters() if "lora_magnitude_vector" in name]
    if any(bool((vector == 0).any()) for vector in magnitudes):
        raise HfGrowError(
            "DoRA divides by the norms of weights, and some of the grown ones are zero: use LoRA, or grow by a step "
            "and without new heads."
        )
    if shard is not None and config.optimizer == "adafactor":
        raise HfGrowError("torch's Adafactor cannot step on sharded parameters: use adamw or sgd.")
    learning = {parameter.dtype for parameter in model.parameters() if parameter.requires_grad}
    if learning & {torch.float16, torch.bfloat16}:
        logger.warning("Weights in half precision lose small steps: load them in float32 and use precision='bf16'.")
    if shard is not None and has_adapters(model):
        raise HfGrowError("A model with adapters cannot be sharded here: train it without shard, or merge them.")


def check_growth_and_schedule(growth: GrowthConfig | None, schedule: GrowthSchedule | None) -> None:
    """Refuse one without the other."""
    if (growth is None) != (schedule is None):
        raise HfGrowError("Growth while training needs growth=GrowthConfig(…) and schedule=GrowthSchedule(…).")


def check_schedule(
    model: Model,
    config: TrainConfig,
    growth: GrowthConfig | None,
    schedule: GrowthSchedule | None,
    evaluates: bool,
) -> None:
    """Refuse growth that cannot work or would never come, before anything is trained."""
    check_growth_and_schedule(growth, schedule)
    if growth is None or schedule is None:
        if config.train == "new" and not has_grown(model):
            raise HfGrowError("train='new' needs something new: grow the model first, or at step 0.")
        return
    model = without_adapters(model)
    check_first_event(model, growth, schedule)
    check_steps(schedule, config.steps)
    if schedule.plateau is not None and (config.eval_every is None or not evaluates):
        raise HfGrowError("Growth on a plateau needs evaluations on the way: give eval_every and eval_rows.")
    projections = [projection for site in attention_sites(model) for projection, _ in site.projections()]
    merges = config.train == "all" and attachment_name(model, growth.attach) is None
    if merges and not any(projection.weight.requires_grad for projection in projections):
        raise HfGrowError("The attention projections are frozen, so growth would never learn: use train='new'.")
    if config.train == "new":
        if growth.strategy != "append":
            raise HfGrowError(f"train='new' leaves the base as it is, which strategy='{growth.strategy}' would change.")
        if not has_grown(model) and 0 not in schedule.at:
            raise HfGrowError("train='new' needs something new: grow the model first, or at step 0.")


def labelled(model: PreTrainedModel, batches: list[Batch]) -> list[Batch]:
    """The batches that give a loss: where all tokens are left out of it, it is not a number."""
    return [batch for batch in batches if Passes(model).weight(batch) > 0]


def check_batches(model: PreTrainedModel, batches: Iterable[Batch], what: str) -> None:
    """Refuse data that does not fit the model or gives no loss, as far as the first batch with labels tells."""
    for batch in batches:
        check_length(model, batch)
        if labelled(model, [batch]):
            if not isfinite(Passes(model).loss([batch])):
                raise HfGrowError(f"The loss on the {what} data is not finite: look at the data and the weights.")
            return
    raise HfGrowError(f"The first batches of the {what} data hold no labels: there is nothing to learn from.")


def check_length(model: PreTrainedModel, batch: Batch) -> None:
    """Refuse sequences with more tokens than the model has positions."""
    ids, most = batch.get("input_ids"), getattr(model.config, "max_position_embeddings", None)
    if torch.is_tensor(ids) and most is not None and ids.shape[-1] > most:
        raise HfGrowError(
            f"A sequence has {ids.shape[-1]} tokens, more than the {most} positions of the model: make them shorter."
        )
