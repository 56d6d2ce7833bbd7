"""Growable Llama."""

from transformers.models.llama import modeling_llama as stock
from transformers.models.llama.configuration_llama import LlamaConfig

from .growable_model import COMMON_FILES, GrowableConfig, GrowableModel
from .growable_rotary import GrowableRotaryAttention


class GrowableLlamaConfig(GrowableConfig, LlamaConfig):
    model_type = "growable_llama"
    hf_grow: dict | None = None


class GrowableLlamaAttention(GrowableRotaryAttention, stock.LlamaAttention):
    rotate = staticmethod(stock.apply_rotary_pos_emb)
    eager = staticmethod(stock.eager_attention_forward)


class GrowableLlama(GrowableModel):
    config_class = GrowableLlamaConfig
    stock_config_class = LlamaConfig
    attention_classes = {stock.LlamaAttention: GrowableLlamaAttention}
    code_files = (*COMMON_FILES, "growable_rotary.py", "modeling_growable_llama.py")


class GrowableLlamaModel(GrowableLlama, stock.LlamaModel):
    auto_classes = ("AutoModel",)


class GrowableLlamaForCausalLM(GrowableLlama, stock.LlamaForCausalLM):
    auto_classes = ("AutoModelForCausalLM",)


class GrowableLlamaForSequenceClassification(GrowableLlama, stock.LlamaForSequenceClassification):
    auto_classes = ("AutoModelForSequenceClassification",)


class GrowableLlamaForTokenClassification(GrowableLlama, stock.LlamaForTokenClassification):
    auto_classes = ("AutoModelForTokenClassification",)


class GrowableLlamaForQuestionAnswering(GrowableLlama, stock.LlamaForQuestionAnswering):
    auto_classes = ("AutoModelForQuestionAnswering",)
