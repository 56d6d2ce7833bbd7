"""How words of the command line become values of config fields, by the fields' types."""

import re
from collections.abc import Callable
from dataclasses import dataclass
from types import NoneType, UnionType
from typing import Any, Union, get_args, get_origin

from hf_grow.errors import HfGrowError
from hf_grow.growth.config import Amount


def types_of(hint: Any) -> tuple[Any, ...]:
    """The types that a field may have, besides None."""
    types = get_args(hint) if get_origin(hint) in (Union, UnionType) else (hint,)
    return tuple(each for each in types if each is not NoneType)


def names(option: str, text: str) -> tuple[str, ...]:
    """Names with commas; commas too many are passed over, but no name at all is for the config to refuse."""
    return tuple(name.strip() for name in text.split(",") if name.strip() or not text.strip())


def read_whole(option: str, text: int | str) -> int:
    """A whole number, also of an option that takes other things too."""
    if isinstance(text, str) and not text.strip().isdecimal():
        raise HfGrowError(f"{option} must be made of whole numbers, not {text!r}.")
    return int(text)


def whole_numbers(option: str, text: str) -> tuple[int, ...]:
    """Whole numbers with commas."""
    return tuple(read_whole(option, part) for part in text.split(","))


def numbers(option: str, text: str) -> tuple[float, ...]:
    """Numbers with commas."""
    try:
        return tuple(float(part) for part in text.split(","))
    except ValueError as error:
        raise HfGrowError(f"{option} must be made of numbers, not {text!r}.") from error


def amounts(option: str, text: str) -> int | dict[int, int]:
    """A number for every layer, or numbers by layer."""
    if re.fullmatch(r"[+-]?\d+", text.strip()):
        return int(text)
    pairs = [re.fullmatch(r"\s*(\d+)\s*:\s*([+-]?\d+)\s*", part) for part in text.split(",")]
    by_layer = {int(pair[1]): int(pair[2]) for pair in pairs if pair}
    if len(by_layer) < len(pairs):
        raise HfGrowError(f"{option} must be a whole number or numbers by layer like 0:8,3:4, not {text!r}.")
    return by_layer


def as_it_is(option: str, value: Any) -> Any:
    """What typer has read already."""
    return value


@dataclass(frozen=True)
class Reader:
    """What typer makes of the words of an option, how that becomes the value of a field, and how help shows it."""

    typed: type
    read: Callable[[str, Any], Any] = as_it_is
    metavar: str | None = None


READERS = {
    (bool,): Reader(bool),
    (bool, str): Reader(bool),
    (int,): Reader(int, read_whole),
    (float,): Reader(float),
    (str,): Reader(str),
    (int, str): Reader(str, metavar="N or N%"),
    (tuple[str, ...],): Reader(str, names, "NAME,…"),
    (tuple[int, ...],): Reader(str, whole_numbers, "N,…"),
    (tuple[float, float],): Reader(str, numbers, "X,X"),
    types_of(Amount): Reader(str, amounts, "N or LAYER:N,…"),
}


def reader_of(hint: Any) -> Reader:
    """The reader of a field with this type."""
    if types_of(hint) not in READERS:
        raise TypeError(f"No option can be made of a field of type {hint}.")
    return READERS[types_of(hint)]
