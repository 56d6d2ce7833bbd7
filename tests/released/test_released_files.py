"""Files that a released version wrote load as they did, and its runs go on to the same end."""

import json
import shutil
from pathlib import Path

import pytest
import torch
from released_runs import (
    AMOUNTS,
    SAVED_STEP,
    SCHEDULE,
    STEPS,
    adapted_run,
    callback_run,
    growth_run,
    load_base,
    logits,
    losses,
    token_batches,
)
from safetensors.torch import load_file

import hf_grow
from hf_grow import GrowthConfig, GrowthPlan, Statistics

VERSIONS = sorted(file.parent.name for file in Path(__file__).parent.glob("*/expected.json"))
# Parameters: of 2 layers, 2 heads with a query, a key and a value column of rank 1 each.
LORA_ON_COLUMNS = {"adapted": 2 * 2 * 3}
MODELS = {
    "base": load_base,
    "grown": lambda folder: hf_grow.load_grown(folder / "grown"),
    "growth": lambda folder: hf_grow.load_growth(load_base(folder), folder / "growth"),
    "adapted": lambda folder: hf_grow.load_adapted(load_base(folder), folder / "adapted"),
}


@pytest.fixture(params=VERSIONS)
def files(request, tmp_path):
    """A copy of what a version wrote, as runs that go on write into it."""
    return shutil.copytree(Path(__file__).parent / request.param, tmp_path / request.param)


@pytest.fixture
def expected(files):
    """What that version computed."""
    return json.loads((files / "expected.json").read_text(encoding="utf-8"))


def near(value):
    """Equal as far as kernels of different machines agree."""
    return pytest.approx(value, rel=1e-4)


@pytest.mark.parametrize("name", MODELS)
def test_a_saved_model_computes_what_it_did(files, expected, name):
    stored = load_file(files / "logits.safetensors")
    assert torch.equal(stored["input_ids"], token_batches()[0]["input_ids"][:2])
    model = MODELS[name](files)
    assert torch.allclose(logits(model), stored[name], rtol=1e-4, atol=1e-5)
    parameters = sum(parameter.numel() for parameter in model.parameters())
    # LoRA of 0.1 sat on new columns too; what it did to them is in these.
    assert parameters == expected[name]["parameters"] - LORA_ON_COLUMNS.get(name, 0)
    others = [other for other in MODELS if other != name]
    assert not any(torch.allclose(stored[name], stored[other], rtol=1e-3, atol=1e-4) for other in others)


def test_the_history_of_a_saved_model_is_read(files, expected):
    history = hf_grow.load_grown(files / "grown").growth_history
    assert [event["kind"] for event in history["events"]] == ["growth", "query_key_columns"]
    assert history["base_model"] == "base" and history["events"][0]["config"]["columns"] == AMOUNTS["columns"]
    summary = hf_grow.inspect_checkpoint(files / "grown")
    assert summary["parameters"] == expected["grown"]["parameters"] and summary["events"] == history["events"]
    for name in ("growth", "adapted"):
        assert [event["kind"] for event in hf_grow.inspect_checkpoint(files / name)["events"]] == ["growth"]


def test_saved_growth_comes_off_its_base_again(files):
    model = hf_grow.remove_growth(MODELS["growth"](files))
    assert torch.equal(logits(model), logits(hf_grow.make_growable(load_base(files))))


def test_saved_statistics_give_the_saved_plan(files, expected):
    statistics = Statistics.load(files / "statistics.safetensors")
    facts = {"loss": statistics.loss, "steps": statistics.step_sizes, "sequences": statistics.sequences}
    assert facts == expected["statistics"]
    plan = hf_grow.plan_growth(statistics, GrowthConfig(**AMOUNTS))
    stored = GrowthPlan.load(files / "plan.safetensors")
    assert plan.parameters_added == stored.parameters_added and plan.step_sizes == stored.step_sizes
    for layer, other in zip(plan.summary()["layers"], stored.summary()["layers"], strict=True):
        assert layer["expected_decrease"] == near(other["expected_decrease"])
        assert layer["head_patterns"] == other["head_patterns"]


@pytest.mark.parametrize("name", ["plan", "plan-refactor"])
def test_a_saved_plan_is_carried_out_on_its_model(files, expected, name):
    plan, model = GrowthPlan.load(files / f"{name}.safetensors"), hf_grow.make_growable(load_base(files))
    report = hf_grow.insert_growth(model, plan, token_batches())
    wanted = expected[name]
    assert report.form == wanted["form"] == "stepped" and wanted["loss_after"] < wanted["loss_before"]
    assert (report.loss_before, report.loss_after) == near((wanted["loss_before"], wanted["loss_after"]))
    sizes = (report.parameters_before, report.parameters_after)
    assert sizes == (wanted["parameters_before"], wanted["parameters_after"])
    assert model.num_parameters() == wanted["parameters_after"] > wanted["parameters_before"]


def checkpoints(folder):
    """Those of a run, by name."""
    return sorted(place.name for place in folder.glob("checkpoint-*"))


def test_a_run_goes_on_to_the_same_end(files, expected):
    assert checkpoints(files / "run") == [f"checkpoint-{SAVED_STEP}"]
    trainer = growth_run(load_base(files), files / "run")
    result = trainer.train(resume=True)
    wanted = expected["run"]
    # Growth on the way is measured as it is now: from there on the losses are only much the same.
    before, found = wanted["growth_steps"][-1], losses(result.history)
    assert before > SAVED_STEP and found[:before] == near(wanted["losses"][:before])
    assert found[before:] == pytest.approx(wanted["losses"][before:], rel=0.02)
    assert result.eval_loss == pytest.approx(wanted["eval_loss"], rel=0.02)
    assert [report["training_step"] for report in result.reports] == wanted["growth_steps"] == list(SCHEDULE.at)
    assert trainer.model.num_parameters() == wanted["parameters"]
    assert f"checkpoint-{STEPS}" in checkpoints(files / "run")


def test_finetuning_of_a_frozen_model_goes_on_to_the_same_end(files, expected, tmp_path):
    assert checkpoints(files / "adapted-run") == [f"checkpoint-{SAVED_STEP}"]
    result = adapted_run(load_base(files), files / "adapted-run", tmp_path / "out", resume=True)
    wanted = dict(expected["adapted-run"])
    for name in ("parameters", "trainable_parameters"):
        assert getattr(result, name) == wanted.pop(name) - LORA_ON_COLUMNS["adapted"]
    assert result.eval_before == near(wanted.pop("eval_before"))
    # The same up to the checkpoint; from there on LoRA on new columns, which was trained too, is missing.
    for name, value in wanted.items():
        assert getattr(result, name) == pytest.approx(value, rel=2e-3), name
    assert checkpoints(files / "adapted-run") == [f"checkpoint-{SAVED_STEP}", f"checkpoint-{STEPS}"]


def test_a_run_of_a_transformers_trainer_goes_on_to_the_same_end(files, expected):
    trainer, grower = callback_run(load_base(files), files / "trainer-run")
    trainer.train(resume_from_checkpoint=True)
    wanted = expected["trainer-run"]
    assert losses(trainer.state.log_history) == near(wanted["losses"])
    # One before the checkpoint and one after it.
    assert (grower.progress.events, len(grower.reports)) == (wanted["events"], 1) == (2, 1)
    assert trainer.model.num_parameters() == wanted["parameters"]
