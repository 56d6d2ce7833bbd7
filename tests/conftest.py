"""Test settings: no network, and one thread, as the models are too small to share; the command line as a fixture."""

import os
import sys

os.environ.setdefault("HF_HUB_OFFLINE", "1")
os.environ.setdefault("TOKENIZERS_PARALLELISM", "false")
os.environ.setdefault("OMP_NUM_THREADS", "1")

import pytest
import torch

from hf_grow.cli import main

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
