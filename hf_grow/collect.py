"""Collection: run batches through a growable model and sum up where the loss wants other attention scores.

Collecting leaves the model as it was found: parameters, gradients, buffers, hooks, modes and random numbers.
"""

import logging
from collections.abc import Iterable, Iterator, Mapping
from contextlib import ExitStack, contextmanager
from dataclasses import replace
from typing import Any

import torch
from torch import Tensor, nn

from hf_grow import linalg
from hf_grow.errors import HfGrowError
from hf_grow.modeling.growable_attention import AttentionSite, attention_sites, weight_rows
from hf_grow.modeling.growable_model import GrowableModel
from hf_grow.statistics import AttentionStatistics, AttentionSums

logger = logging.getLogger("hf_grow")


class ExactObserver:
    """Materialises the scores of one attention module and keeps a handle on their gradient."""

    def __init__(self, site: AttentionSite) -> None:
        self.site = site
        self.query_inputs: Tensor | None = None
        self.key_inputs: Tensor | None = None
        self.score_change: Tensor | None = None

    def __call__(
        self, kernel: Any, query: Tensor, key: Tensor, value: Tensor, attention_mask: Tensor | None, **kwargs: Any
    ) -> tuple[Tensor, Tensor]:
        """Plain attention, with a zero added to the scores whose gradient is theirs."""
        group = query.shape[1] // key.shape[1]
        key, value = key.repeat_interleave(group, dim=1), value.repeat_interleave(group, dim=1)
        scores = query @ key.mT * kwargs["scaling"]
        self.score_change = torch.zeros_like(scores, requires_grad=True)
        scores = scores + self.score_change
        if attention_mask is not None:
            scores = scores + attention_mask
        weights = scores.softmax(-1, dtype=torch.float32).to(value.dtype)
        return (weights @ value).transpose(1, 2), weights

    def install(self, stack: ExitStack) -> None:
        """Watch the inputs of the query and key projections and stand in for the kernel, until the stack unwinds."""
        for projection, roles in self.site.projections():
            if "query" in roles:
                stack.callback(projection.register_forward_pre_hook(self._keep_query_inputs).remove)
            if "key" in roles:
                stack.callback(projection.register_forward_pre_hook(self._keep_key_inputs).remove)
        self.site.attention.observer = self
        stack.callback(delattr, self.site.attention, "observer")

    def _keep_query_inputs(self, module: nn.Module, args: tuple[Tensor, ...]) -> None:
        self.query_inputs = with_bias(module, args[0].detach())

    def _keep_key_inputs(self, module: nn.Module, args: tuple[Tensor, ...]) -> None:
        self.key_inputs = with_bias(module, args[0].detach())


def with_bias(projection: Any, inputs: Tensor) -> Tensor:
    """(batch, tokens, inputs), with a last input of ones where the projection has a bias."""
    if getattr(projection, "bias", None) is None:
        return inputs
    return torch.cat((inputs, torch.ones_like(inputs[..., :1])), dim=-1)


def collect_exact(model: Any, batches: Iterable[Mapping[str, Any]]) -> list[AttentionStatistics]:
    """The exact statistics of every attention module over the batches; sequences go to the two halves in turn.

    Memory is quadratic in the number of tokens: the scores of all layers are held at once.
    """
    if not isinstance(model, GrowableModel):
        raise HfGrowError(f"{type(model).__name__} is not growable yet: call hf_grow.make_growable(model) first.")
    observers = [ExactObserver(site) for site in attention_sites(model)]  # type: ignore[arg-type]
    statistics = [_empty(observer.site) for observer in observers]
    counts = {"batches": 0, "skipped": 0, "sequences": 0}
    with as_found(model), ExitStack() as stack:
        model.set_attn_implementation("eager")  # type: ignore[attr-defined]
        for observer in observers:
            observer.install(stack)
        for batch in batches:
            counts["batches"] += 1
            gradients = _score_gradients(model, batch, observers)
            if gradients is None:
                counts["skipped"] += 1
                continue
            for index, (observer, gradient) in enumerate(zip(observers, gradients, strict=True)):
                statistics[index] = _add(statistics[index], observer, gradient, batch, counts["sequences"])
            counts["sequences"] += gradients[0].shape[0]
    _check_counts(counts)
    return statistics


def _score_gradients(model: Any, batch: Mapping[str, Any], observers: list[ExactObserver]) -> list[Tensor] | None:
    """G of every attention module for one batch, times its number of sequences; None where it is not finite."""
    inputs = {name: value.to(model.device) if isinstance(value, Tensor) else value for name, value in batch.items()}
    with torch.enable_grad():
        loss = getattr(model(**inputs), "loss", None)
        if loss is None:
            raise HfGrowError("The model returned no loss: batches must hold labels.")
        changes: list[Any] = [observer.score_change for observer in observers]
        found = torch.autograd.grad(loss, changes, allow_unused=True)
    # The loss is a mean over the batch; sums over sequences are what adds up over batches of any size.
    gradients = [
        torch.zeros_like(change) if gradient is None else gradient * change.shape[0]
        for change, gradient in zip(changes, found, strict=True)
    ]
    finite = bool(torch.isfinite(loss)) and all(bool(torch.isfinite(gradient).all()) for gradient in gradients)
    return gradients if finite else None


def _check_counts(counts: dict[str, int]) -> None:
    if counts["batches"] == 0:
        raise HfGrowError("There was no batch to collect statistics from.")
    if counts["skipped"] * 10 > counts["batches"]:
        raise HfGrowError(
            f"{counts['skipped']} of {counts['batches']} batches gave a loss or gradient that is not finite."
        )
    if counts["skipped"]:
        logger.warning("Skipped %(skipped)d of %(batches)d batches: loss or gradient not finite.", counts)


def _empty(site: AttentionSite) -> AttentionStatistics:
    sizes = {}
    for projection, roles in site.projections():
        for role in roles:
            sizes[role] = weight_rows(projection).shape[1] + (projection.bias is not None)
    attention = site.attention
    device = next(site.projections())[0].weight.device
    zeros = AttentionSums.zeros(
        attention.n_heads, sizes["query"], sizes["key"], dtype=linalg.working_dtype(device), device=device
    )
    return AttentionStatistics(
        site.name, site.layer, site.kind, attention.n_kv_heads, attention.scaling, (zeros, zeros)
    )


def _add(
    statistics: AttentionStatistics, observer: ExactObserver, gradient: Tensor, batch: Mapping[str, Any], start: int
) -> AttentionStatistics:
    """The statistics with one more batch, whose first sequence is number `start`."""
    dtype = statistics.halves[0].gradient.dtype
    query_inputs, key_inputs = observer.query_inputs.to(dtype), observer.key_inputs.to(dtype)  # type: ignore[union-attr]
    query_mask = token_mask(batch, "attention_mask", query_inputs)
    key_mask = token_mask(
        batch, "encoder_attention_mask" if statistics.kind == "cross" else "attention_mask", key_inputs
    )
    halves = []
    for half, sums in enumerate(statistics.halves):
        taken = slice((half - start) % 2, None, 2)
        queries, keys = query_inputs[taken], key_inputs[taken]
        real_queries, real_keys = queries * query_mask[taken], keys * key_mask[taken]
        new = AttentionSums(
            torch.einsum("bqi,bhqk,bkj->hij", queries, gradient[taken].to(dtype), keys),
            torch.einsum("bti,btj->ij", real_queries, real_queries),
            torch.einsum("bti,btj->ij", real_keys, real_keys),
            queries.shape[0],
        )
        halves.append(sums.merge(new))
    return replace(statistics, halves=(halves[0], halves[1]))


def token_mask(batch: Mapping[str, Any], name: str, inputs: Tensor) -> Tensor:
    """One for tokens and zero for padding, (batch, tokens, 1); a mask of four dimensions is read along its keys."""
    mask = batch.get(name)
    if mask is None:
        return torch.ones_like(inputs[..., :1])
    mask = mask.to(inputs.device)
    if mask.ndim == 4:
        allowed = mask if mask.dtype == torch.bool else mask >= 0
        mask = allowed.any(2).any(1)
    return mask.reshape(inputs.shape[0], -1, 1)[:, -inputs.shape[1] :].ne(0).to(inputs.dtype)


@contextmanager
def as_found(model: Any) -> Iterator[None]:
    """Evaluation mode and frozen parameters inside; everything as it was outside, also after an error."""
    training = {module: module.training for module in model.modules()}
    learning = {parameter: parameter.requires_grad for parameter in model.parameters()}
    implementation = model.config._attn_implementation
    random = torch.get_rng_state()
    try:
        model.eval()
        model.requires_grad_(False)
        yield
    finally:
        model.set_attn_implementation(implementation)
        for module, mode in training.items():
            module.training = mode
        for parameter, learns in learning.items():
            parameter.requires_grad_(learns)
        torch.set_rng_state(random)
