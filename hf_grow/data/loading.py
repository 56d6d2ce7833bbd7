"""Data: files or a data set of the Hub become sequences for training, or a list of batches.

What a sequence is follows from the class of the model, see `data.sequences`. Sequences keep the order of the data; only
a stream can be shuffled here.
"""

import logging
import re
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from dataclasses import dataclass
from glob import escape, glob
from itertools import islice
from pathlib import Path
from typing import Any

import datasets
import torch
from torch import Tensor
from torch.utils.data import IterableDataset, Subset
from transformers import PreTrainedModel, PreTrainedTokenizerBase

from hf_grow.data.sequences import (
    CLASSIFICATION,
    Batch,
    Classification,
    MapRows,
    Packing,
    Row,
    check_model_and_tokenizer,
    check_padding,
    classify,
    is_for,
    pack,
    padding_tokenizer,
)
from hf_grow.errors import HfGrowError
from hf_grow.progress import bar
from hf_grow.surgery.base import without_adapters

logger = logging.getLogger("hf_grow")

# Only whole documents keep their newlines: the paragraphs of datasets come without the blank lines between them.
TEXT: tuple[str, dict[str, str]] = ("text", {"sample_by": "document"})
JSON: tuple[str, dict[str, str]] = ("json", {})
FILE_READERS = {".txt": TEXT, ".text": TEXT, ".md": TEXT, ".jsonl": JSON, ".json": JSON, ".parquet": ("parquet", {})}
FILE_READERS |= {".csv": ("csv", {}), ".tsv": ("csv", {"sep": "\t"})}
SPLITS = {"train": "train", "test": "test", **dict.fromkeys(("validation", "valid", "val", "dev"), "validation")}
LABEL_COLUMNS = ("label", "labels")
# What datasets says of tables without rows.
EMPTY = ("corresponds to no data", "BatchSize must be greater than 0")
TOO_LITTLE_TEXT = "The data has too little text for one sequence of at least 2 tokens: give more."


@dataclass(frozen=True)
class DataConfig:
    """What the user wants of the data.

    split           which part of the data
    text_column     the column with the text, or two for pairs: "premise,hypothesis"; None: text, or the only one
                    with text
    label_column    the column with the label, for classifiers; None: label or labels
    length          tokens per sequence; None: as many as the model has positions, at most 256
    batch_size      sequences at once
    max_sequences   read so many at most; None: all
    seed            of masking when batches are measured on, of the shuffling of a stream, and of what is held out
    streaming       read on the way, not all before
    processes       how many tokenise, if all of the data is wanted
    shuffle_buffer  rows of a stream from which the next one is drawn; None: their order
    """

    split: str = "train"
    text_column: str | None = None
    label_column: str | None = None
    length: int | None = None
    batch_size: int = 8
    max_sequences: int | None = None
    seed: int = 0
    streaming: bool = False
    processes: int | None = None
    shuffle_buffer: int | None = None

    def __post_init__(self) -> None:
        for name in ("length", "batch_size", "max_sequences", "processes", "shuffle_buffer"):
            value = getattr(self, name)
            if not (isinstance(value, int) and value > 0) and (value is not None or name == "batch_size"):
                raise HfGrowError(f"{name} must be a positive integer, not {value!r}.")
        if self.shuffle_buffer and not self.streaming:
            raise HfGrowError("shuffle_buffer shuffles only a stream: set streaming=True, or leave it out.")


class StreamedRows(IterableDataset[Row]):
    """Sequences of a stream, read as they are asked for; each iteration starts anew."""

    def __init__(self, data: str, dataset: Any, task: Packing | Classification) -> None:
        self.data, self.dataset, self.task = data, dataset, task

    def __iter__(self) -> Iterator[Row]:
        with _one_sentence_errors(self.data):
            yield from self.task.lazily(self.dataset)

    def set_epoch(self, epoch: int) -> None:
        """Shuffle the next iterations differently; Accelerate's data loaders call this."""
        self.dataset.set_epoch(epoch)


@dataclass(frozen=True)
class Sequences:
    """Data for training: one sequence in each row, and what makes a list of rows a batch that gives a loss.

    Masking draws from torch's global generator, unless `collate` is given a generator.
    """

    rows: MapRows | StreamedRows
    collate: Callable[..., Batch]


def load_sequences(
    data: str,
    tokenizer: PreTrainedTokenizerBase,
    model: PreTrainedModel,
    *,
    config: DataConfig = DataConfig(),  # noqa: B008
) -> Sequences:
    """Sequences for the model from a file, a folder or a data set `name` or `name:configuration`.

    All in memory, or a stream with `config.streaming` and no `max_sequences`, of which only the start is checked here.
    """
    model = without_adapters(model)
    check_model_and_tokenizer(model, tokenizer)
    length = _length(model, config)
    if is_for(model, CLASSIFICATION):
        tokenizer = padding_tokenizer(tokenizer)
        check_padding(tokenizer, model.config, config.batch_size)
    with _one_sentence_errors(data):
        dataset = datasets.load_dataset(**_source(data, config), split=config.split, streaming=config.streaming)
        row = next(iter(dataset), None)
        if row is None:
            raise HfGrowError(f"The data set {data!r} is empty: its split {config.split!r} has no row.")
        task = _task(dataset, row, length, tokenizer, model, config)
        return Sequences(_rows(data, dataset.select_columns(task.needed_columns), task, config), task.collate)


def load_batches(
    data: str,
    tokenizer: PreTrainedTokenizerBase,
    model: PreTrainedModel,
    *,
    config: DataConfig = DataConfig(),  # noqa: B008
) -> list[Batch]:
    """Batches of the sequences of `load_sequences`, each of which gives `model(**batch)` a loss."""
    sequences = load_sequences(data, tokenizer, model, config=config)
    rows = _taken(iter(sequences.rows), None)
    generator = torch.Generator().manual_seed(config.seed)
    starts = range(0, len(rows), config.batch_size)
    batches = [sequences.collate(rows[start : start + config.batch_size], generator) for start in starts]
    if is_for(without_adapters(model), CLASSIFICATION) and len({row["labels"] for row in rows}) == 1:
        logger.warning("All sequences have one label: the data may be sorted by label, so take more or shuffle it.")
    return batches


def split_rows(rows: MapRows | StreamedRows, share: float, seed: int) -> tuple[MapRows, MapRows]:
    """Rows to train on, and a share of them, chosen at random, to evaluate on; both keep the order."""
    if isinstance(rows, StreamedRows):
        raise HfGrowError("A stream cannot be split: name another split or file to evaluate on, or do not stream.")
    if not 0 < share < 1:
        raise HfGrowError(f"The share of rows to evaluate on must lie between 0 and 1, not be {share!r}.")
    if len(rows) < 2:
        raise HfGrowError(f"Two parts need at least 2 sequences, not {len(rows)}: give more text, or a smaller length.")
    held_out = min(max(1, round(share * len(rows))), len(rows) - 1)
    order = torch.randperm(len(rows), generator=torch.Generator().manual_seed(seed))
    return _chosen(rows, order[held_out:]), _chosen(rows, order[:held_out])


def _chosen(rows: Any, numbers: Tensor) -> MapRows:
    return Subset(rows, numbers.sort().values.tolist())


def _task(
    dataset: Any, row: Row, length: int, tokenizer: PreTrainedTokenizerBase, model: PreTrainedModel, config: DataConfig
) -> Packing | Classification:
    """What to make of the columns that the first row shows."""
    if not is_for(model, CLASSIFICATION):
        (column,) = _text_columns(row, config, most=1)
        return pack(column, length, tokenizer, model)
    label = _column(row, "label_column", *([config.label_column] if config.label_column else LABEL_COLUMNS))
    columns = _text_columns(row, config, 2, label)
    return classify(columns, label, (dataset.features or {}).get(label), length, tokenizer, model)


def _rows(data: str, dataset: Any, task: Packing | Classification, config: DataConfig) -> MapRows | StreamedRows:
    """All sequences, the first ones, or a stream of them."""
    shuffled = dataset
    if config.shuffle_buffer:
        shuffled = dataset.shuffle(seed=config.seed, buffer_size=config.shuffle_buffer)
    if config.streaming and config.max_sequences is None:
        # In the order of the data, as the check should not wait for the buffer.
        if next(task.lazily(dataset), None) is None:
            raise HfGrowError(TOO_LITTLE_TEXT)
        return StreamedRows(data, shuffled, task)
    rows: MapRows
    if config.max_sequences is None:
        rows = task.at_once(dataset, config.processes)
    else:
        rows = task.store(_taken(task.lazily(shuffled), config.max_sequences))
    if not len(rows):
        raise HfGrowError(TOO_LITTLE_TEXT)
    return rows


def _taken(rows: Iterator[Row], most: int | None) -> list[Row]:
    """The first rows, with a progress bar."""
    return list(bar(True, iterable=islice(rows, most), desc="Sequences", total=most, unit=" sequences"))


def _length(model: PreTrainedModel, config: DataConfig) -> int:
    """Tokens per sequence."""
    positions = getattr(model.config, "max_position_embeddings", None) or getattr(model.config, "n_positions", None)
    if config.length and positions and config.length > positions:
        raise HfGrowError(f"length {config.length} exceeds the {positions} positions of the model: give at most these.")
    return config.length or min(positions or 256, 256)


@contextmanager
def _one_sentence_errors(data: str) -> Iterator[None]:
    """Whatever reading raises becomes one sentence, with the original as its cause."""
    try:
        yield
    except HfGrowError:
        raise
    except Exception as error:
        root: BaseException = error
        while root.__cause__ is not None:
            root = root.__cause__
        reason = " ".join(str(root).split())[:300].rstrip(".") or type(root).__name__
        if any(sign in reason for sign in EMPTY):
            raise HfGrowError(f"The data set {data!r} is empty: it has no row.") from error
        raise HfGrowError(
            f"The data {data!r} cannot be read ({reason}): check the file, or the name and the connection to the Hub."
        ) from error


def _source(data: str, config: DataConfig) -> dict[str, Any]:
    """The arguments with which `load_dataset` reads the data; local files are checked first."""
    path = Path(data).expanduser()
    if data and path.exists():
        splits, (builder, options) = _local_files(path)
        if re.split(r"[\[+]", config.split)[0] not in splits:
            raise HfGrowError(f"{data!r} has no split {config.split!r}: choose from {', '.join(splits)}.")
        return {"path": builder, "data_files": splits, **options}
    if not data or path.is_absolute() or data.startswith((".", "~")) or path.suffix.lower() in FILE_READERS:
        raise HfGrowError(f"There is no file or folder {data!r}: check the path.")
    name, _, configuration = data.partition(":")
    return {"path": name, "name": configuration or None}


def _local_files(path: Path) -> tuple[dict[str, list[str]], tuple[str, dict[str, str]]]:
    """The files of each split, and how to read them; of a folder, all but hidden files and READMEs."""
    names = sorted(glob("**", root_dir=path, recursive=True)) if path.is_dir() else [""]
    known = [name for name in names if (path / name).is_file() and (path / name).suffix.lower() in FILE_READERS]
    files = [path / name for name in known if Path(name).name != "README.md"]
    readers = [FILE_READERS[file.suffix.lower()] for file in files]
    if not readers:
        raise HfGrowError(f"'{path}' is no data that can be read: give files that end in {', '.join(FILE_READERS)}.")
    if any(reader != readers[0] for reader in readers):
        endings = ", ".join(sorted({file.suffix for file in files}))
        raise HfGrowError(f"'{path}' mixes kinds of files ({endings}): give one file, or a folder with one kind.")
    if not any(file.stat().st_size for file in files):
        raise HfGrowError(f"The data set '{path}' is empty: give a file with content.")
    splits: dict[str, list[str]] = {}
    for file in files:
        # Escaped, as brackets and stars would be read as patterns.
        splits.setdefault(_split_of(file.relative_to(path)), []).append(escape(str(file.absolute())))
    logger.info("Files in each split of '%s': %s", path, {split: len(names) for split, names in splits.items()})
    return splits, readers[0]


def _split_of(name: Path) -> str:
    """The split that a path in a folder names: test.csv, train-00000-of-00001.parquet, validation/part.jsonl."""
    words = re.split(r"[^a-z]+", str(name).lower())
    return next((SPLITS[word] for word in words if word in SPLITS), "train")


def _text_columns(row: Row, config: DataConfig, most: int, label: str | None = None) -> list[str]:
    if config.text_column:
        names = [config.text_column] if config.text_column in row else config.text_column.split(",")
        if len(names) > most:
            raise HfGrowError(f"text_column {config.text_column!r} names {len(names)} columns: name at most {most}.")
        return [_column(row, "text_column", name.strip()) for name in names]
    strings = [name for name, value in row.items() if isinstance(value, str) and name not in (*LABEL_COLUMNS, label)]
    return strings if "text" not in row and len(strings) == 1 else [_column(row, "text_column", "text")]


def _column(row: Row, field: str, *names: str) -> str:
    """The first of the names that is a column."""
    column = next((name for name in names if name in row), None)
    if column is None:
        raise HfGrowError(f"There is no column {' or '.join(names)}: choose {field} from {', '.join(row)}.")
    return column
