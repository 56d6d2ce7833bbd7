"""Which sequences every step of training sees: a matter of the seed, the step and the process alone.

So a run that is taken up again goes on with the same sequences, and two processes see together what one with twice the
batch would. Epochs follow one another without a gap, each in an order of its own.
"""

import json
import random
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from dataclasses import dataclass, field
from functools import lru_cache
from itertools import islice
from typing import Any

import numpy as np
import torch
from torch.utils.data import IterableDataset

from hf_grow.errors import HfGrowError
from hf_grow.files import digest, first_line
from hf_grow.running.batches import Batch

Collate = Callable[[list[Any]], Batch]


@contextmanager
def random_numbers(*marks: int) -> Iterator[None]:
    """Inside, random numbers follow from these marks; outside, they go on as if nothing had been drawn."""
    python, arrays, seed = random.getstate(), np.random.get_state(), mixed(*marks)
    with torch.random.fork_rng(devices=[]):
        try:
            random.seed(seed)
            np.random.seed(seed % 2**32)
            # The CPU's alone: torch.manual_seed would seed those of all devices too.
            torch.default_generator.manual_seed(seed)
            yield
        finally:
            random.setstate(python)
            np.random.set_state(arrays)


def mixed(*marks: int) -> int:
    """One seed out of several numbers."""
    seed = 0
    for mark in marks:
        seed = (seed * 6364136223846793005 + mark + 1442695040888963407) % 2**63
    return seed


@dataclass
class Feed:
    """Batches of a data set for one of several processes.

    rows     anything with a length and numbered rows, or an iterable of rows that can be started again
    collate  makes a batch out of rows
    """

    rows: Any
    collate: Collate
    batch_size: int
    accumulation: int = 1
    processes: int = 1
    process: int = 0
    seed: int = 0
    _stream: Iterator[Any] = field(init=False, repr=False)
    _position: int = field(default=0, init=False, repr=False)

    def __post_init__(self) -> None:
        if isinstance(self.rows, (str, Mapping)) or not (self.numbered or isinstance(self.rows, Iterable)):
            raise HfGrowError(f"Training data must be a data set of rows, not {type(self.rows).__name__}.")
        if isinstance(self.rows, Iterator):
            raise HfGrowError("Training data is read more than once: give a list or a data set, not an iterator.")
        if self.numbered and len(self.rows) == 0:
            raise HfGrowError("The training data is empty.")
        self._order = lru_cache(maxsize=2)(self._make_order)
        self._stream = endless(self.rows)

    @property
    def numbered(self) -> bool:
        """Whether rows can be taken by their number, in any order."""
        return is_numbered(self.rows)

    @property
    def sequences_per_step(self) -> int:
        """Over all processes."""
        return self.batch_size * self.accumulation * self.processes

    def batches(self, step: int) -> list[Batch]:
        """This process's batches of a step, which is counted from 0."""
        first = step * self.sequences_per_step
        own = range(self.process * self.batch_size, self.sequences_per_step, self.processes * self.batch_size)
        return [self._collated(self._rows_from(first + start), step, number) for number, start in enumerate(own)]

    def sample(self, count: int, mark: int) -> list[Batch]:
        """This process's share of `count` rows, of a stream the first ones, of other data chosen by chance."""
        rows = self._share(count, mark, self.process)
        if not rows:
            # All must take part, so where rows are too few for all processes some are measured twice.
            rows = self._share(count, mark, 0)[:1]
        return in_batches(rows, self._collate_marked(mixed(mark, 2)), self.batch_size)

    def _share(self, count: int, mark: int, process: int) -> list[Any]:
        if not self.numbered:
            return list(islice(iter(self.rows), process, count, self.processes))
        generator = torch.Generator().manual_seed(mixed(self.seed, mark, 1))
        chosen = torch.randperm(len(self.rows), generator=generator)[:count].tolist()
        return [self.rows[number] for number in chosen[process :: self.processes]]

    def _collate_marked(self, mark: int) -> Collate:
        return lambda rows: self._collated(rows, mark, 0)

    def mark(self) -> dict[str, Any]:
        """What tells these rows from others: how many there are, if that is known, and the first and last one."""
        ends = [self.rows[0], self.rows[len(self.rows) - 1]] if self.numbered else [next(iter(self.rows), None)]
        marks = (json.dumps(row, default=_plain, sort_keys=True) for row in ends)
        return {"rows": len(self.rows) if self.numbered else None, "ends": digest(marks)}

    def _collated(self, rows: list[Any], *marks: int) -> Batch:
        with random_numbers(self.seed, *marks, self.process, 3):
            return collated(rows, self.collate)

    def _rows_from(self, start: int) -> list[Any]:
        """The rows of a batch; places go on over the end of the data."""
        if not self.numbered:
            return self._streamed(start)
        places = (divmod(place, len(self.rows)) for place in range(start, start + self.batch_size))
        return [self.rows[self._order(epoch)[place]] for epoch, place in places]

    def _make_order(self, epoch: int) -> list[int]:
        generator = torch.Generator().manual_seed(mixed(self.seed, epoch))
        return torch.randperm(len(self.rows), generator=generator).tolist()

    def _streamed(self, start: int) -> list[Any]:
        """Rows of a stream, which every process reads to take its own."""
        if self._position > start:
            self._stream, self._position = endless(self.rows), 0
        rows = list(islice(self._stream, start - self._position, start - self._position + self.batch_size))
        self._position = start + len(rows)
        return rows


def is_numbered(rows: Any) -> bool:
    """Whether rows have a length and numbers."""
    # All of torch's data sets have __getitem__, those to be iterated over only to refuse.
    return hasattr(rows, "__len__") and hasattr(rows, "__getitem__") and not isinstance(rows, IterableDataset)


def endless(rows: Iterable[Any]) -> Iterator[Any]:
    """A stream again and again."""
    while True:
        empty = True
        for row in rows:
            empty = False
            yield row
        if empty:
            raise HfGrowError("The training data is empty.")


def evaluation_batches(
    rows: Any, collate: Collate, batch_size: int, seed: int, processes: int = 1, process: int = 0
) -> list[Batch]:
    """A process's share of all rows, drawn once, so that it is the same at every evaluation."""
    all_rows = [rows[place] for place in range(len(rows))] if is_numbered(rows) else list(rows)
    if not all_rows:
        raise HfGrowError("The evaluation data is empty.")
    with random_numbers(seed, process, 4):
        return in_batches(all_rows[process::processes], collate, batch_size)


def in_batches(rows: Sequence[Any], collate: Collate, batch_size: int) -> list[Batch]:
    """All rows in order, the last batch perhaps smaller."""
    starts = range(0, len(rows), batch_size)
    return [collated(list(rows[start : start + batch_size]), collate) for start in starts]


def collated(rows: list[Any], collate: Collate) -> Batch:
    """A batch, or one sentence on why these rows do not make one."""
    try:
        batch = collate(rows)
    except HfGrowError:
        raise
    except (RuntimeError, ValueError, TypeError, KeyError) as error:
        raise HfGrowError(
            f"The rows cannot be made into a batch ({first_line(error)}): give a collate function that pads them."
        ) from error
    if not isinstance(batch, Mapping) or not any(isinstance(value, torch.Tensor) for value in batch.values()):
        raise HfGrowError("The rows hold nothing that makes a batch of tensors: tokenise them first.")
    return batch


def _plain(value: Any) -> Any:
    """What JSON lacks: tensors and arrays as lists, anything else as text."""
    return value.tolist() if hasattr(value, "tolist") else str(value)
