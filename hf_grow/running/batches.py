"""Batches: what a model is called with, their sequences, and which of these choose and which judge."""

from collections.abc import Iterable, Mapping, Sequence
from itertools import islice
from typing import Any

import torch
from torch import Tensor

from hf_grow.errors import HfGrowError

Batch = Mapping[str, Any]
# Multiples of this, modulo one, fill the interval evenly and never repeat.
GOLDEN = (5**0.5 - 1) / 2


def read_batches(batches: Iterable[Batch], most: int | None = None, least: int = 1) -> list[Batch]:
    """All batches in a list, checked to be batches."""
    if isinstance(batches, (Mapping, str)) or not isinstance(batches, Iterable):
        raise HfGrowError(f"batches must be an iterable of dicts for model(**batch), not {type(batches).__name__}.")
    read = list(islice(batches, most))
    if len(read) < least:
        raise HfGrowError("There was no batch: the iterable is empty, or was used up before.")
    for batch in read:
        if not isinstance(batch, Mapping) or not any(isinstance(value, Tensor) for value in batch.values()):
            raise HfGrowError(f"Each batch must be a dict of tensors for model(**batch), not {type(batch).__name__}.")
        if batch_size(batch) == 0:
            raise HfGrowError("A batch holds no sequences.")
    return read


def split_sequences(
    batches: Sequence[Batch], share: float, processes: int = 1, process: int = 0
) -> tuple[list[Batch], list[Batch]]:
    """Batches of the sequences that choose and batches of those that judge, a `share` of all, evenly spread.

    Which are which does not depend on how sequences are grouped into batches, nor on the number of processes that took
    them in turn, and follows no period of the data.
    """
    choosing: list[Batch] = []
    judging: list[Batch] = []
    start = 0
    for batch in batches:
        size = batch_size(batch)
        places = ((start + number) * processes + process + 1 for number in range(size))
        judges = torch.tensor([place * GOLDEN % 1 < share for place in places])
        start += size
        for rows, part in ((~judges, choosing), (judges, judging)):
            if bool(rows.all()):
                part.append(batch)
            elif bool(rows.any()):
                rest = _take_rows(batch, rows, size)
                # A part of a batch may be without labels where the whole is not; it would have no loss.
                labels = rest.get("labels")
                if not isinstance(labels, Tensor) or labels.ndim < 2 or bool((labels != -100).any()):
                    part.append(rest)
    return choosing, judging


def batch_size(batch: Batch) -> int:
    """How many sequences a batch holds."""
    first = next((batch[name] for name in ("input_ids", "inputs_embeds", "pixel_values") if name in batch), None)
    if not isinstance(first, Tensor):
        first = next(value for value in batch.values() if isinstance(value, Tensor))
    return first.shape[0] if first.ndim else 1


def _take_rows(batch: Batch, rows: Tensor, size: int) -> Batch:
    return {
        name: value[rows.to(value.device)] if isinstance(value, Tensor) and value.shape[:1] == (size,) else value
        for name, value in batch.items()
    }
