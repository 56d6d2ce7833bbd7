"""Growable BERT, as an encoder or a decoder, with or without cross-attention."""

from collections.abc import Callable
from typing import Any

import torch
from torch import nn
from transformers import EncoderDecoderCache
from transformers.models.bert import modeling_bert as stock
from transformers.models.bert.configuration_bert import BertConfig

from .growable_attention import AttentionDims, GrowableAttention, Layout, attend
from .growable_model import GrowableConfig, GrowableModel


class GrowableBertConfig(GrowableConfig, BertConfig):
    model_type = "growable_bert"
    hf_grow: dict | None = None


class _GrowableBertBase(GrowableAttention):
    """What self- and cross-attention share; the output projection is in the parent module."""

    layout = Layout(
        inputs={"query": ("query",), "key": ("key",), "value": ("value",)},
        output=".output.dense",
    )
    num_attention_heads: int
    attention_head_size: int
    layer_idx: int
    training: bool
    dropout: nn.Dropout
    query: Callable
    key: Callable
    value: Callable

    def stock_dims(self) -> AttentionDims:
        heads, size = self.num_attention_heads, self.attention_head_size
        return AttentionDims(heads, heads, size, size, self.scaling)

    def set_dims(self, dims: AttentionDims) -> None:
        super().set_dims(dims)
        self.num_attention_heads, self.attention_head_size = self.n_heads, self.query_key_dim
        self.all_head_size = self.n_heads * self.value_dim

    def _queries(self, states: torch.Tensor) -> torch.Tensor:
        return self.query(states).view(*states.shape[:-1], -1, self.query_key_dim).transpose(1, 2)

    def _keys_and_values(self, states: torch.Tensor) -> tuple[torch.Tensor, torch.Tensor]:
        key = self.key(states).view(*states.shape[:-1], -1, self.query_key_dim).transpose(1, 2)
        value = self.value(states).view(*states.shape[:-1], -1, self.value_dim).transpose(1, 2)
        return key, value

    def _attend(
        self, query: torch.Tensor, key: torch.Tensor, value: torch.Tensor, attention_mask: Any, **kwargs: Any
    ) -> tuple[torch.Tensor, torch.Tensor | None]:
        dropout = self.dropout.p if self.training else 0.0
        eager = stock.eager_attention_forward
        output, weights = attend(
            self, eager, query, key, value, attention_mask, dropout=dropout, scaling=self.scaling, **kwargs
        )
        return output.reshape(*output.shape[:-2], -1).contiguous(), weights


class GrowableBertSelfAttention(_GrowableBertBase, stock.BertSelfAttention):
    def forward(
        self,
        hidden_states: torch.Tensor,
        attention_mask: torch.Tensor | None = None,
        past_key_values: Any = None,
        **kwargs: Any,
    ) -> tuple[torch.Tensor, torch.Tensor | None]:
        query = self._queries(hidden_states)
        key, value = self._keys_and_values(hidden_states)
        if past_key_values is not None:
            cache = past_key_values
            if isinstance(cache, EncoderDecoderCache):
                cache = cache.self_attention_cache
            key, value = cache.update(key, value, self.layer_idx)
        return self._attend(query, key, value, attention_mask, **kwargs)


class GrowableBertCrossAttention(_GrowableBertBase, stock.BertCrossAttention):
    is_cross = True

    def forward(
        self,
        hidden_states: torch.Tensor,
        encoder_hidden_states: Any = None,
        attention_mask: torch.Tensor | None = None,
        past_key_values: Any = None,
        **kwargs: Any,
    ) -> tuple[torch.Tensor, torch.Tensor | None]:
        query = self._queries(hidden_states)
        cache = past_key_values
        if cache is not None and cache.is_updated.get(self.layer_idx):
            layer = cache.cross_attention_cache.layers[self.layer_idx]
            key, value = layer.keys, layer.values
        else:
            key, value = self._keys_and_values(encoder_hidden_states)
            if cache is not None:
                key, value = cache.cross_attention_cache.update(key, value, self.layer_idx)
                cache.is_updated[self.layer_idx] = True
        return self._attend(query, key, value, attention_mask, **kwargs)


class GrowableBert(GrowableModel):
    config_class = GrowableBertConfig
    stock_config_class = BertConfig
    attention_classes = {
        stock.BertSelfAttention: GrowableBertSelfAttention,
        stock.BertCrossAttention: GrowableBertCrossAttention,
    }
    code_files = ("growable_attention.py", "growable_model.py", "modeling_growable_bert.py")


class GrowableBertModel(GrowableBert, stock.BertModel):
    auto_classes = ("AutoModel", "AutoModelForTextEncoding")


class GrowableBertForPreTraining(GrowableBert, stock.BertForPreTraining):
    auto_classes = ("AutoModelForPreTraining",)


class GrowableBertForCausalLM(GrowableBert, stock.BertLMHeadModel):
    auto_classes = ("AutoModelForCausalLM",)


class GrowableBertForMaskedLM(GrowableBert, stock.BertForMaskedLM):
    auto_classes = ("AutoModelForMaskedLM",)


class GrowableBertForNextSentencePrediction(GrowableBert, stock.BertForNextSentencePrediction):
    auto_classes = ("AutoModelForNextSentencePrediction",)


class GrowableBertForSequenceClassification(GrowableBert, stock.BertForSequenceClassification):
    auto_classes = ("AutoModelForSequenceClassification",)


class GrowableBertForMultipleChoice(GrowableBert, stock.BertForMultipleChoice):
    auto_classes = ("AutoModelForMultipleChoice",)


class GrowableBertForTokenClassification(GrowableBert, stock.BertForTokenClassification):
    auto_classes = ("AutoModelForTokenClassification",)


class GrowableBertForQuestionAnswering(GrowableBert, stock.BertForQuestionAnswering):
    auto_classes = ("AutoModelForQuestionAnswering",)
