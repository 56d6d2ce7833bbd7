"""Sequences for training: streams against memory, splits against counting, masking against torch's seed."""

import json
import pickle

import datasets
import pytest
import torch
from models import small_model
from peft import LoraConfig, get_peft_model
from texts import TEXTS, CountingTokenizer, assert_equal_batches, bert, gpt2_classifier, plain_concatenation, write_rows
from torch.utils.data import DataLoader
from transformers import BertForMaskedLM, BertForSequenceClassification, BertLMHeadModel

from hf_grow.data import DataConfig, StreamedRows, load_batches, load_sequences, split_rows
from hf_grow.data import sequences as sequences_module
from hf_grow.errors import HfGrowError


def load(data, its_tokenizer, model, **settings):
    return load_sequences(data, its_tokenizer, model, config=DataConfig(**settings))


def every_row(rows):
    """All rows by number, or as they come."""
    return [rows[index] for index in range(len(rows))] if hasattr(rows, "__len__") else list(rows)


def tokens_of(rows):
    return [token for row in every_row(rows) for token in row["input_ids"]]


@pytest.fixture
def tasks(documents, rated, gpt2, tokenizer, bert_tokenizer):
    """Data, tokenizer and model of each task."""
    return {
        "causal": (documents, tokenizer, gpt2),
        "masked": (documents, bert_tokenizer, bert(BertForMaskedLM)),
        "classification": (rated, bert_tokenizer, bert(BertForSequenceClassification, num_labels=3)),
        "decoder classification": (rated, tokenizer, gpt2_classifier()),
    }


TASKS = ["causal", "masked", "classification", "decoder classification"]


# Rows.


@pytest.mark.parametrize("task", TASKS)
def test_rows_are_the_same_however_they_are_read(tasks, task):
    in_memory = every_row(load(*tasks[task], length=9).rows)
    assert len(in_memory) > 10
    for settings in ({"streaming": True}, {"processes": 2}, {"max_sequences": 10_000}):
        assert every_row(load(*tasks[task], length=9, **settings).rows) == in_memory
    for streaming in (False, True):
        rows = load(*tasks[task], length=9, max_sequences=7, streaming=streaming).rows
        assert len(rows) == 7 and every_row(rows) == in_memory[:7]


@pytest.mark.parametrize("streaming", [False, True])
def test_rows_hold_every_token_in_order(documents, gpt2, tokenizer, streaming):
    tokens = plain_concatenation(TEXTS, tokenizer, [tokenizer.eos_token_id])
    rows = load(documents, tokenizer, gpt2, length=11, streaming=streaming).rows
    assert tokens_of(rows) == tokens[: len(tokens) // 11 * 11]
    assert {len(row["input_ids"]) for row in every_row(rows)} == {11}


def test_one_long_document_is_tokenised_in_parallel(tmp_path, gpt2, tokenizer, monkeypatch):
    monkeypatch.setattr(sequences_module, "PIECE_CHARACTERS", 100)
    path = tmp_path / "long.txt"
    path.write_text(text := "some words, more words\n" * 300, encoding="utf-8")
    asked = []
    whole_map = datasets.Dataset.map

    def watched_map(dataset, *arguments, **options):
        asked.append((len(dataset), options.get("num_proc")))
        return whole_map(dataset, *arguments, **options)

    monkeypatch.setattr(datasets.Dataset, "map", watched_map)
    rows = load(str(path), tokenizer, gpt2, length=16, processes=2).rows
    assert asked[-1][1] == 2 and asked[-1][0] > 60
    tokens = tokenizer(text)["input_ids"]
    assert tokens_of(rows) == tokens[: len(tokens) // 16 * 16]


def test_packed_rows_take_four_bytes_for_a_token(documents, gpt2, tokenizer):
    for settings in ({}, {"max_sequences": 20}):
        rows = load(documents, tokenizer, gpt2, length=8, **settings).rows
        assert rows.tokens.nbytes == len(rows) * 8 * 4
    with pytest.raises(IndexError):
        rows[20]
    with pytest.raises(TypeError):
        rows[:2]


def test_nothing_is_left_on_the_disk(tasks, tmp_path, monkeypatch):
    folder = tmp_path / "temporary"
    folder.mkdir()
    monkeypatch.setattr("tempfile.tempdir", str(folder))
    rows = load(*tasks["causal"], length=8).rows
    assert len(rows) > 10 and not list(folder.iterdir())


# Streams.


@pytest.mark.parametrize("task", TASKS)
def test_a_stream_starts_anew_at_each_iteration(tasks, task):
    rows = load(*tasks[task], length=9, streaming=True).rows
    assert isinstance(rows, StreamedRows) and not hasattr(rows, "__len__")
    first = iter(rows)
    beginning = [next(first), next(first)]
    assert list(rows) == list(rows) and list(rows)[:2] == beginning


@pytest.mark.parametrize("rated_rows", [False, True])
def test_a_stream_reads_no_further_than_needed(tmp_path, gpt2, tokenizer, monkeypatch, rated_rows):
    text, read = "some words " * 10, []

    def endless():
        while True:
            read.append(text)
            yield {"text": text, "label": len(read) % 3}

    stream = datasets.IterableDataset.from_generator(endless)
    monkeypatch.setattr(datasets, "load_dataset", lambda **arguments: stream)
    counting = CountingTokenizer(tokenizer)
    model = gpt2_classifier() if rated_rows else gpt2
    rows = load("user/endless", counting, model, length=8, streaming=True).rows
    # The first row shows the columns, the first sequence is a check.
    assert len(read) <= 1 + 64 and counting.characters <= 64 * len(text)
    iterator = iter(rows)
    for _ in range(3):
        next(iterator)
    assert len(read) <= 1 + 2 * 64 and counting.characters <= 2 * 64 * len(text)


def test_a_long_document_of_a_stream_is_tokenised_as_needed(tmp_path, gpt2, tokenizer, monkeypatch):
    monkeypatch.setattr(sequences_module, "PIECE_CHARACTERS", 100)
    path = tmp_path / "long.txt"
    path.write_text("some words " * 20_000, encoding="utf-8")
    counting = CountingTokenizer(tokenizer)
    rows = load(str(path), counting, gpt2, length=8, streaming=True).rows
    next(iter(rows))
    assert 0 < counting.characters <= 2 * 64 * 100


@pytest.mark.parametrize("max_sequences", [None, 30])
def test_a_shuffled_stream_holds_the_same_rows_in_an_order_of_the_seed(rated, tokenizer, max_sequences):
    def read(**settings):
        rows = load(rated, tokenizer, gpt2_classifier(), streaming=True, max_sequences=max_sequences, **settings).rows
        return [json.dumps(row, sort_keys=True) for row in every_row(rows)]

    plain = read()
    first, again, other = (read(shuffle_buffer=10, seed=seed) for seed in (1, 1, 2))
    assert first == again
    assert len({tuple(plain), tuple(first), tuple(other)}) == 3
    assert sorted(plain) == sorted(first) == sorted(other)


def test_epochs_shuffle_a_stream_differently(rated, tokenizer):
    rows = load(rated, tokenizer, gpt2_classifier(), streaming=True, shuffle_buffer=10).rows
    epochs = []
    for epoch in (0, 1, 0):
        rows.set_epoch(epoch)
        epochs.append([row["labels"] for row in rows])
    assert epochs[0] == epochs[2] != epochs[1]


def test_shuffling_needs_a_stream():
    with pytest.raises(HfGrowError, match=r"shuffle_buffer shuffles only a stream: set streaming=True"):
        DataConfig(shuffle_buffer=10)
    with pytest.raises(HfGrowError, match=r"shuffle_buffer must be a positive integer, not 0\."):
        DataConfig(shuffle_buffer=0, streaming=True)


# Batches.


@pytest.mark.parametrize("task", TASKS)
@pytest.mark.parametrize("streaming", [False, True])
@pytest.mark.parametrize("workers", [0, 2])
def test_a_data_loader_of_torch_gives_finite_losses(tasks, task, streaming, workers):
    data, its_tokenizer, model = tasks[task]
    sequences = load(data, its_tokenizer, model, length=12, streaming=streaming)
    loader = DataLoader(
        sequences.rows,
        batch_size=4,
        collate_fn=sequences.collate,
        shuffle=None if streaming else True,
        num_workers=workers,
    )
    seen = 0
    for batch in loader:
        seen += len(batch["labels"])
        with torch.no_grad():
            assert bool(torch.isfinite(model(**batch).loss))
    assert seen == len(every_row(sequences.rows))


def test_sequences_can_be_pickled(tasks):
    for task in TASKS:
        sequences = load(*tasks[task], length=12)
        copied = pickle.loads(pickle.dumps(sequences))
        torch.manual_seed(0)
        expected = sequences.collate([sequences.rows[1], sequences.rows[2]])
        torch.manual_seed(0)
        assert_equal_batches([copied.collate([copied.rows[1], copied.rows[2]])], [expected])


def test_the_rows_of_load_sequences_are_those_of_load_batches(tasks):
    for task in ("causal", "classification", "decoder classification"):
        settings = {"length": 9, "batch_size": 5}
        batches = load_batches(*tasks[task], config=DataConfig(**settings))
        sequences = load(*tasks[task], **settings)
        rows = every_row(sequences.rows)
        expected = [sequences.collate(rows[start : start + 5]) for start in range(0, len(rows), 5)]
        assert_equal_batches(batches, expected)


def test_masking_follows_the_seed_of_torch_and_changes_at_each_call(tasks):
    sequences = load(*tasks["masked"], length=32)
    rows = every_row(sequences.rows)[:8]
    torch.manual_seed(5)
    first, second = sequences.collate(rows), sequences.collate(rows)
    torch.manual_seed(5)
    again = sequences.collate(rows)
    assert_equal_batches([first], [again])
    assert not torch.equal(first["labels"], second["labels"])
    for batch in (first, second):
        original = torch.where(batch["labels"] == -100, batch["input_ids"], batch["labels"])
        assert original.tolist() == [row["input_ids"] for row in rows]


def test_masking_from_a_generator_leaves_the_global_one_alone(tasks):
    sequences = load(*tasks["masked"], length=32)
    rows, state = every_row(sequences.rows)[:8], torch.get_rng_state()
    batches = [sequences.collate(rows, torch.Generator().manual_seed(seed)) for seed in (3, 3, 4)]
    assert torch.equal(torch.get_rng_state(), state)
    assert_equal_batches(batches[:1], batches[1:2])
    assert not torch.equal(batches[0]["labels"], batches[2]["labels"])


def test_a_batch_of_one_short_sequence_has_something_masked(tasks):
    sequences = load(*tasks["masked"], length=4)
    torch.manual_seed(0)
    rows = every_row(sequences.rows)
    assert len(rows) > 300
    assert all(bool((sequences.collate([row])["labels"] != -100).any()) for row in rows)


def test_padding_that_a_decoder_would_not_find_is_refused_in_any_batch(rated, tokenizer):
    sequences = load(rated, tokenizer, gpt2_classifier(pad_token_id=None), batch_size=1)
    assert sequences.collate([sequences.rows[0]])["labels"].tolist() == [0]
    with pytest.raises(HfGrowError, match=r"pads with id 0, but pad_token_id .* None"):
        sequences.collate([sequences.rows[0], sequences.rows[1]])


# Models that PEFT wraps.


@pytest.mark.parametrize(
    ("stock_class", "changes", "task_type"),
    [
        (BertForMaskedLM, {}, None),
        # The name of the wrapper speaks of another task than the model inside.
        (BertForMaskedLM, {}, "SEQ_CLS"),
        (BertLMHeadModel, {"is_decoder": True}, "CAUSAL_LM"),
        (BertForSequenceClassification, {"num_labels": 3}, "SEQ_CLS"),
    ],
)
def test_the_model_inside_peft_decides(documents, rated, bert_tokenizer, stock_class, changes, task_type):
    data = rated if stock_class is BertForSequenceClassification else documents
    expected = load_batches(data, bert_tokenizer, small_model(stock_class, "bert", **changes))
    adapter = LoraConfig(target_modules=["query"], task_type=task_type)
    wrapped = get_peft_model(small_model(stock_class, "bert", **changes), adapter)
    assert_equal_batches(load_batches(data, bert_tokenizer, wrapped), expected)
    assert expected[0]["input_ids"].shape[1] <= 64


# Held-out rows.


@pytest.mark.parametrize(
    ("count", "share", "held_out"), [(2, 0.01, 1), (2, 0.99, 1), (3, 0.99, 2), (100, 0.1, 10), (100, 0.001, 1)]
)
def test_a_split_parts_the_rows(count, share, held_out):
    rows = [{"input_ids": [number, 0]} for number in range(count)]
    train, held = (every_row(part) for part in split_rows(rows, share, seed=0))
    assert len(held) == held_out and len(train) == count - held_out
    order = [row["input_ids"][0] for row in train + held]
    assert sorted(order) == list(range(count))
    assert train == sorted(train, key=rows.index) and held == sorted(held, key=rows.index)


def test_a_split_follows_its_seed_alone():
    rows = [{"input_ids": [number]} for number in range(50)]
    chosen = []
    for seed in (1, 1, 2):
        torch.manual_seed(len(chosen))
        state = torch.get_rng_state()
        chosen.append(every_row(split_rows(rows, 0.2, seed)[1]))
        assert torch.equal(torch.get_rng_state(), state)
    assert chosen[0] == chosen[1] != chosen[2]
    assert chosen[0] not in (rows[:10], rows[-10:])


def test_rows_of_every_task_can_be_split(tasks):
    for task in TASKS:
        sequences = load(*tasks[task], length=9)
        train, held = split_rows(sequences.rows, 0.25, seed=0)
        rows = sorted(map(json.dumps, every_row(sequences.rows)))
        assert sorted(map(json.dumps, every_row(train) + every_row(held))) == rows
        (batch,) = DataLoader(held, batch_size=len(held), collate_fn=sequences.collate)
        assert len(batch["labels"]) == len(held) == round(len(rows) / 4)


def test_what_cannot_be_split_is_told(tasks):
    rows = [{"input_ids": [1, 2]}] * 4
    for share in (0, 1, -0.5, 5, float("nan")):
        with pytest.raises(HfGrowError, match="must lie between 0 and 1, not be"):
            split_rows(rows, share, seed=0)
    for count in (0, 1):
        with pytest.raises(HfGrowError, match=f"need at least 2 sequences, not {count}: give more text"):
            split_rows(rows[:count], 0.5, seed=0)
    with pytest.raises(HfGrowError, match="A stream cannot be split"):
        split_rows(load(*tasks["causal"], streaming=True).rows, 0.5, seed=0)


# Errors come when the data is loaded, also of a stream.


@pytest.mark.parametrize("reading", [{}, {"streaming": True}, {"streaming": True, "shuffle_buffer": 5}])
@pytest.mark.parametrize(
    ("rows", "settings", "pattern"),
    [
        ([{"title": 3}], {}, "no column text: choose text_column from title"),
        ([{"text": 3}], {}, "Column text holds int, not text"),
        ([{"text": ""}] * 3, {}, "too little text"),
        ([{"text": "many words"}], {"length": 257}, "length 257 exceeds the 256 positions"),
    ],
)
def test_bad_text_is_told_before_any_training(tmp_path, gpt2, tokenizer, rows, settings, pattern, reading):
    with pytest.raises(HfGrowError, match=pattern):
        load(write_rows(tmp_path / "rows.jsonl", rows), tokenizer, gpt2, **reading, **settings)


@pytest.mark.parametrize("streaming", [False, True])
def test_an_empty_data_set_is_told(gpt2, tokenizer, monkeypatch, streaming):
    nothing = datasets.IterableDataset.from_generator(list) if streaming else datasets.Dataset.from_dict({"text": []})
    monkeypatch.setattr(datasets, "load_dataset", lambda **arguments: nothing)
    with pytest.raises(HfGrowError, match="'user/nothing' is empty: its split 'train' has no row"):
        load("user/nothing", tokenizer, gpt2, streaming=streaming)


@pytest.mark.parametrize("streaming", [False, True])
def test_a_first_label_out_of_range_is_told_before_any_training(tmp_path, tokenizer, streaming):
    path = write_rows(tmp_path / "rows.jsonl", [{"text": "a", "label": 3}, {"text": "b", "label": 0}])
    with pytest.raises(HfGrowError, match="The label 3 is none of the model's 3"):
        load(path, tokenizer, gpt2_classifier(), streaming=streaming)


def test_a_later_label_out_of_range_is_told_when_the_stream_meets_it(tmp_path, tokenizer):
    rows = [{"text": "a", "label": 3 if number == 150 else 0} for number in range(200)]
    path = write_rows(tmp_path / "rows.jsonl", rows)
    with pytest.raises(HfGrowError, match="The label 3 is none of the model's 3"):
        load(path, tokenizer, gpt2_classifier())
    stream = iter(load(path, tokenizer, gpt2_classifier(), streaming=True).rows)
    assert [next(stream)["labels"] for _ in range(100)] == [0] * 100
    with pytest.raises(HfGrowError, match="The label 3 is none of the model's 3"):
        list(stream)


def test_what_breaks_later_in_a_stream_is_one_sentence(gpt2, tokenizer, monkeypatch):
    def breaking():
        yield from ({"text": "some words"} for _ in range(100))
        raise ConnectionError("the line is dead")

    stream = datasets.IterableDataset.from_generator(breaking)
    monkeypatch.setattr(datasets, "load_dataset", lambda **arguments: stream)
    rows = load("user/corpus", tokenizer, gpt2, length=4, streaming=True).rows
    with pytest.raises(HfGrowError, match=r"'user/corpus' cannot be read \(the line is dead\): check .* Hub\.$"):
        list(rows)
