"""Data becomes batches: all formats read alike, packing against plain concatenation, one sentence for each error."""

import copy
import json
import random
import re
import sys

import datasets
import numpy as np
import pytest
import torch
from texts import TEXTS, CountingTokenizer, assert_equal_batches, bert, gpt2_classifier, plain_concatenation, write_rows
from transformers import (
    AutoConfig,
    AutoModelForCausalLM,
    BertForMaskedLM,
    BertForQuestionAnswering,
    BertForSequenceClassification,
    BertLMHeadModel,
)

import hf_grow
from hf_grow.data import DataConfig, load_batches
from hf_grow.data import sequences as sequences_module
from hf_grow.errors import HfGrowError


def packed_tokens(batches):
    return torch.cat([batch["input_ids"].flatten() for batch in batches]).tolist()


@torch.no_grad()
def assert_finite_losses(model, batches):
    for batch in batches:
        assert bool(torch.isfinite(model(**batch).loss))


# Formats, files and folders.


@pytest.mark.parametrize("ending", ["jsonl", "json", "csv", "tsv", "parquet", "JSONL"])
def test_tables_of_every_format_give_the_same_batches(tmp_path, ending, gpt2, tokenizer):
    rows = [{"text": text, "page": number} for number, text in enumerate(TEXTS) if text.strip()]
    table = datasets.Dataset.from_list(rows)
    path = str(tmp_path / f"table.{ending}")
    if ending == "parquet":
        table.to_parquet(path)
    elif ending == "json":
        (tmp_path / "table.json").write_text(json.dumps(rows), encoding="utf-8")
    elif ending in ("csv", "tsv"):
        table.to_csv(path, sep="\t" if ending == "tsv" else ",", index=False)
    else:
        table.to_json(path)
    config = DataConfig(length=16, batch_size=4)
    batches = load_batches(path, tokenizer, gpt2, config=config)
    # pandas reads \r\n inside a cell as it is, so that one oracle serves all.
    tokens = plain_concatenation(TEXTS, tokenizer, [tokenizer.eos_token_id])
    assert packed_tokens(batches) == tokens[: len(tokens) // 16 * 16]


@pytest.mark.parametrize("ending", ["txt", "text", "md"])
def test_a_text_file_keeps_every_character(tmp_path, ending, gpt2, tokenizer):
    path = tmp_path / f"file.{ending}"
    path.write_text(TEXTS[0], encoding="utf-8")
    (batch,) = load_batches(str(path), tokenizer, gpt2)
    assert tokenizer.decode(batch["input_ids"][0]) == TEXTS[0]
    assert TEXTS[0].count("\n") == 5


def test_a_folder_holds_a_document_in_each_text_file(tmp_path, gpt2, tokenizer):
    for name in ("b.txt", "a.txt", "deeper/c.text", ".hidden.txt", ".git/x.txt", "README.md"):
        (tmp_path / name).parent.mkdir(exist_ok=True)
        (tmp_path / name).write_text(f"I am {name}.", encoding="utf-8")
    before = sorted(tmp_path.rglob("*"))
    (batch,) = load_batches(str(tmp_path), tokenizer, gpt2)
    text = tokenizer.decode(batch["input_ids"][0])
    assert text == "I am a.txt.<|endoftext|>I am b.txt.<|endoftext|>I am deeper/c.text."
    assert sorted(tmp_path.rglob("*")) == before


def test_splits_of_a_folder_follow_the_names(tmp_path, gpt2, tokenizer):
    names = ["train-00000-of-00001.jsonl", "my_test.jsonl", "dev/part.jsonl", "more.jsonl"]
    folder = tmp_path / "test"
    for name in names:
        (folder / name).parent.mkdir(exist_ok=True, parents=True)
        write_rows(folder / name, [{"text": name}])
    found = {}
    for split in ("train", "test", "validation", "train+test"):
        (batch,) = load_batches(str(folder), tokenizer, gpt2, config=DataConfig(split=split))
        found[split] = tokenizer.decode(batch["input_ids"][0]).split("<|endoftext|>")
    more, test, train = "more.jsonl", "my_test.jsonl", "train-00000-of-00001.jsonl"
    assert found == {
        "train": [more, train],
        "test": [test],
        "validation": ["dev/part.jsonl"],
        "train+test": [more, train, test],
    }


def test_part_of_a_split_can_be_chosen(documents, gpt2, tokenizer):
    (batch,) = load_batches(documents, tokenizer, gpt2, config=DataConfig(split="train[:1]"))
    assert tokenizer.decode(batch["input_ids"][0]) == TEXTS[0]


def test_names_with_brackets_and_stars_are_no_patterns(tmp_path, gpt2, tokenizer):
    folder = tmp_path / "a[1]*"
    folder.mkdir()
    write_rows(folder / "b?[x].jsonl", [{"text": "here I am"}])
    for path in (folder, folder / "b?[x].jsonl"):
        (batch,) = load_batches(str(path), tokenizer, gpt2)
        assert tokenizer.decode(batch["input_ids"][0]) == "here I am"


def test_a_changed_file_is_read_anew(tmp_path, gpt2, tokenizer):
    path = tmp_path / "file.txt"
    for text in ("first version", "other version"):
        path.write_text(text, encoding="utf-8")
        (batch,) = load_batches(str(path), tokenizer, gpt2)
        assert tokenizer.decode(batch["input_ids"][0]) == text


@pytest.mark.parametrize(
    ("data", "name", "configuration"),
    [("wikitext:wikitext-2-raw-v1", "wikitext", "wikitext-2-raw-v1"), ("user/corpus", "user/corpus", None)],
)
@pytest.mark.parametrize("streaming", [False, True])
def test_other_names_are_loaded_from_the_hub(monkeypatch, gpt2, tokenizer, data, name, configuration, streaming):
    asked = {}

    def load_dataset(**arguments):
        asked.update(arguments)
        found = datasets.Dataset.from_dict({"text": ["from the Hub"]})
        return found.to_iterable_dataset() if streaming else found

    monkeypatch.setattr(datasets, "load_dataset", load_dataset)
    config = DataConfig(split="validation", streaming=streaming)
    (batch,) = load_batches(data, tokenizer, gpt2, config=config)
    assert tokenizer.decode(batch["input_ids"][0]) == "from the Hub"
    assert asked == {"path": name, "name": configuration, "split": "validation", "streaming": streaming}


@pytest.mark.parametrize("watched", [True, False])
def test_progress_goes_to_standard_error_where_somebody_watches(
    watched, documents, gpt2, tokenizer, capfd, monkeypatch
):
    monkeypatch.setattr(sys.stderr, "isatty", lambda: watched)
    load_batches(documents, tokenizer, gpt2)
    output = capfd.readouterr()
    assert output.out == ""
    assert ("Tokenising" in output.err) == watched
    assert not datasets.are_progress_bars_disabled()


# Packing.


@pytest.mark.parametrize("length", [2, 7, 64])
def test_packing_loses_no_token_and_keeps_the_order(documents, gpt2, tokenizer, length):
    batches = load_batches(documents, tokenizer, gpt2, config=DataConfig(length=length, batch_size=3))
    tokens = plain_concatenation(TEXTS, tokenizer, [tokenizer.eos_token_id])
    blocks = len(tokens) // length
    assert packed_tokens(batches) == tokens[: blocks * length]
    assert [len(batch["input_ids"]) for batch in batches] == [3] * (blocks // 3) + [blocks % 3] * bool(blocks % 3)
    for batch in batches:
        assert torch.equal(batch["labels"], batch["input_ids"]) and batch["input_ids"].dtype == torch.int64
        assert batch["input_ids"].shape[1] == length and bool(batch["attention_mask"].all())


def test_without_an_end_token_documents_touch(documents, gpt2, tokenizer):
    tokenizer.eos_token = None
    batches = load_batches(documents, tokenizer, gpt2, config=DataConfig(length=4))
    tokens = plain_concatenation(TEXTS, tokenizer, [])
    assert packed_tokens(batches) == tokens[: len(tokens) // 4 * 4]


def test_an_incomplete_block_counts_only_if_it_is_alone(tmp_path, gpt2, tokenizer):
    path = tmp_path / "short.txt"
    path.write_text("one two three", encoding="utf-8")
    tokens = tokenizer("one two three")["input_ids"]
    (batch,) = load_batches(str(path), tokenizer, gpt2)
    assert batch["input_ids"].tolist() == [tokens]
    batches = load_batches(str(path), tokenizer, gpt2, config=DataConfig(length=len(tokens) - 1))
    assert packed_tokens(batches) == tokens[:-1]


@pytest.mark.parametrize("max_sequences", [None, 2])
def test_text_is_found_behind_many_blank_documents(tmp_path, gpt2, tokenizer, max_sequences):
    rows = [{"text": text} for text in [""] * 1500 + ["here at last"]]
    path = write_rows(tmp_path / "rows.jsonl", rows)
    (batch,) = load_batches(path, tokenizer, gpt2, config=DataConfig(max_sequences=max_sequences))
    assert tokenizer.decode(batch["input_ids"][0]) == "here at last"


def test_long_documents_are_cut_without_changing_their_tokens(tmp_path, gpt2, tokenizer, monkeypatch):
    path = tmp_path / "long.txt"
    path.write_text("Some words,  two spaces,\n\n\n        and an indented line: 1 2 3.\n" * 40, encoding="utf-8")
    whole = load_batches(str(path), tokenizer, gpt2, config=DataConfig(length=5))
    monkeypatch.setattr(sequences_module, "PIECES_AT_ONCE", 2)
    for characters in range(40, 70):
        monkeypatch.setattr(sequences_module, "PIECE_CHARACTERS", characters)
        assert_equal_batches(load_batches(str(path), tokenizer, gpt2, config=DataConfig(length=5)), whole)
    monkeypatch.setattr(sequences_module, "PIECE_CHARACTERS", 30)
    pieces = [piece for _, piece in sequences_module._pieces("x" * 70 + " y")]
    assert pieces == ["x" * 30, "x" * 30, "x" * 10 + " y"]


def test_the_default_length_is_the_positions_up_to_256(tmp_path, gpt2, tokenizer):
    path = tmp_path / "long.txt"
    path.write_text("many words " * 500, encoding="utf-8")
    assert load_batches(str(path), tokenizer, gpt2)[0]["input_ids"].shape[1] == 256
    longer, shorter = copy.copy(gpt2), copy.copy(gpt2)
    longer.config = AutoConfig.from_pretrained(hf_grow.SMALL_MODEL, n_positions=1024)
    shorter.config = AutoConfig.from_pretrained(hf_grow.SMALL_MODEL, n_positions=100)
    assert load_batches(str(path), tokenizer, longer)[0]["input_ids"].shape[1] == 256
    assert load_batches(str(path), tokenizer, shorter)[0]["input_ids"].shape[1] == 100


# Losses, for stock and growable models.


@pytest.mark.parametrize("growable", [False, True])
def test_batches_of_every_task_give_finite_losses(documents, rated, tokenizer, bert_tokenizer, growable):
    cases = [
        (AutoModelForCausalLM.from_pretrained(hf_grow.SMALL_MODEL), tokenizer, documents),
        (bert(BertLMHeadModel, is_decoder=True), bert_tokenizer, documents),
        (bert(BertForMaskedLM), bert_tokenizer, documents),
        (bert(BertForSequenceClassification, num_labels=3), bert_tokenizer, rated),
        (gpt2_classifier(), tokenizer, rated),
    ]
    for model, its_tokenizer, data in cases:
        if growable:
            hf_grow.make_growable(model)
        batches = load_batches(data, its_tokenizer, model.eval(), config=DataConfig(length=16, batch_size=4))
        assert len(batches) > 1
        assert_finite_losses(model, batches)


# Masking.


def test_masked_blocks_have_their_ends_and_the_original_tokens_as_labels(documents, bert_tokenizer):
    model = bert(BertForMaskedLM)
    batches = load_batches(documents, bert_tokenizer, model, config=DataConfig(length=32, batch_size=5))
    ids = torch.cat([batch["input_ids"] for batch in batches])
    labels = torch.cat([batch["labels"] for batch in batches])
    original = torch.where(labels == -100, ids, labels)
    assert (
        original[:, 0].eq(bert_tokenizer.cls_token_id).all() and original[:, -1].eq(bert_tokenizer.sep_token_id).all()
    )
    tokens = plain_concatenation(TEXTS, bert_tokenizer, [bert_tokenizer.sep_token_id])
    assert original[:, 1:-1].flatten().tolist() == tokens[: len(tokens) // 30 * 30]
    assert not torch.isin(labels, torch.tensor(bert_tokenizer.all_special_ids)).any()
    masked = labels != -100
    assert 0.12 < float(masked.sum() / original[:, 1:-1].numel()) < 0.18
    assert 0.7 < float((ids[masked] == bert_tokenizer.mask_token_id).float().mean()) < 0.9


def test_masking_follows_the_seed_and_leaves_the_global_generators_alone(documents, bert_tokenizer):
    model = bert(BertForMaskedLM)
    states = torch.get_rng_state(), str(np.random.get_state()), random.getstate()
    first, again, other = (
        load_batches(documents, bert_tokenizer, model, config=DataConfig(seed=seed)) for seed in (3, 3, 4)
    )
    assert torch.equal(torch.get_rng_state(), states[0])
    assert (str(np.random.get_state()), random.getstate()) == states[1:]
    assert_equal_batches(first, again)
    assert not torch.equal(first[0]["labels"], other[0]["labels"])


def test_every_batch_has_something_masked(documents, bert_tokenizer):
    batches = load_batches(documents, bert_tokenizer, bert(BertForMaskedLM), config=DataConfig(length=4, batch_size=1))
    assert len(batches) > 300
    assert all(bool((batch["labels"] != -100).any()) for batch in batches)


# Classification.


def test_classified_texts_are_cut_to_the_length_and_padded_to_the_longest(rated, bert_tokenizer):
    model = bert(BertForSequenceClassification, num_labels=3)
    batches = load_batches(rated, bert_tokenizer, model, config=DataConfig(length=20, batch_size=6))
    assert [len(batch["labels"]) for batch in batches] == [6, 6, 6, 2]
    assert torch.cat([batch["labels"] for batch in batches]).tolist() == [number % 3 for number in range(20)]
    for start, batch in zip(range(0, 20, 6), batches, strict=True):
        # Four letters in each word, and two special tokens.
        lengths = [min(20, 2 + 4 * (1 + 3 * number % 11)) for number in range(start, min(start + 6, 20))]
        assert batch["attention_mask"].sum(1).tolist() == lengths
        assert batch["input_ids"].shape[1] == max(lengths)
        assert bool((batch["input_ids"][batch["attention_mask"] == 0] == bert_tokenizer.pad_token_id).all())


def test_labels_go_by_the_names_the_model_knows(tmp_path, bert_tokenizer):
    model = bert(BertForSequenceClassification, label2id={"bad": 0, "good": 1}, id2label={0: "bad", 1: "good"})
    names = ["good", "bad", "good"]
    strings = write_rows(tmp_path / "strings.jsonl", [{"sentence": "x", "labels": name} for name in names])
    classes = datasets.Features({"sentence": datasets.Value("string"), "label": datasets.ClassLabel(names=names[:2])})
    rows = [{"sentence": "x", "label": name} for name in names]
    datasets.Dataset.from_list(rows, features=classes).to_parquet(tmp_path / "classes.parquet")
    for data in (strings, str(tmp_path / "classes.parquet")):
        for streaming in (False, True):
            (batch,) = load_batches(data, bert_tokenizer, model, config=DataConfig(streaming=streaming))
            assert batch["labels"].tolist() == [1, 0, 1]


def test_class_numbers_count_where_the_model_knows_other_names(tmp_path, bert_tokenizer):
    classes = datasets.Features({"text": datasets.Value("string"), "label": datasets.ClassLabel(names=["b", "a"])})
    rows = datasets.Dataset.from_list([{"text": "x", "label": "a"}, {"text": "y", "label": "b"}], features=classes)
    rows.to_parquet(tmp_path / "classes.parquet")
    (batch,) = load_batches(str(tmp_path / "classes.parquet"), bert_tokenizer, bert(BertForSequenceClassification))
    assert batch["labels"].tolist() == [1, 0]


def test_one_label_means_regression(tmp_path, bert_tokenizer):
    path = write_rows(tmp_path / "scores.jsonl", [{"text": "x", "label": score} for score in (0.5, -2, 7)])
    model = bert(BertForSequenceClassification, num_labels=1)
    batches = load_batches(path, bert_tokenizer, model)
    assert batches[0]["labels"].tolist() == [0.5, -2.0, 7.0]
    assert_finite_losses(model, batches)


def test_pairs_of_texts_have_segments(tmp_path, bert_tokenizer):
    path = write_rows(tmp_path / "pairs.jsonl", [{"first": "ab", "second": "cde", "gold": 1}])
    config = DataConfig(text_column="first, second", label_column="gold")
    (batch,) = load_batches(path, bert_tokenizer, bert(BertForSequenceClassification), config=config)
    expected = bert_tokenizer("ab", "cde", return_token_type_ids=True)
    assert batch["input_ids"].tolist() == [expected["input_ids"]]
    assert batch["token_type_ids"].tolist() == [expected["token_type_ids"]] and 1 in expected["token_type_ids"]


def test_models_without_segments_get_none(rated, tokenizer):
    tokenizer.model_input_names = ["input_ids", "token_type_ids", "attention_mask"]
    assert "token_type_ids" in tokenizer("text")
    batches = load_batches(rated, tokenizer, gpt2_classifier())
    assert batches[0].keys() == {"input_ids", "attention_mask", "labels"}


def test_the_end_token_pads_where_there_is_no_other(rated, tokenizer):
    model = gpt2_classifier()
    expected = load_batches(rated, tokenizer, model)
    tokenizer.pad_token = None
    assert_equal_batches(load_batches(rated, tokenizer, model), expected)
    assert tokenizer.pad_token is None
    assert any(bool((batch["attention_mask"] == 0).any()) for batch in expected)


def test_rows_without_tokens_are_passed_over(tmp_path, tokenizer):
    rows = [{"text": text, "label": label} for text, label in [("a", 0), ("", 1), (None, 1), ("b", 2)]]
    (batch,) = load_batches(write_rows(tmp_path / "rows.jsonl", rows), tokenizer, gpt2_classifier())
    assert batch["labels"].tolist() == [0, 2]


def test_a_single_label_is_worth_a_warning(rated, tokenizer, caplog):
    load_batches(rated, tokenizer, gpt2_classifier())
    assert not caplog.records
    load_batches(rated, tokenizer, gpt2_classifier(), config=DataConfig(max_sequences=1))
    assert "sorted by label" in caplog.text


# Columns.


@pytest.mark.parametrize(
    ("row", "given"),
    [
        ({"text": "right one", "title": "wrong"}, None),
        ({"number": 3, "content": "right one"}, None),
        ({"label": "wrong", "content": "right one"}, None),
        ({"text": "wrong", "title": "right one"}, "title"),
        ({"text": "wrong", "a,b": "right one"}, "a,b"),
    ],
)
@pytest.mark.parametrize("streaming", [False, True])
def test_the_text_column_is_found(tmp_path, gpt2, tokenizer, row, given, streaming):
    config = DataConfig(text_column=given, streaming=streaming)
    (batch,) = load_batches(write_rows(tmp_path / "row.jsonl", [row]), tokenizer, gpt2, config=config)
    assert tokenizer.decode(batch["input_ids"][0]) == "right one"


# Amounts.


@pytest.mark.parametrize("max_sequences", [None, 5])
def test_streaming_gives_the_same_batches(documents, rated, gpt2, tokenizer, bert_tokenizer, max_sequences):
    cases = [
        (documents, tokenizer, gpt2),
        (documents, bert_tokenizer, bert(BertForMaskedLM)),
        (rated, bert_tokenizer, bert(BertForSequenceClassification, num_labels=3)),
    ]
    for data, its_tokenizer, model in cases:
        settings = {"length": 9, "batch_size": 2, "max_sequences": max_sequences}
        streamed = load_batches(data, its_tokenizer, model, config=DataConfig(**settings, streaming=True))
        assert_equal_batches(streamed, load_batches(data, its_tokenizer, model, config=DataConfig(**settings)))


def test_max_sequences_takes_the_first_ones(documents, rated, gpt2, tokenizer):
    for data, model in ((documents, gpt2), (rated, gpt2_classifier())):
        settings = {"length": 8, "batch_size": 4}
        every = load_batches(data, tokenizer, model, config=DataConfig(**settings))
        some = load_batches(data, tokenizer, model, config=DataConfig(**settings, max_sequences=8))
        assert len(every) > 2
        assert_equal_batches(some, every[:2])
        more = load_batches(data, tokenizer, model, config=DataConfig(**settings, max_sequences=10_000))
        assert_equal_batches(more, every)


@pytest.mark.parametrize("streaming", [False, True])
@pytest.mark.parametrize("shape", ["one long document", "many documents", "many rated"])
def test_max_sequences_bounds_the_work(tmp_path, gpt2, tokenizer, monkeypatch, streaming, shape):
    monkeypatch.setattr(sequences_module, "PIECE_CHARACTERS", 100)
    counting = CountingTokenizer(tokenizer)
    text = "some words " * 10
    if shape == "one long document":
        path = tmp_path / "long.txt"
        path.write_text(text * 2000, encoding="utf-8")
    else:
        path = write_rows(tmp_path / "many.jsonl", [{"text": text, "label": number % 3} for number in range(2000)])
    model = gpt2_classifier() if shape == "many rated" else gpt2
    config = DataConfig(length=8, max_sequences=3, streaming=streaming)
    batches = load_batches(str(path), counting, model, config=config)
    assert sum(len(batch["input_ids"]) for batch in batches) == 3
    assert 0 < counting.characters <= 65 * len(text)


def test_several_processes_give_the_same_batches(documents, rated, gpt2, tokenizer):
    for data, model in ((documents, gpt2), (rated, gpt2_classifier())):
        parallel = load_batches(data, tokenizer, model, config=DataConfig(length=8, processes=2))
        assert_equal_batches(parallel, load_batches(data, tokenizer, model, config=DataConfig(length=8)))


# Errors.


def assert_error(pattern, *arguments, **settings):
    """One sentence that matches, and none of the traceback of a reader in it."""
    with pytest.raises(HfGrowError, match=pattern) as caught:
        load_batches(*arguments, config=DataConfig(**settings))
    message = str(caught.value)
    assert "\n" not in message and message.endswith(".") and len(message) < 450
    return message


@pytest.mark.parametrize("name", ["length", "batch_size", "max_sequences", "processes"])
@pytest.mark.parametrize("value", [0, -1, 2.5, "8"])
def test_amounts_must_be_positive(name, value):
    with pytest.raises(HfGrowError, match=f"^{name} must be a positive integer, not {re.escape(repr(value))}.$"):
        DataConfig(**{name: value})


def test_the_batch_size_is_needed():
    with pytest.raises(HfGrowError, match="batch_size must be a positive integer, not None"):
        DataConfig(batch_size=None)


@pytest.mark.parametrize("streaming", [False, True])
@pytest.mark.parametrize("data", ["nobody/nothing", "wikitext:wikitext-2-raw-v1", "no such thing"])
def test_a_hub_that_is_out_of_reach_is_one_sentence(gpt2, tokenizer, data, streaming):
    assert_error(
        f"'{data}' cannot be read .* check .* connection to the Hub", data, tokenizer, gpt2, streaming=streaming
    )


def test_the_reason_of_an_unknown_split_on_the_hub_is_told(gpt2, tokenizer, monkeypatch):
    def load_dataset(**arguments):
        raise ValueError("Unknown split \"tset\".\nShould be one of ['train', 'test'].")

    monkeypatch.setattr(datasets, "load_dataset", load_dataset)
    assert_error("'user/corpus' cannot be read .*one of \\['train', 'test'\\]", "user/corpus", tokenizer, gpt2)


@pytest.mark.parametrize(
    "data", ["missing.txt", "./missing", "/nowhere/missing", "~/missing-folder", "a/b.parquet", ""]
)
def test_a_missing_file_is_told(gpt2, tokenizer, data):
    assert_error(f"There is no file or folder '{re.escape(data)}'", data, tokenizer, gpt2)


def test_unknown_endings_are_told(tmp_path, gpt2, tokenizer):
    (tmp_path / "data.xml").write_text("<a/>", encoding="utf-8")
    for path in (tmp_path / "data.xml", tmp_path):
        assert_error(r"is no data that can be read: give files that end in \.txt, .*\.tsv", str(path), tokenizer, gpt2)


def test_mixed_kinds_of_files_are_told(tmp_path, gpt2, tokenizer):
    write_rows(tmp_path / "a.jsonl", [{"text": "x"}])
    (tmp_path / "b.csv").write_text("text\nx\n", encoding="utf-8")
    assert_error(r"mixes kinds of files \(\.csv, \.jsonl\)", str(tmp_path), tokenizer, gpt2)


@pytest.mark.parametrize("streaming", [False, True])
@pytest.mark.parametrize(
    ("name", "content", "pattern"),
    [
        ("empty.txt", "", "The data set .* is empty"),
        ("empty.jsonl", "", "The data set .* is empty"),
        ("empty.csv", "", "The data set .* is empty"),
        ("header.csv", "text,label\n", "The data set .* is empty: .* no row"),
        ("blank.jsonl", "\n", "The data set .* is empty: .* no row"),
        ("blank.txt", " \n \n", "too little text"),
        ("letter.txt", "a", "too little text for one sequence of at least 2 tokens"),
        ("nulls.jsonl", '{"text": null}\n', "too little text"),
        ("broken.jsonl", '{"text": \n', "broken.jsonl' cannot be read .*JSON"),
        ("latin.txt", b"caf\xe9 ol\xe9", "latin.txt' cannot be read .*utf-8"),
        ("broken.parquet", "nothing of the kind", "broken.parquet' cannot be read .*[Pp]arquet"),
        ("numbers.jsonl", '{"text": 3}\n', "Column text holds int, not text"),
        ("two.jsonl", '{"a": "x", "b": "y", "c": 1}\n', "no column text: choose text_column from a, b, c"),
    ],
)
def test_bad_content_is_told(tmp_path, gpt2, tokenizer, name, content, pattern, streaming):
    content = content if isinstance(content, bytes) else content.encode()
    (tmp_path / name).write_bytes(content)
    assert_error(pattern, str(tmp_path / name), tokenizer, gpt2, streaming=streaming)


def test_missing_columns_are_told_with_those_there_are(rated, gpt2, tokenizer):
    assert_error("no column title: choose text_column from text, label", rated, tokenizer, gpt2, text_column="title")
    assert_error("names 2 columns: name at most 1", rated, tokenizer, gpt2, text_column="text,label")
    model = gpt2_classifier()
    assert_error("no column stars: choose label_column from text, label", rated, tokenizer, model, label_column="stars")
    assert_error("names 3 columns: name at most 2", rated, tokenizer, model, text_column="a,b,c")


def test_a_missing_label_column_is_told(documents, tokenizer):
    assert_error("no column label or labels: choose label_column from text", documents, tokenizer, gpt2_classifier())


@pytest.mark.parametrize("streaming", [False, True])
def test_missing_splits_are_told_with_those_there_are(documents, gpt2, tokenizer, streaming):
    pattern = "has no split 'test': choose from train"
    assert_error(pattern, documents, tokenizer, gpt2, split="test", streaming=streaming)


@pytest.mark.parametrize("label", [3, -1, None, "good", 0.5])
@pytest.mark.parametrize("processes", [None, 2])
def test_labels_out_of_range_are_told(tmp_path, tokenizer, label, processes):
    path = write_rows(tmp_path / "rows.jsonl", [{"text": "a", "label": label}] * 2)
    pattern = f"The label {label!r} is none of the model's 3: use 0 to 2 or LABEL_0, LABEL_1, LABEL_2"
    assert_error(pattern, path, tokenizer, gpt2_classifier(), processes=processes)


def test_lengths_that_do_not_fit_are_told(documents, rated, gpt2, tokenizer, bert_tokenizer):
    assert_error("length 257 exceeds the 256 positions", documents, tokenizer, gpt2, length=257)
    masked, classifier = bert(BertForMaskedLM), bert(BertForSequenceClassification, num_labels=3)
    assert_error("length 65 exceeds the 64 positions", documents, bert_tokenizer, masked, length=65)
    assert_error("length 1 leaves too little room .* give at least 2", documents, tokenizer, gpt2, length=1)
    assert_error("length 3 leaves too little room .* give at least 4", documents, bert_tokenizer, masked, length=3)
    assert_error("length 2 leaves too little room .* give at least 3", rated, bert_tokenizer, classifier, length=2)


def test_tokenizers_that_do_not_fit_are_told(tokenizer, bert_tokenizer, gpt2):
    # The data does not exist: these errors come before anything is read.
    data, masked, classifier = "missing.txt", bert(BertForMaskedLM), bert(BertForSequenceClassification)
    assert_error("The model has no tokenizer", data, None, gpt2)
    assert_error("ids up to 1023, but the model's vocabulary has only 96", data, tokenizer, masked)
    bert_tokenizer.mask_token = None
    assert_error("no mask token", data, bert_tokenizer, masked)
    assert_error("length 999 exceeds", data, tokenizer, gpt2, length=999)
    assert_error("pads with id 0, but pad_token_id .* None", data, tokenizer, gpt2_classifier(pad_token_id=None))
    bert_tokenizer.pad_token = None
    assert_error("neither a pad nor an eos token", data, bert_tokenizer, classifier)


def test_a_decoder_without_padding_takes_one_text_at_a_time(rated, tokenizer):
    model = gpt2_classifier(pad_token_id=None)
    batches = load_batches(rated, tokenizer, model, config=DataConfig(batch_size=1, max_sequences=3))
    assert len(batches) == 3
    assert_finite_losses(model, batches)


def test_other_models_are_told_to_make_their_own_batches(documents, bert_tokenizer):
    model = bert(BertForQuestionAnswering)
    pattern = "for BertForQuestionAnswering, only .* ForCausalLM, LMHeadModel, ForMaskedLM, ForSequence.* Python API"
    assert_error(pattern, documents, bert_tokenizer, model)
    several = bert(BertForSequenceClassification, problem_type="multi_label_classification")
    assert_error("several labels per text", documents, bert_tokenizer, several)


def test_text_of_special_tokens_cannot_be_masked(tmp_path, bert_tokenizer):
    (tmp_path / "special.txt").write_text("[SEP] " * 20, encoding="utf-8")
    assert_error("only special tokens", str(tmp_path / "special.txt"), bert_tokenizer, bert(BertForMaskedLM))
