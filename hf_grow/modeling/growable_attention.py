"""Growable attention: its sizes, where its projections are, and the call of the attention kernel.

This file travels with every checkpoint, so it imports torch and transformers only.
"""

from collections.abc import Callable, Iterator
from dataclasses import dataclass
from functools import partial
from math import isfinite
from typing import Any, ClassVar

import torch
from torch import nn
from torch.nn import functional as F
from transformers.modeling_utils import ALL_ATTENTION_FUNCTIONS
from transformers.pytorch_utils import Conv1D

ROLES = ("query", "key", "value", "output")


@dataclass(frozen=True)
class AttentionDims:
    """The sizes of one attention module; `scaling` multiplies the scores and never follows from the sizes."""

    num_attention_heads: int
    num_key_value_heads: int
    qk_head_dim: int
    v_head_dim: int
    scaling: float

    def __post_init__(self) -> None:
        for name in ("num_attention_heads", "num_key_value_heads", "qk_head_dim", "v_head_dim"):
            size = getattr(self, name)
            if not isinstance(size, int) or isinstance(size, bool) or size < 1:
                raise ValueError(f"{name} must be a positive integer, not {size!r}.")
        if isinstance(self.scaling, bool) or not isinstance(self.scaling, (int, float)) or not isfinite(self.scaling):
            raise ValueError(f"scaling must be a finite number, not {self.scaling!r}.")
        if self.num_attention_heads % self.num_key_value_heads:
            raise ValueError(
                f"{self.num_attention_heads} query heads cannot share {self.num_key_value_heads} key heads evenly."
            )

    def heads(self, role: str) -> int:
        """How many heads the query, key, value or output projection has."""
        return self.num_attention_heads if role in ("query", "output") else self.num_key_value_heads

    def size(self, role: str) -> int:
        """The width of one head in the query, key, value or output projection."""
        return self.qk_head_dim if role in ("query", "key") else self.v_head_dim


@dataclass(frozen=True)
class Layout:
    """Where an attention module keeps its projections.

    `inputs` names each input projection and the roles fused in it, in order. Paths start at the attention
    module, or at its parent when they begin with a dot. With `per_head` a fused projection holds query, key and
    value of the first head, then of the second (GPT-NeoX); otherwise all queries come first (GPT-2).
    """

    inputs: dict[str, tuple[str, ...]]
    output: str
    per_head: bool = False


class GrowableAttention:
    """Mixin over a stock attention class: independent sizes, and growth beside its projections.

    base_dims      the sizes before any growth that was merged into them
    grown          attached growth by name, once there is some; that of `active_growth` is computed with
    score_scale    how far learnable factors of the scores are from one, (1, 1) or (heads, 1), or None
    The other sizes are those of the whole, with the growth that is active.
    """

    layout: ClassVar[Layout]
    is_cross: bool = False
    active_growth: str | None = None
    base_dims: AttentionDims
    _projection_dims: AttentionDims
    n_heads: int
    n_kv_heads: int
    query_key_dim: int
    value_dim: int
    scaling: float
    score_scale: nn.Parameter | None
    _modules: dict[str, Any]

    def stock_dims(self) -> AttentionDims:
        """The sizes the stock module was built with."""
        raise NotImplementedError

    def set_dims(self, dims: AttentionDims) -> None:
        """Take new sizes of the projections, which must be given the matching weights by the caller."""
        self._projection_dims = dims
        self.refresh_sizes()

    def refresh_sizes(self) -> None:
        """Have the sizes of the whole follow those of the projections and of the active growth."""
        dims = self._projection_dims if self.growth is None else self.growth.dims
        self.n_heads = dims.num_attention_heads
        self.n_kv_heads = dims.num_key_value_heads
        self.query_key_dim = dims.qk_head_dim
        self.value_dim = dims.v_head_dim
        self.scaling = dims.scaling

    @property
    def dims(self) -> AttentionDims:
        return AttentionDims(self.n_heads, self.n_kv_heads, self.query_key_dim, self.value_dim, self.scaling)

    @property
    def own_dims(self) -> AttentionDims:
        """The sizes of the projections themselves."""
        return self.dims if self.growth is None else self.growth.own

    @property
    def growth(self) -> Any:
        """The attached growth that is computed with, if there is any in this module."""
        return self.attached.get(self.active_growth)

    @property
    def attached(self) -> dict[str | None, Any]:
        """All growth beside the projections of this module, by name."""
        grown = self._modules.get("grown")
        return {} if grown is None else dict(grown._modules)

    @property
    def rotary_dim(self) -> int:
        """How many leading query/key columns of a head are rotated."""
        return 0

    def split_heads(self, role: str, projected: torch.Tensor) -> torch.Tensor:
        """What a projection gave, (batch, tokens, heads · width) → (batch, heads, tokens, width)."""
        return projected.view(*projected.shape[:-1], -1, self._projection_dims.size(role)).transpose(1, 2)

    def extend(self, role: str, own: torch.Tensor, states: torch.Tensor) -> torch.Tensor:
        """Queries, keys or values of the projections, with those of attached growth for the same states behind them."""
        if self.growth is not None:
            own = self.growth.extend(role, own, states)
        if role == "query" and self.score_scale is not None:
            own = scaled_queries(own, self.score_scale)
        return own

    def split_output(self, output: torch.Tensor) -> tuple[torch.Tensor, torch.Tensor | None]:
        """What the kernel gave, (batch, tokens, heads, width), as the output projection takes it.

        Beside it what attached growth adds to the projection's output, if there is any.
        """
        if self.growth is None:
            return output.reshape(*output.shape[:-2], -1).contiguous(), None
        own_dims = self._projection_dims
        own = output[..., : own_dims.num_attention_heads, : own_dims.v_head_dim]
        return own.reshape(*own.shape[:-2], -1), self.growth.contribution(output)

    def project_output(self, projection: Callable, output: torch.Tensor) -> torch.Tensor:
        """The block's output: that of the output projection and of attached growth."""
        own, contribution = self.split_output(output)
        projected = projection(own)
        return projected if contribution is None else projected + contribution.to(projected.dtype)


def scaled_queries(query: torch.Tensor, scale: torch.Tensor) -> torch.Tensor:
    """Queries (batch, heads, tokens, width) with a learnable scale in them."""
    return query * scale_factors(scale, query.shape[1]).to(query.dtype)[:, None, None]


def scale_factors(scale: torch.Tensor, heads: int) -> torch.Tensor:
    """What the scores of each head are multiplied with: one, changed by a learnable scale (1, 1) or (heads, 1).

    Heads that came later than the scale keep theirs.
    """
    changes = scale.expand(heads, 1) if scale.shape[0] == 1 else F.pad(scale, (0, 0, 0, heads - scale.shape[0]))
    return 1 + changes[:, 0]


def attend(
    attention: Any,
    eager: Callable,
    query: torch.Tensor,
    key: torch.Tensor,
    value: torch.Tensor,
    attention_mask: Any,
    **kwargs: Any,
) -> tuple[torch.Tensor, torch.Tensor | None]:
    """Call the attention kernel; q, k, v are (batch, heads, tokens, width).

    While `attention.observer` is set it is called instead, with the kernel before the other arguments.
    """
    kernel = partial(_run_kernel, attention, eager)
    observer = attention.__dict__.get("observer")
    if observer is not None:
        return observer(kernel, query, key, value, attention_mask, **kwargs)
    return kernel(query, key, value, attention_mask, **kwargs)


def _run_kernel(
    attention: Any,
    eager: Callable,
    query: torch.Tensor,
    key: torch.Tensor,
    value: torch.Tensor,
    attention_mask: Any,
    **kwargs: Any,
) -> tuple[torch.Tensor, torch.Tensor | None]:
    """Call transformers' attention interface.

    The fast kernels want one width, so the narrower side is padded with zeros: exact, as the scale is explicit.
    """
    implementation = attention.config._attn_implementation
    interface = ALL_ATTENTION_FUNCTIONS.get_interface(implementation, eager)
    missing = query.shape[-1] - value.shape[-1]
    # One new token against a long cache: padding would copy the whole cache to save nothing.
    decoding_with_sdpa = implementation == "sdpa" and query.shape[2] == 1
    if missing == 0 or implementation == "eager" or decoding_with_sdpa:
        return interface(attention, query, key, value, attention_mask, **kwargs)
    if missing > 0:
        padded_value = F.pad(value, (0, missing))
        output, weights = interface(attention, query, key, padded_value, attention_mask, **kwargs)
        return output[..., : value.shape[-1]], weights
    query, key = F.pad(query, (0, -missing)), F.pad(key, (0, -missing))
    return interface(attention, query, key, value, attention_mask, **kwargs)


@dataclass(frozen=True)
class AttentionSite:
    """One attention module, its place in the model and where its projections are."""

    name: str
    attention: Any
    parent: nn.Module
    layout: Layout

    @property
    def layer(self) -> int:
        return self.attention.layer_idx

    @property
    def growth(self) -> Any:
        """The attached growth that the module computes with, if there is any."""
        return self.attention.growth

    @property
    def attention_type(self) -> str:
        """Either "self", or "cross" where keys and values come from elsewhere."""
        return "cross" if self.attention.is_cross else "self"

    def projection(self, path: str) -> Any:
        """The projection module at a path of the layout."""
        root = self.parent if path.startswith(".") else self.attention
        return root.get_submodule(path.removeprefix("."))

    def projections(self) -> Iterator[tuple[Any, tuple[str, ...]]]:
        """Each projection with its roles, the output projection last; under an adapter, the one it adapts."""
        for path, roles in (*self.layout.inputs.items(), (self.layout.output, ("output",))):
            projection = self.projection(path)
            while hasattr(projection, "base_layer"):
                projection = projection.base_layer
            yield projection, roles


def layer_entry(name: str, layer: int, attention_type: str, dims: AttentionDims) -> dict[str, Any]:
    """The place and sizes of an attention module as summaries, plans and reports have them, ready for JSON."""
    return {
        "name": name,
        "layer": layer,
        # Its name in files since 0.1.
        "kind": attention_type,
        "n_heads": dims.num_attention_heads,
        "n_kv_heads": dims.num_key_value_heads,
        "query_key_dim": dims.qk_head_dim,
        "value_dim": dims.v_head_dim,
        "scaling": dims.scaling,
    }


def attention_sites(model: nn.Module) -> list[AttentionSite]:
    """All growable attention modules of a model, in the order of its modules."""
    return [
        AttentionSite(name, module, model.get_submodule(name.rpartition(".")[0]), module.layout)
        for name, module in model.named_modules()
        if isinstance(module, GrowableAttention)
    ]


def projection_size(projection: Any) -> tuple[int, int]:
    """How many outputs and inputs a projection has, also where its weight is packed."""
    if isinstance(projection, Conv1D):
        return projection.nf, projection.nx
    return projection.out_features, projection.in_features


def new_parameters(
    projection: Any, weight: torch.Tensor, bias: torch.Tensor | None, *, initialized: bool = True
) -> dict[str, nn.Parameter]:
    """Parameters of any size that can take the place of a Linear's or Conv1D's; `weight` is (out, in) for both."""
    parameters = {"weight": new_parameter(projection.weight, in_rows(projection, weight), initialized)}
    if bias is not None:
        parameters["bias"] = new_parameter(projection.bias, bias, initialized)
    return parameters


def install(projection: Any, parameters: dict[str, nn.Parameter]) -> None:
    """Give a projection its new parameters and tell it their sizes; nothing here can fail."""
    for name, parameter in parameters.items():
        setattr(projection, name, parameter)
    outputs, inputs = weight_rows(projection).shape
    if isinstance(projection, Conv1D):
        projection.nf, projection.nx = outputs, inputs
    else:
        projection.out_features, projection.in_features = outputs, inputs


def new_parameter(old: nn.Parameter, values: torch.Tensor, initialized: bool = True) -> nn.Parameter:
    """A parameter that replaces `old`: same dtype, device, training flag, attributes and hooks."""
    values = values.detach().to(device=old.device, dtype=old.dtype).contiguous()
    new = nn.Parameter(values, requires_grad=old.requires_grad)
    new.__dict__.update(old.__dict__)
    # The handles that users hold keep working, because they point at these very dictionaries.
    for hooks in ("_backward_hooks", "_post_accumulate_grad_hooks"):
        if getattr(old, hooks, None):
            setattr(new, hooks, getattr(old, hooks))
    if not initialized:
        new.__dict__.pop("_is_hf_initialized", None)
    return new


def weight_rows(projection: Any) -> torch.Tensor:
    """The weight as (out, in), for Linear and Conv1D alike."""
    return in_rows(projection, projection.weight)


def in_rows(projection: Any, weight: torch.Tensor) -> torch.Tensor:
    """From the order of a projection's weight to (out, in), or back: Conv1D keeps it the other way round."""
    return weight.T if isinstance(projection, Conv1D) else weight
