"""The command line in this process."""

import io
import sys
from contextlib import redirect_stderr, redirect_stdout

import pytest

from hf_grow.cli import main


def call(*arguments):
    """Run `hf-grow` with these arguments: exit code, standard output, standard error."""
    before, sys.argv = sys.argv, ["hf-grow", *(str(argument) for argument in arguments)]
    out, err = io.StringIO(), io.StringIO()
    try:
        with redirect_stdout(out), redirect_stderr(err), pytest.raises(SystemExit) as ended:
            main()
    finally:
        sys.argv = before
    return ended.value.code, out.getvalue(), err.getvalue()


def succeed(*arguments):
    code, out, err = call(*arguments)
    assert code == 0, err[-2000:]
    return out
