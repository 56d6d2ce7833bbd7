"""What of a model learns: all of it, or growth beside a frozen base."""

from dataclasses import replace
from typing import Any

import torch
from peft import PeftModel
from transformers import PreTrainedModel

from hf_grow.errors import HfGrowError
from hf_grow.growth.config import GrowthConfig
from hf_grow.saving.beside_adapters import keep_growth
from hf_grow.surgery.base import (
    Model,
    attached_parameters,
    base_parameters,
    growth_parameters,
    has_adapters,
    has_merged_growth,
    without_adapters,
)
from hf_grow.surgery.forms import attach_growth


def freeze_base(model: Model) -> Any:
    """Let only the attached growth that is active learn, and adapters as they are; returns the same model.

    Growth beside adapters of PEFT is from now on saved with them.
    """
    if has_adapters(model) and not isinstance(model, PeftModel):
        raise HfGrowError(
            "The adapters of this model are not in a PeftModel, so growth would not be saved with them: put them in "
            "with get_peft_model."
        )
    active = set(growth_parameters(model))
    for _, parameter in (*base_parameters(model), *attached_parameters(model)):
        parameter.requires_grad_(parameter in active)
        if parameter not in active:
            # An optimizer would go on with a gradient from before.
            parameter.grad = None
    if active:
        keep_growth(model)
    return model


def freeze_growth(model: Model) -> Any:
    """Freeze the base and growth beside it, so that adapters alone learn; returns the same model."""
    for _, parameter in (*base_parameters(model), *attached_parameters(model)):
        parameter.requires_grad_(False)
    return model


def attached(growth: GrowthConfig) -> GrowthConfig:
    """Growth that learns alone, which is beside the projections."""
    if growth.attach is False:
        raise HfGrowError("train='new' lets growth beside the base learn alone, which attach=False puts into it.")
    return replace(growth, attach=growth.attach or True)


def learning_parameters(model: PreTrainedModel, train: str) -> list[torch.nn.Parameter]:
    """What the optimizer gets: all that learns. With train="new" the base is frozen and its growth is beside it."""
    if train == "new":
        let_growth_learn(model)
    learning = [parameter for parameter in model.parameters() if parameter.requires_grad]
    if not learning:
        raise HfGrowError("No parameter of the model learns: set requires_grad where training should change it.")
    return learning


def let_growth_learn(model: Any) -> None:
    """Freeze the base, so that only attached growth learns, and adapters; refused where there is no growth."""
    if not growth_parameters(model):
        raise HfGrowError("train='new' needs something new: grow the model first, or train='all'.")
    freeze_base(model)


def separate_growth(model: Any) -> None:
    """Growth that is merged into a growable model goes beside its projections, where it can learn alone."""
    inner = without_adapters(model)
    if inner.active_growth is None and has_merged_growth(inner):
        attach_growth(inner)
