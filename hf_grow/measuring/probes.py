"""Collection by probing: products with the gradients through extra columns on the model's own kernel.

No score is ever held, so memory is linear in the number of tokens. A probe whose other side is zero changes no output,
and the gradient of that zero side is a product with the wanted statistic: s·TΩ, s·TᵀΨ, ΩᵀR or RΨ. So probes of all
kinds and of both sides stand in the model together, and one backward pass answers them all.
"""

from collections.abc import Callable, Sequence
from contextlib import closing
from dataclasses import dataclass
from functools import partial
from typing import Any

import torch
from torch import Tensor

from hf_grow import linalg
from hf_grow.modeling.growable_attention import AttentionSite
from hf_grow.running.batches import Batch, batch_size
from hf_grow.running.observe import Observer, join_heads, project
from hf_grow.running.passes import Passes, token_mask
from hf_grow.surgery.place import input_sizes

GRAM_ROLES = ("query", "key")
# What the gradient of the block's output answers, in this order.
HEARD = ("value", "output")
SCORE_ANSWERS = ("key", "query", "present_query", "present_key")


@dataclass(frozen=True)
class NewHead:
    """A head that is not there yet: value (1, inputs, columns) and output (heads of a group, columns, outputs)."""

    value: Tensor
    output: Tensor


@dataclass(frozen=True)
class Question:
    """What is asked of one attention module in a pass over the data.

    key      Ω (key heads, key inputs, k): TΩ
    query    Ψ (heads, query inputs, k): TᵀΨ, summed over the heads of a group
    head     asks these two of the scores of this head, whose pattern is uniform, instead of the present ones
    present  T W_K and TᵀW_Q for the present columns, as the kernel sees them
    value    Ω (key heads + 1, value inputs, k): ΩᵀR and ΩᵀNΩ, the last for the uniform pattern
    metric   NΩ for these, too
    output   Ψ (heads + 1, k, outputs): RΨ, the last for the uniform pattern
    grams    those of the inputs
    """

    key: Tensor | None = None
    query: Tensor | None = None
    head: NewHead | None = None
    present: bool = False
    value: Tensor | None = None
    metric: bool = False
    output: Tensor | None = None
    grams: bool = False


@dataclass(frozen=True)
class Grams:
    """X_qᵀX_q (query inputs, query inputs) and X_kᵀX_k (key inputs, key inputs), over tokens that are not padding."""

    query: Tensor
    key: Tensor


@dataclass(frozen=True)
class Answers:
    """What one attention module answered, of the mean loss; None where nothing was asked.

    key            TΩ (heads, query inputs, k)
    query          TᵀΨ (key heads, key inputs, k)
    present_query  T W_K (heads, query inputs, columns); present_key TᵀW_Q (key heads, key inputs, columns)
    value          ΩᵀR (heads + 1, k, outputs)
    output         RΨ (key heads + 1, value inputs, k)
    read           ΩᵀNΩ per sequence (heads + 1, k, k)
    metric         NΩ per sequence (key heads + 1, value inputs, k), summed over the heads of a group
    grams          those of the inputs, per sequence
    """

    key: Tensor | None = None
    query: Tensor | None = None
    present_query: Tensor | None = None
    present_key: Tensor | None = None
    value: Tensor | None = None
    output: Tensor | None = None
    read: Tensor | None = None
    metric: Tensor | None = None
    grams: Grams | None = None


class _Tapped(torch.autograd.Function):
    """States as they are, whose gradient also goes to weights of zero that would lead into them."""

    @staticmethod
    def forward(ctx: Any, own: Tensor, inputs: Tensor, weight: Tensor) -> Tensor:
        ctx.save_for_backward(inputs)
        return own.view_as(own)

    @staticmethod
    def backward(ctx: Any, gradient: Tensor) -> tuple[Tensor, None, Tensor]:
        return gradient, None, _through_inputs(ctx.saved_tensors[0], gradient)


class _Passive(torch.autograd.Function):
    """A block's output as it is, whose gradient also goes to what output rows (heads, k, outputs) would add to it.

    That is read (batch, tokens, heads, k).
    """

    @staticmethod
    def forward(ctx: Any, output: Tensor, read: Tensor, rows: Tensor) -> Tensor:
        ctx.save_for_backward(rows)
        return output.view_as(output)

    @staticmethod
    def backward(ctx: Any, gradient: Tensor) -> tuple[Tensor, Tensor, None]:
        return gradient, _before_rows(gradient, ctx.saved_tensors[0]), None


class _Heard(torch.autograd.Function):
    """A block's output as it is, whose gradient a probe hears: it says what the given zeros get of it."""

    @staticmethod
    def forward(ctx: Any, output: Tensor, probe: "Probe", *zeros: Tensor) -> Tensor:
        ctx.probe = probe
        return output.view_as(output)

    @staticmethod
    def backward(ctx: Any, gradient: Tensor) -> tuple[Tensor | None, ...]:
        return gradient, None, *ctx.probe.hear(gradient)


def _before_rows(gradient: Tensor, rows: Tensor) -> Tensor:
    """EΨᵀ (batch, tokens, heads, k) for output rows Ψ (heads, k, outputs)."""
    return (gradient @ rows.flatten(0, 1).mT.to(gradient)).unflatten(-1, rows.shape[:2])


def _through_inputs(inputs: Tensor, states: Tensor) -> Tensor:
    """Xᵀ states for inputs X (batch, tokens, inputs) and states (batch, heads, tokens, k): (heads, inputs, k)."""
    fine = torch.promote_types(inputs.dtype, torch.float32)
    flat = states.transpose(1, 2).flatten(0, 1).flatten(1).to(fine)
    product = inputs.flatten(0, 1).mT.to(fine) @ flat
    return product.unflatten(1, (states.shape[1], states.shape[3])).transpose(0, 1)


def site_device(site: AttentionSite) -> torch.device:
    """Where an attention module computes."""
    return next(site.projections())[0].weight.device


def single_or_finer(site: AttentionSite) -> torch.dtype:
    """The precision of an attention module's weights, or single precision where they are coarser or packed."""
    dtype = next(site.projections())[0].weight.dtype
    return torch.promote_types(dtype, torch.float32) if dtype.is_floating_point else torch.float32


class Probe(Observer):
    """Asks a question: extra columns in the kernel, whose other side is zero; no output changes."""

    def __init__(self, site: AttentionSite, question: Question) -> None:
        super().__init__(site)
        self.question = question
        self.dtype = single_or_finer(site)
        self.zeros = {name: zero.requires_grad_(True) for name, zero in self._zeros().items()}
        # What was seen of a batch beside gradients, by the names of answers.
        self.seen: dict[str, Tensor] = {}
        # What is to happen to the block's output once it is there, and how the heads attend until its gradient is.
        self._waiting: Callable[[Tensor], Tensor] | None = None
        self._attend: Callable[[Tensor], Tensor] | None = None

    def _zeros(self) -> dict[str, Tensor]:
        """The zero sides, by the names of their answers."""
        asked, sizes, dims = self.question, input_sizes(self.site), self.site.attention.dims
        groups, group = dims.num_key_value_heads, dims.num_attention_heads // dims.num_key_value_heads
        asked_heads = groups if asked.head is None else 1
        shapes: dict[str, tuple[int, ...]] = {}
        if asked.key is not None:
            shapes["key"] = (asked_heads * group, sizes["query"], asked.key.shape[-1])
        if asked.query is not None:
            shapes["query"] = (asked_heads, sizes["key"], asked.query.shape[-1])
        if asked.present:
            shapes["present_query"] = (dims.num_attention_heads, sizes["query"], dims.qk_head_dim)
            shapes["present_key"] = (groups, sizes["key"], dims.qk_head_dim)
        if asked.value is not None:
            shapes["value"] = (dims.num_attention_heads + 1, asked.value.shape[-1], sizes["output"])
        if asked.output is not None:
            shapes["output"] = (groups + 1, sizes["value"], asked.output.shape[1])
        # They say where gradients go and have the shape of these; their values are never read.
        nothing = torch.zeros(1, dtype=self.dtype, device=site_device(self.site))
        return {name: nothing.expand(shape) for name, shape in shapes.items()}

    def leaves(self) -> dict[str, Tensor]:
        """The zero sides."""
        return self.zeros

    def __call__(self, kernel: Any, query: Tensor, key: Tensor, value: Tensor, *args: Any, **kwargs: Any) -> Any:
        """The model's own kernel with more columns and, for the scores of a new head, one key head more."""
        asked, heads, width = self.question, query.shape[1], value.shape[-1]
        self.seen = {}
        if asked.present:
            query = _Tapped.apply(query, self.inputs["query"], self.zeros["present_query"])
            key = _Tapped.apply(key, self.inputs["key"], self.zeros["present_key"])
        queries, keys = self._score_columns("query", query), self._score_columns("key", key)
        if asked.head is not None:
            new, rows = project(self.inputs["value"], asked.head.value), asked.head.output
            output, weights = kernel(
                join_heads(query, queries), join_heads(key, keys), join_heads(value, new), *args, **kwargs
            )
            read = output[:, :, heads:, : new.shape[-1]]
            self._waiting = lambda block: _Passive.apply(block, read, rows)
        else:
            columns = query.shape[-1]
            query, key = _wider(query, queries), _wider(key, keys)
            output, weights = kernel(query, key, value, *args, **kwargs)
            if any(name in self.zeros for name in HEARD):
                # The same patterns without the probes; views of what the kernel keeps anyway.
                patterns = query.detach()[..., :columns], key.detach()[..., :columns]
                self._attend = partial(_attend, kernel, *patterns, args, kwargs)
        own = output[:, :, :heads, :width]
        return own, weights if weights is None else weights[:, :heads]

    def _score_columns(self, role: str, own: Tensor) -> Tensor:
        """More columns of queries or keys, (batch, heads, tokens, …): probes of this side, zeros against the other's.

        Zeros stand before the probes among the queries, and behind them among the keys, so that each meets the other.
        """
        other = "key" if role == "query" else "query"
        parts = [self._empty(own, role, other)] if other in self.zeros else []
        if (asked := getattr(self.question, role)) is not None:
            parts.append(project(self.inputs[role], asked).to(own.dtype))
        return torch.cat(parts[:: -1 if role == "key" else 1], dim=-1) if parts else own[..., :0]

    def _empty(self, own: Tensor, role: str, name: str) -> Tensor:
        """What weights of zero make of the inputs: a place for their gradient."""
        heads, _, columns = self.zeros[name].shape
        empty = own.new_zeros(own.shape[0], heads, own.shape[2], columns)
        return _Tapped.apply(empty, self.inputs[role], self.zeros[name])

    def _add_contribution(self, module: Any, args: tuple[Tensor, ...], output: Tensor) -> Tensor:
        waiting, self._waiting = self._waiting, None
        if waiting is not None:
            return waiting(output)
        heard = [self.zeros[name] for name in HEARD if name in self.zeros]
        return _Heard.apply(output, self, *heard) if heard else output

    def hear(self, gradient: Tensor) -> list[Tensor]:
        """From the gradient E of the block's output, those of output rows and value columns of zero.

        The patterns are computed with again, which holds what is needed for one layer at a time only.
        """
        asked, inputs, attend = self.question, self.inputs["value"], self._attend
        assert attend is not None
        self._attend = None
        sides: dict[str, Tensor] = {}
        if asked.value is not None:
            sides["value"] = project(inputs, asked.value).to(gradient.dtype)
        if asked.output is not None:
            heads, _, columns = self.zeros["output"].shape
            sides["output"] = gradient.new_zeros(inputs.shape[0], heads, inputs.shape[1], columns)
        with torch.enable_grad():
            values = torch.cat(list(sides.values()), dim=-1).requires_grad_(asked.metric or asked.output is not None)
            read = attend(values)
        found, wanted = [], []
        if asked.value is not None:
            heard = read.detach()[..., : asked.value.shape[-1]]
            found.append(_into_rows(heard, gradient))
            real = heard * token_mask(self.batch, self, "query")[..., None].to(heard.dtype)
            fine = real.to(torch.promote_types(real.dtype, torch.float32))
            self.seen["read"] = torch.einsum("bthi,bthj->hij", fine, fine)
            wanted.append(real)
        if asked.output is not None:
            wanted.append(_before_rows(gradient, asked.output))
        if values.requires_grad:
            (slopes,) = torch.autograd.grad(read, values, torch.cat(wanted, dim=-1))
            products = dict(zip(sides, slopes.split([side.shape[-1] for side in sides.values()], dim=-1), strict=True))
            if asked.metric:
                self.seen["metric"] = _through_inputs(inputs, products["value"])
            if asked.output is not None:
                found.append(_through_inputs(inputs, products["output"]))
        return found

    def no_sums(self) -> dict[str, Tensor]:
        """Zeros for all that is added up, by name."""
        shapes = {name: tuple(zeros.shape) for name, zeros in self.zeros.items()}
        sizes = input_sizes(self.site)
        if self.question.value is not None:
            count = self.question.value.shape[-1]
            shapes["read"] = (self.zeros["value"].shape[0], count, count)
            if self.question.metric:
                shapes["metric"] = tuple(self.question.value.shape)
        if self.question.grams:
            shapes |= {f"{role}_gram": (sizes[role], sizes[role]) for role in GRAM_ROLES}
        device = site_device(self.site)
        # Grams are inverted, and there are few of them.
        fine = linalg.working_dtype(device)
        return {
            name: torch.zeros(shape, dtype=fine if name.endswith("gram") else self.dtype, device=device)
            for name, shape in shapes.items()
        }

    def add_to(self, sums: dict[str, Tensor], batch: Batch, gradients: dict[str, Tensor], weight: float) -> None:
        """Add what was seen of a batch, and its gradients times their weight."""
        for name, gradient in gradients.items():
            sums[name].add_(gradient, alpha=weight)
        for name, part in (self.seen | self._grams(batch)).items():
            sums[name].add_(part)

    def _grams(self, batch: Batch) -> dict[str, Tensor]:
        if not self.question.grams:
            return {}
        query = self._gram("query", batch)
        shared = self.site.attention_type == "self" and self.inputs["key"] is self.inputs["query"]
        return {"query_gram": query, "key_gram": query if shared else self._gram("key", batch)}

    def _gram(self, role: str, batch: Batch) -> Tensor:
        states = self.inputs[role]
        fine = states.to(torch.promote_types(states.dtype, torch.float32))
        real = (fine * token_mask(batch, self, role)).flatten(0, 1)
        return real.mT @ real


def _attend(kernel: Any, query: Tensor, key: Tensor, args: tuple, kwargs: dict[str, Any], values: Tensor) -> Tensor:
    """What the heads, and last a uniform one, read of values (batch, key heads + 1, tokens, k).

    (batch, tokens, heads + 1, k)
    """
    heads, group = query.shape[1], query.shape[1] // key.shape[1]
    query = join_heads(query, query.new_zeros(query.shape[0], group, query.shape[2], 1))
    key = join_heads(key, key.new_zeros(key.shape[0], 1, key.shape[2], 1))
    output, _ = kernel(query, key, values, *args, **kwargs)
    # Of the last group one head is enough.
    return output[:, :, : heads + 1]


def _into_rows(heard: Tensor, gradient: Tensor) -> Tensor:
    """The gradient of output rows (heads, k, outputs) through which heard (batch, tokens, heads, k) goes."""
    fine = torch.promote_types(heard.dtype, torch.float32)
    flat = heard.flatten(0, 1).flatten(1).to(fine)
    return (flat.mT @ gradient.flatten(0, 1).to(fine)).unflatten(0, heard.shape[2:])


def _wider(own: Tensor, columns: Tensor) -> Tensor:
    return torch.cat((own, columns), dim=-1) if columns.shape[-1] else own


def ask(
    passes: Passes,
    sites: Sequence[AttentionSite],
    batches: Sequence[Batch],
    questions: Sequence[Question],
    what: str = "",
) -> list[Answers]:
    """What every attention module answers in one pass over the batches of all processes."""
    probes = [Probe(site, question) for site, question in zip(sites, questions, strict=True)]
    sums = [probe.no_sums() for probe in probes]
    counts = torch.zeros(2, dtype=torch.float64)
    with closing(passes.gradients(batches, probes, what=what)) as stream:
        for new in stream:
            counts += torch.tensor([new.weight, batch_size(new.batch)], dtype=torch.float64)
            for probe, total, gradients in zip(probes, sums, new.by_observer, strict=True):
                probe.add_to(total, new.batch, gradients, new.weight)
            del new, gradients
    (counts,) = passes.reduce([counts])
    weight, sequences = (max(count, 1.0) for count in counts.tolist())
    answers = []
    # Sums are let go one by one.
    for probe in probes:
        totals = passes.reduce_named(sums.pop(0))
        answers.append(_answers(probe, totals, weight, sequences))
    return answers


def _answers(probe: Probe, sums: dict[str, Tensor], weight: float, sequences: float) -> Answers:
    """Means: of gradients over what the loss is a mean of, of all else over sequences.

    Answers are kept as precise as the model computed them, so that those of all passes fit in memory.
    """
    grams = None
    if probe.question.grams:
        query, key = ((sums.pop(f"{role}_gram") / sequences).to(probe.dtype) for role in GRAM_ROLES)
        grams = Grams(query, query if query.shape == key.shape and torch.equal(query, key) else key)
    # The kernel multiplies the scores with the scaling.
    counts = {name: weight * (probe.site.attention.scaling if name in SCORE_ANSWERS else 1.0) for name in probe.zeros}
    means = {name: (part / counts.get(name, sequences)).to(probe.dtype) for name, part in sums.items()}
    return Answers(**means, grams=grams)
