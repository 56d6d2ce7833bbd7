"""What a training run is set up with: an accelerator, the parameters that learn, an optimizer, and what is refused."""

import logging
from collections.abc import Callable, Iterable, Iterator
from contextlib import contextmanager
from math import isfinite
from pathlib import Path
from typing import Any

import torch
from accelerate import Accelerator
from accelerate.state import AcceleratorState
from accelerate.utils import DistributedDataParallelKwargs, DynamoBackend
from peft import PeftModel

from hf_grow.base import base_parameters, has_adapters, has_grown, without_adapters
from hf_grow.config import GrowthConfig
from hf_grow.errors import HfGrowError
from hf_grow.modeling.growable_attention import attention_sites
from hf_grow.modeling.growable_model import GrowableModel
from hf_grow.passes import Batch, Passes
from hf_grow.schedule import GrowthSchedule, check_first_event, check_steps
from hf_grow.train_config import TrainConfig

logger = logging.getLogger("hf_grow")


def make_accelerator(config: TrainConfig, folder: str | Path | None) -> Accelerator:
    """An accelerator for the config's precision and tracker."""
    if config.tracker is not None and folder is None:
        raise HfGrowError("A tracker needs a folder to write to: give the trainer one.")
    # A head that the loss does not need has no gradient, which DDP must be told to expect.
    unused = DistributedDataParallelKwargs(find_unused_parameters=not config.gradient_checkpointing)
    if AcceleratorState._shared_state:
        # Accelerate remembers the precision of the first accelerator of a process for ever.
        AcceleratorState._reset_state()
    try:
        accelerator = Accelerator(
            mixed_precision=config.precision, log_with=config.tracker, project_dir=folder, kwargs_handlers=[unused]
        )
    except (ValueError, ImportError) as error:
        raise HfGrowError(f"Accelerate cannot be set up: {str(error).splitlines()[0]}") from error
    if config.tracker is not None and not accelerator.log_with:
        raise HfGrowError(f"The tracker {config.tracker} is not installed: install it, or choose another.")
    return accelerator


def check_accelerator(accelerator: Accelerator, config: TrainConfig) -> None:
    """Refuse what the device lacks, and an accelerator that was made for another way of training."""
    config.check_device(accelerator.device)
    kind = accelerator.distributed_type.value
    if kind != "NO" and not kind.startswith("MULTI_"):
        raise HfGrowError(f"GrowthTrainer does not train with Accelerate's {kind}: use DDP, or shard=… for FSDP2.")
    if accelerator.state.dynamo_plugin.backend != DynamoBackend.NO:
        raise HfGrowError("A compiled model would be compiled again for every size: train without dynamo.")
    if accelerator.gradient_accumulation_steps != 1:
        raise HfGrowError("The accelerator accumulates gradients: leave that to accumulation of the TrainConfig.")
    if accelerator.mixed_precision != config.precision:
        raise HfGrowError(
            f"The accelerator's mixed precision is {accelerator.mixed_precision}, but precision of the TrainConfig is "
            f"{config.precision}: give both the same."
        )


def learning_parameters(model: Any, train: str) -> list[torch.nn.Parameter]:
    """What the optimizer gets: all that learns, or every projection that may get new entries, and adapters."""
    if train == "all":
        found = [parameter for parameter in model.parameters() if parameter.requires_grad]
        if not found:
            raise HfGrowError("No parameter of the model learns: set requires_grad where training should change it.")
        return found
    base = {parameter for _, parameter in base_parameters(model)}
    adapters = [parameter for parameter in model.parameters() if parameter.requires_grad and parameter not in base]
    sites = attention_sites(without_adapters(model))
    projections = [projection for site in sites for projection, _ in site.projections()]
    return adapters + [parameter for module in projections for parameter in module.parameters(recurse=False)]


def make_optimizer(parameters: list[torch.nn.Parameter], config: TrainConfig) -> torch.optim.Optimizer:
    """The config's optimizer; biases and norms do not decay."""
    matrices = [parameter for parameter in parameters if parameter.ndim > 1]
    vectors = [parameter for parameter in parameters if parameter.ndim <= 1]
    groups = [{"params": matrices, "weight_decay": config.weight_decay}, {"params": vectors, "weight_decay": 0.0}]
    if config.optimizer == "sgd":
        return torch.optim.SGD(groups, lr=config.learning_rate, momentum=config.betas[0])
    if config.optimizer == "adafactor":
        return torch.optim.Adafactor(groups, lr=config.learning_rate)
    return torch.optim.AdamW(groups, lr=config.learning_rate, betas=config.betas)


@contextmanager
def left_as_found(present: Callable[[], Any]) -> Iterator[None]:
    """Inside, a model is trained; outside, modes, what learns, its forward and random numbers are as they were.

    `present` gives the model, which may be another one in the end.
    """
    model = present()
    modes = {name: module.training for name, module in model.named_modules()}
    learning = {name: parameter.requires_grad for name, parameter in model.named_parameters()}
    forward, checkpointing = vars(model).get("forward"), without_adapters(model).is_gradient_checkpointing
    devices = [model.device] if model.device.type == "cuda" else []
    with torch.random.fork_rng(devices=devices):
        try:
            yield
        finally:
            model = present()
            # Accelerate leaves a forward of its own behind, and a mark by which it would not prepare the model again.
            for name in ("forward", "_original_forward", "_is_accelerate_prepared"):
                vars(model).pop(name, None)
            if forward is not None:
                model.forward = forward
            if not checkpointing and without_adapters(model).is_gradient_checkpointing:
                without_adapters(model).gradient_checkpointing_disable()
            for name, module in model.named_modules():
                module.training = modes[name]
            for name, parameter in model.named_parameters():
                parameter.requires_grad_(learning.get(name, True))
                parameter.grad = None


def newest_values(model: Any, history: list[dict[str, Any]], events: int) -> dict[str, str]:
    """For a progress bar: the last losses, the query/key columns of the heads, and how often the model grew."""
    newest: dict[str, float] = {}
    for entry in history[-20:]:
        newest |= {name: entry[name] for name in ("loss", "eval_loss") if name in entry}
    widths = [site.attention.query_key_dim for site in attention_sites(model)]
    wide = str(widths[0]) if min(widths) == max(widths) else f"{min(widths)}-{max(widths)}"
    return {**{name: f"{value:.3f}" for name, value in newest.items()}, "d_k": wide, "events": str(events)}


def check_model(model: Any, config: TrainConfig, shard: Any) -> None:
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


def check_schedule(
    model: Any, config: TrainConfig, growth: GrowthConfig | None, schedule: GrowthSchedule | None, evaluates: bool
) -> None:
    """Refuse growth that cannot work or would never come, before anything is trained."""
    if growth is None or schedule is None:
        if growth is not schedule:
            raise HfGrowError("Growth while training needs growth=GrowthConfig(…) and schedule=GrowthSchedule(…).")
        if config.train == "new" and not has_grown(model):
            raise HfGrowError("train='new' needs something new: grow the model first, or at step 0.")
        return
    if has_adapters(model):
        raise HfGrowError("A model with live adapters cannot grow: grow it before PEFT wraps it, or merge them.")
    check_first_event(model, growth, schedule)
    check_steps(schedule, config.steps)
    if schedule.plateau is not None and (config.eval_every is None or not evaluates):
        raise HfGrowError("Growth on a plateau needs evaluations on the way: give eval_every and eval_rows.")
    projections = [projection for site in attention_sites(model) for projection, _ in site.projections()]
    if config.train == "all" and not any(projection.weight.requires_grad for projection in projections):
        raise HfGrowError("The attention projections are frozen, so growth would never learn: use train='new'.")
    if config.train == "new":
        if growth.strategy != "append":
            raise HfGrowError(f"train='new' leaves the base as it is, which strategy='{growth.strategy}' would change.")
        if not has_grown(model) and 0 not in schedule.at:
            raise HfGrowError("train='new' needs something new: grow the model first, or at step 0.")


def labelled(model: Any, batches: list[Batch]) -> list[Batch]:
    """The batches that give a loss: where all tokens are left out of it, it is not a number."""
    return [batch for batch in batches if Passes(model).weight(batch) > 0]


def check_batches(model: Any, batches: Iterable[Batch], what: str) -> None:
    """Refuse data that does not fit the model or gives no loss, as far as the first batch with labels tells."""
    for batch in batches:
        check_length(model, batch)
        if labelled(model, [batch]):
            if not isfinite(Passes(model).loss([batch])):
                raise HfGrowError(f"The loss on the {what} data is not finite: look at the data and the weights.")
            return
    raise HfGrowError(f"The first batches of the {what} data hold no labels: there is nothing to learn from.")


def check_length(model: Any, batch: Batch) -> None:
    """Refuse sequences with more tokens than the model has positions."""
    ids, most = batch.get("input_ids"), getattr(model.config, "max_position_embeddings", None)
    if torch.is_tensor(ids) and most is not None and ids.shape[-1] > most:
        raise HfGrowError(
            f"A sequence has {ids.shape[-1]} tokens, more than the {most} positions of the model: make them shorter."
        )
