"""Fields of the config dataclasses: checks that say what is wrong, and configs as plain values for JSON and back."""

import math
import re
import warnings
from collections.abc import Callable, Mapping
from dataclasses import MISSING, fields, is_dataclass
from functools import wraps
from operator import attrgetter
from typing import Any, TypeVar, cast, get_args, get_type_hints

from hf_grow.errors import HfGrowError

Config = TypeVar("Config")
Function = TypeVar("Function", bound=Callable[..., Any])


class _Any:
    """Equal to everything."""

    def __eq__(self, other: object) -> bool:
        return True

    def __hash__(self) -> int:
        return 0


# For `gone`: a parameter that no longer does anything, whatever it is.
ANY = _Any()


def require(config: Any, cls: type[Config]) -> Config:
    """Refuse anything but a config of this class."""
    if not isinstance(config, cls):
        raise HfGrowError(f"Give a {cls.__name__}(…), not {type(config).__name__}.")
    return config


def one_of(name: str, value: Any, allowed: tuple[str, ...]) -> None:
    """Refuse anything but the allowed names, and list them."""
    if value not in allowed:
        raise HfGrowError(f"{name} must be one of {', '.join(allowed)}, not {value!r}.")


def some_of(name: str, value: Any, allowed: tuple[str, ...]) -> tuple[str, ...]:
    """One or more of the allowed names, given as one text or as several."""
    if not isinstance(value, (str, list, tuple)):
        raise HfGrowError(f"{name} must be a tuple of some of {', '.join(allowed)}, not {value!r}.")
    given = (value,) if isinstance(value, str) else tuple(value)
    if not given:
        raise HfGrowError(f"{name} must name at least one of {', '.join(allowed)}.")
    for one in given:
        one_of(name, one, allowed)
    return given


def whole(name: str, value: Any, least: int) -> None:
    """Refuse anything but a whole number of at least `least`."""
    if not isinstance(value, int) or isinstance(value, bool) or value < least:
        raise HfGrowError(f"{name} must be a whole number of at least {least}, not {value!r}.")


def is_number(value: Any) -> bool:
    """Whether a value is a finite number."""
    return isinstance(value, (int, float)) and not isinstance(value, bool) and math.isfinite(value)


def to_dict(config: Any) -> dict[str, Any]:
    """A dataclass of plain values as JSON has them: lists for tuples, text for the keys of dicts."""
    return {field.name: _plain(getattr(config, field.name)) for field in fields(config)}


def from_dict(cls: type[Config], values: Mapping[str, Any]) -> Config:
    """The config that `to_dict` wrote, also under names that its fields had before; layer numbers are numbers again."""
    types = get_type_hints(cls)
    return cls(**{name: _restored(value, types.get(name)) for name, value in completed(cls, values).items()})


def completed(cls: type, values: Mapping[str, Any]) -> dict[str, Any]:
    """What `to_dict` wrote for a config, perhaps when it had fewer fields or other names for them, as it would now."""
    new_names, gone = getattr(cls, "former_names", {}), getattr(cls, "gone_names", {})
    defaults = {field.name: _plain(field.default) for field in fields(cls) if field.default is not MISSING}
    kept = {name: value for name, value in values.items() if name not in gone or value != gone[name]}
    return defaults | {new_names.get(name, name): value for name, value in kept.items()}


def _plain(value: Any) -> Any:
    if is_dataclass(value):
        return to_dict(value)
    if isinstance(value, Mapping):
        return {str(key): _plain(part) for key, part in value.items()}
    return [_plain(part) for part in value] if isinstance(value, (list, tuple)) else value


def _restored(value: Any, annotation: Any) -> Any:
    if isinstance(value, Mapping):
        for part in (annotation, *get_args(annotation)):
            if isinstance(part, type) and is_dataclass(part):
                return from_dict(part, value)
        return {int(key) if re.fullmatch(r"\d+", str(key)) else key: amount for key, amount in value.items()}
    return tuple(value) if isinstance(value, list) else value


def formerly(**new_names: str) -> Callable[[Function], Function]:
    """A function whose parameters had other names: `old="new"`. Those still work for one version, with a warning."""

    def decorate(function: Function) -> Function:
        @wraps(function)
        def call(*args: Any, **kwargs: Any) -> Any:
            for old, new in new_names.items():
                if old in kwargs:
                    if new in kwargs:
                        raise TypeError(f"{old} is the former name of {new}: give {new} alone.")
                    warn_renamed(old, new)
                    kwargs[new] = kwargs.pop(old)
            return function(*args, **kwargs)

        return cast(Function, call)

    return decorate


def gone(advice: str, **defaults: Any) -> Callable[[Function], Function]:
    """A function or class that had more parameters: what they did by default may still be said, with a warning."""

    def decorate(function: Any) -> Any:
        if isinstance(function, type):
            function.__init__ = gone(advice, **defaults)(function.__init__)  # type: ignore[misc]
            function.gone_names = defaults  # type: ignore[attr-defined]
            return function

        @wraps(function)
        def call(*args: Any, **kwargs: Any) -> Any:
            for name, default in defaults.items():
                if name in kwargs:
                    if kwargs.pop(name) != default:
                        raise HfGrowError(f"{name} is gone: {advice}")
                    warnings.warn(f"{name} is gone, and will be an error with 0.3: {advice}", DeprecationWarning, 3)
            return function(*args, **kwargs)

        return call

    return decorate


def former_attributes(**new_names: str) -> Callable[[type[Config]], type[Config]]:
    """A class whose attributes had other names: the old ones can still be read for one version, with a warning.

    A new name may lead through several objects; where it is a private one, the attribute will go altogether.
    """

    def decorate(cls: type[Config]) -> type[Config]:
        for old, new in new_names.items():
            setattr(cls, old, _former_attribute(old, new))
        return cls

    return decorate


def former_fields(**new_names: str) -> Callable[[type[Config]], type[Config]]:
    """A dataclass whose fields had other names: attributes, arguments and saved values still work with these."""

    def decorate(cls: type[Config]) -> type[Config]:
        cls.__init__ = formerly(**new_names)(cls.__init__)  # type: ignore[method-assign]
        cls.former_names = new_names  # type: ignore[attr-defined]
        return former_attributes(**new_names)(cls)

    return decorate


def _former_attribute(old: str, new: str) -> property:
    def read(self: Any) -> Any:
        warn_renamed(old, new)
        return attrgetter(new)(self)

    return property(read)


def warn_renamed(old: str, new: str) -> None:
    """Tell whoever called our caller that a name will go."""
    now = "" if new.startswith("_") else f" is now called {new}; the old name"
    warnings.warn(f"{old}{now} goes with 0.3.", DeprecationWarning, stacklevel=3)
