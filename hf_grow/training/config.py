"""What the user wants of training. Checked when made."""

import math
from dataclasses import dataclass
from typing import Any

import torch
from transformers import SchedulerType

from hf_grow.errors import HfGrowError
from hf_grow.fields import former_attributes, gone, is_number, one_of, to_dict, warn_renamed, whole

TRAIN = ("all", "new")
PRECISIONS = ("no", "bf16", "fp16")
OPTIMIZERS = ("adamw", "sgd", "adafactor")
# Of transformers' learning-rate schedules, those that need no more than a warm-up and an end.
LR_SCHEDULES = ("linear", "cosine", "constant_with_warmup", "constant")
# What may differ when a run is taken up again: how long it goes on, what it tells, and how its steps are divided.
FREE_ON_RESUME = ("steps", "eval_every", "save_every", "log_every", "keep", "tracker", "batch_size", "accumulation")


OWN_RATE = "give growth_parameters(model) a group of their own in the optimizer."


@gone(OWN_RATE, new_learning_rate_multiplier=1.0)
@former_attributes(scheduler_type="lr_scheduler_type")
@dataclass(frozen=True)
class TrainConfig:
    """How to train.

    steps                   of the optimizer
    batch_size              sequences at once on each process
    accumulation            how many such batches make a step
    learning_rate           at its highest; `finetune` itself chooses 3e-3 for the few new weights of a frozen model
    weight_decay            of matrices; biases and norms do not decay
    optimizer               "adamw", "sgd", "adafactor"
    betas                   of AdamW; the first is the momentum of SGD
    lr_schedule             how the rate decays after the warm-up: "linear", "cosine", "constant_with_warmup",
                            "constant"
    warmup                  so many steps, or below one such a share of all steps
    clip                    largest norm of the gradient; 0 on the command line, in Python None, for any
    precision               "no"; "bf16" and "fp16": autocast
    gradient_checkpointing  less memory, more time
    train                   "all" weights, or only "new" columns and heads (and adapters), attached beside a base that
                            is frozen
    eval_every              steps between evaluations; None: at the end only
    log_every               steps between entries of the history
    save_every              steps between checkpoints; None: at the end only
    keep                    how many checkpoints to keep
    tracker                 one of Accelerate's, such as tensorboard
    seed                    of the order of sequences, of dropout and of masking
    """

    steps: int = 1000
    batch_size: int = 8
    accumulation: int = 1
    learning_rate: float = 1e-4
    weight_decay: float = 0.0
    optimizer: str = "adamw"
    betas: tuple[float, float] = (0.9, 0.999)
    lr_schedule: str = "linear"
    warmup: float = 0.05
    clip: float | None = 1.0
    precision: str = "no"
    gradient_checkpointing: bool = False
    train: str = "all"
    eval_every: int | None = None
    log_every: int = 10
    save_every: int | None = None
    keep: int = 2
    tracker: str | None = None
    seed: int = 0

    def __post_init__(self) -> None:
        one_of("precision", self.precision, PRECISIONS)
        one_of("optimizer", self.optimizer, OPTIMIZERS)
        one_of("lr_schedule", self.lr_schedule, LR_SCHEDULES)
        one_of("train", self.train, TRAIN)
        for name in ("steps", "batch_size", "accumulation", "log_every", "keep"):
            whole(name, getattr(self, name), 1)
        whole("seed", self.seed, 0)
        if self.seed >= 2**32:
            raise HfGrowError(f"seed must be below {2**32}, not {self.seed}.")
        for name in ("eval_every", "save_every"):
            if getattr(self, name) is not None:
                whole(name, getattr(self, name), 1)
        for name in ("learning_rate", "clip"):
            value = getattr(self, name)
            if (value is not None or name != "clip") and not (is_number(value) and value > 0):
                raise HfGrowError(f"{name} must be a positive number, not {value!r}.")
        for name in ("weight_decay", "warmup"):
            if not is_number(getattr(self, name)) or getattr(self, name) < 0:
                raise HfGrowError(f"{name} must be a number that is not negative, not {getattr(self, name)!r}.")
        if not isinstance(self.betas, (tuple, list)) or len(self.betas) != 2 or not all(map(_share, self.betas)):
            raise HfGrowError(f"betas must be two numbers from 0 to below 1, not {self.betas!r}.")
        object.__setattr__(self, "betas", tuple(self.betas))

    @property
    def warmup_steps(self) -> int:
        """The warm-up in steps: below one it is a share of all steps."""
        return math.ceil(self.warmup * self.steps) if self.warmup < 1 else int(self.warmup)

    @property
    def lr_scheduler_type(self) -> SchedulerType:
        """The schedule of the learning rate as transformers knows it."""
        return SchedulerType(self.lr_schedule)

    def check_device(self, device: torch.device) -> None:
        """Refuse mixed precision that the device lacks."""
        lacks_bf16 = device.type == "cuda" and not torch.cuda.is_bf16_supported()
        if (self.precision == "fp16" and device.type == "cpu") or (self.precision == "bf16" and lacks_bf16):
            other = "bf16 or no" if self.precision == "fp16" else "fp16 or no"
            raise HfGrowError(f"The device {device.type} cannot train in {self.precision}: use precision {other}.")

    def as_dict(self) -> dict[str, Any]:
        """Plain values for JSON, as `hf_grow.fields.to_dict` gives them; goes with 0.3."""
        warn_renamed("TrainConfig.as_dict()", "hf_grow.fields.to_dict(config)")
        return to_dict(self)


def _share(value: Any) -> bool:
    return is_number(value) and 0 <= value < 1
