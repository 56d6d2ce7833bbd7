"""Statistics of two processes are those of one on the same data."""

import os
import subprocess
import sys
from pathlib import Path

import pytest
from models import relative_difference

from hf_grow import Statistics


def run(processes, folder, collection, size=7, held_out=0.0):
    """Collect on so many gloo processes, on loopback."""
    command = [sys.executable, "-m", "torch.distributed.run", "--nproc_per_node", str(processes), "--standalone"]
    environment = {**os.environ, "ACCELERATE_USE_CPU": "true", "OMP_NUM_THREADS": "1"}
    script = Path(__file__).parent / "collect_on_rank.py"
    arguments = [script, folder, collection, str(size), str(held_out)]
    done = subprocess.run([*command, *arguments], env=environment, capture_output=True, text=True, timeout=240)
    assert done.returncode == 0, done.stderr[-2000:]
    return [Statistics.load(folder / f"{processes}-{rank}.safetensors") for rank in range(processes)]


@pytest.mark.slow
@pytest.mark.parametrize("held_out", [0.0, 0.25])
@pytest.mark.parametrize("collection", ["exact", "sketch"])
def test_two_processes_find_what_one_finds(tmp_path, collection, held_out):
    """On seven sequences, so that the last batch is uneven; the same ones judge."""
    (alone,) = run(1, tmp_path, collection, held_out=held_out)
    pair = run(2, tmp_path, collection, held_out=held_out)
    for statistics in pair:
        assert statistics.sequences == alone.sequences == 7 and statistics.fingerprint == alone.fingerprint
        assert statistics.loss == pytest.approx(alone.loss, rel=1e-6)
        for one, other in zip(alone.layers, statistics.layers, strict=True):
            assert relative_difference(other.query_gram, one.query_gram) < 1e-5
            for name in ("columns", "values", "uniform"):
                assert relative_difference(getattr(other, name).gains, getattr(one, name).gains) < 1e-5, name
            if held_out:
                assert relative_difference(other.columns.held_out, one.columns.held_out) < 1e-5
            if collection == "exact":
                assert relative_difference(other.total().gradient, one.total().gradient) < 1e-5
    assert pair[0].steps == pair[1].steps


@pytest.mark.slow
@pytest.mark.parametrize("collection", ["exact", "sketch"])
def test_a_process_without_judges_takes_part(tmp_path, collection):
    """Of four sequences, two go to each process; one of the second's judges, and the first has none that does."""
    first, second = run(2, tmp_path, collection, size=4, held_out=0.25)
    assert first.sequences == second.sequences == 4 and first.steps == second.steps
    for one, other in zip(first.layers, second.layers, strict=True):
        assert one.columns.held_out is not None
        assert relative_difference(other.columns.held_out, one.columns.held_out) < 1e-9
