"""An optimizer goes on while parameters grow: new ones in the places of the old, the state of old entries carried.

Entries that are new start with a state of zero, or with what the optimizer itself starts with. Adafactor keeps means
over whole rows and columns instead; there a new row or column starts with the mean of the others, as a variance of zero
would make its first steps far too long.
"""

from collections.abc import Callable, Collection, Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from math import prod
from typing import Any

import torch
from torch import Tensor, nn
from torch.distributed.optim import ZeroRedundancyOptimizer

from hf_grow.errors import HfGrowError

State = dict[str, Any]
# The names under which torch's Adafactor and that of transformers keep one number for each row or column.
ROW_STATES, COLUMN_STATES = ("row_var", "exp_avg_sq_row"), ("col_var", "exp_avg_sq_col")
# States that do not start at zero, and the option of their optimizer that they start at: Adagrad's and Rprop's.
STARTS = {"sum": "initial_accumulator_value", "step_size": "lr"}
# They keep more than a state for each parameter, so that parameters cannot change under them.
REFUSED = (torch.optim.LBFGS, ZeroRedundancyOptimizer)


@dataclass(frozen=True)
class Replacement:
    """A parameter and the one that takes its place.

    origins  for each row of the new one the row of the old one that it continues, -1 where there is none; of a matrix
             also for each column
    """

    old: nn.Parameter
    new: nn.Parameter
    origins: tuple[Tensor, ...]

    @property
    def living(self) -> int:
        """How many old entries live on."""
        return prod(int((origin >= 0).sum()) for origin in self.origins)

    @property
    def partly_remade(self) -> bool:
        """Whether new entries stand where old ones did, beside some that live on: fused projections after refactor."""
        return 0 < self.living < min(self.old.numel(), self.new.numel())


@dataclass(frozen=True)
class Added:
    """A parameter that takes nobody's place, and the present one that it stands beside."""

    parameter: nn.Parameter
    beside: nn.Parameter | None


@dataclass(frozen=True)
class CarriedState:
    """New states, ready to be put into an optimizer; nothing in `apply` can fail.

    added    parameters that take nobody's place, each with its group
    """

    optimizer: torch.optim.Optimizer
    replacements: Sequence[Replacement]
    added: Sequence[tuple[nn.Parameter, dict[str, Any]]]
    states: Mapping[nn.Parameter, State | None]
    summary: str

    def apply(self, order: Iterable[nn.Parameter] = ()) -> None:
        """Put the new parameters and their states into the optimizer, in the places of the old ones.

        Where some were added, groups take the order of all of the model's: so a fresh optimizer would have them.
        """
        pairs = {replacement.old: replacement.new for replacement in self.replacements}
        swap_parameters(self.optimizer, pairs, lambda new, _: self.states[new])
        for parameter, group in self.added:
            group["params"].append(parameter)
        places = {parameter: place for place, parameter in enumerate(order)}
        for group in self.optimizer.param_groups if self.added else ():
            group["params"].sort(key=lambda parameter: places.get(parameter, -1))

    def __str__(self) -> str:
        return self.summary


def plain_optimizer(optimizer: torch.optim.Optimizer) -> torch.optim.Optimizer:
    """The torch optimizer inside Accelerate's wrapper, if it is one whose parameters may change."""
    inside = getattr(optimizer, "optimizer", None)
    plain = inside if isinstance(inside, torch.optim.Optimizer) else optimizer
    if not isinstance(plain, torch.optim.Optimizer) or isinstance(plain, REFUSED):
        raise HfGrowError(
            f"The state of {type(plain).__name__} cannot be carried over growth: use a torch optimizer that keeps its "
            "state by parameter, such as AdamW, SGD or Adafactor."
        )
    return plain


def swap_parameters(
    optimizer: torch.optim.Optimizer,
    pairs: Mapping[nn.Parameter, nn.Parameter],
    carried: Callable[[nn.Parameter, State], State | None],
) -> None:
    """Put new parameters in the places of old ones, each with what `carried(new, state)` makes of the old one's state.

    Where that is None, or the old one had no state, the optimizer starts afresh.
    """
    plain = plain_optimizer(optimizer)
    for group in plain.param_groups:
        group["params"][:] = [pairs.get(parameter, parameter) for parameter in group["params"]]
    for old, new in pairs.items():
        state = plain.state.pop(old, None)
        kept = None if state is None else carried(new, state)
        if kept is not None:
            plain.state[new] = kept


def drop_parameters(optimizer: torch.optim.Optimizer, gone: Collection[nn.Parameter]) -> None:
    """Let an optimizer forget parameters."""
    plain, gone = plain_optimizer(optimizer), set(gone)
    for group in plain.param_groups:
        group["params"][:] = [parameter for parameter in group["params"] if parameter not in gone]
    for parameter in gone:
        plain.state.pop(parameter, None)


def carry_state(
    optimizer: torch.optim.Optimizer,
    replacements: Sequence[Replacement],
    added: Sequence[Added] = (),
    *,
    present: Iterable[nn.Parameter] = (),
    kin: Collection[nn.Parameter] = (),
) -> CarriedState:
    """What an optimizer needs to go on after these replacements; refused before anything changes if it cannot.

    What is added goes where its `kin` is. `present` are all parameters of the model, of which the optimizer must hold
    some if anything is added to it.
    """
    plain = plain_optimizer(optimizer)
    options = {parameter: group for group in plain.param_groups for parameter in group["params"]}
    for replacement in replacements:
        _check(plain, replacement.old, plain.state.get(replacement.old, {}))
    learning = [replacement.old for replacement in replacements if replacement.old.requires_grad]
    strange = bool(learning) and not any(replacement.old in options for replacement in replacements)
    if strange or (added and not any(parameter in options for parameter in present)):
        raise HfGrowError(
            "The optimizer holds none of the parameters that grow: it belongs to another model, or to this one "
            "before it grew. Make a new one."
        )
    states = {
        replacement.new: _carried(replacement, plain.state.get(replacement.old), options.get(replacement.old, {}))
        for replacement in replacements
    }
    for replacement in replacements:
        if replacement.old.grad is not None:
            replacement.new.grad = _entries(replacement, replacement.old.grad)
    outside = sum(each.old.requires_grad and each.old not in options for each in replacements)
    summary = _summary(plain, replacements) + (f"; {outside} that learn are not in the optimizer" if outside else "")
    summary += f"; {len(added)} parameters are new" if added else ""
    placed = [(each.parameter, _group_for(each, plain, set(kin))) for each in added]
    return CarriedState(plain, replacements, placed, states, summary)


def _group_for(added: Added, optimizer: torch.optim.Optimizer, kin: set[nn.Parameter]) -> dict[str, Any]:
    """The group that holds its kin, its like first; that of what it stands beside; else one that holds its like."""
    like: list[Callable[[nn.Parameter], bool]] = [
        lambda parameter: parameter in kin and parameter.ndim == added.parameter.ndim,
        lambda parameter: parameter in kin and added.parameter.ndim > 1,
        lambda parameter: parameter is added.beside,
        lambda parameter: parameter.ndim == added.parameter.ndim,
    ]
    groups = optimizer.param_groups
    for is_like in like:
        for group in groups:
            if any(is_like(parameter) for parameter in group["params"]):
                return group
    # A bias among matrices alone: where it would not decay.
    undecayed = (group for group in groups if added.parameter.ndim == 1 and not group.get("weight_decay"))
    return next(undecayed, groups[0])


def _summary(optimizer: torch.optim.Optimizer, replacements: Sequence[Replacement]) -> str:
    known = [replacement for replacement in replacements if optimizer.state.get(replacement.old)]
    carried = [replacement for replacement in known if replacement.living]
    partly = sum(replacement.partly_remade for replacement in carried)
    what = f"the state of {len(carried)} parameters carried"
    what += f", partly reset in {partly} of them" if partly else ""
    return what + (f", of {len(known) - len(carried)} reset" if len(known) > len(carried) else "")


def _check(optimizer: torch.optim.Optimizer, parameter: Tensor, state: State) -> None:
    for name, value in state.items():
        if isinstance(value, Tensor):
            known = value.shape == parameter.shape or value.numel() == 1 or _line(name, parameter, value) is not None
        else:
            known = value is None or isinstance(value, (bool, int, float))
        if not known:
            what = f"shape {tuple(value.shape)}" if isinstance(value, Tensor) else f"type {type(value).__name__}"
            raise HfGrowError(
                f"{type(optimizer).__name__} keeps {name!r} of {what} for a parameter of shape "
                f"{tuple(parameter.shape)}, which cannot be carried over growth."
            )


def _line(name: str, parameter: Tensor, value: Tensor) -> int | None:
    """Whether a state has one number for each row (0) or column (1) of a matrix."""
    for line, names in enumerate((ROW_STATES, COLUMN_STATES)):
        if name in names and parameter.ndim == 2 and value.numel() == parameter.shape[line]:
            return line
    return None


def _carried(replacement: Replacement, state: State | None, options: Mapping[str, Any]) -> State | None:
    """The state of the new parameter; none where no old entry lives on, so that the optimizer starts afresh."""
    # SGD starts with a momentum of zero, but its fused kernel wants all parameters to have one, or none.
    if state is None or not (replacement.living or state.keys() == {"momentum_buffer"}):
        return None
    return dict(_carried_values(replacement, state, options))


def _carried_values(replacement: Replacement, state: State, options: Mapping[str, Any]) -> Iterator[tuple[str, Any]]:
    for name, value in state.items():
        line = _line(name, replacement.old, value) if isinstance(value, Tensor) else None
        if line is not None:
            yield name, _lines(replacement, value, line)
        elif isinstance(value, Tensor) and value.shape == replacement.old.shape:
            yield name, _entries(replacement, value, float(options.get(STARTS.get(name, ""), 0.0)))
        else:
            yield name, value


def _entries(replacement: Replacement, values: Tensor, start: float = 0.0) -> Tensor:
    """Values of the old entries at their new places, `start` elsewhere."""
    # Fused kernels go through parameter and state by memory, so both must lie alike: contiguous.
    placed = values.new_full(replacement.new.shape, start)
    origins = [origin.to(values.device) for origin in replacement.origins]
    places = [torch.nonzero(origin >= 0)[:, 0] for origin in origins]
    olds = [origin[place] for origin, place in zip(origins, places, strict=True)]
    if placed.ndim == 1:
        placed[places[0]] = values[olds[0]]
    else:
        placed[places[0][:, None], places[1]] = values[olds[0][:, None], olds[1]]
    return placed


def _lines(replacement: Replacement, values: Tensor, line: int) -> Tensor:
    """Values of old rows (or columns) at their new places, their mean for new ones."""
    origin = replacement.origins[line].to(values.device)
    kept = values.flatten()[origin.clamp(min=0)]
    lines = torch.where(origin >= 0, kept, kept[origin >= 0].mean())
    return lines if values.ndim == 1 else lines.unsqueeze(1 - line)
