"""Data for the command line: files or a data set of the Hub become batches that give a model a loss.

The task follows from the class of the model. Sequences keep the order of the data; nothing is shuffled.
"""

import copy
import logging
import re
from collections.abc import Callable, Iterable, Iterator
from contextlib import contextmanager
from dataclasses import dataclass
from functools import partial
from glob import escape, glob
from itertools import islice
from pathlib import Path
from typing import Any

import datasets
import torch
from datasets.utils import tqdm
from torch import Tensor
from transformers import DataCollatorForLanguageModeling, DataCollatorWithPadding

from hf_grow.errors import HfGrowError

logger = logging.getLogger("hf_grow")
Row = dict[str, Any]
Rows = dict[str, list[Any]]  # as datasets hands them to a function: columns
Batch = dict[str, Tensor]

# Parts of the names of transformers' classes, and of the growable ones.
CAUSAL, MASKED, CLASSIFICATION = ("ForCausalLM", "LMHeadModel"), ("ForMaskedLM",), ("ForSequenceClassification",)
# Only whole documents keep their newlines: the paragraphs of datasets come without the blank lines between them.
TEXT: tuple[str, dict[str, str]] = ("text", {"sample_by": "document"})
JSON: tuple[str, dict[str, str]] = ("json", {})
READERS = {".txt": TEXT, ".text": TEXT, ".md": TEXT, ".jsonl": JSON, ".json": JSON, ".parquet": ("parquet", {})}
READERS |= {".csv": ("csv", {}), ".tsv": ("csv", {"sep": "\t"})}
SPLITS = {"train": "train", "test": "test", **dict.fromkeys(("validation", "valid", "val", "dev"), "validation")}
LABEL_COLUMNS = ("label", "labels")
# Long documents are tokenised in pieces, in parallel and no further than needed.
PIECE_CHARACTERS, PIECES_AT_ONCE = 10_000, 64
WORD_SPACE = re.compile(r"(?<=\S) (?=\S)")


@dataclass(frozen=True)
class DataConfig:
    """What the user wants of the data; `text_column` may name the two columns of a pair: "premise,hypothesis"."""

    split: str = "train"
    text_column: str | None = None
    label_column: str | None = None
    length: int | None = None  # tokens per sequence; None: as many as the model has positions, at most 256
    batch_size: int = 8
    max_sequences: int | None = None
    seed: int = 0  # of the masking
    streaming: bool = False
    processes: int | None = None  # that tokenise, if all of the data is wanted

    def __post_init__(self) -> None:
        for name in ("length", "batch_size", "max_sequences", "processes"):
            value = getattr(self, name)
            if not (isinstance(value, int) and value > 0) and (value is not None or name == "batch_size"):
                raise HfGrowError(f"{name} must be a positive integer, not {value!r}.")


def load_batches(data: str, tokenizer: Any, model: Any, *, config: DataConfig = DataConfig()) -> list[Batch]:  # noqa: B008
    """Batches that give `model(**batch)` a loss, from a file, a folder or a data set `name` or `name:configuration`."""
    _check_model_and_tokenizer(model, tokenizer)
    length = _length(model, config)
    make = _language_batches
    if _is(model, CLASSIFICATION):
        make, tokenizer = _classification_batches, _padding_tokenizer(tokenizer, model, config)
    with _one_sentence_errors(data):
        dataset = datasets.load_dataset(**_source(data, config), split=config.split, streaming=config.streaming)
        row = next(iter(dataset), None)
        if row is None:
            raise HfGrowError(f"The data set {data!r} is empty: its split {config.split!r} has no row.")
        return make(dataset, row, tokenizer, model, length, config)


def _is(model: Any, task: tuple[str, ...]) -> bool:
    return any(part in cls.__name__ for cls in type(model).__mro__ for part in task)


def _check_model_and_tokenizer(model: Any, tokenizer: Any) -> None:
    if not _is(model, known := CAUSAL + MASKED + CLASSIFICATION):
        raise HfGrowError(
            f"Text cannot be made into batches for {type(model).__name__}, only for classes named like "
            f"{', '.join(known)}; the Python API takes any batches that you make yourself."
        )
    if tokenizer is None:
        raise HfGrowError("The model has no tokenizer: save the one it was trained with in its folder.")
    largest, vocabulary = max(tokenizer.get_vocab().values()), model.config.vocab_size
    if largest >= vocabulary:
        raise HfGrowError(
            f"The tokenizer has ids up to {largest}, but the model's vocabulary has only {vocabulary} tokens: "
            "use the tokenizer the model was trained with, or model.resize_token_embeddings."
        )
    if getattr(model.config, "problem_type", None) == "multi_label_classification":
        raise HfGrowError("Models with several labels per text are not supported here: make the batches yourself.")
    if _is(model, MASKED) and tokenizer.mask_token_id is None:
        raise HfGrowError("The tokenizer has no mask token, which masked language models need: set its mask_token.")


def _length(model: Any, config: DataConfig) -> int:
    """Tokens per sequence."""
    positions = getattr(model.config, "max_position_embeddings", None) or getattr(model.config, "n_positions", None)
    if config.length and positions and config.length > positions:
        raise HfGrowError(f"length {config.length} exceeds the {positions} positions of the model: give at most these.")
    return config.length or min(positions or 256, 256)


def _check_room(length: int, special: int, least: int) -> None:
    if length < special + least:
        raise HfGrowError(
            f"length {length} leaves too little room beside {special} special tokens: give at least {special + least}."
        )


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
    if not data or path.is_absolute() or data.startswith((".", "~")) or path.suffix.lower() in READERS:
        raise HfGrowError(f"There is no file or folder {data!r}: check the path.")
    name, _, configuration = data.partition(":")
    return {"path": name, "name": configuration or None}


def _local_files(path: Path) -> tuple[dict[str, list[str]], tuple[str, dict[str, str]]]:
    """The files of each split, and how to read them; of a folder, all but hidden files and READMEs."""
    names = sorted(glob("**", root_dir=path, recursive=True)) if path.is_dir() else [""]
    known = [name for name in names if (path / name).is_file() and (path / name).suffix.lower() in READERS]
    files = [path / name for name in known if Path(name).name != "README.md"]
    readers = [READERS[file.suffix.lower()] for file in files]
    if not readers:
        raise HfGrowError(f"'{path}' is no data that can be read: give files that end in {', '.join(READERS)}.")
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
    found = next((name for name in names if name in row), None)
    if found is None:
        raise HfGrowError(f"There is no column {' or '.join(names)}: choose {field} from {', '.join(row)}.")
    return found


def _texts(rows: Rows, column: str) -> list[str]:
    for value in rows[column]:
        if not isinstance(value, str | None):
            raise HfGrowError(f"Column {column} holds {type(value).__name__}, not text: choose another text_column.")
    return [value or "" for value in rows[column]]


def _map(dataset: Any, function: Callable, columns: list[str], features: dict[str, Any], config: DataConfig) -> Any:
    """Rows of the features: all computed now with a progress bar, or as they are asked for if only some are wanted."""
    options = {"batched": True, "remove_columns": columns, "features": datasets.Features(features)}
    dataset = dataset.select_columns(columns)
    if isinstance(dataset, datasets.Dataset) and config.max_sequences is None:
        # In memory, as results cached on disk would outlive changes of this code.
        return dataset.map(function, num_proc=config.processes, keep_in_memory=True, desc="Tokenising", **options)
    if isinstance(dataset, datasets.Dataset):
        dataset = dataset.to_iterable_dataset()
    return dataset.map(function, batch_size=min(1000, config.max_sequences or 1000), **options)


def _batched(sequences: Iterable[Any], collate: Callable[[list[Any]], Batch], config: DataConfig) -> list[Batch]:
    """Batches of at most `max_sequences` sequences in all."""
    wanted = islice(sequences, config.max_sequences)
    taken = list(tqdm(wanted, desc="Sequences", total=config.max_sequences, unit=" sequences"))
    if not taken:
        raise HfGrowError("The data has too little text for one sequence of at least 2 tokens: give more.")
    return [collate(taken[start : start + config.batch_size]) for start in range(0, len(taken), config.batch_size)]


def _language_batches(
    dataset: Any, row: Row, tokenizer: Any, model: Any, length: int, config: DataConfig
) -> list[Batch]:
    """Documents one after the other, cut into full blocks."""
    masked = _is(model, MASKED)
    before, after = _ends(tokenizer) if masked else ([], [])
    special = len(before) + len(after)
    _check_room(length, special, least=2)
    (column,) = _text_columns(row, config, most=1)
    border = [token for token in (tokenizer.eos_token_id, tokenizer.sep_token_id) if token is not None][:1]
    enough = float("inf") if config.max_sequences is None else config.max_sequences * length
    encode = partial(_encode_documents, column=column, tokenizer=tokenizer, border=border, enough=enough)
    rows = _map(dataset, encode, [column], {"input_ids": datasets.List(datasets.Value("int32"))}, config)
    blocks = (torch.tensor(before + block + after) for block in _blocks(rows, length - special, len(border)))
    if not masked:
        return _batched(blocks, _copy_as_labels, config)
    collator = DataCollatorForLanguageModeling(tokenizer, mlm=True, mlm_probability=0.15)
    # Its own seeding fails in child processes that are no DataLoader's.
    collator.generator = torch.Generator().manual_seed(config.seed)
    return _batched(blocks, partial(_mask, collator=collator), config)


def _ends(tokenizer: Any) -> tuple[list[int], list[int]]:
    """The special tokens that the tokenizer puts before and after a text."""
    encoded = tokenizer("a", return_special_tokens_mask=True)
    ids, special = encoded["input_ids"], encoded["special_tokens_mask"]
    start = special.index(0)
    return ids[:start], ids[start + special.count(0) :]


def _encode_documents(rows: Rows, column: str, tokenizer: Any, border: list[int], enough: float) -> Rows:
    """Token ids of the pieces of every document that is not blank, with the border before each document."""
    documents = [text for text in _texts(rows, column) if text.strip()]
    pieces = [(piece, [] if start else border) for text in documents for start, piece in _pieces(text)]
    tokens: list[list[int]] = []
    while pieces and sum(map(len, tokens)) <= enough:
        some, pieces = pieces[:PIECES_AT_ONCE], pieces[PIECES_AT_ONCE:]
        encoded = tokenizer([piece for piece, _ in some], add_special_tokens=False, verbose=False)["input_ids"]
        tokens += [first + ids for (_, first), ids in zip(some, encoded, strict=True)]
    return {"input_ids": tokens}


def _pieces(text: str) -> Iterator[tuple[int, str]]:
    """The text in pieces with their starts, cut before the single space of a word, where tokens begin anyway."""
    start = 0
    while start < len(text):
        end = start + PIECE_CHARACTERS
        if end < len(text):
            spaces = WORD_SPACE.finditer(text, max(start + 1, end - 1000), end)
            end = max((space.start() for space in spaces), default=end)
        yield start, text[start:end]
        start = end


def _blocks(rows: Iterable[dict[str, list[int]]], size: int, skip: int) -> Iterator[list[int]]:
    """All tokens after the first `skip` in blocks of `size`; an incomplete one only if there is no other."""
    rest: list[int] = []
    full = 0
    for row in rows:
        tokens = rest + row["input_ids"][skip:]
        skip, end = 0, len(tokens) // size * size
        yield from (tokens[start : start + size] for start in range(0, end, size))
        full, rest = full + end, tokens[end:]
    if not full and len(rest) >= 2:
        yield rest


def _copy_as_labels(blocks: list[Tensor]) -> Batch:
    ids = torch.stack(blocks)
    return {"input_ids": ids, "attention_mask": torch.ones_like(ids), "labels": ids.clone()}


def _mask(blocks: list[Tensor], collator: Any) -> Batch:
    """Some tokens masked, at least one: the loss of a batch without any is not a number."""
    ids = torch.stack(blocks)
    for _ in range(100):
        inputs, labels = collator.torch_mask_tokens(ids.clone())
        if (labels != -100).any():
            return {"input_ids": inputs, "attention_mask": torch.ones_like(ids), "labels": labels}
    raise HfGrowError("A batch holds only special tokens, which are never masked: check the text.")


def _classification_batches(
    dataset: Any, row: Row, tokenizer: Any, model: Any, length: int, config: DataConfig
) -> list[Batch]:
    """One sequence for each row that has text, padded to the longest of its batch."""
    label = _column(row, "label_column", *([config.label_column] if config.label_column else LABEL_COLUMNS))
    columns = _text_columns(row, config, 2, label)
    _check_room(length, tokenizer.num_special_tokens_to_add(pair=len(columns) == 2), least=1)
    # GPT-2 would take segment 0 for token 0 and add its embedding everywhere.
    segments = getattr(model.config, "type_vocab_size", 0) > 1
    options = {"truncation": True, "max_length": length, "return_token_type_ids": segments}
    read = partial(_label, model_config=model.config, feature=(dataset.features or {}).get(label))
    encode = partial(_encode_rows, columns=columns, label=label, tokenizer=tokenizer, options=options, read=read)
    names = ["input_ids", "attention_mask"] + ["token_type_ids"] * segments
    features = {name: datasets.List(datasets.Value("int32")) for name in names}
    features["labels"] = datasets.Value("float32" if model.config.num_labels == 1 else "int64")
    rows = _map(dataset, encode, [*columns, label], features, config)
    collator = DataCollatorWithPadding(tokenizer)
    batches = _batched((row for row in rows if row["input_ids"]), lambda some: dict(collator(some)), config)
    if len(torch.cat([batch["labels"] for batch in batches]).unique()) == 1:
        logger.warning("All sequences have one label: the data may be sorted by label, so take more or shuffle it.")
    return batches


def _padding_tokenizer(tokenizer: Any, model: Any, config: DataConfig) -> Any:
    """The tokenizer, or a copy that pads with the end token if it has no padding token."""
    if tokenizer.pad_token_id is None:
        if tokenizer.eos_token_id is None:
            raise HfGrowError("The tokenizer has neither a pad nor an eos token to pad with: set its pad_token.")
        tokenizer = copy.deepcopy(tokenizer)
        tokenizer.pad_token = tokenizer.eos_token
    # Decoders classify by the last token that is not padding, which they find by the id in their config.
    if config.batch_size > 1 and model.config.pad_token_id != tokenizer.pad_token_id:
        raise HfGrowError(
            f"The tokenizer pads with id {tokenizer.pad_token_id}, but pad_token_id in the model's config is "
            f"{model.config.pad_token_id}: set it to {tokenizer.pad_token_id}, or batch_size to 1."
        )
    return tokenizer


def _encode_rows(
    rows: Rows, columns: list[str], label: str, tokenizer: Any, options: dict[str, Any], read: Callable
) -> Rows:
    """Token ids and labels of rows."""
    texts = [_texts(rows, column) for column in columns]
    return {**tokenizer(*texts, **options), "labels": [read(value) for value in rows[label]]}


def _label(value: Any, model_config: Any, feature: Any) -> int | float:
    """A label as the model counts them: by name if the model knows the names."""
    numbers, n_labels = model_config.label2id or {}, model_config.num_labels
    names = getattr(feature, "names", None) or []
    if value in range(len(names)) and set(names) <= set(numbers):
        value = names[value]
    number = numbers.get(value, value) if isinstance(value, str) else value
    if n_labels == 1 and isinstance(number, int | float):
        return float(number)
    if not isinstance(number, int | float) or number not in range(n_labels):
        raise HfGrowError(
            f"The label {value!r} is none of the model's {n_labels}: use 0 to {n_labels - 1} or {', '.join(numbers)}."
        )
    return int(number)
