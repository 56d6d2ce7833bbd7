"""Statistics of two processes are those of one on the same data."""

import pytest
from models import relative_difference
from processes import launch

from hf_grow import Statistics


def run(processes, folder, collection, size=7, held_out=0.0):
    """Collect on so many processes."""
    launch(processes, "collect_on_rank.py", folder, collection, size, held_out)
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
    assert pair[0].step_sizes == pair[1].step_sizes


@pytest.mark.slow
@pytest.mark.parametrize("collection", ["exact", "sketch"])
def test_a_process_without_judges_takes_part(tmp_path, collection):
    """Of four sequences, two go to each process; one of the second's judges, and the first has none that does."""
    first, second = run(2, tmp_path, collection, size=4, held_out=0.25)
    assert first.sequences == second.sequences == 4 and first.step_sizes == second.step_sizes
    for one, other in zip(first.layers, second.layers, strict=True):
        assert one.columns.held_out is not None
        assert relative_difference(other.columns.held_out, one.columns.held_out) < 1e-9
