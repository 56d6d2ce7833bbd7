"""Growth under torch's DistributedDataParallel, whose wrapper holds on to the parameters it was made with."""

import gc
import inspect
from typing import Any

from accelerate import PartialState
from accelerate.utils import reduce
from torch import Tensor, nn
from torch.nn.parallel import DistributedDataParallel

from hf_grow.errors import HfGrowError


class LaunchedProcesses:
    """The processes of a run, with what growth needs of an accelerator, where none is at hand.

    A second `Accelerator` would change how the first one accumulates gradients.
    """

    def __init__(self) -> None:
        state = PartialState()
        self.num_processes: int = state.num_processes
        self.process_index: int = state.process_index
        self.device = state.device

    def reduce(self, tensor: Tensor, reduction: str = "sum") -> Tensor:
        """The sum (or mean) over all processes."""
        return reduce(tensor, reduction)


def wrappers_of(model: nn.Module) -> list[DistributedDataParallel]:
    """The live wrappers around a model."""
    # A training loop may keep its wrapper in a local variable, which only the garbage collector can name.
    wrappers = [thing for thing in gc.get_objects() if issubclass(type(thing), DistributedDataParallel)]
    return [wrapper for wrapper in wrappers if wrapper.module is model]


def rewrap(wrapper: DistributedDataParallel) -> None:
    """Make a wrapper anew around its grown module, the same object with the arguments and hooks it had.

    All processes must do so, and the gradients of one step must not be half gathered.
    """
    arguments = _arguments(wrapper)
    hooks = {name: value for name, value in vars(wrapper).items() if name.endswith(("_hooks", "_hooks_with_kwargs"))}
    kept = {name: vars(wrapper)[name] for name in ("training", "require_backward_grad_sync")}
    wrapper._remove_autograd_hooks()
    for handle in hooks.pop("_accum_grad_hooks", ()):
        handle.remove()
    communication = hooks.pop("_comm_hooks", ())
    DistributedDataParallel.__init__(wrapper, wrapper.module, **arguments)
    # The very dictionaries, so that the handles users hold keep working.
    vars(wrapper).update(hooks | kept)
    for hook, state in communication:
        wrapper.register_comm_hook(state, hook)


def _arguments(wrapper: DistributedDataParallel) -> dict[str, Any]:
    """The arguments a wrapper was made with: it keeps most under their own names."""
    if wrapper.mixed_precision is not None or wrapper._delay_all_reduce_params:
        raise HfGrowError(
            "A DistributedDataParallel with mixed_precision or delayed reductions cannot be made anew around a grown "
            "model: leave these options out."
        )
    own = vars(wrapper)
    arguments = {name: own[name] for name in inspect.signature(DistributedDataParallel).parameters if name in own}
    if "device_mesh" in arguments:
        del arguments["process_group"]
    if not wrapper.bucket_bytes_cap_default:
        arguments["bucket_cap_mb"] = wrapper.bucket_bytes_cap / 2**20
    return arguments
