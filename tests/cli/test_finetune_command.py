"""`hf-grow finetune` and the scripts for every day: what they print, save and refuse, and that killed runs go on."""

import json
import runpy
import sys

import pytest
import torch
from commands import call, succeed
from finetunes import BUDGET, LENGTH, loss_on
from processes import ROOT, launch, run_module
from runs import interrupted_at
from transformers import AutoTokenizer, BertConfig, BertForMaskedLM, BertForSequenceClassification

import hf_grow
from hf_grow import load_adapted, load_grown
from hf_grow.cli import script
from hf_grow.training.run import Run

SMALL = ("--length", LENGTH, "--batch-size", 4, "--growth-sequences", 8, "--steps", 4, "--lr", "1e-3")
ADAPT = ("--budget", BUDGET)


@pytest.fixture
def command(data):
    """The words that every call has."""
    evaluation = ("--eval-data", data / "other.txt", "--max-eval-sequences", 4)
    return ("finetune", hf_grow.SMALL_MODEL, "--data", data / "train.txt", *SMALL, *evaluation)


def test_full_finetuning_grows_at_its_events_and_saves_what_it_reports(command, data, tmp_path):
    events = ("--grow-at", "0,2", "--columns", "1", "--value-columns", "0:2")
    found = json.loads(succeed(*command, "--out", tmp_path / "out", *events, "--json"))
    model = load_grown(tmp_path / "out")
    assert [event["training_step"] for event in found["growth"]] == [0, 2]
    assert {layer["query_key_dim"] for layer in model.growth_summary()["layers"]} == {18}
    assert model.growth_summary()["layers"][0]["value_dim"] == 20
    assert found["trainable_parameters"] == found["parameters"] == model.num_parameters()
    assert found["eval_before"] == pytest.approx(loss_on(hf_grow.small_model(), data), rel=1e-5)
    assert found["eval_after"] == pytest.approx(loss_on(model, data), rel=1e-5)
    assert found["eval_after"] != found["eval_before"] and found["steps"] == 4
    assert (tmp_path / "out" / "tokenizer.json").exists() and (tmp_path / "out-checkpoints" / "checkpoint-4").is_dir()


@pytest.mark.parametrize("method", ["grow", "lora", "grow+lora"])
def test_new_weights_beside_a_frozen_model_are_saved_merged(command, data, tmp_path, method):
    found = json.loads(succeed(*command, "--out", tmp_path / "out", "--method", method, *ADAPT, "--json"))
    assert 0.5 * BUDGET < found["trainable_parameters"] <= BUDGET
    assert len(found["growth"]) == (method != "lora")
    model = load_grown(tmp_path / "out")
    assert found["eval_before"] == pytest.approx(loss_on(hf_grow.small_model(), data), rel=1e-5)
    assert found["eval_after"] == pytest.approx(loss_on(model, data), rel=1e-4)
    embeddings = (either.transformer.wte.weight for either in (model, hf_grow.small_model()))
    assert torch.equal(*embeddings)


def test_only_what_was_added_is_saved_and_a_table_is_printed(command, data, tmp_path):
    # Held-out rows of the same data, whole: no other data to evaluate on.
    words = [word for word in command if word not in ("--eval-data", data / "other.txt")]
    options = ("--method", "grow+lora", "--columns", 1, "--rank", 2, "--growth-only", "--held-out", "0.2")
    printed = succeed(*words, "--out", tmp_path / "out", *options)
    assert {place.name for place in (tmp_path / "out").iterdir()} == {"growth", "lora", "adapt.json"}
    model = load_adapted(hf_grow.small_model(), tmp_path / "out")
    assert f"{hf_grow.trainable_parameters(model):,} of" in printed
    for words in ("growth at step 0", "evaluation loss", f"saved in {tmp_path / 'out'}"):
        assert words in printed


def test_without_amounts_nothing_grows_and_all_options_reach_their_configs(command, tmp_path):
    train = {"steps": 3, "accumulation": 2, "optimizer": "sgd", "weight_decay": 0.1, "clip": 0.5, "warmup": 2}
    train |= {"precision": "bf16", "eval_every": 2, "save_every": 2, "log_every": 1, "seed": 5, "batch_size": 2}
    options = [word for name, value in train.items() for word in (f"--{name.replace('_', '-')}", value)]
    options += ["--schedule", "cosine", "--gradient-checkpointing", "--processes", 2, "--checkpoints", tmp_path / "run"]
    found = json.loads(succeed(*command, "--out", tmp_path / "out", *options, "--json"))
    assert found["growth"] == [] and found["parameters"] == hf_grow.small_model().num_parameters()
    state = json.loads((tmp_path / "run" / "checkpoint-3" / "trainer_state.json").read_text())
    settings = state["settings"]["train"]
    assert {name: settings[name] for name in train} == train
    assert settings["lr_schedule"] == "cosine" and settings["gradient_checkpointing"] and settings["train"] == "all"
    assert [entry["step"] for entry in state["history"] if "eval_loss" in entry] == [2, 3]


def test_limits_and_plateaus_reach_the_schedule_and_streams_train(command, tmp_path):
    limits = {"max_events": 3, "max_query_key_dim": 30, "max_value_dim": 31, "max_heads": 9, "max_parameters": 10**7}
    options = [word for name, value in limits.items() for word in (f"--{name.replace('_', '-')}", value)]
    options += ["--grow-on-plateau", 2, "--min-improvement", 5, "--grow-every", 3, "--budget", "1%", "--eval-every", 1]
    succeed(*command, "--out", tmp_path / "out", *options, "--streaming", "--shuffle-buffer", 2, "--json")
    state = json.loads((tmp_path / "out-checkpoints" / "checkpoint-4" / "trainer_state.json").read_text())
    schedule = state["settings"]["schedule"]
    assert {name: schedule[name] for name in limits} == limits
    assert (schedule["plateau"], schedule["min_improvement"], schedule["every"]) == (2, 5.0, 3)
    assert [report["training_step"] for report in state["reports"]] == [3]


@pytest.mark.parametrize(
    "options", [("--columns", 1, "--grow-at", "0,2"), ("--method", "grow+lora", *ADAPT)], ids=["full", "grow+lora"]
)
def test_a_killed_run_goes_on_to_the_same_model(command, options, tmp_path):
    command = (*command, *options, "--save-every", 1, "--overwrite")
    succeed(*command, "--out", tmp_path / "whole")
    with interrupted_at(3, "take_step"):
        assert call(*command, "--out", tmp_path / "killed")[0] != 0
    assert not (tmp_path / "killed").exists()
    code, _, err = call(*command, "--out", tmp_path / "killed")
    assert code == 2 and "resume it, or choose another folder" in " ".join(err.split())
    succeed(*command, "--out", tmp_path / "killed", "--resume")
    first, second = (load_grown(tmp_path / name).state_dict() for name in ("whole", "killed"))
    assert all(torch.equal(first[name], second[name]) for name in first)


FULL = ("--columns", "1")
BAD = {
    "unknown method": (("--method", "prune"), "--method must be one of full, grow, lora, grow+lora"),
    "amount with a method": (("--method", "lora", "--columns", "2"), "columns has no meaning"),
    "events with a method": (("--method", "grow", "--grow-at", "0"), "--grow-at has no meaning with --method grow"),
    "rank with full": (("--rank", "2"), "--rank has no meaning with --method full"),
    "growth only with full": (("--growth-only",), "--growth-only has no meaning with --method full"),
    "events without amounts": (("--grow-at", "0"), "Say how much to grow"),
    "no step": ((*FULL, "--grow-at", "soon"), "--grow-at must be made of whole numbers"),
    "event after the end": ((*FULL, "--grow-at", "4"), "nothing left to train after growth at step 4"),
    "event beyond a limit": ((*FULL, "--max-query-key-dim", "16"), "more than max_query_key_dim=16"),
    "small budget": (("--method", "grow", "--budget", "100"), "too small"),
    "plateau": ((*FULL, "--grow-on-plateau", "1"), "needs evaluations on the way"),
    "precision": (("--precision", "fp16"), "cannot train in fp16"),
    "unknown precision": (("--precision", "int4"), "precision must be one of"),
    "long": (("--length", "999"), "exceeds the 256 positions"),
    "column": (("--text-column", "body"), "There is no column body"),
    "no data": (("--data", "nowhere.txt"), "There is no file or folder 'nowhere.txt'"),
    "empty data": (("--data", "EMPTY"), "is empty"),
    "stream without evaluation": (("--streaming", "--held-out", "0.5", "NO EVALUATION"), "A stream cannot be split"),
    "file as run": (("--checkpoints", "EMPTY"), "is a file"),
    "run is out": (("--checkpoints", "OUT"), "must go to different folders"),
    "run in out": (("--checkpoints", "INSIDE"), "none inside the other"),
    "share with full": (("--share", "0.9"), "--share has no meaning with --method full"),
    "step without growth": (("--step-size", "0"), "--step-size has no meaning with a run without growth"),
    "kinds with lora": (("--method", "lora", "--kinds", "columns"), "--kinds has no meaning with --method lora"),
    "unknown kind": (("--method", "grow", "--kinds", "heads"), "kinds must be one of columns, value_columns"),
    "unknown role": (("--method", "lora", "--lora-on", "mlp"), "lora_on must be one of query, key, value, output"),
    "budget and amounts": (
        ("--method", "grow", "--columns", 1, "--budget", 9),
        "--budget has no meaning with all amounts",
    ),
    "no module": (("--method", "lora", "--also-train", ""), "also_train names ''"),
    "large seed": (("--seed", 10**20), "seed must be below"),
    "no digit": ((*FULL, "--grow-at", "²"), "--grow-at must be made of whole numbers"),
    "foreign run": (("--checkpoints", "FOREIGN", "--resume"), "holds no run to resume"),
    "half checkpoint": (("--checkpoints", "HALF", "--resume"), "is not a whole checkpoint"),
    "half run": (("--checkpoints", "HALF", "--resume", "--method", "lora"), "not a whole run of the method lora"),
}


@pytest.mark.parametrize("case", BAD)
def test_bad_input_ends_with_one_sentence_before_any_step(case, command, data, tmp_path, monkeypatch):
    arguments, message = BAD[case]
    places = {name: tmp_path / name.lower() for name in ("OUT", "FOREIGN", "HALF")} | {"EMPTY": tmp_path / "empty.txt"}
    places["INSIDE"] = places["OUT"] / "run"
    places["EMPTY"].write_text("")
    for folder, name in ((places["FOREIGN"], "notes.txt"), (places["HALF"] / "checkpoint-2", "trainer_state.json")):
        folder.mkdir(parents=True)
        (folder / name).write_text("{")
    monkeypatch.setattr(Run, "take_step", lambda _: pytest.fail("trained"))
    words = list(command)
    if "NO EVALUATION" in arguments:
        del words[words.index("--eval-data") : words.index("--eval-data") + 2]
    words += [places.get(word, word) for word in arguments if word != "NO EVALUATION"]
    before = sorted(tmp_path.rglob("*"))
    code, out, err = call(*words, "--out", places["OUT"])
    assert code == 2 and out == ""
    assert message in " ".join(err.replace("│", " ").split())
    assert err.count("Error:") == 1 and sorted(tmp_path.rglob("*")) == before


def test_a_run_of_another_model_or_recipe_is_refused(command, tmp_path):
    options = ("--out", tmp_path / "out", "--method", "lora", "--steps", 1)
    succeed(*command, *options, "--rank", 1)
    for changed, message in (
        (("--rank", 2), "another recipe"),
        (("--rank", 1, "--clip", 2), "other settings (train: clip)"),
    ):
        code, _, err = call(*command, *options, *changed, "--resume", "--overwrite")
        assert code == 2 and message in " ".join(err.split())
    model = hf_grow.small_model()
    with torch.no_grad():
        model.transformer.wte.weight.add_(1e-3)
    model.save_pretrained(tmp_path / "other")
    AutoTokenizer.from_pretrained(hf_grow.SMALL_MODEL).save_pretrained(tmp_path / "other")
    other = [tmp_path / "other" if word == hf_grow.SMALL_MODEL else word for word in command]
    code, _, err = call(*other, *options, "--rank", 1, "--resume", "--overwrite")
    assert code == 2 and "is of another model" in " ".join(err.split())


def test_a_run_on_other_data_is_not_taken_up(command, data, tmp_path):
    options = ("--out", tmp_path / "out", "--checkpoints", tmp_path / "run", "--overwrite")
    succeed(*command, *options)
    changed = [data / "other.txt" if word == data / "train.txt" else word for word in command]
    code, _, err = call(*changed, *options, "--resume")
    assert code == 2 and "other settings (data: ends, rows)" in " ".join(err.split())


def test_a_whole_adapter_is_put_onto_its_model(command, data, tmp_path):
    options = ("--method", "grow+lora", *ADAPT, "--lr", "1e-2")
    succeed(*command, "--out", tmp_path / "whole", *options)
    succeed(*command, "--out", tmp_path / "added", *options, "--growth-only")
    succeed("patch", hf_grow.SMALL_MODEL, "--growth", tmp_path / "added", "--out", tmp_path / "patched")
    first, second = (load_grown(tmp_path / name).state_dict() for name in ("whole", "patched"))
    assert first.keys() == second.keys()
    for name, value in first.items():
        torch.testing.assert_close(second[name], value, msg=name)
    found = json.loads(succeed("inspect", tmp_path / "added", "--json"))
    assert found["growth_only"] and found["lora"] and {layer["value_dim"] for layer in found["layers"]} == {18}


def test_growth_of_half_precision_weights_goes_back_onto_them(command, tmp_path):
    hf_grow.small_model().bfloat16().save_pretrained(tmp_path / "half")
    AutoTokenizer.from_pretrained(hf_grow.SMALL_MODEL).save_pretrained(tmp_path / "half")
    words = [tmp_path / "half" if word == hf_grow.SMALL_MODEL else word for word in command]
    succeed(*words, "--method", "grow", "--columns", 1, "--growth-only", "--out", tmp_path / "added")
    succeed("patch", tmp_path / "half", "--growth", tmp_path / "added", "--out", tmp_path / "patched")
    assert load_grown(tmp_path / "patched").dtype == torch.float32
    # Also onto a base that is growable already.
    succeed("patch", tmp_path / "half", "--out", tmp_path / "growable")
    succeed("patch", tmp_path / "growable", "--growth", tmp_path / "added", "--out", tmp_path / "again")


def small_bert(folder, tokenizer, stock_class, **changes):
    """A folder with a tiny BERT and its tokenizer."""
    sizes = {"hidden_size": 32, "num_hidden_layers": 2, "num_attention_heads": 4, "intermediate_size": 48}
    config = BertConfig(vocab_size=len(tokenizer), max_position_embeddings=64, **sizes, **changes)
    torch.manual_seed(0)
    stock_class(config).save_pretrained(folder)
    tokenizer.save_pretrained(folder)
    return folder


@pytest.fixture
def rated(tmp_path):
    """Texts with a label each."""
    file = tmp_path / "rated.jsonl"
    rows = [
        {"text": word * (number % 5 + 1), "label": label}
        for number in range(12)
        for label, word in enumerate(("yes ", "no "))
    ]
    file.write_text("\n".join(json.dumps(row) for row in rows), encoding="utf-8")
    return file


def test_classifiers_learn_with_their_head_and_labels_out_of_range_are_refused(rated, bert_tokenizer, tmp_path):
    folder = small_bert(tmp_path / "bert", bert_tokenizer, BertForSequenceClassification, num_labels=2)
    command = ("finetune", folder, "--data", rated, "--steps", 2, "--growth-sequences", 8, "--held-out", "0.2")
    found = json.loads(succeed(*command, "--out", tmp_path / "out", "--method", "grow", "--columns", 1, "--json"))
    assert found["trainable_parameters"] == 2 * 2 * 4 * 33 + 66
    head = BertForSequenceClassification.from_pretrained(folder).classifier.weight
    assert not torch.equal(load_grown(tmp_path / "out").classifier.weight, head)
    rated.write_text('{"text": "yes", "label": 7}\n' * 8, encoding="utf-8")
    code, _, err = call(*command, "--out", tmp_path / "more")
    assert code == 2 and "The label 7 is none of the model's 2" in " ".join(err.split())


@pytest.fixture
def run_script(monkeypatch, capsys):
    """Run a script of the project in this process; what it printed."""

    def run(path, *arguments):
        monkeypatch.setattr(sys, "argv", [path, *map(str, arguments)])
        runpy.run_path(str(ROOT / path), run_name="__main__")
        return capsys.readouterr().out

    return run


SCRIPT = ("--length", 24, "--batch-size", 4, "--growth-sequences", 8, "--steps", 3, "--every", 2)


def test_the_gpt2_script_adapts_a_frozen_model(data, run_script, tmp_path):
    options = (
        "--data",
        data / "train.txt",
        "--out",
        tmp_path / "out",
        *SCRIPT,
        "--method",
        "grow+lora",
        "--budget",
        BUDGET,
    )
    assert f"saved in {tmp_path / 'out'}" in run_script("scripts/grow_then_finetune_gpt2.py", *options)
    model = load_adapted(hf_grow.small_model(), tmp_path / "out")
    assert 0 < hf_grow.trainable_parameters(model) <= BUDGET


def test_the_bert_script_grows_a_classifier(rated, bert_tokenizer, run_script, tmp_path):
    folder = small_bert(tmp_path / "bert", bert_tokenizer, BertForMaskedLM)
    options = ("--model", folder, "--data", rated, "--out", tmp_path / "out", *SCRIPT, "--columns", 2, "--grow-at", 1)
    assert "evaluation loss" in run_script("scripts/grow_then_finetune_bert.py", *options)
    model = load_grown(tmp_path / "out")
    assert {layer["query_key_dim"] for layer in model.growth_summary()["layers"]} == {10}
    assert type(model).__name__ == "GrowableBertForSequenceClassification"


def test_the_example_pushes_where_it_is_told_to(hub, run_script, tmp_path, monkeypatch):
    monkeypatch.chdir(tmp_path)
    monkeypatch.setenv("HF_TOKEN", "hf_test")
    assert "pushed to" in run_script("examples/push_to_hub.py", "user/grown")
    files = {file.name: file.read_bytes() for file in (tmp_path / "to_push").iterdir()}
    assert hub.repos["user/grown"].private and hub.repos["user/grown"].files == files


@pytest.mark.slow
@pytest.mark.parametrize("method", ["full", "grow+lora"])
def test_the_gpt2_script_runs_on_two_processes_and_goes_on(data, tmp_path, method):
    options = ["--data", data / "train.txt", *SCRIPT, "--method", method, "--budget", BUDGET]
    launch(2, "../scripts/grow_then_finetune_gpt2.py", *options, "--out", tmp_path / "out")
    (tmp_path / "out").rename(tmp_path / "first")
    last = tmp_path / "out-checkpoints" / "checkpoint-3"
    last.rename(tmp_path / "gone")
    launch(2, "../scripts/grow_then_finetune_gpt2.py", *options, "--out", tmp_path / "out", "--resume")
    first, second = (
        load_grown(tmp_path / name) if method == "full" else load_adapted(hf_grow.small_model(), tmp_path / name)
        for name in ("first", "out")
    )
    weights = second.state_dict()
    assert all(torch.equal(value, weights[name]) for name, value in first.state_dict().items())


@pytest.mark.slow
def test_accelerate_launches_the_command_on_two_processes(command, data, tmp_path):
    # On CPUs alone Accelerate's launcher would want MPI; the environment has the processes stay there.
    launcher = ("accelerate.commands.launch", "--multi_gpu", "--num_processes", 2, "--num_machines", 1)
    words = ("-m", "hf_grow", *command, "--columns", 1, "--json", "--out", tmp_path / "out")
    # The main process alone prints.
    printed = json.loads(
        run_module(*launcher, "--main_process_port", 0, "--mixed_precision", "no", "--dynamo_backend", "no", *words)
    )
    assert printed["eval_after"] == pytest.approx(loss_on(load_grown(tmp_path / "out"), data), rel=1e-5)
    state = json.loads((tmp_path / "out-checkpoints" / "checkpoint-4" / "trainer_state.json").read_text())
    assert state["settings"]["train"]["sequences_per_step"] == 2 * 4


@pytest.mark.slow
def test_the_bert_script_fills_in_words_on_two_processes(data, bert_tokenizer, tmp_path):
    folder = small_bert(tmp_path / "bert", bert_tokenizer, BertForMaskedLM)
    options = ("--mlm", "--model", folder, "--data", data / "train.txt", *SCRIPT, "--columns", 2, "--grow-at", 0, 2)
    launch(2, "../scripts/grow_then_finetune_bert.py", *options, "--out", tmp_path / "out")
    model = load_grown(tmp_path / "out")
    assert {layer["query_key_dim"] for layer in model.growth_summary()["layers"]} == {12}


@pytest.mark.parametrize(
    ("given", "amount"),
    [
        ([], ["--budget", "1%"]),
        (["--columns", "4"], ["--columns", "4"]),
        (["--columns", "4", "--budget", "5%"], ["--budget", "5%", "--columns", "4"]),
    ],
)
def test_scripts_hand_on_the_amounts_that_they_are_given(given, amount, monkeypatch):
    words = []
    monkeypatch.setattr(script, "main", words.extend)
    script.finetune_script("", ["--method", "grow+lora", *given], [], model="small")
    at = words.index("--growth-only")
    assert words[at - len(amount) : at] == amount and words.count("--budget") == amount.count("--budget")
