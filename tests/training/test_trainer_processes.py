"""Two processes train and grow as one does on the same sequences: with DDP, and sharded with FSDP2."""

import pytest
import torch
from processes import launch
from train_on_rank import RUNS

pytestmark = [pytest.mark.slow, pytest.mark.timeout(900)]


@pytest.fixture(scope="module")
def folder(tmp_path_factory):
    """Where all runs wrote what they came to: alone, in two forms on two processes, and taken up from these by one."""
    folder = tmp_path_factory.mktemp("processes")
    for processes, form in ((1, "alone"), (2, "ddp"), (2, "fsdp"), (1, "resume")):
        launch(processes, "train_on_rank.py", folder, form)
    return folder


def read(folder, form, rank=0):
    return torch.load(folder / f"{form}-{rank}.pt", weights_only=False)


@pytest.fixture(scope="module")
def alone(folder):
    return read(folder, "alone")


@pytest.fixture(scope="module", params=["ddp", "fsdp"])
def pair(request, folder):
    """What both processes found, first the main one."""
    return [read(folder, request.param, rank) for rank in range(2)]


def assert_close(actual, expected, most=1e-6):
    assert actual.keys() == expected.keys()
    for key, value in expected.items():
        assert actual[key].dtype == torch.float64
        assert torch.allclose(actual[key], value, rtol=0, atol=most), (key, float((actual[key] - value).abs().max()))


@pytest.mark.parametrize("name", RUNS)
def test_two_processes_end_where_one_does(pair, alone, name):
    """With growth on shares of four and three sequences on the way."""
    run, expected = pair[0][name], alone[name]
    assert len(expected["reports"]) in (1, 2)
    # Norms and rotations of Llama are computed in float32 whatever the model's dtype.
    assert_close(run["weights"], expected["weights"], most=1e-5 if name == "llama" else 1e-6)
    assert [report["training_step"] for report in run["reports"]] == [
        report["training_step"] for report in expected["reports"]
    ]
    for one, other in zip(run["reports"], expected["reports"], strict=True):
        assert one["loss_after"] == pytest.approx(other["loss_after"], rel=1e-5)
        assert one["step"] == pytest.approx(other["step"], rel=1e-5)
        for layer, alike in zip(one["layers"], other["layers"], strict=True):
            assert layer["predicted"]["in_sample"] == pytest.approx(alike["predicted"]["in_sample"], rel=1e-5)
    assert len(run["history"]) == len(expected["history"])
    for one, other in zip(run["history"], expected["history"], strict=True):
        for key in ("step", "loss", "eval_loss", "learning_rate"):
            assert one.get(key) == (other.get(key) if other.get(key) is None else pytest.approx(other[key], rel=1e-5))
    assert run["evaluated"] == pytest.approx(expected["evaluated"], rel=1e-5)


@pytest.mark.parametrize("name", [*RUNS, "again"])
def test_weights_are_the_same_on_both_processes_to_the_bit(pair, name):
    first, second = (outcomes[name] for outcomes in pair)
    assert all(torch.equal(value, second["weights"][key]) for key, value in first["weights"].items())
    assert first["history"] == second["history"] and first["base"] == second["base"]


@pytest.mark.parametrize("name", ["plain", "plateau"])
def test_everything_learns_after_growth(pair, name):
    run = pair[0][name]
    last = run["grown"][-1]
    attention = [key for key in last if "attn.c_attn" in key or "attn.c_proj" in key]
    assert len(attention) == 8 and last[attention[0]].shape != run["start"]["weights"][attention[0]].shape
    for key in attention:
        changed = last[key] != run["weights"][key]
        # A bias of the keys has no gradient, as softmax does not see it.
        assert changed.double().mean() > 0.6, key


def test_new_weights_alone_leave_the_base_to_the_bit(pair, alone):
    for outcomes in pair:
        run = outcomes["new alone"]
        assert run["base"] == run["start"]["base"] == alone["new alone"]["base"]
        last = run["grown"][-1]
        assert any(not torch.equal(value, last[key]) for key, value in run["weights"].items())


def test_a_model_is_left_as_found(pair):
    for outcomes in pair:
        for name in RUNS:
            run = outcomes[name]
            assert not run["training"] and not run["checkpointing"], name
            assert all(learns == ("frozen" not in RUNS[name]) for learns in run["learns"]), name


def test_a_checkpoint_is_taken_up_by_as_many_processes(pair):
    """To the bit: nothing else was different."""
    for outcomes in pair:
        for key, value in outcomes["plain"]["weights"].items():
            assert torch.equal(value, outcomes["again"]["weights"][key]), key
        assert outcomes["again"]["history"] == outcomes["plain"]["history"]


def test_one_sequence_for_two_processes(folder):
    """To evaluate and to measure on; and a tracker, which leaves the processes together."""
    first, second = (read(folder, "ddp", rank)["odd"] for rank in range(2))
    assert len(first["reports"]) == 1 and first["evaluated"] == second["evaluated"]
    evaluations = [entry["eval_loss"] for entry in first["history"] if "eval_loss" in entry]
    assert len(evaluations) == 2 and first["evaluated"] == evaluations[-1]
    assert list((folder / "ddp" / "odd" / "hf_grow").glob("**/events*"))


@pytest.mark.parametrize("form", ["ddp", "fsdp"])
def test_checkpoints_of_two_processes_are_taken_up_by_one(folder, alone, form):
    run = read(folder, "resume")[form]
    assert_close(run["weights"], alone["plain"]["weights"])
    assert len(run["reports"]) == 2
