"""A run that was interrupted goes on as if it had not been, to the bit, or says in one sentence why it cannot."""

import json
import shutil

import pytest
import torch
from models import causal_model
from runs import (
    Stream,
    interrupt,
    interrupted_at,
    make_trainer,
    steps_of_growth,
    task,
    token_rows,
    weights,
    with_method,
)
from safetensors.torch import load_file, save_file

import hf_grow.training.run
from hf_grow import GrowthConfig, GrowthSchedule, HfGrowError, load_grown

STEPS = 8


def a_run(folder, name="gpt2", rows=None, **options):
    """A run with dropout, growth, evaluations and accumulation."""
    model, own, more = task(name)
    settings = {"steps": STEPS, "at": (0, 3, 5), "save_every": 2, "log_every": 3, "eval_every": 4, "accumulation": 2}
    settings |= {"batch_size": 2, "weight_decay": 0.1, "folder": folder} | more | options
    return make_trainer(model, rows or own, own[:5], **settings)


def interrupted(trainer, step, resume=True):
    """Train until the middle of a step, between its gradients and the optimizer."""
    with pytest.raises(KeyboardInterrupt), interrupted_at(step):
        trainer.train(resume=resume)
    assert trainer.state.step == step
    return trainer


@pytest.fixture(scope="module")
def whole():
    """A run without an interrupt, and its result."""
    trainer = a_run(None)
    return trainer, trainer.train()


def without_seconds(reports):
    kept = []
    for report in reports:
        report = {name: value for name, value in report.items() if name != "seconds"}
        kept.append(report | {"collected": {**report["collected"], "seconds": None}})
    return kept


def assert_same_run(trainer, result, expected_trainer, expected):
    """Weights, optimizer, history and reports."""
    assert result.history == expected.history
    assert without_seconds(result.reports) == without_seconds(expected.reports)
    wanted = weights(expected_trainer.model)
    assert wanted.keys() == weights(trainer.model).keys()
    for key, value in weights(trainer.model).items():
        assert torch.equal(value, wanted[key]), key
    states = [one._stage.optimizer.state_dict()["state"] for one in (trainer, expected_trainer)]
    assert states[0].keys() == states[1].keys()
    for number, state in states[0].items():
        for key, value in state.items():
            assert torch.equal(torch.as_tensor(value), torch.as_tensor(states[1][number][key])), key


CASES = {
    "masked": {"name": "masked"},
    "stream": {"rows": Stream(token_rows(11))},
    "bf16": {"precision": "bf16"},
    "new alone": {"train": "new"},
    "plateau": {"at": (), "schedule": GrowthSchedule(plateau=1, min_improvement=5.0, sequences=5), "eval_every": 2},
}
MORE = {
    "classification": {"name": "classification"},
    "sgd": {"optimizer": "sgd"},
    "adafactor": {"optimizer": "adafactor"},
    "budget": {"growth": GrowthConfig(budget="5%")},
}
cases = [pytest.param(options, id=name) for name, options in CASES.items()]
cases += [pytest.param(options, id=name, marks=pytest.mark.slow) for name, options in MORE.items()]


def test_a_run_interrupted_in_the_middle_of_every_step_ends_the_same(tmp_path, whole):
    """One run after the other takes one new step; every second step is a checkpoint, so steps are also taken twice."""
    for step in range(STEPS):
        interrupted(a_run(tmp_path), step)
    trainer = a_run(tmp_path)
    assert_same_run(trainer, trainer.train(resume=True), *whole)
    assert sorted(place.name for place in tmp_path.iterdir()) == ["checkpoint-6", "checkpoint-8"]


@pytest.mark.parametrize("options", cases)
def test_an_interrupted_run_of_any_kind_ends_the_same(tmp_path, options):
    trainer = a_run(tmp_path / "whole", **options)
    expected = trainer.train()
    assert len(expected.reports) >= 2
    interrupted(a_run(tmp_path / "broken", **options), 5)
    again = a_run(tmp_path / "broken", **options)
    assert_same_run(again, again.train(resume=True), trainer, expected)


@pytest.mark.parametrize("when", ["before", "after"])
def test_a_run_interrupted_at_every_growth_ends_the_same(tmp_path, when, monkeypatch, whole):
    grow = hf_grow.training.prepared_run.grow_on_schedule
    for step in (0, 3, 5):

        def broken(model, batches, growth, state, now, step=step, **options):
            report = grow(model, batches, growth, state, now, **options) if when == "after" or now != step else None
            return interrupt() if now == step else report

        monkeypatch.setattr(hf_grow.training.prepared_run, "grow_on_schedule", broken)
        trainer = a_run(tmp_path)
        with pytest.raises(KeyboardInterrupt):
            trainer.train(resume=True)
        assert trainer.state.step == step
    monkeypatch.undo()
    trainer = a_run(tmp_path)
    assert_same_run(trainer, trainer.train(resume=True), *whole)


def test_a_run_interrupted_while_saving_ends_the_same(tmp_path, monkeypatch, whole):
    folder = tmp_path / "run"
    monkeypatch.setattr(torch, "save", lambda *_: interrupt())
    with pytest.raises(KeyboardInterrupt):
        a_run(folder).train(resume=True)
    assert not folder.exists()
    monkeypatch.undo()
    trainer = a_run(folder)
    assert_same_run(trainer, trainer.train(resume=True), *whole)


def test_the_same_trainer_resumes_after_an_interrupt(tmp_path, whole):
    """As in a notebook. Its model had grown further than the checkpoint, and shrinks back to it."""
    trainer = a_run(tmp_path)
    with with_method("save", lambda run, save: save() if run.state.step < 3 else None):
        interrupted(trainer, 4, resume=False)
    with pytest.raises(HfGrowError, match="resume it"):
        trainer.train()
    assert_same_run(trainer, trainer.train(resume=True), *whole)


def test_a_trainer_does_not_train_twice():
    trainer = make_trainer(causal_model("gpt2"), steps=2)
    trainer.train()
    with pytest.raises(HfGrowError, match="has trained before"):
        trainer.train()


def test_a_finished_run_is_not_trained_again_and_may_go_on_longer(tmp_path, finished, whole):
    shutil.copytree(finished, tmp_path, dirs_exist_ok=True)
    again = a_run(tmp_path)
    assert_same_run(again, again.train(resume=True), *whole)
    longer = a_run(tmp_path, steps=STEPS + 2)
    result, before = longer.train(resume=True), whole[1].history
    assert result.steps == STEPS + 2 and result.history[: len(before)] == before
    assert len(result.history) > len(before)


def test_a_step_may_be_divided_otherwise_when_a_run_goes_on(tmp_path):
    """More memory, or fewer processes: as long as a step sees the same sequences."""
    interrupted(a_run(tmp_path, at=(3,)), 5)
    other = a_run(tmp_path, at=(3,), batch_size=4, accumulation=1)
    other.train(resume=True)
    assert other.state.step == STEPS
    with pytest.raises(HfGrowError, match="train: sequences_per_step"):
        a_run(tmp_path, at=(3,), batch_size=3).train(resume=True)


@pytest.mark.parametrize("keep", [1, 3])
def test_only_the_newest_checkpoints_are_kept(tmp_path, keep):
    a_run(tmp_path, at=(3,), save_every=1, keep=keep).train()
    expected = {f"checkpoint-{step}" for step in range(STEPS - keep + 1, STEPS + 1)}
    assert {place.name for place in tmp_path.iterdir()} == expected


def test_remains_of_a_killed_run_vanish(tmp_path, finished):
    shutil.copytree(finished, tmp_path, dirs_exist_ok=True)
    for name in (".checkpoint-3.saving-0123abcd", ".checkpoint-2.removed", "checkpoint-1"):
        shutil.copytree(tmp_path / "checkpoint-6", tmp_path / name)
    (tmp_path / "notes").mkdir()
    (tmp_path / "checkpoint-best").mkdir()
    a_run(tmp_path).train(resume=True)
    names = {place.name for place in tmp_path.iterdir()}
    assert names == {"checkpoint-6", "checkpoint-8", "checkpoint-best", "notes"}


def test_a_checkpoint_is_a_model_that_loads(finished, whole):
    loaded = load_grown(finished / f"checkpoint-{STEPS}")
    for key, value in weights(whole[0].model).items():
        assert torch.equal(value, loaded.state_dict()[key]), key
    assert [event["kind"] for event in loaded.growth_history["events"]] == ["growth"] * 3


def test_a_resumed_model_knows_its_growth(tmp_path):
    interrupted(a_run(tmp_path), 4)
    other = a_run(tmp_path)
    result = other.train(resume=True)
    assert len(other.model.growth_history["events"]) == 3 and steps_of_growth(result) == [0, 3, 5]


@pytest.fixture(scope="module")
def finished(tmp_path_factory):
    """A folder with checkpoints at steps 6 and 8."""
    folder = tmp_path_factory.mktemp("finished")
    a_run(folder).train()
    return folder


def snapshot(folder):
    return {str(file.relative_to(folder)): file.read_bytes() for file in folder.rglob("*") if file.is_file()}


def assert_refused(trainer, words, folder, resume=True):
    """One sentence, with model and files as they were."""
    start, files = weights(trainer.model), snapshot(folder)
    modes = [module.training for module in trainer.model.modules()]
    with pytest.raises(HfGrowError, match=words) as caught:
        trainer.train(resume=resume)
    assert "\n" not in str(caught.value) and str(caught.value).count(". ") <= 1
    assert snapshot(folder) == files and trainer.state.step == 0
    assert [module.training for module in trainer.model.modules()] == modes
    now = weights(trainer.model)
    assert all(torch.equal(value, now[key]) for key, value in start.items())


def test_a_folder_with_checkpoints_is_not_written_over(finished):
    assert_refused(a_run(finished), "holds checkpoints of a run: resume it", finished, resume=False)


def test_a_run_of_another_model_is_not_taken_up(finished):
    trainer = a_run(finished)
    with torch.no_grad():
        trainer.model.transformer.ln_f.weight[0] += 1e-6
    other = make_trainer(trainer.model, steps=STEPS, folder=finished)
    assert_refused(other, "is of another model", finished)
    assert_refused(a_run(finished, name="llama"), "is of another model", finished)


@pytest.mark.parametrize(
    ("changes", "words"),
    [
        ({"learning_rate": 0.5}, "train: learning_rate"),
        ({"seed": 3, "clip": None}, "train: clip, seed"),
        ({"growth": GrowthConfig(columns=3)}, "growth: columns"),
        ({"at": (0, 3, 6)}, "schedule: at"),
        ({"at": ()}, r"\(growth"),
    ],
)
def test_a_run_with_other_settings_is_not_taken_up(finished, changes, words):
    assert_refused(a_run(finished, **changes), words, finished)


FILES = ("trainer_state.json", "optimizer.pt", "config.json", "model.safetensors")


@pytest.mark.parametrize("damage", ["missing", "truncated", "garbled", "empty"])
@pytest.mark.parametrize("name", FILES)
def test_half_a_checkpoint_is_refused(finished, tmp_path, name, damage):
    folder = tmp_path / "run"
    shutil.copytree(finished, folder)
    file = folder / f"checkpoint-{STEPS}" / name
    content = file.read_bytes()
    if damage == "missing":
        file.unlink()
    else:
        half = len(content) // 2
        file.write_bytes({"truncated": content[:half], "garbled": bytes(half) + content[half:], "empty": b""}[damage])
    assert_refused(a_run(folder), f"checkpoint-{STEPS}", folder)


def test_weights_that_lack_a_parameter_are_refused(finished, tmp_path):
    folder = tmp_path / "run"
    shutil.copytree(finished, folder)
    file = folder / f"checkpoint-{STEPS}" / "model.safetensors"
    content = load_file(file)
    del content["transformer.ln_f.bias"]
    save_file(content, file)
    assert_refused(a_run(folder), "transformer.ln_f.bias is missing", folder)


def test_a_checkpoint_of_another_format_is_refused(finished, tmp_path):
    folder = tmp_path / "run"
    shutil.copytree(finished, folder)
    file = folder / f"checkpoint-{STEPS}" / "trainer_state.json"
    file.write_text(json.dumps({**json.loads(file.read_text()), "format": 99}))
    assert_refused(a_run(folder), "has format 99", folder)


def test_another_optimizer_is_refused_in_one_sentence(finished):
    trainer = a_run(finished, optimizer=lambda parameters: torch.optim.AdamW(parameters, lr=1e-3))
    with pytest.raises(HfGrowError, match="The optimizer's state in"):
        trainer.train(resume=True)


def test_there_is_nothing_to_resume_without_a_folder():
    trainer = make_trainer(causal_model("gpt2"))
    with pytest.raises(HfGrowError, match="give the trainer the folder"):
        trainer.train(resume=True)


def test_a_checkpoint_without_its_history_is_not_whole(tmp_path):
    make_trainer(causal_model("gpt2"), at=(2,), folder=tmp_path).train()
    (tmp_path / "checkpoint-6" / "growth.json").unlink()
    with pytest.raises(HfGrowError, match="not a whole checkpoint of a run: growth"):
        make_trainer(causal_model("gpt2"), at=(2,), folder=tmp_path).train(resume=True)


def test_growth_of_other_settings_is_not_taken_up(tmp_path):
    """Also where a setting of growth has the name of one of training that may differ."""
    make_trainer(causal_model("gpt2"), at=(2,), folder=tmp_path).train()
    other = make_trainer(
        causal_model("gpt2"), at=(2,), growth=GrowthConfig(columns=2, step_scope="per_layer"), folder=tmp_path
    )
    with pytest.raises(HfGrowError, match=r"other settings \(growth: step_scope\)"):
        other.train(resume=True)
