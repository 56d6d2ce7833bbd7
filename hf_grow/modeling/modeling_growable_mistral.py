"""Growable Mistral."""

from transformers.models.mistral import modeling_mistral as stock
from transformers.models.mistral.configuration_mistral import MistralConfig

from .growable_model import COMMON_FILES, GrowableConfig, GrowableModel
from .growable_rotary import GrowableRotaryAttention


class GrowableMistralConfig(GrowableConfig, MistralConfig):
    model_type = "growable_mistral"
    hf_grow: dict | None = None


class GrowableMistralAttention(GrowableRotaryAttention, stock.MistralAttention):
    rotate = staticmethod(stock.apply_rotary_pos_emb)
    eager = staticmethod(stock.eager_attention_forward)

    def window(self) -> dict[str, int | None]:
        return {"sliding_window": self.config.sliding_window}


class GrowableMistral(GrowableModel):
    config_class = GrowableMistralConfig
    stock_config_class = MistralConfig
    attention_classes = {stock.MistralAttention: GrowableMistralAttention}
    code_files = (*COMMON_FILES, "growable_rotary.py", "modeling_growable_mistral.py")


class GrowableMistralModel(GrowableMistral, stock.MistralModel):
    auto_classes = ("AutoModel",)


class GrowableMistralForCausalLM(GrowableMistral, stock.MistralForCausalLM):
    auto_classes = ("AutoModelForCausalLM",)


class GrowableMistralForSequenceClassification(GrowableMistral, stock.MistralForSequenceClassification):
    auto_classes = ("AutoModelForSequenceClassification",)


class GrowableMistralForTokenClassification(GrowableMistral, stock.MistralForTokenClassification):
    auto_classes = ("AutoModelForTokenClassification",)


class GrowableMistralForQuestionAnswering(GrowableMistral, stock.MistralForQuestionAnswering):
    auto_classes = ("AutoModelForQuestionAnswering",)
