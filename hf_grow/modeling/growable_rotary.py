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

    def refresh_sizes(self) -> None:
        super().refresh_sizes()
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
        query = self.extend("query", self.split_heads("query", self.q_proj(hidden_states)), hidden_states)
        key = self.extend("key", self.split_heads("key", self.k_proj(hidden_states)), hidden_states)
        value = self.extend("value", self.split_heads("value", self.v_proj(hidden_states)), hidden_states)
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
        return self.project_output(self.o_proj, output), weights

    def _rotate_leading(
        self, query: torch.Tensor, key: torch.Tensor, position_embeddings: Any
    ) -> tuple[torch.Tensor, torch.Tensor]:
        cos, sin = position_embeddings
        rotated = self.head_dim
        if query.shape[-1] == rotated:
            return type(self).rotate(query, key, cos, sin)
        turned_query, turned_key = type(self).rotate(query[..., :rotated], key[..., :rotated], cos, sin)
        query = torch.cat((turned_query, query[..., rotated:]), dim=-1)
        return query, torch.cat((turned_key, key[..., rotated:]), dim=-1)
