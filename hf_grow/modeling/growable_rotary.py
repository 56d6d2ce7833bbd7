"""Attention with rotary embeddings and grouped keys, as in Llama and its relatives."""

from collections.abc import Callable
from typing import Any, ClassVar

import torch

from .growable_attention import AttentionDims, GrowableAttention, Layout, attend


class GrowableRotaryAttention(GrowableAttention):
    """New query/key columns stand behind the rotated ones and are not rotated themselves."""

    layout = Layout(
        inputs={"q_proj": ("query",), "k_proj": ("key",), "v_proj": ("value",)},
        output="o_proj",
    )
    rotate: ClassVar[Callable]
    eager: ClassVar[Callable]
    head_dim: int
    config: Any
    layer_idx: int
    training: bool
    attention_dropout: float
    num_key_value_groups: int
    q_proj: Callable
    k_proj: Callable
    v_proj: Callable
    o_proj: Callable

    def stock_dims(self) -> AttentionDims:
        heads, kv_heads = self.config.num_attention_heads, self.config.num_key_value_heads
        return AttentionDims(heads, kv_heads, self.head_dim, self.head_dim, self.scaling)

    def set_dims(self, dims: AttentionDims) -> None:
        super().set_dims(dims)
        self.num_key_value_groups = self.n_heads // self.n_kv_heads

    @property
    def rotary_dim(self) -> int:
        return self.head_dim

    def window(self) -> dict[str, int | None]:
        """What the family passes to the attention interface beside the usual."""
        return {}

    def forward(
        self,
        hidden_states: torch.Tensor,
        position_embeddings: tuple[torch.Tensor, torch.Tensor] | None = None,
        attention_mask: torch.Tensor | None = None,
        past_key_values: Any = None,
        **kwargs: Any,
    ) -> tuple[torch.Tensor, torch.Tensor | None]:
        input_shape = hidden_states.shape[:-1]  # (batch, tokens)
        query = self.q_proj(hidden_states).view(*input_shape, -1, self.query_key_dim).transpose(1, 2)
        key = self.k_proj(hidden_states).view(*input_shape, -1, self.query_key_dim).transpose(1, 2)
        value = self.v_proj(hidden_states).view(*input_shape, -1, self.value_dim).transpose(1, 2)
        query, key = self._rotate_leading(query, key, position_embeddings)
        if past_key_values is not None:
            key, value = past_key_values.update(key, value, self.layer_idx)
        output, weights = attend(
            self,
            type(self).eager,
            query,
            key,
            value,
            attention_mask,
            dropout=self.attention_dropout if self.training else 0.0,
            scaling=self.scaling,
            **self.window(),
            **kwargs,
        )
        return self.o_proj(output.reshape(*input_shape, -1).contiguous()), weights

    def _rotate_leading(
        self, query: torch.Tensor, key: torch.Tensor, position_embeddings: Any
    ) -> tuple[torch.Tensor, torch.Tensor]:
        cos, sin = position_embeddings
        rotated = self.head_dim
        if self.query_key_dim == rotated:
            return type(self).rotate(query, key, cos, sin)
        turned_query, turned_key = type(self).rotate(query[..., :rotated], key[..., :rotated], cos, sin)
        query = torch.cat((turned_query, query[..., rotated:]), dim=-1)
        return query, torch.cat((turned_key, key[..., rotated:]), dim=-1)
