"""What stands in for an attention kernel for a while: a watch on the scores, or weights tried beside the model's own.

An observer is installed on an attention module, sees what enters its projections, and leaves no trace when removed.
"""

import weakref
from collections.abc import Callable
from contextlib import ExitStack
from dataclasses import dataclass
from functools import partial
from typing import Any

import torch
from torch import Tensor, nn
from torch.nn import functional as F

from hf_grow.modeling.growable_attention import AttentionSite
from hf_grow.running.batches import Batch


@dataclass(frozen=True)
class Extra:
    """Weights for an attention module to compute with beside its own, shaped as in `structure`.

    query, key            more columns for every head
    value, output         more value columns for every head
    copies                whole heads more that attend like these key heads, with their queries and keys
    head_query, head_key  then whole heads with queries and keys of their own; one key head counts as one, with the
                          query heads it serves
    head_value, …_output  the value and output side of all these heads
    """

    query: Tensor | None = None
    key: Tensor | None = None
    value: Tensor | None = None
    output: Tensor | None = None
    head_query: Tensor | None = None
    head_key: Tensor | None = None
    head_value: Tensor | None = None
    head_output: Tensor | None = None
    copies: tuple[int, ...] = ()


@dataclass(frozen=True)
class _Kept:
    """States as a projection takes them, made from what entered it, which is known by a weak reference."""

    entered: weakref.ref[Tensor]
    has_bias: bool
    states: Tensor

    def serves(self, entering: Tensor, has_bias: bool) -> bool:
        """Whether another projection takes the very same."""
        return self.entered() is entering and self.has_bias == has_bias


class Observer:
    """Watches what enters the query, key and value projections of one attention module."""

    def __init__(self, site: AttentionSite) -> None:
        self.site = site
        self.inputs: dict[str, Tensor] = {}
        # The batch that is going through the model.
        self.batch: Batch = {}
        self._kept: _Kept | None = None
        # What was added to the block's output, made by the kernel and used after the output projection.
        self.contribution: Tensor | None = None

    def leaves(self) -> dict[str, Tensor]:
        """The tensors whose gradients are wanted, by name."""
        return {}

    def install(self, stack: ExitStack) -> None:
        """Be called by the attention module until the stack unwinds."""
        for projection, roles in self.site.projections():
            if roles == ("output",):
                stack.callback(projection.register_forward_hook(self._add_contribution).remove)
            else:
                keep: Callable = partial(self._keep_inputs, roles)
                stack.callback(projection.register_forward_pre_hook(keep).remove)
        if type(self).__call__ is not Observer.__call__:
            self.site.attention.observer = self
            stack.callback(delattr, self.site.attention, "observer")

    def _keep_inputs(self, roles: tuple[str, ...], module: nn.Module, args: tuple[Tensor, ...]) -> None:
        """Projections that read the same states share one copy of them."""
        has_bias = getattr(module, "bias", None) is not None
        if self._kept is None or not self._kept.serves(args[0], has_bias):
            # A weak reference, as the states hold on to the graph that made them.
            self._kept = _Kept(weakref.ref(args[0]), has_bias, with_bias(args[0].detach(), has_bias))
        self.inputs.update(dict.fromkeys(roles, self._kept.states))

    def _add_contribution(self, module: nn.Module, args: tuple[Tensor, ...], output: Tensor) -> Tensor:
        contribution, self.contribution = self.contribution, None
        return output if contribution is None else output + contribution.to(output.dtype)

    def __call__(self, kernel: Any, query: Tensor, key: Tensor, value: Tensor, *args: Any, **kwargs: Any) -> Any:
        """Stand in for the kernel; here, just call it."""
        return kernel(query, key, value, *args, **kwargs)


class ExactObserver(Observer):
    """Materialises the scores and keeps a handle on their gradient and on that of the block's output."""

    def __init__(self, site: AttentionSite) -> None:
        super().__init__(site)
        # Zeros that were added to the scores and to the block's output: None before a pass, and once forgotten.
        self.scores: Tensor | None = None
        self.block: Tensor | None = None
        # How the heads attend, and how a head without scores would: (batch, heads or 1, queries, keys).
        self.weights: Tensor | None = None
        self.uniform: Tensor | None = None

    def leaves(self) -> dict[str, Tensor]:
        """The zeros that were added to the scores and to the block's output."""
        assert self.scores is not None and self.block is not None
        return {"scores": self.scores, "block": self.block}

    def patterns(self) -> Tensor:
        """How each head attends, and last the uniform pattern: (batch, heads + 1, queries, keys)."""
        assert self.weights is not None and self.uniform is not None
        return torch.cat((self.weights, self.uniform.to(self.weights)), dim=1)

    def forget(self) -> None:
        """Let go of what is quadratic in the tokens."""
        self.scores = self.block = self.weights = self.uniform = None

    def _add_contribution(self, module: nn.Module, args: tuple[Tensor, ...], output: Tensor) -> Tensor:
        self.block = torch.zeros_like(output, requires_grad=True)
        return output + self.block

    def __call__(self, kernel: Any, query: Tensor, key: Tensor, value: Tensor, *args: Any, **kwargs: Any) -> Any:
        """Plain attention, with a zero added to the scores whose gradient is theirs."""
        mask = args[0] if args else kwargs.get("attention_mask")
        group = query.shape[1] // key.shape[1]
        key, value = key.repeat_interleave(group, dim=1), value.repeat_interleave(group, dim=1)
        scores = query @ key.mT * kwargs["scaling"]
        self.scores = torch.zeros_like(scores, requires_grad=True)
        scores = scores + self.scores
        nothing = torch.zeros_like(scores[:, :1]).detach()
        if mask is not None:
            scores, nothing = scores + mask, nothing + mask
        weights = scores.softmax(-1, dtype=torch.promote_types(scores.dtype, torch.float32)).to(value.dtype)
        self.weights, self.uniform = weights.detach(), nothing.softmax(-1)
        return (weights @ value).transpose(1, 2), weights


class Attachment(Observer):
    """Extra weights that the model computes with while attached, through its own kernel; its own stay untouched."""

    def __init__(self, site: AttentionSite, extra: Extra) -> None:
        super().__init__(site)
        self.extra = extra
        # What went through each of the extra weights "output" and "head_output": (batch, tokens, heads, columns).
        self.read: dict[str, Tensor] = {}

    def leaves(self) -> dict[str, Tensor]:
        """Those of the extra weights that want a gradient."""
        weights = {name: weight for name, weight in vars(self.extra).items() if isinstance(weight, Tensor)}
        return {name: weight for name, weight in weights.items() if weight.requires_grad}

    def __call__(self, kernel: Any, query: Tensor, key: Tensor, value: Tensor, *args: Any, **kwargs: Any) -> Any:
        """The model's own kernel with more columns and heads; what they add goes to the block's output."""
        extra, heads, width = self.extra, query.shape[1], value.shape[-1]
        query = self._more_heads("query", self._more_columns(query, "query"), heads // key.shape[1])
        key = self._more_heads("key", self._more_columns(key, "key"), 1)
        value = join_heads(self._more_columns(value, "value"), self._project("value", extra.head_value))
        output, weights = kernel(query, key, value, *args, **kwargs)
        self.read = {}
        if extra.output is not None:
            self.read["output"] = output[:, :, :heads, width : width + extra.output.shape[1]]
        if extra.head_output is not None:
            more, columns = extra.head_output.shape[:2]
            self.read["head_output"] = output[:, :, heads : heads + more, :columns]
        if self.read:
            parts = [_through(read, getattr(extra, name)) for name, read in self.read.items()]
            self.contribution = sum(parts[1:], start=parts[0])
        own = output[:, :, :heads, :width]
        return own, weights if weights is None else weights[:, :heads]

    def _more_columns(self, own: Tensor, role: str) -> Tensor:
        columns = self._project(role, getattr(self.extra, role))
        return own if columns is None else torch.cat((own, columns.to(own.dtype)), dim=-1)

    def _more_heads(self, role: str, own: Tensor, group: int) -> Tensor:
        """The own heads, copies of some of them, then those with weights of their own."""
        if self.extra.copies:
            copied = (own[:, index * group : (index + 1) * group] for index in self.extra.copies)
            own = torch.cat((own, *copied), dim=1)
        return join_heads(own, self._project(role, getattr(self.extra, f"head_{role}")))

    def _project(self, role: str, weight: Tensor | None) -> Tensor | None:
        """The states of a role through extra weights, where there are any."""
        return None if weight is None else project(self.inputs[role], weight)


def project(states: Tensor, weight: Tensor) -> Tensor:
    """(batch, tokens, inputs) through (heads, inputs, columns): (batch, heads, tokens, columns)."""
    heads, _, columns = weight.shape
    flat = states @ weight.transpose(0, 1).flatten(1).to(states)
    return flat.unflatten(-1, (heads, columns)).transpose(1, 2)


def join_heads(own: Tensor, heads: Tensor | None) -> Tensor:
    """More heads behind the own ones; the narrower are filled with zeros."""
    if heads is None:
        return own
    width = max(own.shape[-1], heads.shape[-1])
    own, heads = (F.pad(states, (0, width - states.shape[-1])) for states in (own, heads.to(own.dtype)))
    return torch.cat((own, heads), dim=1)


def _through(read: Tensor, output: Tensor) -> Tensor:
    """(batch, tokens, heads, columns) through output rows (heads, columns, outputs)."""
    return read.flatten(2) @ output.flatten(0, 1).to(read)


def with_bias(inputs: Tensor, has_bias: bool) -> Tensor:
    """(batch, tokens, inputs), with a last input of ones where the projection has a bias."""
    return torch.cat((inputs, torch.ones_like(inputs[..., :1])), dim=-1) if has_bias else inputs
