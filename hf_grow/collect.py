"""Collection: run batches through a growable model and sum up where the loss wants other attention scores.

Collecting leaves the model as it was found: parameters, gradients, buffers, hooks, modes and random numbers.
"""

import logging
from collections.abc import Generator, Iterable, Iterator, Mapping, Sequence
from contextlib import ExitStack, closing, contextmanager
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


class Observer:
    """Watches what enters the query and key projections of one attention module, and stands in for its kernel."""

    def __init__(self, site: AttentionSite) -> None:
        self.site = site
        self.query_inputs: Any = None
        self.key_inputs: Any = None

    def install(self, stack: ExitStack) -> None:
        """Be called by the attention module until the stack unwinds."""
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


class ExactObserver(Observer):
    """Materialises the scores and keeps a handle on their gradient."""

    leaf: Any = None

    def __call__(
        self, kernel: Any, query: Tensor, key: Tensor, value: Tensor, attention_mask: Tensor | None, **kwargs: Any
    ) -> tuple[Tensor, Tensor]:
        """Plain attention, with a zero added to the scores whose gradient is theirs."""
        group = query.shape[1] // key.shape[1]
        key, value = key.repeat_interleave(group, dim=1), value.repeat_interleave(group, dim=1)
        scores = query @ key.mT * kwargs["scaling"]
        self.leaf = torch.zeros_like(scores, requires_grad=True)
        scores = scores + self.leaf
        if attention_mask is not None:
            scores = scores + attention_mask
        weights = scores.softmax(-1, dtype=torch.float32).to(value.dtype)
        return (weights @ value).transpose(1, 2), weights


class ProbeObserver(Observer):
    """Appends probe columns, zero on one side: the outputs stay, and that side's gradient is s·TΩ or s·TᵀΨ."""

    def __init__(self, site: AttentionSite, probes: Tensor, side: str) -> None:
        super().__init__(site)
        dims = site.attention.dims
        other = "query" if side == "key" else "key"
        self.leaf: Any = probes.new_zeros(dims.heads(other), input_sizes(site)[other], probes.shape[-1])
        self.leaf.requires_grad_(True)
        self.probes = {side: probes, other: self.leaf}

    def __call__(self, kernel: Any, query: Tensor, key: Tensor, value: Tensor, *args: Any, **kwargs: Any) -> Any:
        """The model's own kernel with more query/key columns."""
        more_queries = torch.einsum("bti,hik->bhtk", self.query_inputs, self.probes["query"].to(query.dtype))
        more_keys = torch.einsum("bti,hik->bhtk", self.key_inputs, self.probes["key"].to(key.dtype))
        return kernel(torch.cat((query, more_queries), -1), torch.cat((key, more_keys), -1), value, *args, **kwargs)


def with_bias(projection: Any, inputs: Tensor) -> Tensor:
    """(batch, tokens, inputs), with a last input of ones where the projection has a bias."""
    if getattr(projection, "bias", None) is None:
        return inputs
    return torch.cat((inputs, torch.ones_like(inputs[..., :1])), dim=-1)


def collect_exact(model: Any, batches: Iterable[Mapping[str, Any]]) -> list[AttentionStatistics]:
    """The exact statistics of every attention module over the batches; sequences go to the two halves in turn.

    Memory is quadratic in the number of tokens: the scores of all layers are held at once.
    """
    observers = [ExactObserver(site) for site in _sites(model)]
    statistics = [_empty(observer.site) for observer in observers]
    seen = 0
    # Closing the stream restores the model at once, also when adding up fails.
    with closing(_gradients(model, batches, observers, "eager")) as stream:
        for batch, gradients in stream:
            for index, (observer, gradient) in enumerate(zip(observers, gradients, strict=True)):
                statistics[index] = _add(statistics[index], observer, gradient, batch, seen)
            seen += gradients[0].shape[0]
    return statistics


def collect_products(
    model: Any, batches: Iterable[Mapping[str, Any]], probes: Sequence[Tensor], side: str
) -> list[Tensor]:
    """T Ω for key probes Ω (key heads, key inputs, k), or Tᵀ Ψ summed over each group for query probes Ψ (heads, …, k).

    One probe for each attention module, in the order of `attention_sites`; sums over sequences, as in `AttentionSums`.
    The model's own kernel runs and no score is ever held, so memory is linear in the number of tokens.
    """
    if side not in ("query", "key"):
        raise HfGrowError(f"side must be 'query' or 'key', not {side!r}.")
    observers = [ProbeObserver(site, probe, side) for site, probe in zip(_sites(model), probes, strict=True)]
    products = [torch.zeros_like(observer.leaf) for observer in observers]
    with closing(_gradients(model, batches, observers, model.config._attn_implementation)) as stream:
        for _, gradients in stream:
            for product, observer, gradient in zip(products, observers, gradients, strict=True):
                product += gradient / observer.site.attention.scaling
    return [product.detach() for product in products]


def _sites(model: Any) -> list[AttentionSite]:
    if not isinstance(model, GrowableModel):
        raise HfGrowError(f"{type(model).__name__} is not growable yet: call hf_grow.make_growable(model) first.")
    return attention_sites(model)  # type: ignore[arg-type]


def _gradients(
    model: Any, batches: Iterable[Mapping[str, Any]], observers: Sequence[Any], implementation: str
) -> Generator[tuple[Mapping[str, Any], list[Tensor]], None, None]:
    """Each batch with the gradients of the observers' leaves; batches that are not finite are counted and skipped."""
    counts = {"batches": 0, "skipped": 0}
    with as_found(model), ExitStack() as stack:
        model.set_attn_implementation(implementation)
        for observer in observers:
            observer.install(stack)
        for batch in batches:
            counts["batches"] += 1
            gradients = _leaf_gradients(model, batch, observers)
            if gradients is None:
                counts["skipped"] += 1
            else:
                yield batch, gradients
    _check_counts(counts)


def _leaf_gradients(model: Any, batch: Mapping[str, Any], observers: Sequence[Any]) -> list[Tensor] | None:
    """∂L/∂leaf for every observer, times the number of sequences; None where it is not finite."""
    inputs = {name: value.to(model.device) if isinstance(value, Tensor) else value for name, value in batch.items()}
    with torch.enable_grad():
        loss = getattr(model(**inputs), "loss", None)
        if loss is None:
            raise HfGrowError("The model returned no loss: batches must hold labels.")
        leaves = [observer.leaf for observer in observers]
        found = torch.autograd.grad(loss, leaves, allow_unused=True)
    # The loss is a mean over the batch; sums over sequences are what adds up over batches of any size.
    sequences = observers[0].query_inputs.shape[0]
    gradients = [
        torch.zeros_like(leaf) if gradient is None else gradient * sequences
        for leaf, gradient in zip(leaves, found, strict=True)
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


def input_sizes(site: AttentionSite) -> dict[str, int]:
    """How many inputs the query, key and value projections have, a bias counted as one."""
    return {
        role: weight_rows(projection).shape[1] + (projection.bias is not None)
        for projection, roles in site.projections()
        for role in roles
    }


def _empty(site: AttentionSite) -> AttentionStatistics:
    attention, sizes = site.attention, input_sizes(site)
    device = next(site.projections())[0].weight.device
    kwargs = {"dtype": linalg.working_dtype(device), "device": device}
    zeros = AttentionSums.zeros(attention.n_heads, sizes["query"], sizes["key"], **kwargs)
    return AttentionStatistics(
        site.name, site.layer, site.kind, attention.n_kv_heads, attention.scaling, (zeros, zeros)
    )


def _add(
    statistics: AttentionStatistics, observer: ExactObserver, gradient: Tensor, batch: Mapping[str, Any], start: int
) -> AttentionStatistics:
    """The statistics with one more batch, whose first sequence is number `start`."""
    dtype = statistics.halves[0].gradient.dtype
    query_inputs, key_inputs = observer.query_inputs.to(dtype), observer.key_inputs.to(dtype)
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
