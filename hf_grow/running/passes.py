"""Passes of batches through a model that is left as found: parameters, gradients, hooks, modes, random numbers."""

import logging
import time
from collections.abc import Generator, Iterator, Mapping, Sequence
from contextlib import ExitStack, contextmanager
from dataclasses import dataclass
from math import inf, isfinite
from typing import Any, NamedTuple, Protocol

import torch
from torch import Tensor
from transformers import PreTrainedModel

from hf_grow.errors import HfGrowError
from hf_grow.progress import Progress
from hf_grow.running.batches import Batch, batch_size
from hf_grow.running.observe import Observer

logger = logging.getLogger("hf_grow")

# How much work a sequence is, beside others: with gradients, and without.
GRADIENTS, FORWARD = 1.0, 1 / 3
# Fewer batches say nothing of how they differ.
LEAST_TO_TELL = 3
# What a model raises on a batch that does not fit it.
UNFIT = (TypeError, ValueError, IndexError, KeyError, AttributeError, RuntimeError)


class Processes(Protocol):
    """The processes that share the work, as Accelerate's `Accelerator` knows them."""

    @property
    def num_processes(self) -> int:
        """How many there are."""

    @property
    def process_index(self) -> int:
        """Which of them this is."""

    @property
    def device(self) -> torch.device:
        """Where this one computes."""

    def reduce(self, tensor: Tensor, reduction: str = "sum") -> Tensor:
        """The sum (or mean) over all of them."""


@dataclass(frozen=True)
class BatchGradients:
    """One batch, and the gradients of each observer's leaves by their names.

    The loss is a mean over the batch, whose weight says of how much: gradients times weights add up over batches.
    """

    batch: Batch
    weight: float
    by_observer: list[dict[str, Tensor]]


class Usable(NamedTuple):
    """Batches whose loss is finite, their losses on this process, and the mean loss over all processes."""

    batches: list[Batch]
    losses: list[float]
    loss: float


@dataclass(frozen=True)
class _Watch:
    """Observers that are installed until the stack unwinds."""

    observers: Sequence[Observer]
    stack: ExitStack


class Passes:
    """Runs batches through one model, on one process or many, and adds up over all of them."""

    def __init__(self, model: PreTrainedModel, accelerator: Processes | None = None, progress: bool = False) -> None:
        self.model = model
        self.accelerator = accelerator
        self.progress = Progress(progress)
        # Time spent in the model, so that the rest can be told apart.
        self.seconds = 0.0
        self._warned = False

    def gradients(
        self, batches: Sequence[Batch], observers: Sequence[Observer], implementation: str | None = None, what: str = ""
    ) -> Generator[BatchGradients, None, None]:
        """Each batch with the gradients of each observer's leaves.

        Batches whose loss or gradients are not finite are counted and passed over.
        """
        skipped = 0
        with self._watched(observers, implementation) as watch:
            for number, batch in enumerate(self._told(batches, what, GRADIENTS)):
                with self._timed():
                    found = self._leaf_gradients(batch, number, watch)
                if found is None:
                    skipped += 1
                else:
                    yield found
                # Scores and their gradients are large: let go of them before the next batch makes more.
                del found
        self._check_skipped(skipped, len(batches))

    def watch(
        self, batches: Sequence[Batch], observers: Sequence[Observer], what: str = ""
    ) -> Generator[Batch, None, None]:
        """Each batch, after a forward pass that keeps no graph."""
        with self._watched(observers, None) as watch, torch.no_grad():
            for number, batch in enumerate(self._told(batches, what, FORWARD)):
                with self._timed():
                    self._forward(batch, number, watch)
                _check_used(observers)
                yield batch

    def loss(self, batches: Sequence[Batch], observers: Sequence[Observer] = (), what: str = "") -> float:
        """The mean loss over all batches and processes by their weights; infinite where a batch's is not finite."""
        return self.mean(batches, self.losses(batches, observers, what))

    def usable(self, batches: Sequence[Batch], what: str = "") -> Usable:
        """The batches whose loss is finite; an error where that of more than a tenth is not."""
        pairs = zip(batches, self.losses(batches, (), what), strict=True)
        kept = [(batch, loss) for batch, loss in pairs if isfinite(loss)]
        self._check_skipped(len(batches) - len(kept), len(batches))
        batches, losses = [batch for batch, _ in kept], [loss for _, loss in kept]
        return Usable(batches, losses, self.mean(batches, losses))

    def losses(self, batches: Sequence[Batch], observers: Sequence[Observer] = (), what: str = "") -> list[float]:
        """The loss of each batch of this process."""
        losses = []
        with self._watched(observers, None) as watch, torch.no_grad():
            for number, batch in enumerate(self._told(batches, what, FORWARD)):
                with self._timed():
                    losses.append(float(self._loss(batch, number, watch)))
        return losses

    def mean(self, batches: Sequence[Batch], losses: Sequence[float]) -> float:
        """The mean over all batches and processes by their weights; infinite where it is not finite."""
        total = torch.zeros(2, dtype=torch.float64)
        for batch, loss in zip(batches, losses, strict=True):
            total += torch.tensor([loss, 1.0], dtype=torch.float64) * self.weight(batch)
        (total,) = self.reduce([total])
        value = float(total[0] / total[1])
        return value if isfinite(value) else inf

    def standard_error(self, batches: Sequence[Batch], values: Sequence[float]) -> float | None:
        """How far such a mean may be off by chance, as the batches differ; None where they are too few to tell."""
        rows = [
            [weight, weight**2, weight * value, weight**2 * value, weight**2 * value**2]
            for weight, value in zip(map(self.weight, batches), values, strict=True)
        ]
        total = torch.tensor([[1.0, *row] for row in rows], dtype=torch.float64).reshape(-1, 6).sum(0)
        (total,) = self.reduce([total])
        count, weight, squares, first, weighted, second = total.tolist()
        if count < LEAST_TO_TELL or weight == 0:
            return None
        mean = first / weight
        spread = max(second - 2 * mean * weighted + mean**2 * squares, 0.0)
        # As many degrees of freedom less as the mean takes.
        return (spread * count / (count - 1)) ** 0.5 / weight

    def weight(self, batch: Batch) -> float:
        """What a batch's loss is a mean over: its labels where each token has one, else its sequences."""
        labels = batch.get("labels")
        if not isinstance(labels, Tensor) or labels.ndim < 2 or labels.is_floating_point():
            return float(batch_size(batch))
        # Causal models predict the next token, so that the first has no prediction.
        labels = labels[..., 1:] if self.model.loss_type == "ForCausalLM" and labels.shape[-1] > 1 else labels
        return float((labels != -100).sum())

    def reduce(self, sums: Sequence[Tensor]) -> list[Tensor]:
        """Sums over all processes."""
        if self.accelerator is None or self.accelerator.num_processes == 1:
            return list(sums)
        device = self.accelerator.device
        dtype = torch.float64 if device.type == "cpu" else torch.float32
        reduced = [self.accelerator.reduce(value.to(device, dtype), "sum") for value in sums]
        return [value.to(like) for value, like in zip(reduced, sums, strict=True)]

    def reduce_named(self, sums: Mapping[str, Tensor]) -> dict[str, Tensor]:
        """Sums over all processes, by their names."""
        return dict(zip(sums, self.reduce(list(sums.values())), strict=True))

    def count(self, batches: Sequence[Batch]) -> int:
        """How many sequences the batches of all processes hold."""
        (total,) = self.reduce([torch.tensor(float(sum(batch_size(batch) for batch in batches)), dtype=torch.float64)])
        return round(float(total))

    @contextmanager
    def _timed(self) -> Iterator[None]:
        began = time.perf_counter()
        try:
            yield
        finally:
            self.seconds += time.perf_counter() - began

    @contextmanager
    def _watched(self, observers: Sequence[Observer], implementation: str | None) -> Iterator[_Watch]:
        with as_found(self.model), ExitStack() as stack:
            if implementation is not None:
                self.model.set_attn_implementation(implementation)
            for observer in observers:
                observer.install(stack)
            yield _Watch(observers, stack)

    def _told(self, batches: Sequence[Batch], what: str, units: float) -> Iterator[Batch]:
        """The batches, each told as work done once the next is asked for."""
        self.progress.say(what)
        for batch in batches:
            yield batch
            self.progress.done(units * batch_size(batch))

    def _run(self, batch: Batch) -> Any:
        device = self.model.device
        return self.model(
            **{name: value.to(device) if isinstance(value, Tensor) else value for name, value in batch.items()}
        )

    def _forward(self, batch: Batch, number: int, watch: _Watch) -> Any:
        for observer in watch.observers:
            observer.batch = batch
        try:
            return self._run(batch)
        except torch.OutOfMemoryError:
            raise
        except UNFIT as error:
            # A batch that the model takes alone is not at fault: the fault is in what watches it, and surfaces.
            if watch.observers and self._fits(batch, watch):
                raise
            reason = str(error).strip().splitlines()
            raise HfGrowError(
                f"Batch {number} does not fit {type(self.model).__name__}: {reason[0] if reason else type(error)}"
            ) from error

    def _fits(self, batch: Batch, watch: _Watch) -> bool:
        """Whether the model takes the batch without observers, for whom this is the end."""
        watch.stack.close()
        try:
            with torch.no_grad():
                self._run(batch)
        except UNFIT:
            return False
        return True

    def _loss(self, batch: Batch, number: int, watch: _Watch) -> Tensor:
        loss = getattr(self._forward(batch, number, watch), "loss", None)
        if loss is None:
            raise HfGrowError("The model returned no loss: batches must hold labels.")
        return loss

    def _leaf_gradients(self, batch: Batch, number: int, watch: _Watch) -> BatchGradients | None:
        """∂L/∂leaf for every observer; None where it is not finite."""
        with torch.enable_grad():
            loss = self._loss(batch, number, watch)
            _check_used(watch.observers)
            leaves = [observer.leaves() for observer in watch.observers]
            flat = [leaf for named in leaves for leaf in named.values()]
            # A loss that no leaf touches has no graph at all.
            slopes = torch.autograd.grad(loss, flat, allow_unused=True) if loss.requires_grad else [None] * len(flat)
        gradients = [
            torch.zeros_like(leaf) if slope is None else slope for leaf, slope in zip(flat, slopes, strict=True)
        ]
        finite = torch.isfinite(loss).all()
        for gradient in gradients:
            finite = finite & torch.isfinite(gradient).all().to(finite.device)
        in_order = iter(gradients)
        if not bool(finite):
            return None
        by_observer = [{name: next(in_order) for name in named} for named in leaves]
        return BatchGradients(batch, self.weight(batch), by_observer)

    def _check_skipped(self, skipped: int, batches: int) -> None:
        # All processes go on, or none.
        (counts,) = self.reduce([torch.tensor([skipped, batches], dtype=torch.float64)])
        skipped, batches = (round(count) for count in counts.tolist())
        if skipped * 10 > batches:
            raise HfGrowError(f"{skipped} of {batches} batches gave a loss or gradient that is not finite.")
        if skipped and not self._warned:
            self._warned = True
            logger.warning("Skipped %d of %d batches: loss or gradient not finite.", skipped, batches)


def _check_used(observers: Sequence[Observer]) -> None:
    for observer in observers:
        if not observer.inputs:
            raise HfGrowError(
                f"{observer.site.name} is not used with these batches: cross-attention needs encoder_hidden_states."
            )


def token_mask(batch: Batch, observer: Observer, role: str) -> Tensor:
    """One for tokens and zero for padding among what an observer saw enter the query, key or value projection.

    (batch, tokens, 1); a mask of four dimensions is read along its keys.
    """
    inputs = observer.inputs[role]
    # Cross-attention asks with the model's own tokens, and looks at the encoder's.
    looks_at_encoder = observer.site.attention_type == "cross" and role != "query"
    mask = batch.get("encoder_attention_mask" if looks_at_encoder else "attention_mask")
    if mask is None:
        return torch.ones_like(inputs[..., :1])
    mask = mask.to(inputs.device)
    if mask.ndim == 4:
        allowed = mask if mask.dtype == torch.bool else mask >= 0
        mask = allowed.any(2).any(1)
    return mask.reshape(inputs.shape[0], -1, 1)[:, -inputs.shape[1] :].ne(0).to(inputs.dtype)


@contextmanager
def as_found(model: PreTrainedModel) -> Iterator[None]:
    """Evaluation mode, frozen parameters and no cache inside; everything as it was outside, also after an error."""
    training = {module: module.training for module in model.modules()}
    learning = {parameter: parameter.requires_grad for parameter in model.parameters()}
    implementation = model.config._attn_implementation
    caching = getattr(model.config, "use_cache", None)
    devices = [model.device] if model.device.type == "cuda" else []
    with torch.random.fork_rng(devices=devices):
        try:
            model.eval()
            model.requires_grad_(False)
            if caching is not None:
                model.config.use_cache = False
            yield
        finally:
            model.set_attn_implementation(implementation)
            if caching is not None:
                model.config.use_cache = caching
            for module, mode in training.items():
                module.training = mode
            for parameter, learns in learning.items():
                parameter.requires_grad_(learns)
