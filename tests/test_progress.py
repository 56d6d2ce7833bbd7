"""Bars are drawn where somebody watches, and nowhere else."""

import io
import sys

import datasets
import pytest
from batches import labelled, sequences_of
from models import causal_model
from transformers.utils import logging

from hf_grow import CollectConfig, collect_statistics, make_growable
from hf_grow.progress import Progress, libraries_quiet_unless_watched


class Terminal(io.StringIO):
    """What looks like a terminal."""

    def isatty(self):
        """It does."""
        return True


@pytest.mark.parametrize("watched", [True, False])
def test_measuring_shows_one_bar_with_the_time_left(watched, monkeypatch):
    screen = Terminal() if watched else io.StringIO()
    monkeypatch.setattr(sys, "stderr", screen)
    model = make_growable(causal_model("gpt2"))
    batches = sequences_of(labelled(model, size=8, length=16))
    collect_statistics(model, batches, CollectConfig(columns=2), progress=True)
    shown = screen.getvalue()
    for words in ("pass 1 of 3", "pass 3 of 3", "judging", "left", "columns: "):
        assert (words in shown) == watched, words
    assert "[00:00<" not in shown


def test_work_inside_other_work_is_part_of_it(monkeypatch):
    screen = Terminal()
    monkeypatch.setattr(sys, "stderr", screen)
    progress = Progress(shown=True)
    with progress.work(2):
        progress.done(1)
        with progress.work(5):
            progress.say("inside")
            progress.done(3)
        progress.tell("a result")
    assert "100%" in screen.getvalue() and "a result" in screen.getvalue()
    progress.done(1)
    progress.tell("nobody works")
    assert "nobody works" not in screen.getvalue()


def test_libraries_are_as_chatty_afterwards_as_before(monkeypatch):
    monkeypatch.setattr(sys, "stderr", io.StringIO())
    datasets.disable_progress_bars()
    try:
        with libraries_quiet_unless_watched():
            assert not logging.is_progress_bar_enabled()
        assert logging.is_progress_bar_enabled() and datasets.are_progress_bars_disabled()
    finally:
        datasets.enable_progress_bars()
