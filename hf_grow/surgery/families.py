"""The registry of model families: each is a class in `hf_grow.modeling`, listed here once."""

from transformers import AutoConfig

from hf_grow.errors import HfGrowError
from hf_grow.modeling.growable_model import GrowableModel
from hf_grow.modeling.modeling_growable_bert import GrowableBert
from hf_grow.modeling.modeling_growable_gpt2 import GrowableGPT2
from hf_grow.modeling.modeling_growable_llama import GrowableLlama
from hf_grow.modeling.modeling_growable_mistral import GrowableMistral
from hf_grow.modeling.modeling_growable_qwen2 import GrowableQwen2

FAMILIES: dict[str, type[GrowableModel]] = {
    family.stock_config_class.model_type: family
    for family in (GrowableBert, GrowableGPT2, GrowableLlama, GrowableMistral, GrowableQwen2)
}

for _family in FAMILIES.values():
    AutoConfig.register(_family.config_class.model_type, _family.config_class, exist_ok=True)


def family_of(model_type: str) -> type[GrowableModel]:
    """The family of a stock or growable model_type."""
    family = FAMILIES.get(model_type.removeprefix("growable_"))
    if family is None:
        raise HfGrowError(
            f"No attention family for model_type '{model_type}'. Known: {', '.join(sorted(FAMILIES))}. "
            f"To add it, see 'Add a model family' in CONTRIBUTING.md."
        )
    return family
