"""Models that FSDP2 (`fully_shard`) has spread over processes: gathered whole to grow, and spread again.

A sharded module cannot change its sizes, so gathering makes a new model, out of a copy without weights that was taken
before it was sharded. While it is whole every process holds all of it, and of the optimizer's state.
"""

import copy
from collections.abc import Callable
from typing import Any

import torch
from torch import Tensor, nn
from torch.distributed.fsdp import FSDPModule
from torch.distributed.tensor import DTensor, distribute_tensor
from transformers import PreTrainedModel

from hf_grow.surgery.optimizer_state import State, plain_optimizer, swap_parameters


def reshard(model: nn.Module) -> None:
    """Let go of whole parameters: after a pass without gradients those of the outermost module are still in place."""
    for module in model.modules():
        if isinstance(module, FSDPModule):
            module.reshard()


def whole_copy(model: PreTrainedModel, skeleton: Any) -> Any:
    """A whole model with the weights of a sharded one, on every process; `skeleton` is what `spread` returned."""
    reshard(model)
    parameters, buffers = dict(model.named_parameters()), dict(model.named_buffers())
    filled: dict[int, Any] = {}
    for name, place in skeleton.named_parameters():
        filled[id(place)] = nn.Parameter(_full(parameters[name]), requires_grad=parameters[name].requires_grad)
    for name, place in skeleton.named_buffers():
        filled[id(place)] = buffers[name].detach().clone()
    return copy.deepcopy(skeleton, filled).train(model.training)


def gather(model: PreTrainedModel, skeleton: Any, optimizer: torch.optim.Optimizer) -> Any:
    """As `whole_copy`, and the optimizer's parameters and state become the whole ones."""
    whole = whole_copy(model, skeleton)
    named = dict(whole.named_parameters())
    pairs = {parameter: named[name] for name, parameter in model.named_parameters()}
    swap_parameters(optimizer, pairs, lambda _, state: _full_state(state))
    return whole


def whole_state(optimizer: torch.optim.Optimizer) -> dict[str, Any]:
    """The state of an optimizer as torch saves it, with whole tensors."""
    saved = plain_optimizer(optimizer).state_dict()
    return {**saved, "state": {number: _full_state(state) for number, state in saved["state"].items()}}


def spread(model: PreTrainedModel, shard: Callable[[Any], Any], optimizer: torch.optim.Optimizer) -> Any:
    """Shard a whole model in place, and the optimizer's state with it; returns a copy of it as it was, without weights.

    So what is set on its modules, such as dropout or hooks, outlives being gathered.
    """
    before = dict(model.named_parameters())
    skeleton = _without_weights(model)
    shard(model)
    pairs = {before[name]: parameter for name, parameter in model.named_parameters()}
    swap_parameters(optimizer, pairs, _spread_state)
    return skeleton


def _without_weights(model: nn.Module) -> Any:
    empty: dict[int, Any] = {}
    for parameter in model.parameters():
        empty[id(parameter)] = nn.Parameter(torch.empty_like(parameter, device="meta"))
    for buffer in model.buffers():
        empty[id(buffer)] = torch.empty_like(buffer, device="meta")
    return copy.deepcopy(model, empty)


def _full_state(state: State) -> State:
    return {name: _full(value) for name, value in state.items()}


def _full(value: Any) -> Any:
    return value.full_tensor().detach() if isinstance(value, DTensor) else value


def _spread_state(parameter: nn.Parameter, state: State) -> State:
    return {name: _like(value, parameter) for name, value in state.items()}


def _like(value: Any, parameter: Tensor) -> Any:
    """A state tensor spread as its parameter is, if it has its shape."""
    if not isinstance(value, Tensor) or not isinstance(parameter, DTensor) or value.shape != parameter.shape:
        return value
    return distribute_tensor(value, parameter.device_mesh, parameter.placements)
