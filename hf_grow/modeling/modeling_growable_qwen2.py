"""Growable Qwen2."""

from transformers.models.qwen2 import modeling_qwen2 as stock
from transformers.models.qwen2.configuration_qwen2 import Qwen2Config

from .growable_model import COMMON_FILES, GrowableConfig, GrowableModel
from .growable_rotary import GrowableRotaryAttention


class GrowableQwen2Config(GrowableConfig, Qwen2Config):
    model_type = "growable_qwen2"
    hf_grow: dict | None = None


class GrowableQwen2Attention(GrowableRotaryAttention, stock.Qwen2Attention):
    rotate = staticmethod(stock.apply_rotary_pos_emb)
    eager = staticmethod(stock.eager_attention_forward)

    def window(self) -> dict[str, int | None]:
        return {"sliding_window": self.sliding_window}


class GrowableQwen2(GrowableModel):
    config_class = GrowableQwen2Config
    stock_config_class = Qwen2Config
    attention_classes = {stock.Qwen2Attention: GrowableQwen2Attention}
    code_files = (*COMMON_FILES, "growable_rotary.py", "modeling_growable_qwen2.py")


class GrowableQwen2Model(GrowableQwen2, stock.Qwen2Model):
    auto_classes = ("AutoModel",)


class GrowableQwen2ForCausalLM(GrowableQwen2, stock.Qwen2ForCausalLM):
    auto_classes = ("AutoModelForCausalLM",)


class GrowableQwen2ForSequenceClassification(GrowableQwen2, stock.Qwen2ForSequenceClassification):
    auto_classes = ("AutoModelForSequenceClassification",)


class GrowableQwen2ForTokenClassification(GrowableQwen2, stock.Qwen2ForTokenClassification):
    auto_classes = ("AutoModelForTokenClassification",)


class GrowableQwen2ForQuestionAnswering(GrowableQwen2, stock.Qwen2ForQuestionAnswering):
    auto_classes = ("AutoModelForQuestionAnswering",)
