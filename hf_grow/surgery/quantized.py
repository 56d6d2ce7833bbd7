"""Quantised projections: their weights as the numbers that are computed with."""

from typing import Any

import torch
from peft.utils.integrations import dequantize_module_weight
from torch import Tensor, nn
from transformers.pytorch_utils import Conv1D

FLOATS = (torch.float16, torch.bfloat16, torch.float32, torch.float64)


def is_plain(projection: Any) -> bool:
    """Whether a projection is an ordinary one whose weights can take new entries."""
    weight = getattr(projection, "weight", None)
    return type(projection) in (nn.Linear, Conv1D) and type(weight) is nn.Parameter and weight.dtype in FLOATS


def values(module: Any, name: str) -> Tensor:
    """A parameter of a module as plain numbers, also where it is packed."""
    parameter = getattr(module, name)
    if type(parameter) is nn.Parameter:
        return parameter.detach()
    form = type(parameter).__name__
    if form == "Int8Params":
        # PEFT's own function would take the scales off the module.
        scales = module.state.SCB if parameter.SCB is None else parameter.SCB
        return parameter.detach().float() * scales[:, None] / 127
    if form == "Params4bit":
        return dequantize_module_weight(module).detach()
    return parameter.dequantize().detach() if hasattr(parameter, "dequantize") else parameter.detach()
