"""Test settings: no network, and one thread, as the models are too small to share; fixtures of several folders."""

import os
import sys
from pydoc_data.topics import topics

os.environ.setdefault("HF_HUB_OFFLINE", "1")
os.environ.setdefault("TOKENIZERS_PARALLELISM", "false")
os.environ.setdefault("OMP_NUM_THREADS", "1")

import pytest
import torch
from hub_server import HubServer
from tokenizers import Tokenizer, normalizers, pre_tokenizers, processors
from tokenizers.models import WordPiece
from transformers import PreTrainedTokenizerFast

from hf_grow.cli import main

LETTERS = "abcdefghijklmnopqrstuvwxyz"

torch.set_num_threads(1)


@pytest.fixture
def run(capsys, monkeypatch):
    """Run `hf-grow` with these arguments and return what it printed, checked for its exit code."""

    def call(*arguments, code=0):
        monkeypatch.setattr(sys, "argv", ["hf-grow", *(str(argument) for argument in arguments)])
        with pytest.raises(SystemExit) as ended:
            main()
        printed = capsys.readouterr()
        assert ended.value.code == code, printed.err[-2000:]
        return printed.out if code == 0 else printed.err

    return call


@pytest.fixture(scope="module")
def data(tmp_path_factory):
    """Texts to train on, and others to evaluate on."""
    folder = tmp_path_factory.mktemp("data")
    (folder / "train.txt").write_text("\n\n".join(topics[name] for name in ("assert", "bitwise")), encoding="utf-8")
    (folder / "other.txt").write_text(topics["numbers"], encoding="utf-8")
    return folder


@pytest.fixture
def hub(monkeypatch):
    """A Hub with one user, and this process's client pointed at it."""
    with HubServer(token="hf_test", user="user") as server:
        server.redirect_client(monkeypatch, max_retries=0)
        yield server


@pytest.fixture
def bert_tokenizer():
    """Words in letters, with the special tokens of BERT and fewer than 96 ids."""
    special = ["[PAD]", "[UNK]", "[CLS]", "[SEP]", "[MASK]"]
    tokens = [*special, *LETTERS, *(f"##{letter}" for letter in LETTERS), *"0123456789.,:"]
    vocabulary = {token: index for index, token in enumerate(tokens)}
    backend = Tokenizer(WordPiece(vocabulary, unk_token="[UNK]"))
    backend.normalizer = normalizers.BertNormalizer()
    backend.pre_tokenizer = pre_tokenizers.BertPreTokenizer()
    backend.post_processor = processors.BertProcessing(("[SEP]", 3), ("[CLS]", 2))
    names = ("pad", "unk", "cls", "sep", "mask")
    given = {f"{name}_token": token for name, token in zip(names, special, strict=True)}
    return PreTrainedTokenizerFast(tokenizer_object=backend, **given)
