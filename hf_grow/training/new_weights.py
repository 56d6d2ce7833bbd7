"""The weights that growth added, for training them alone or at a rate of their own.

New columns and heads are entries of the projections that hold the old ones too, so they cannot be told apart by
parameter. Gradients are masked where old entries must stay, and each step of the optimizer is corrected afterwards: old
entries get back what they were, to the bit, whatever the optimizer does (weight decay, momentum), and new ones go a
multiple of the way.
"""

from collections.abc import Iterator
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor, nn
from torch.distributed.tensor import DTensor, distribute_tensor
from torch.utils.hooks import RemovableHandle

from hf_grow.errors import HfGrowError
from hf_grow.fields import is_number, one_of
from hf_grow.modeling.growable_attention import AttentionDims, attention_sites
from hf_grow.surgery.base import base_parameters, new_entries
from hf_grow.surgery.optimizer_state import plain_optimizer

TRAIN = ("all", "new")


@dataclass(frozen=True)
class _Part:
    """The new entries of one parameter."""

    projection: Any
    name: str
    mask: Tensor

    @property
    def parameter(self) -> nn.Parameter:
        return getattr(self.projection, self.name)

    def masked(self, gradient: Tensor) -> Tensor:
        """A gradient that leaves old entries alone; growth may have made this mask too small by now."""
        return gradient * self.mask if gradient.shape == self.mask.shape else gradient


class NewWeights:
    """The entries that growth added to a model beyond its base, also where PEFT has wrapped it.

    train                     "new": only they learn (and PEFT's adapters, if there are any); "all": everything does
    learning_rate_multiplier  new entries move this much further in every step

    `attach` an optimizer for both to take effect; `refresh` when the model has grown again.
    """

    def __init__(self, model: nn.Module, *, train: str = "new", learning_rate_multiplier: float = 1.0) -> None:
        one_of("train", train, TRAIN)
        multiplier = learning_rate_multiplier
        if not is_number(multiplier) or multiplier <= 0:
            raise HfGrowError(f"learning_rate_multiplier must be a positive number, not {multiplier!r}.")
        self.model, self.train, self.multiplier = model, train, float(multiplier)
        self._step_hooks: list[RemovableHandle] = []
        self._gradient_hooks: list[RemovableHandle] = []
        self._before: list[tuple[_Part, Tensor]] = []
        self._parts: list[_Part] = []
        self._sizes: list[tuple[Any, AttentionDims]] = []
        self.refresh()

    def refresh(self) -> None:
        """Look again what is new, after growth or after the model was sharded; with train="new", freeze the rest."""
        parts = list(self._find())
        if self.train == "new" and not parts:
            raise HfGrowError("train='new' needs something new: grow the model first, or train='all'.")
        self._parts = parts
        self._sizes = [(site.attention, site.attention.dims) for site in attention_sites(self.model)]
        _remove(self._gradient_hooks)
        if self.train == "all":
            return
        for _, parameter in base_parameters(self.model):
            parameter.requires_grad_(False)
            # An optimizer would go on with a gradient from before.
            parameter.grad = None
        for part in self._parts:
            part.parameter.requires_grad_(True)
            self._gradient_hooks.append(part.parameter.register_hook(part.masked))

    def _find(self) -> Iterator[_Part]:
        for site in attention_sites(self.model):
            for projection, name, mask in new_entries(site):
                parameter = getattr(projection, name)
                if isinstance(parameter, DTensor):
                    mask = distribute_tensor(mask, parameter.device_mesh, parameter.placements)
                yield _Part(projection, name, mask)

    @property
    def count(self) -> int:
        """How many entries are new."""
        return sum(int(part.mask.sum()) for part in self._parts)

    def parameters(self) -> list[nn.Parameter]:
        """The parameters that hold new entries; with train="new" an optimizer needs these and the adapters'."""
        return [part.parameter for part in self._parts]

    def mask_gradients(self) -> None:
        """With train="new", zero the gradients of old entries where no hook of autograd does: on sharded parameters."""
        for part in self._parts if self.train == "new" else ():
            if part.parameter.grad is not None:
                part.parameter.grad = part.masked(part.parameter.grad)

    def attach(self, optimizer: torch.optim.Optimizer) -> "NewWeights":
        """Correct every step that the optimizer takes from now on."""
        plain = plain_optimizer(optimizer)
        self._step_hooks.append(plain.register_step_pre_hook(self._before_step))
        self._step_hooks.append(plain.register_step_post_hook(self._after_step))
        return self

    def detach(self) -> None:
        """Let gradients and optimizers be as they are again; what is frozen stays so."""
        _remove(self._step_hooks)
        _remove(self._gradient_hooks)

    def _before_step(self, *_: Any) -> None:
        if any(attention.dims != dims for attention, dims in self._sizes):
            raise HfGrowError("The model has grown since: call refresh() of its NewWeights after growth.")
        self.mask_gradients()
        if self.train == "new" or self.multiplier != 1:
            self._before = [(part, part.parameter.detach().clone()) for part in self._parts]

    @torch.no_grad()
    def _after_step(self, *_: Any) -> None:
        for part, before in self._before:
            # Exactly where it was if old and frozen; a multiple of the way if new.
            now = part.parameter
            moved = torch.lerp(before, now, self.multiplier) if self.multiplier != 1 else now
            now.copy_(torch.where(part.mask, moved, before if self.train == "new" else now))
        self._before = []


class NewWeightsOfRun:
    """The new weights of a run in which the model grows, and perhaps has none before the first time.

    train, learning_rate_multiplier  as of `NewWeights`; where they ask for nothing special, nothing is attached
    """

    def __init__(self, *, train: str, learning_rate_multiplier: float) -> None:
        self.train, self.multiplier = train, learning_rate_multiplier
        self._followed: NewWeights | None = None

    def follow(self, model: nn.Module, optimizer: torch.optim.Optimizer) -> None:
        """Let the new weights that there are learn as they should, from now on or after growth."""
        if self._followed is None and (self.train == "new" or self.multiplier != 1):
            new_weights = NewWeights(model, train=self.train, learning_rate_multiplier=self.multiplier)
            self._followed = new_weights.attach(optimizer)
        else:
            self.refresh(model)

    def refresh(self, model: nn.Module) -> None:
        """Go on with other parameters, or with another model: a sharded one is gathered into a new one."""
        if self._followed is not None:
            self._followed.model = model
            self._followed.refresh()

    def parameters(self) -> list[nn.Parameter]:
        """Those that hold the new entries that are followed."""
        return [] if self._followed is None else self._followed.parameters()

    def mask_gradients(self) -> None:
        """As of `NewWeights`."""
        if self._followed is not None:
            self._followed.mask_gradients()

    def let_go(self) -> None:
        """Take all hooks off."""
        if self._followed is not None:
            self._followed.detach()
        self._followed = None


def _remove(handles: list[RemovableHandle]) -> None:
    for handle in handles:
        handle.remove()
    handles.clear()
