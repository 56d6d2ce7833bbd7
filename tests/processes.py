"""Scripts and modules run in processes of their own."""

import os
import subprocess
import sys
from pathlib import Path

TESTS = Path(__file__).parent
ROOT = TESTS.parent


def run_python(*words, timeout=240, **environment):
    """Run `python` with these words, on CPU, and how it ended."""
    known = {**os.environ, "ACCELERATE_USE_CPU": "true", "OMP_NUM_THREADS": "1", **environment}
    command = [sys.executable, *map(str, words)]
    return subprocess.run(command, env=known, capture_output=True, text=True, timeout=timeout)


def torchrun(processes):
    """The words that run a script on so many gloo processes, on loopback."""
    return ("-m", "torch.distributed.run", "--nproc_per_node", processes, "--standalone")


def launch(processes, script, *arguments):
    """Run a script, found from this folder, on so many processes; what it printed."""
    return printed_by(*torchrun(processes), TESTS / script, *arguments)


def run_module(*words):
    """Run `python -m` with these words; what it printed."""
    return printed_by("-m", *words)


def printed_by(*words):
    """Run `python` with these words, which must succeed; what it printed."""
    done = run_python(*words)
    assert done.returncode == 0, done.stderr[-3000:]
    return done.stdout
