"""Data, tokenizers and models for the tests of data."""

import datasets
import pytest
from texts import TEXTS, write_rows
from transformers import AutoModelForCausalLM, AutoTokenizer

import hf_grow


@pytest.fixture(scope="module", autouse=True)
def no_trace_in_the_home_folder(tmp_path_factory):
    """datasets' caches in a temporary folder."""
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(datasets.config, "HF_DATASETS_CACHE", tmp_path_factory.mktemp("cache"))
        yield


@pytest.fixture(scope="module")
def gpt2():
    return AutoModelForCausalLM.from_pretrained(hf_grow.SMALL_MODEL).eval()


@pytest.fixture
def tokenizer():
    return AutoTokenizer.from_pretrained(hf_grow.SMALL_MODEL)


@pytest.fixture
def documents(tmp_path):
    """TEXTS as a file of JSON lines."""
    return write_rows(tmp_path / "documents.jsonl", [{"text": text} for text in TEXTS])


@pytest.fixture
def rated(tmp_path):
    """Texts of different lengths with labels 0, 1, 2."""
    rows = [{"text": "word " * (1 + 3 * number % 11), "label": number % 3} for number in range(20)]
    return write_rows(tmp_path / "rated.jsonl", rows)
