"""Collection by probing: products with the gradients through extra columns on the model's own kernel.

No score is ever held, so memory is linear in the number of tokens. A probe whose other side is zero changes no output,
and the gradient of that zero side is a product with the wanted statistic: s·TΩ, s·TᵀΨ, ΩᵀR or RΨ.
"""

from collections.abc import Sequence
from contextlib import closing
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor

from hf_grow import linalg
from hf_grow.modeling.growable_attention import AttentionSite
from hf_grow.observe import Attachment, Extra, Observer, input_sizes
from hf_grow.passes import Batch, Passes, batch_size, token_mask


def collect_grams(
    passes: Passes, sites: Sequence[AttentionSite], batches: Sequence[Batch]
) -> list[tuple[Tensor, Tensor]]:
    """The query and key gram of every attention module per sequence, by forward passes alone."""
    observers = [Observer(site) for site in sites]
    sums = [part for site in sites for part in _zero_grams(site)]
    sequences = 0
    with closing(passes.watch(batches, observers, "grams")) as stream:
        for batch, size in stream:
            new = [gram for observer in observers for gram in _grams(observer, batch)]
            # What is not finite is counted and judged when gradients are taken.
            if all(bool(torch.isfinite(gram).all()) for gram in new):
                sums = [old + gram for old, gram in zip(sums, new, strict=True)]
                sequences += size
    *sums, count = passes.reduce([*sums, torch.tensor(float(sequences), dtype=torch.float64)])
    means = [part / max(float(count), 1.0) for part in sums]
    return list(zip(means[::2], means[1::2], strict=True))


def _zero_grams(site: AttentionSite) -> list[Tensor]:
    sizes, device = input_sizes(site), next(site.projections())[0].weight.device
    dtype = linalg.working_dtype(device)
    return [torch.zeros(sizes[role], sizes[role], dtype=dtype, device=device) for role in ("query", "key")]


def _grams(observer: Observer, batch: Batch) -> list[Tensor]:
    query = _gram(observer, batch, "query")
    shared = observer.site.kind == "self" and observer.inputs["key"] is observer.inputs["query"]
    return [query, query if shared else _gram(observer, batch, "key")]


def _gram(observer: Observer, batch: Batch, role: str) -> Tensor:
    states = observer.inputs[role]
    states = states.to(torch.promote_types(states.dtype, torch.float32))
    kind = "cross" if role == "key" and observer.site.kind == "cross" else role
    real = (states * token_mask(batch, kind, states)).flatten(0, 1)
    return (real.mT @ real).to(linalg.working_dtype(real.device))


@dataclass(frozen=True)
class NewHead:
    """A head that is not there yet: value (1, inputs, columns) and output (heads of a group, columns, outputs)."""

    value: Tensor
    output: Tensor


def score_products(
    passes: Passes,
    sites: Sequence[AttentionSite],
    batches: Sequence[Batch],
    probes: Sequence[Tensor],
    side: str,
    new_heads: Sequence[NewHead] | None = None,
) -> list[Tensor]:
    """T Ω for key probes Ω (key heads, key inputs, k), or Tᵀ Ψ summed over each group for query probes Ψ (heads, …, k).

    Of the mean loss, for every attention module; with `new_heads` for the uniform scores of these instead.
    """
    attachments = []
    for index, (site, probe) in enumerate(zip(sites, probes, strict=True)):
        other = "query" if side == "key" else "key"
        head = new_heads[index] if new_heads is not None else None
        zeros = _zero_side(site, other, probe, head)
        blocks: dict[str, Any] = {side: probe, other: zeros}
        if head is None:
            attachments.append(Attachment(site, Extra(**blocks)))
        else:
            blocks = {
                f"head_{side}": probe,
                f"head_{other}": zeros,
                "head_value": head.value,
                "head_output": head.output,
            }
            attachments.append(Attachment(site, Extra(**blocks), passive=True))
    products = _summed(passes, attachments, batches, "score gradients")
    return [product / site.attention.scaling for (product,), site in zip(products, sites, strict=True)]


def _zero_side(site: AttentionSite, role: str, probe: Tensor, head: NewHead | None) -> Tensor:
    heads = site.attention.dims.heads(role)
    if head is not None:
        heads = head.output.shape[0] if role == "query" else 1
    return probe.new_zeros(heads, input_sizes(site)[role], probe.shape[-1]).requires_grad_(True)


def _summed(
    passes: Passes, attachments: Sequence[Attachment], batches: Sequence[Batch], what: str, grams: bool = False
) -> list[list[Tensor]]:
    """The gradients of each attachment's leaves for the mean loss; with `grams` also those of what each head read."""
    sums = [_zero_sums(attachment, grams) for attachment in attachments]
    weights, sequences = 0.0, 0
    with closing(passes.gradients(batches, attachments, what=what)) as stream:
        for batch, weight, gradients in stream:
            weights, sequences = weights + weight, sequences + batch_size(batch)
            for old, found, attachment in zip(sums, gradients, attachments, strict=True):
                new = [*found, *(_read_grams(attachment, batch) if grams else ())]
                old[:] = [first + second.to(first.dtype) for first, second in zip(old, new, strict=True)]
    counts = torch.tensor([weights, float(sequences)], dtype=torch.float64)
    *flat, counts = passes.reduce([*(part for found in sums for part in found), counts])
    weights, sequences = (max(count, 1.0) for count in counts.tolist())
    means, parts = [], iter(flat)
    for attachment, found in zip(attachments, sums, strict=True):
        leaves = len(attachment.leaves())
        means.append([next(parts) / (weights if index < leaves else sequences) for index in range(len(found))])
    return means


def _zero_sums(attachment: Attachment, grams: bool) -> list[Tensor]:
    zeros = [torch.zeros_like(leaf, requires_grad=False) for leaf in attachment.leaves()]
    if grams:
        for output in (attachment.extra.output, attachment.extra.head_output):
            if output is not None:
                zeros.append(output.new_zeros(output.shape[0], output.shape[1], output.shape[1]).detach())
    return [part.to(linalg.working_dtype(part.device)) for part in zeros]


def driving_inputs(
    passes: Passes, sites: Sequence[AttentionSite], batches: Sequence[Batch], outputs: Sequence[tuple[Tensor, Tensor]]
) -> list[Tensor]:
    """RΨ for output rows Ψ, (key heads + 1, value inputs, k); the last is the uniform pattern's."""
    attachments = []
    for site, (output, uniform) in zip(sites, outputs, strict=True):
        inputs, width = input_sizes(site)["value"], output.shape[1]
        zeros = output.new_zeros(site.attention.n_kv_heads, inputs, width).requires_grad_(True)
        uniform_zeros = output.new_zeros(1, inputs, width).requires_grad_(True)
        attachments.append(_circuit_probe(site, zeros, output, uniform_zeros, uniform))
    return [torch.cat(pair) for pair in _summed(passes, attachments, batches, "value gradients")]


def output_products(
    passes: Passes,
    sites: Sequence[AttentionSite],
    batches: Sequence[Batch],
    values: Sequence[Tensor],
    grams: bool = False,
) -> list[list[Tensor]]:
    """ΩᵀR for value columns Ω (key heads + 1, value inputs, k): (heads, k, outputs), and (1, …) of the uniform pattern.

    With `grams` also Ωᵀ(A₀X)ᵀ(A₀X)Ω, (heads, k, k) and (1, k, k).
    """
    attachments = []
    for site, value in zip(sites, values, strict=True):
        outputs, width = input_sizes(site)["output"], value.shape[-1]
        zeros = value.new_zeros(site.attention.n_heads, width, outputs).requires_grad_(True)
        uniform_zeros = value.new_zeros(1, width, outputs).requires_grad_(True)
        attachments.append(_circuit_probe(site, value[:-1], zeros, value[-1:], uniform_zeros))
    return _summed(passes, attachments, batches, "output gradients", grams)


def _circuit_probe(
    site: AttentionSite, value: Tensor, output: Tensor, uniform_value: Tensor, uniform_output: Tensor
) -> Attachment:
    """More value columns for all heads, and one head without scores, which attends uniformly."""
    sizes, dims = input_sizes(site), site.attention.dims
    group = dims.num_attention_heads // dims.num_key_value_heads
    return Attachment(
        site,
        Extra(
            value=value,
            output=output,
            head_query=value.new_zeros(group, sizes["query"], 1),
            head_key=value.new_zeros(1, sizes["key"], 1),
            head_value=uniform_value,
            head_output=uniform_output,
        ),
    )


def _read_grams(attachment: Attachment, batch: Batch) -> list[Tensor]:
    """The gram of what each head read at tokens that are not padding, (heads, k, k)."""
    states = attachment.inputs["query"]
    mask = token_mask(batch, "query", states)[..., None]
    found = []
    for read in attachment.read:
        real = read.detach().to(torch.promote_types(read.dtype, torch.float32)) * mask
        found.append(torch.einsum("bthi,bthj->hij", real, real))
    return found
