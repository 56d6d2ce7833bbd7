"""Rows of a data set become sequences, and sequences become batches that give a model a loss.

The task follows from the class of the model: documents are packed for a language model, rows classified one by one.
Both tasks know `lazily` (as sequences are asked for), `at_once` (all, in parallel), `store` and `collate`.
"""

import copy
import operator
import re
from collections.abc import Callable, Iterable, Iterator
from dataclasses import dataclass
from itertools import islice
from pathlib import Path
from tempfile import TemporaryDirectory
from typing import Any, Protocol

import datasets
import numpy as np
import torch
from torch import Tensor
from transformers import (
    DataCollatorForLanguageModeling,
    DataCollatorWithPadding,
    PreTrainedModel,
    PreTrainedTokenizerBase,
)

from hf_grow.errors import HfGrowError
from hf_grow.progress import libraries_quiet_unless_watched

Row = dict[str, Any]
Columns = dict[str, list[Any]]  # rows as datasets hands them to a function
Batch = dict[str, Tensor]

# Parts of the names of transformers' classes, and of the growable ones.
CAUSAL, MASKED, CLASSIFICATION = ("ForCausalLM", "LMHeadModel"), ("ForMaskedLM",), ("ForSequenceClassification",)
# Long documents are tokenised in pieces, in parallel and no further than needed.
PIECE_CHARACTERS, PIECES_AT_ONCE = 10_000, 64
# More at once costs memory in every process, fewer cost time.
MAPPED_AT_ONCE = 256
WORD_SPACE = re.compile(r"(?<=\S) (?=\S)")
TOKENS = datasets.List(datasets.Value("int32"))


class MapRows(Protocol):
    """Sequences by number: a list, a `datasets.Dataset`, `PackedRows`."""

    def __len__(self) -> int: ...
    def __getitem__(self, index: int, /) -> Row: ...


@dataclass(frozen=True)
class PackedRows:
    """Sequences as one array of int32 [n_sequences, n_tokens], and the special tokens around each."""

    tokens: np.ndarray
    before: list[int]
    after: list[int]

    def __len__(self) -> int:
        return len(self.tokens)

    def __getitem__(self, index: int) -> Row:
        return {"input_ids": self.before + self.tokens[operator.index(index)].tolist() + self.after}


def is_for(model: PreTrainedModel, task: tuple[str, ...]) -> bool:
    """Whether the class of the model, or one it inherits from, is named after the task."""
    return any(part in cls.__name__ for cls in type(model).__mro__ for part in task)


def check_model_and_tokenizer(model: PreTrainedModel, tokenizer: PreTrainedTokenizerBase) -> None:
    """Refuse what gives no loss, before any data is read."""
    if not is_for(model, known := CAUSAL + MASKED + CLASSIFICATION):
        raise HfGrowError(
            f"Text cannot be made into batches for {type(model).__name__}, only for classes named like "
            f"{', '.join(known)}; the Python API takes any batches that you make yourself."
        )
    if "BertLMHeadModel" in {cls.__name__ for cls in type(model).__mro__} and not model.config.is_decoder:
        raise HfGrowError(
            "This BERT sees the tokens it should predict: load it as a masked language model, or set is_decoder."
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
    if is_for(model, MASKED) and tokenizer.mask_token_id is None:
        raise HfGrowError("The tokenizer has no mask token, which masked language models need: set its mask_token.")


def _check_room(length: int, special: int, least: int) -> None:
    if length < special + least:
        raise HfGrowError(
            f"length {length} leaves too little room beside {special} special tokens: give at least {special + least}."
        )


def _texts(values: Iterable[Any], column: str) -> Iterator[str]:
    for value in values:
        if not isinstance(value, str | None):
            raise HfGrowError(f"Column {column} holds {type(value).__name__}, not text: choose another text_column.")
        yield value or ""


def _some_at_once(items: Iterable[Any]) -> Iterator[list[Any]]:
    """The items in lists that a tokenizer works on in parallel."""
    items = iter(items)
    while some := list(islice(items, PIECES_AT_ONCE)):
        yield some


def _map(dataset: Any, function: Callable, features: dict[str, Any], description: str, **options: Any) -> Any:
    """What the function makes of the rows, in place of their columns, with a progress bar."""
    with libraries_quiet_unless_watched():
        return dataset.map(
            function,
            batched=True,
            batch_size=MAPPED_AT_ONCE,
            remove_columns=dataset.column_names,
            features=datasets.Features(features),
            desc=description,
            **options,
        )


# Language models: documents one after the other, cut into full blocks.


@dataclass(frozen=True)
class Packing:
    """Blocks of `size` tokens of text, for a causal or a masked language model."""

    column: str
    size: int
    tokenizer: PreTrainedTokenizerBase
    masked: bool
    before: list[int]  # special tokens around each block
    after: list[int]
    border: list[int]  # the special token between documents, if there is one

    @property
    def needed_columns(self) -> list[str]:
        """The only columns that the data set may have."""
        return [self.column]

    def lazily(self, dataset: Any) -> Iterator[Row]:
        """Blocks as they are asked for; nothing is read or tokenised much beyond them."""
        texts = _texts((row[self.column] for row in dataset), self.column)
        encoded = (ids for pieces in _some_at_once(_pieces_of_all(texts)) for ids in self._encode(pieces))
        for block in _blocks(encoded, self.size, skip=len(self.border)):
            yield {"input_ids": self.before + block + self.after}

    def at_once(self, dataset: Any, processes: int | None) -> PackedRows:
        """All blocks."""
        # On disk while it is worked on, but not in datasets' cache, which would outlive changes of this code.
        with TemporaryDirectory(prefix="hf_grow-", ignore_cleanup_errors=True) as folder:
            pieces = _map(
                dataset,
                self._cut,
                {"piece": datasets.Value("large_string"), "first": datasets.Value("bool")},
                "Cutting",
                cache_file_name=str(Path(folder, "pieces.arrow")),
            )
            options = {"num_proc": processes, "cache_file_name": str(Path(folder, "tokens.arrow"))}
            encoded = _map(pieces, self._encode_columns, {"input_ids": TOKENS}, "Tokenising", **options)
            tokens = _one_array(encoded)[len(self.border) :] if len(pieces) else np.empty(0, np.int32)
        size = self.size if len(tokens) >= self.size else max(2, len(tokens))
        blocks = len(tokens) // size
        return PackedRows(tokens[: blocks * size].reshape(blocks, size), self.before, self.after)

    def store(self, rows: Iterable[Row]) -> PackedRows:
        """The same rows, in little memory."""
        arrays = [np.array(row["input_ids"], np.int32) for row in rows]
        return PackedRows(np.stack(arrays) if arrays else np.empty((0, self.size), np.int32), [], [])

    def collate(self, rows: list[Row], generator: torch.Generator | None = None) -> Batch:
        """A batch; what is masked is drawn from the generator, or from torch's global one."""
        ids = torch.tensor([row["input_ids"] for row in rows])
        inputs, labels = self._mask(ids, generator) if self.masked else (ids, ids.clone())
        return {"input_ids": inputs, "attention_mask": torch.ones_like(ids), "labels": labels}

    def _cut(self, rows: Columns) -> Columns:
        pieces = list(_pieces_of_all(_texts(rows[self.column], self.column)))
        return {"piece": [piece for piece, _ in pieces], "first": [first for _, first in pieces]}

    def _encode_columns(self, rows: Columns) -> Columns:
        return {"input_ids": self._encode(list(zip(rows["piece"], rows["first"], strict=True)))}

    def _encode(self, pieces: list[tuple[str, bool]]) -> list[list[int]]:
        """Token ids of each piece, after the border if it is the first of its document."""
        texts = [piece for piece, _ in pieces]
        encoded = self.tokenizer(texts, add_special_tokens=False, verbose=False)["input_ids"]
        return [self.border * first + ids for (_, first), ids in zip(pieces, encoded, strict=True)]

    def _mask(self, ids: Tensor, generator: torch.Generator | None) -> tuple[Tensor, Tensor]:
        """Some tokens masked, at least one: the loss of a batch without any is not a number."""
        collator = DataCollatorForLanguageModeling(self.tokenizer, mlm=True, mlm_probability=0.15)
        # Its own seeding fails in child processes that are no DataLoader's.
        collator.generator = generator
        for _ in range(100):
            inputs, labels = collator.torch_mask_tokens(ids.clone())
            if (labels != -100).any():
                return inputs, labels
        raise HfGrowError("A batch holds only special tokens, which are never masked: check the text.")


def pack(column: str, length: int, tokenizer: PreTrainedTokenizerBase, model: PreTrainedModel) -> Packing:
    """Sequences of `length` tokens in all for a language model."""
    masked = is_for(model, MASKED)
    before, after = _ends(tokenizer) if masked else ([], [])
    special = len(before) + len(after)
    _check_room(length, special, least=2)
    border = [token for token in (tokenizer.eos_token_id, tokenizer.sep_token_id) if token is not None][:1]
    return Packing(column, length - special, tokenizer, masked, before, after, border)


def _ends(tokenizer: PreTrainedTokenizerBase) -> tuple[list[int], list[int]]:
    """The special tokens that the tokenizer puts before and after a text."""
    encoded = tokenizer("a", return_special_tokens_mask=True)
    ids, special = encoded["input_ids"], encoded["special_tokens_mask"]
    start = special.index(0)
    return ids[:start], ids[start + special.count(0) :]


def _pieces_of_all(texts: Iterable[str]) -> Iterator[tuple[str, bool]]:
    """The pieces of every document that is not blank, and whether each is the first of its document."""
    return ((piece, start == 0) for text in texts if text.strip() for start, piece in _pieces(text))


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


def _blocks(encoded: Iterable[list[int]], size: int, skip: int) -> Iterator[list[int]]:
    """All tokens after the first `skip` in blocks of `size`; an incomplete one only if there is no other."""
    rest: list[int] = []
    full = 0
    for ids in encoded:
        tokens = rest + ids[skip:]
        skip, end = 0, len(tokens) // size * size
        yield from (tokens[start : start + size] for start in range(0, end, size))
        full, rest = full + end, tokens[end:]
    if not full and len(rest) >= 2:
        yield rest


def _one_array(encoded: datasets.Dataset) -> np.ndarray:
    """All token ids of all rows, one after the other."""
    column = encoded.with_format("arrow")[:].column("input_ids")
    return np.concatenate([chunk.flatten().to_numpy() for chunk in column.chunks])


# Classifiers: one sequence for each row that has text.


@dataclass(frozen=True)
class Classification:
    """Texts, or pairs of them, cut to `length` tokens, each with the label of its row."""

    columns: list[str]
    label: str
    label_feature: Any
    length: int
    tokenizer: PreTrainedTokenizerBase
    model_config: Any

    @property
    def needed_columns(self) -> list[str]:
        """The only columns that the data set may have."""
        return [*self.columns, self.label]

    def lazily(self, dataset: Any) -> Iterator[Row]:
        """Sequences as they are asked for; nothing is read or tokenised much beyond them."""
        for rows in _some_at_once(dataset):
            encoded = self._encode({name: [row[name] for row in rows] for name in rows[0]})
            for values in zip(*encoded.values(), strict=True):
                yield dict(zip(encoded, values, strict=True))

    def at_once(self, dataset: Any, processes: int | None) -> datasets.Dataset:
        """All sequences."""
        names = ["input_ids", "attention_mask"] + ["token_type_ids"] * self._has_segments
        number = datasets.Value("float32" if self.model_config.num_labels == 1 else "int64")
        # In memory, as results cached on disk would outlive changes of this code.
        options = {"num_proc": processes, "keep_in_memory": True}
        return _map(dataset, self._encode, {**dict.fromkeys(names, TOKENS), "labels": number}, "Tokenising", **options)

    def store(self, rows: Iterable[Row]) -> list[Row]:
        """The same rows by number."""
        return list(rows)

    def collate(self, rows: list[Row], generator: torch.Generator | None = None) -> Batch:
        """A batch, padded to its longest sequence; nothing is drawn."""
        check_padding(self.tokenizer, self.model_config, len(rows))
        return dict(DataCollatorWithPadding(self.tokenizer)(rows))

    @property
    def _has_segments(self) -> bool:
        # GPT-2 would take segment 0 for token 0 and add its embedding everywhere.
        return getattr(self.model_config, "type_vocab_size", 0) > 1

    def _encode(self, rows: Columns) -> Columns:
        """Token ids and labels of the rows that have text."""
        texts = [list(_texts(rows[column], column)) for column in self.columns]
        options = {"truncation": True, "max_length": self.length, "return_token_type_ids": self._has_segments}
        encoded = {**self.tokenizer(*texts, **options), "labels": [self._number(value) for value in rows[self.label]]}
        full = [index for index, ids in enumerate(encoded["input_ids"]) if ids]
        return {name: [values[index] for index in full] for name, values in encoded.items()}

    def _number(self, value: Any) -> int | float:
        """A label as the model counts them: by name if the model knows the names."""
        numbers, n_labels = self.model_config.label2id or {}, self.model_config.num_labels
        names = getattr(self.label_feature, "names", None) or []
        if value in range(len(names)) and set(names) <= set(numbers):
            value = names[value]
        number = numbers.get(value, value) if isinstance(value, str) else value
        if n_labels == 1 and isinstance(number, int | float):
            return float(number)
        if not isinstance(number, int | float) or number not in range(n_labels):
            known = f"use 0 to {n_labels - 1} or {', '.join(numbers)}"
            raise HfGrowError(f"The label {value!r} is none of the model's {n_labels}: {known}.")
        return int(number)


def classify(
    columns: list[str],
    label: str,
    label_feature: Any,
    length: int,
    tokenizer: PreTrainedTokenizerBase,
    model: PreTrainedModel,
) -> Classification:
    """Sequences of at most `length` tokens in all for a classifier; `label_feature` may know the names of classes."""
    _check_room(length, tokenizer.num_special_tokens_to_add(pair=len(columns) == 2), least=1)
    return Classification(columns, label, label_feature, length, tokenizer, model.config)


def padding_tokenizer(tokenizer: PreTrainedTokenizerBase) -> Any:
    """The tokenizer, or a copy that pads with the end token if it has no padding token."""
    if tokenizer.pad_token_id is None:
        if tokenizer.eos_token_id is None:
            raise HfGrowError("The tokenizer has neither a pad nor an eos token to pad with: set its pad_token.")
        tokenizer = copy.deepcopy(tokenizer)
        tokenizer.pad_token = tokenizer.eos_token
    return tokenizer


def check_padding(tokenizer: PreTrainedTokenizerBase, model_config: Any, batch_size: int) -> None:
    """Decoders classify by the last token that is not padding, which they find by the id in their config."""
    if batch_size > 1 and model_config.pad_token_id != tokenizer.pad_token_id:
        raise HfGrowError(
            f"The tokenizer pads with id {tokenizer.pad_token_id}, but pad_token_id in the model's config is "
            f"{model_config.pad_token_id}: set it to {tokenizer.pad_token_id}, or batch_size to 1."
        )
