"""Runs that are killed at any moment and taken up again end as if they had not been, to the bit."""

import json

import pytest
import torch
from processes import TESTS, run_python, torchrun

pytestmark = [pytest.mark.slow, pytest.mark.timeout(900)]
MOMENTS = [
    "training:0",
    "collecting:0",
    "saving:2",
    "saved:2",
    "training:3",
    "collecting:4",
    "inserting:4",
    "inserted:4",
    "saving:4",
    "removing:6",
    "training:7",
    "inserted:8",
    "removed:8",
    "saved:10",
    "removing:12",
]


def run(*arguments, processes=1, **environment):
    """A script of its own process, and how it ended."""
    launcher = torchrun(processes) if processes > 1 else ()
    return run_python(*launcher, TESTS / "train_and_die.py", *arguments, timeout=400, **environment)


def assert_same(found, expected):
    one, other = (torch.load(place, weights_only=False) for place in (found, expected))
    assert one["history"] == other["history"] and one["weights"].keys() == other["weights"].keys()
    for key, value in one["weights"].items():
        assert torch.equal(value, other["weights"][key]), key


@pytest.fixture(scope="module")
def expected(tmp_path_factory):
    """The outcome of a run that nothing happened to."""
    folder = tmp_path_factory.mktemp("whole")
    done = run("run", folder / "run", folder / "out.pt")
    assert done.returncode == 0, done.stderr[-2000:]
    return folder / "out.pt"


@pytest.mark.parametrize(("seed", "times", "moments"), [(0, 6, MOMENTS), (1, 14, [])], ids=["chosen", "random"])
def test_a_killed_run_ends_as_if_it_had_not_been(tmp_path, expected, seed, times, moments):
    folder, out = tmp_path / "run", tmp_path / "out.pt"
    done = run("often", folder, out, seed, times, *moments)
    assert done.returncode == 0, done.stderr[-2000:]
    *attempts, (_, code, left) = json.loads(done.stdout.splitlines()[-1])
    assert code == 0, done.stderr[-2000:]
    assert [how for moment, how, _ in attempts if moment != "outside"] == ["SIGKILL"] * len(moments), attempts
    assert [how for moment, how, _ in attempts if moment == "outside" and how != 0] == ["SIGKILL"] * times, attempts
    assert left == ["checkpoint-10", "checkpoint-12"]
    # Or the moments were not those that matter.
    remains = [name for _, _, names in attempts for name in names if name.startswith(".")]
    assert not moments or {name.rpartition("-")[0] or name for name in remains} >= {".checkpoint-2.saving"}
    for finished in (out, *tmp_path.glob("done-*.pt")):
        assert_same(finished, expected)


def test_two_processes_of_which_some_are_killed_end_as_if_they_had_not_been(tmp_path):
    def pair(name, **environment):
        return run("run", tmp_path / name, tmp_path / f"{name}.pt", processes=2, **environment)

    assert pair("whole").returncode == 0
    for moment, rank in (("collecting:4", {"DIE_RANK": "1"}), ("saving:6", {"DIE_RANK": "0"}), ("training:9", {})):
        done = pair("killed", DIE_AT=moment, **rank)
        assert done.returncode != 0 and "SIGKILL" in done.stderr, done.stderr[-2000:]
        assert not (tmp_path / "killed.pt").exists()
    done = pair("killed")
    assert done.returncode == 0, done.stderr[-2000:]
    assert_same(tmp_path / "killed.pt", tmp_path / "whole.pt")
    assert sorted(place.name for place in (tmp_path / "killed").iterdir()) == ["checkpoint-10", "checkpoint-12"]
