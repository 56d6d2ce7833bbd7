"""One progress bar over all of some work, on standard error; nothing is drawn where nobody would watch it."""

import sys
from collections.abc import Iterator
from contextlib import contextmanager
from typing import Any

import datasets
import huggingface_hub.utils as hub
from tqdm.auto import tqdm
from transformers.utils import logging


def is_watched() -> bool:
    """Whether somebody would see a bar: in a terminal or a notebook."""
    shell = getattr(sys.modules.get("IPython"), "get_ipython", lambda: None)()
    return sys.stderr.isatty() or type(shell).__name__ == "ZMQInteractiveShell"


def bar(shown: bool, **options: Any) -> Any:
    """A bar of tqdm, drawn only where it is wanted and somebody would see it."""
    return tqdm(disable=not (shown and is_watched()), **options)


@contextmanager
def libraries_quiet_unless_watched() -> Iterator[None]:
    """The bars of transformers, datasets and huggingface_hub are not drawn inside, where nobody would see them."""
    libraries = [
        (logging.is_progress_bar_enabled, logging.disable_progress_bar, logging.enable_progress_bar),
        (datasets.are_progress_bars_disabled, datasets.disable_progress_bars, datasets.enable_progress_bars),
        (hub.are_progress_bars_disabled, hub.disable_progress_bars, hub.enable_progress_bars),
    ]
    # The first says whether they are on, the others whether they are off.
    on = [libraries[0][0](), *(not is_off() for is_off, _, _ in libraries[1:])]
    if is_watched():
        on = []
    for (_, disable, _), was_on in zip(libraries, on, strict=False):
        if was_on:
            disable()
    try:
        yield
    finally:
        for (_, _, enable), was_on in zip(libraries, on, strict=False):
            if was_on:
                enable()


class Progress:
    """How far some work is, in one bar with the time left; what is done now stands before it."""

    def __init__(self, shown: bool = False) -> None:
        self.shown = shown
        self._bar: Any = None

    @contextmanager
    def work(self, units: float) -> Iterator[None]:
        """About so much work inside; what belongs to other work already is part of that."""
        if self._bar is not None:
            yield
            return
        layout = "{desc}{percentage:3.0f}%|{bar}| {elapsed}, {remaining} left"
        self._bar = bar(self.shown, total=units, bar_format=layout, leave=False)
        try:
            yield
        finally:
            self._bar.close()
            self._bar = None

    def say(self, what: str) -> None:
        """What is done now."""
        if self._bar is not None:
            self._bar.set_description(what)

    def tell(self, result: str) -> None:
        """A line above the bar, that stays."""
        if self._bar is not None and not self._bar.disable:
            self._bar.write(result, file=sys.stderr)

    def done(self, units: float) -> None:
        """So much more of the work is done; it may be more than was thought."""
        if self._bar is not None:
            self._bar.total = max(self._bar.total, self._bar.n + units)
            self._bar.update(units)
