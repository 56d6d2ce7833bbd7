"""The command line: what it prints, what it refuses, exit codes."""

import json
import subprocess
import sys

import pytest
import torch
from models import causal_model, grow_everything, small_config
from transformers import MambaConfig, MambaModel

import hf_grow
from hf_grow import load_grown, make_growable, save_grown
from hf_grow.cli import main


@pytest.fixture
def run(capsys, monkeypatch):
    """Run `hf-grow` with these arguments and return what it printed, checked for its exit code."""

    def call(*arguments, code=0):
        monkeypatch.setattr(sys, "argv", ["hf-grow", *(str(argument) for argument in arguments)])
        with pytest.raises(SystemExit) as ended:
            main()
        printed = capsys.readouterr()
        assert ended.value.code == code, printed.err[-2000:]
        return printed.out if code == 0 else printed.err

    return call


def test_the_command_is_installed():
    done = subprocess.run([sys.executable, "-m", "hf_grow", "--help"], capture_output=True, text=True, timeout=100)
    assert done.returncode == 0
    assert all(command in done.stdout for command in ("patch", "inspect", "push", "demo"))


def test_patch_saves_a_growable_model_and_prints_its_sizes(run, tmp_path):
    printed = run("patch", hf_grow.SMALL_MODEL, "--out", tmp_path / "grown")
    assert "query/key" in printed and "bit for bit" in printed
    model = load_grown(tmp_path / "grown").eval()
    ids = torch.arange(10)[None]
    assert torch.equal(model(ids).logits, hf_grow.small_model()(ids).logits)
    assert (tmp_path / "grown" / "tokenizer.json").exists()
    refused = run("patch", hf_grow.SMALL_MODEL, "--out", tmp_path / "grown", code=2)
    assert "exists and is not empty" in refused
    summary = json.loads(run("patch", hf_grow.SMALL_MODEL, "--out", tmp_path / "grown", "--overwrite", "--json"))
    assert summary["largest_output_difference"] == 0 and summary["base_model"] == "small_gpt2"


def test_inspect_shows_sizes_and_history(run, tmp_path):
    model = grow_everything(make_growable(causal_model("llama")))
    save_grown(model, tmp_path / "grown")
    assert json.loads(run("inspect", tmp_path / "grown", "--json")) == json.loads(json.dumps(model.growth_summary()))
    printed = run("inspect", tmp_path / "grown")
    assert "+3 query/key columns in the self-attention of layer 0" in printed
    assert f"{model.num_parameters():,} parameters" in printed


def unknown_model(folder):
    MambaModel(MambaConfig(vocab_size=32, hidden_size=16, num_hidden_layers=1, state_size=4)).save_pretrained(folder)


def growable_model(folder):
    save_grown(make_growable(causal_model("gpt2")), folder)


def broken_model(folder):
    causal_model("gpt2").save_pretrained(folder)
    (folder / "model.safetensors").write_bytes(b"broken")


def config_only(folder):
    small_config("gpt2").save_pretrained(folder)


@pytest.mark.parametrize(
    ("prepare", "message"),
    [
        (unknown_model, "No attention family for model_type 'mamba'"),
        (growable_model, "growable already"),
        (broken_model, "cannot be loaded"),
        (config_only, "cannot be loaded"),
        (lambda folder: None, "cannot be loaded"),
    ],
    ids=["unknown", "growable", "broken", "no weights", "absent"],
)
def test_patch_refuses_bad_models_with_one_sentence(run, tmp_path, prepare, message):
    prepare(tmp_path / "model")
    assert message in run("patch", tmp_path / "model", "--out", tmp_path / "out", code=2)
    assert not (tmp_path / "out").exists()


def test_inspect_refuses_what_is_no_grown_checkpoint(run, tmp_path):
    assert "is not a folder" in run("inspect", tmp_path / "nowhere", code=2)
    causal_model("gpt2").save_pretrained(tmp_path / "stock")
    assert "stock gpt2 checkpoint" in run("inspect", tmp_path / "stock", code=2)


def test_the_demo_runs(run, tmp_path):
    printed = run("demo", "--out", tmp_path / "demo")
    assert "growable and stock logits are equal: True" in printed
    assert "reloaded logits are equal, bit for bit: True" in printed
    assert {file.name for file in tmp_path.iterdir()} == {"demo"}
