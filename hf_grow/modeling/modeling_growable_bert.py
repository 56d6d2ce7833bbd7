"""Growable BERT, as an encoder or a decoder, with or without cross-attention."""

from collections.abc import Callable
from typing import Any

import torch
from torch import nn
from transformers import EncoderDecoderCache
from transformers.models.bert import modeling_bert as stock
from transformers.models.bert.configuration_bert import BertConfig

from .growable_attention import AttentionDims, GrowableAttention, Layout, attend
from .growable_model import COMMON_FILES, GrowableConfig, GrowableModel


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

    def refresh_sizes(self) -> None:
        super().refresh_sizes()
        self.num_attention_heads, self.attention_head_size = self.n_heads, self.query_key_dim
        self.all_head_size = self.n_heads * self.value_dim

    def _states(self, role: str, hidden_states: torch.Tensor) -> torch.Tensor:
        """Queries, keys or values of these states."""
        return self.extend(role, self.split_heads(role, getattr(self, role)(hidden_states)), hidden_states)

    def _attend(
        self, query: torch.Tensor, key: torch.Tensor, value: torch.Tensor, attention_mask: Any, **kwargs: Any
    ) -> tuple[torch.Tensor, torch.Tensor | None]:
        dropout = self.dropout.p if self.training else 0.0
        eager = stock.eager_attention_forward
        output, weights = attend(
            self, eager, query, key, value, attention_mask, dropout=dropout, scaling=self.scaling, **kwargs
        )
        own, contribution = self.split_output(output)
        return own if contribution is None else torch.cat((own, contribution.to(own.dtype)), dim=-1), weights


class GrowableBertSelfAttention(_GrowableBertBase, stock.BertSelfAttention):
    def forward(
        self,
        hidden_states: torch.Tensor,
        attention_mask: torch.Tensor | None = None,
        past_key_values: Any = None,
        **kwargs: Any,
    ) -> tuple[torch.Tensor, torch.Tensor | None]:
        query, key, value = (self._states(role, hidden_states) for role in ("query", "key", "value"))
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
        query = self._states("query", hidden_states)
        cache = past_key_values
        if cache is not None and cache.is_updated.get(self.layer_idx):
            layer = cache.cross_attention_cache.layers[self.layer_idx]
            key, value = layer.keys, layer.values
        else:
            key, value = (self._states(role, encoder_hidden_states) for role in ("key", "value"))
            if cache is not None:
                key, value = cache.cross_attention_cache.update(key, value, self.layer_idx)
                cache.is_updated[self.layer_idx] = True
        return self._attend(query, key, value, attention_mask, **kwargs)


class GrowableBertSelfOutput(stock.BertSelfOutput):
    def forward(self, hidden_states: torch.Tensor, input_tensor: torch.Tensor) -> torch.Tensor:
        # What attached growth adds to the output of the projection comes behind what the projection reads.
        own, contribution = hidden_states.tensor_split((self.dense.in_features,), dim=-1)
        projected = self.dense(own)
        if contribution.shape[-1]:
            projected = projected + contribution
        return self.LayerNorm(self.dropout(projected) + input_tensor)


class GrowableBert(GrowableModel):
    config_class = GrowableBertConfig
    stock_config_class = BertConfig
    attention_classes = {
        stock.BertSelfAttention: GrowableBertSelfAttention,
        stock.BertCrossAttention: GrowableBertCrossAttention,
    }
    output_classes = {stock.BertSelfOutput: GrowableBertSelfOutput}
    code_files = (*COMMON_FILES, "modeling_growable_bert.py")


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
