"""Texts as data, models that read them, and their tokens by plain concatenation."""

import json

import torch
from models import small_model
from transformers import AutoConfig, GPT2ForSequenceClassification

import hf_grow

TEXTS = [
    "The statement is executed.\n\n\nThen the next one:\n    indented, with 2 numbers.\n",
    "",
    "A class definition defines a class object, see section 3.",
    "  \n",
    "Names refer to objects.\tNames are introduced by name binding operations.\r\nLast line without an end",
] + [f"Document number {number} counts to {number * number}." for number in range(30)]


def bert(stock_class, **changes):
    return small_model(stock_class, "bert", **changes)


def gpt2_classifier(**changes):
    config = AutoConfig.from_pretrained(hf_grow.SMALL_MODEL, num_labels=3, **changes)
    torch.manual_seed(0)
    return GPT2ForSequenceClassification(config).eval()


def write_rows(path, rows):
    path.write_text("".join(json.dumps(row) + "\n" for row in rows), encoding="utf-8")
    return str(path)


def plain_concatenation(texts, tokenizer, border):
    """All token ids of the texts that are not blank, the border between them."""
    tokens = []
    for text in texts:
        if text.strip():
            tokens += border * bool(tokens) + tokenizer(text, add_special_tokens=False)["input_ids"]
    return tokens


def assert_equal_batches(first, second):
    assert len(first) == len(second) > 0
    for one, other in zip(first, second, strict=True):
        assert one.keys() == other.keys()
        assert all(torch.equal(one[name], other[name]) for name in one)


class CountingTokenizer:
    """Counts the characters it is given."""

    def __init__(self, tokenizer):
        self.tokenizer, self.characters = tokenizer, 0

    def __getattr__(self, name):
        return getattr(self.tokenizer, name)

    def __call__(self, texts, *args, **kwargs):
        self.characters += sum(map(len, texts))
        return self.tokenizer(texts, *args, **kwargs)
