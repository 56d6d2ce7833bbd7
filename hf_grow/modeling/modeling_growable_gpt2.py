"""Growable GPT-2, with or without cross-attention."""

from typing import Any

import torch
from transformers import EncoderDecoderCache
from transformers.models.gpt2 import modeling_gpt2 as stock
from transformers.models.gpt2.configuration_gpt2 import GPT2Config

from .growable_attention import AttentionDims, GrowableAttention, Layout, attend
from .growable_model import COMMON_FILES, GrowableConfig, GrowableModel


class GrowableGPT2Config(GrowableConfig, GPT2Config):
    model_type = "growable_gpt2"
    hf_grow: dict | None = None


def _upcast_eager(
    attention: Any, query: torch.Tensor, key: torch.Tensor, value: torch.Tensor, attention_mask: Any, **kwargs: Any
) -> tuple[torch.Tensor, torch.Tensor]:
    """The stock eager kernel of models with `reorder_and_upcast_attn`, called like the others."""
    return attention._upcast_and_reordered_attn(query, key, value, attention_mask)


class GrowableGPT2Attention(GrowableAttention, stock.GPT2Attention):
    layout = Layout(inputs={"c_attn": ("query", "key", "value")}, output="c_proj")

    def stock_dims(self) -> AttentionDims:
        return AttentionDims(self.num_heads, self.num_heads, self.head_dim, self.head_dim, self.scaling)

    def refresh_sizes(self) -> None:
        super().refresh_sizes()
        self.num_heads, self.head_dim = self.n_heads, self.query_key_dim
        own = self._projection_dims
        self.split_size = [own.heads(role) * own.size(role) for role in self.layout.inputs["c_attn"]]

    def forward(
        self,
        hidden_states: torch.Tensor,
        past_key_values: Any = None,
        attention_mask: torch.Tensor | None = None,
        output_attentions: bool | None = False,
        **kwargs: Any,
    ) -> tuple[torch.Tensor, torch.Tensor | None]:
        query, key, value = self.c_attn(hidden_states).split(self.split_size, dim=2)
        key, value = self._states("key", key, hidden_states), self._states("value", value, hidden_states)
        if past_key_values is not None:
            cache = past_key_values
            if isinstance(cache, EncoderDecoderCache):
                cache = cache.self_attention_cache
            key, value = cache.update(key, value, self.layer_idx)
        query = self._states("query", query, hidden_states)
        return self._attend(query, key, value, attention_mask, **kwargs)

    def _states(self, role: str, projected: torch.Tensor, hidden_states: Any) -> torch.Tensor:
        return self.extend(role, self.split_heads(role, projected), hidden_states)

    def _attend(
        self, query: torch.Tensor, key: torch.Tensor, value: torch.Tensor, attention_mask: Any, **kwargs: Any
    ) -> tuple[torch.Tensor, torch.Tensor | None]:
        kwargs["dropout"] = self.attn_dropout.p if self.training else 0.0
        kwargs["scaling"] = self.scaling
        eager = _upcast_eager if self.reorder_and_upcast_attn else stock.eager_attention_forward
        output, weights = attend(self, eager, query, key, value, attention_mask, **kwargs)
        return self.resid_dropout(self.project_output(self.c_proj, output)), weights


class GrowableGPT2CrossAttention(GrowableGPT2Attention):
    layout = Layout(inputs={"q_attn": ("query",), "c_attn": ("key", "value")}, output="c_proj")
    is_cross = True

    def forward(  # type: ignore[override]
        self,
        hidden_states: torch.Tensor,
        past_key_values: Any = None,
        attention_mask: torch.Tensor | None = None,
        encoder_hidden_states: torch.Tensor | None = None,
        encoder_attention_mask: torch.Tensor | None = None,
        output_attentions: bool | None = False,
        **kwargs: Any,
    ) -> tuple[torch.Tensor, torch.Tensor | None]:
        query = self._states("query", self.q_attn(hidden_states), hidden_states)
        # Keys and values of the encoder's states are computed once per generation.
        caching = isinstance(past_key_values, EncoderDecoderCache)
        if caching and past_key_values.is_updated.get(self.layer_idx):
            layer = past_key_values.cross_attention_cache.layers[self.layer_idx]
            key, value = layer.keys, layer.values
        else:
            key, value = self.c_attn(encoder_hidden_states).split(self.split_size, dim=2)
            key = self._states("key", key, encoder_hidden_states)
            value = self._states("value", value, encoder_hidden_states)
            if caching:
                key, value = past_key_values.cross_attention_cache.update(key, value, self.layer_idx)
                past_key_values.is_updated[self.layer_idx] = True
        return self._attend(query, key, value, encoder_attention_mask, **kwargs)


class GrowableGPT2(GrowableModel):
    config_class = GrowableGPT2Config
    stock_config_class = GPT2Config
    attention_classes = {stock.GPT2Attention: GrowableGPT2Attention}
    code_files = (*COMMON_FILES, "modeling_growable_gpt2.py")

    @classmethod
    def attention_class(cls, module: Any) -> Any:
        growable = super().attention_class(module)
        return GrowableGPT2CrossAttention if growable and module.is_cross_attention else growable


class GrowableGPT2Model(GrowableGPT2, stock.GPT2Model):
    auto_classes = ("AutoModel",)


class GrowableGPT2ForCausalLM(GrowableGPT2, stock.GPT2LMHeadModel):
    auto_classes = ("AutoModelForCausalLM", "AutoModelForPreTraining")


class GrowableGPT2DoubleHeadsModel(GrowableGPT2, stock.GPT2DoubleHeadsModel):
    auto_classes = ("AutoModelForMultipleChoice",)


class GrowableGPT2ForSequenceClassification(GrowableGPT2, stock.GPT2ForSequenceClassification):
    auto_classes = ("AutoModelForSequenceClassification",)


class GrowableGPT2ForTokenClassification(GrowableGPT2, stock.GPT2ForTokenClassification):
    auto_classes = ("AutoModelForTokenClassification",)


class GrowableGPT2ForQuestionAnswering(GrowableGPT2, stock.GPT2ForQuestionAnswering):
    auto_classes = ("AutoModelForQuestionAnswering",)
