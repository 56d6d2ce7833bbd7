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
from hf_grow.running.batches import Batch, batch_size
from hf_grow.running.observe import Attachment, Extra, Observer
from hf_grow.running.passes import Passes, token_mask
from hf_grow.surgery.place import input_sizes


@dataclass(frozen=True)
class Grams:
    """X_qᵀX_q (query inputs, query inputs) and X_kᵀX_k (key inputs, key inputs), over tokens that are not padding."""

    query: Tensor
    key: Tensor

    def plus(self, other: "Grams") -> "Grams":
        """The sum of both."""
        return Grams(self.query + other.query, self.key + other.key)

    @property
    def finite(self) -> bool:
        """Whether all entries are."""
        return bool(torch.isfinite(self.query).all()) and bool(torch.isfinite(self.key).all())


def collect_grams(passes: Passes, sites: Sequence[AttentionSite], batches: Sequence[Batch]) -> list[Grams]:
    """The grams of every attention module per sequence, by forward passes alone."""
    observers = [Observer(site) for site in sites]
    sums = [_zero_grams(site) for site in sites]
    sequences = 0
    with closing(passes.watch(batches, observers, "grams")) as stream:
        for batch in stream:
            new = [_grams(observer, batch) for observer in observers]
            # What is not finite is counted and judged when gradients are taken.
            if all(grams.finite for grams in new):
                sums = [old.plus(grams) for old, grams in zip(sums, new, strict=True)]
                sequences += batch_size(batch)
    totals = [Grams(**passes.reduce_named(vars(grams))) for grams in sums]
    (total,) = passes.reduce([torch.tensor(float(sequences), dtype=torch.float64)])
    count = max(float(total), 1.0)
    return [Grams(grams.query / count, grams.key / count) for grams in totals]


def _zero_grams(site: AttentionSite) -> Grams:
    sizes, device = input_sizes(site), next(site.projections())[0].weight.device
    dtype = linalg.working_dtype(device)
    query, key = (torch.zeros(sizes[role], sizes[role], dtype=dtype, device=device) for role in ("query", "key"))
    return Grams(query, key)


def _grams(observer: Observer, batch: Batch) -> Grams:
    query = _gram(observer, batch, "query")
    shared = observer.site.attention_type == "self" and observer.inputs["key"] is observer.inputs["query"]
    return Grams(query, query if shared else _gram(observer, batch, "key"))


def _gram(observer: Observer, batch: Batch, role: str) -> Tensor:
    states = observer.inputs[role]
    states = states.to(torch.promote_types(states.dtype, torch.float32))
    real = (states * token_mask(batch, observer, role)).flatten(0, 1)
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
    other = "query" if side == "key" else "key"
    if new_heads is None:
        answer = other
        attachments = [_column_probe(site, probe, side, other) for site, probe in zip(sites, probes, strict=True)]
    else:
        answer = f"head_{other}"
        attachments = [
            _head_probe(site, probe, side, other, head)
            for site, probe, head in zip(sites, probes, new_heads, strict=True)
        ]
    means = _mean_products(passes, attachments, batches, "score gradients")
    return [mean.gradients[answer] / site.attention.scaling for mean, site in zip(means, sites, strict=True)]


def _column_probe(site: AttentionSite, probe: Tensor, side: str, other: str) -> Attachment:
    """Probe columns for all heads on one side, and zeros on the other."""
    zeros = probe.new_zeros(site.attention.dims.heads(other), input_sizes(site)[other], probe.shape[-1])
    columns: dict[str, Any] = {side: probe, other: zeros.requires_grad_(True)}
    return Attachment(site, Extra(**columns))


def _head_probe(site: AttentionSite, probe: Tensor, side: str, other: str, head: NewHead) -> Attachment:
    """A new head, passive, with probe columns on one side of its scores and zeros on the other."""
    heads = head.output.shape[0] if other == "query" else 1
    zeros = probe.new_zeros(heads, input_sizes(site)[other], probe.shape[-1]).requires_grad_(True)
    scores: dict[str, Any] = {f"head_{side}": probe, f"head_{other}": zeros}
    return Attachment(site, Extra(**scores, head_value=head.value, head_output=head.output), passive=True)


@dataclass(frozen=True)
class _Products:
    """For one attachment: gradients by the names of its leaves, and grams of what was read, by those of its outputs.

    Sums over batches, or means.
    """

    gradients: dict[str, Tensor]
    grams: dict[str, Tensor]

    def plus(self, other: "_Products") -> "_Products":
        """The sum of both, as precise as this one."""
        return _Products(_sum(self.gradients, other.gradients), _sum(self.grams, other.grams))


def _sum(first: dict[str, Tensor], second: dict[str, Tensor]) -> dict[str, Tensor]:
    return {name: part + second[name].to(part.dtype) for name, part in first.items()}


def _mean_products(
    passes: Passes, attachments: Sequence[Attachment], batches: Sequence[Batch], what: str, grams: bool = False
) -> list[_Products]:
    """The gradients of each attachment's leaves for the mean loss; with `grams` also what its heads read."""
    sums = [_zero_products(attachment, grams) for attachment in attachments]
    weight, sequences = 0.0, 0
    with closing(passes.gradients(batches, attachments, what=what)) as stream:
        for new in stream:
            weight, sequences = weight + new.weight, sequences + batch_size(new.batch)
            for index, (attachment, gradients) in enumerate(zip(attachments, new.by_observer, strict=True)):
                read = _read_grams(attachment, new.batch) if grams else {}
                sums[index] = sums[index].plus(_Products(gradients, read))
    totals = [_Products(passes.reduce_named(part.gradients), passes.reduce_named(part.grams)) for part in sums]
    (counts,) = passes.reduce([torch.tensor([weight, float(sequences)], dtype=torch.float64)])
    total_weight, total_sequences = (max(count, 1.0) for count in counts.tolist())
    return [
        _Products(
            {name: gradient / total_weight for name, gradient in total.gradients.items()},
            {name: gram / total_sequences for name, gram in total.grams.items()},
        )
        for total in totals
    ]


def _zero_products(attachment: Attachment, grams: bool) -> _Products:
    extra = attachment.extra
    outputs = {"output": extra.output, "head_output": extra.head_output} if grams else {}
    gradients = {name: torch.zeros_like(leaf, requires_grad=False) for name, leaf in attachment.leaves().items()}
    zero_grams = {
        name: output.new_zeros(output.shape[0], output.shape[1], output.shape[1]).detach()
        for name, output in outputs.items()
        if output is not None
    }
    return _Products(_working(gradients), _working(zero_grams))


def _working(parts: dict[str, Tensor]) -> dict[str, Tensor]:
    return {name: part.to(linalg.working_dtype(part.device)) for name, part in parts.items()}


def _read_grams(attachment: Attachment, batch: Batch) -> dict[str, Tensor]:
    """The gram of what each head read at tokens that are not padding, (heads, k, k)."""
    mask = token_mask(batch, attachment, "query")[..., None]
    grams = {}
    for name, read in attachment.read.items():
        real = read.detach().to(torch.promote_types(read.dtype, torch.float32)) * mask
        grams[name] = torch.einsum("bthi,bthj->hij", real, real)
    return grams


@dataclass(frozen=True)
class OutputRows:
    """Output rows Ψ for the patterns of the present heads (heads, k, outputs), and for the uniform one (1, k, …)."""

    present: Tensor
    uniform: Tensor


def driving_inputs(
    passes: Passes, sites: Sequence[AttentionSite], batches: Sequence[Batch], outputs: Sequence[OutputRows]
) -> list[Tensor]:
    """RΨ for output rows Ψ, (key heads + 1, value inputs, k); the last is the uniform pattern's."""
    attachments = []
    for site, rows in zip(sites, outputs, strict=True):
        inputs, width = input_sizes(site)["value"], rows.present.shape[1]
        zeros = rows.present.new_zeros(site.attention.n_kv_heads, inputs, width).requires_grad_(True)
        uniform_zeros = rows.present.new_zeros(1, inputs, width).requires_grad_(True)
        attachments.append(_circuit_probe(site, zeros, rows.present, uniform_zeros, rows.uniform))
    means = _mean_products(passes, attachments, batches, "value gradients")
    return [torch.cat((mean.gradients["value"], mean.gradients["head_value"])) for mean in means]


@dataclass(frozen=True)
class PatternProducts:
    """For one pattern or several: ΩᵀR (patterns, k, outputs), and Ωᵀ(A₀X)ᵀ(A₀X)Ω (patterns, k, k) where wanted."""

    gradient: Tensor
    gram: Tensor | None


@dataclass(frozen=True)
class OutputProducts:
    """Products with value columns Ω, for the patterns of the present heads and for the uniform one."""

    present: PatternProducts
    uniform: PatternProducts


def output_products(
    passes: Passes,
    sites: Sequence[AttentionSite],
    batches: Sequence[Batch],
    values: Sequence[Tensor],
    grams: bool = False,
) -> list[OutputProducts]:
    """ΩᵀR for value columns Ω (key heads + 1, value inputs, k), the last for the uniform pattern; `grams` if wanted."""
    attachments = []
    for site, value in zip(sites, values, strict=True):
        outputs, width = input_sizes(site)["output"], value.shape[-1]
        zeros = value.new_zeros(site.attention.n_heads, width, outputs).requires_grad_(True)
        uniform_zeros = value.new_zeros(1, width, outputs).requires_grad_(True)
        attachments.append(_circuit_probe(site, value[:-1], zeros, value[-1:], uniform_zeros))
    means = _mean_products(passes, attachments, batches, "output gradients", grams)
    return [
        OutputProducts(
            PatternProducts(mean.gradients["output"], mean.grams.get("output")),
            PatternProducts(mean.gradients["head_output"], mean.grams.get("head_output")),
        )
        for mean in means
    ]


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
