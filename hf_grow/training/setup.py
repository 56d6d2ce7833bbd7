"""What a training run is set up with: an accelerator, an optimizer, and a model lent to it."""

from collections.abc import Callable, Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any

import torch
from accelerate import Accelerator
from accelerate.state import AcceleratorState
from accelerate.utils import DistributedDataParallelKwargs
from transformers import PreTrainedModel

from hf_grow.errors import HfGrowError
from hf_grow.modeling.growable_attention import attention_sites
from hf_grow.surgery.base import without_adapters
from hf_grow.training.config import TrainConfig


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


def checkpoint_gradients(model: PreTrainedModel) -> None:
    """Let a model compute its activations again in the backward pass instead of keeping them."""
    if not model.is_gradient_checkpointing:
        model.gradient_checkpointing_enable(gradient_checkpointing_kwargs={"use_reentrant": False})
        # transformers hooks the embeddings for the reentrant form, and would leave the hooks there.
        model.disable_input_require_grads()


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
    # It would be held while another has taken its place.
    del model
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
                module.training = modes.get(name, modes[""])
            for name, parameter in model.named_parameters():
                parameter.requires_grad_(learning.get(name, True))
                parameter.grad = None


def newest_values(model: PreTrainedModel, history: list[dict[str, Any]], events: int) -> dict[str, str]:
    """For a progress bar: the last losses, the query/key columns of the heads, and how often the model grew."""
    newest: dict[str, float] = {}
    for entry in history[-20:]:
        newest |= {name: entry[name] for name in ("loss", "eval_loss") if name in entry}
    widths = [site.attention.query_key_dim for site in attention_sites(model)]
    wide = str(widths[0]) if min(widths) == max(widths) else f"{min(widths)}-{max(widths)}"
    return {**{name: f"{value:.3f}" for name, value in newest.items()}, "d_k": wide, "events": str(events)}
