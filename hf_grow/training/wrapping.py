"""The model in the form it trains in: whole on each process, in DDP if there are many, or spread over them by FSDP2.

Both forms have the same methods; what differs between them is said here alone.
"""

from collections.abc import Callable, Iterator
from contextlib import AbstractContextManager, contextmanager, nullcontext
from typing import Any, Protocol

import torch
from accelerate import Accelerator
from transformers import PreTrainedModel

from hf_grow.training.distributed import rewrap
from hf_grow.training.sharding import gather, spread, whole_copy

Shard = Callable[[Any], Any]


class Wrapper(Protocol):
    """What a training run asks of either form."""

    model: PreTrainedModel

    def __call__(self, **inputs: Any) -> Any:
        """The model's outputs, with gradients that will be those of all processes."""

    def synchronised(self, *, last: bool) -> AbstractContextManager[Any]:
        """For each of a step's passes: gradients travel between processes once a step."""

    def growing(self) -> AbstractContextManager[Any]:
        """Inside, the model is whole and may grow; then it is wrapped as before, unless there was an error."""

    def whole(self) -> Any:
        """The model with all of its weights, to save it."""

    def let_go(self) -> None:
        """Training is over: nothing but the model stays."""


def wrap(
    model: PreTrainedModel, shard: Shard | None, optimizer: torch.optim.Optimizer, accelerator: Accelerator
) -> Wrapper:
    """The model in the form that was asked for; the parameters of a sharded one are others, also in the optimizer."""
    if shard is None:
        return Replicated(model, accelerator)
    return Sharded(model, shard, optimizer)


class Replicated:
    """The whole model on each process, inside Accelerate's wrapper if there are many."""

    def __init__(self, model: PreTrainedModel, accelerator: Accelerator) -> None:
        self.model, self.accelerator = model, accelerator
        self._wrapped = accelerator.prepare_model(model)

    def __call__(self, **inputs: Any) -> Any:
        return self._wrapped(**inputs)

    def synchronised(self, *, last: bool) -> AbstractContextManager[Any]:
        return nullcontext() if last else self.accelerator.no_sync(self._wrapped)

    @contextmanager
    def growing(self) -> Iterator[Any]:
        yield self.model
        if self._wrapped is not self.model:
            rewrap(self._wrapped)

    def whole(self) -> Any:
        return self.model

    def let_go(self) -> None:
        self.accelerator._models = [model for model in self.accelerator._models if model is not self._wrapped]
        self._wrapped = self.model


class Sharded:
    """The model spread over the processes by FSDP2, and the optimizer's state with it."""

    def __init__(self, model: PreTrainedModel, shard: Shard, optimizer: torch.optim.Optimizer) -> None:
        self.model, self.shard, self.optimizer = model, shard, optimizer
        self._skeleton = spread(model, shard, optimizer)

    def __call__(self, **inputs: Any) -> Any:
        return self.model(**inputs)

    def synchronised(self, *, last: bool) -> AbstractContextManager[Any]:
        """Gradients are of one shard each, and travel in every pass."""
        return nullcontext()

    @contextmanager
    def growing(self) -> Iterator[Any]:
        """As the protocol says; the model is another one from then on."""
        self.model = gather(self.model, self._skeleton, self.optimizer)
        yield self.model
        self._skeleton = spread(self.model, self.shard, self.optimizer)

    def whole(self) -> Any:
        """A copy, on every process."""
        return whole_copy(self.model, self._skeleton)

    def let_go(self) -> None:
        """Nothing is attached; the trained model stays sharded."""
