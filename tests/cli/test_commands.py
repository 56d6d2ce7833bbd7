"""The command line: what it prints, what it refuses, exit codes."""

import json
import subprocess
import sys

import pytest
import torch
from models import TASK_HEADS, causal_model, grow_everything, head_id, small_config
from safetensors.torch import load_file, save_file
from transformers import MambaConfig, MambaModel

import hf_grow
from hf_grow import load_grown, make_growable, save_grown
from hf_grow.surgery.families import FAMILIES


def test_the_command_is_installed():
    done = subprocess.run([sys.executable, "-m", "hf_grow", "--help"], capture_output=True, text=True, timeout=100)
    assert done.returncode == 0
    assert all(command in done.stdout for command in ("patch", "inspect", "analyze", "grow", "push", "demo"))


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


def missing_weight(folder):
    causal_model("gpt2").save_pretrained(folder)
    weights = load_file(folder / "model.safetensors")
    del weights["transformer.h.1.attn.c_attn.weight"]
    save_file(weights, folder / "model.safetensors", metadata={"format": "pt"})


def change_config(folder, **changes):
    causal_model("gpt2").save_pretrained(folder)
    config = json.loads((folder / "config.json").read_text())
    (folder / "config.json").write_text(json.dumps({**config, **changes}))


def fewer_layers(folder):
    change_config(folder, n_layer=1)


def no_architecture(folder):
    change_config(folder, architectures=None)


def not_finite(folder):
    model = causal_model("gpt2")
    model.transformer.wte.weight.data[:] = torch.nan
    model.save_pretrained(folder)


def broken_tokenizer(folder):
    causal_model("gpt2").save_pretrained(folder)
    (folder / "tokenizer.json").write_text("{}")


def config_only(folder):
    small_config("gpt2", architectures=["GPT2LMHeadModel"]).save_pretrained(folder)


@pytest.mark.parametrize(
    ("prepare", "message"),
    [
        (unknown_model, "No attention family for model_type 'mamba'"),
        (growable_model, "growable already"),
        (broken_model, "cannot be loaded"),
        (missing_weight, "is incomplete: 1 weights are missing"),
        (fewer_layers, "weights that its config knows nothing of"),
        (no_architecture, "was saved as None; known classes are"),
        (not_finite, "its outputs are not finite"),
        (broken_tokenizer, "The tokenizer of"),
        (config_only, "cannot be loaded"),
        (lambda folder: None, "cannot be loaded"),
    ],
    ids=lambda value: getattr(value, "__name__", None),
)
def test_patch_refuses_bad_models_with_one_sentence(run, tmp_path, prepare, message):
    prepare(tmp_path / "model")
    assert message in run("patch", tmp_path / "model", "--out", tmp_path / "out", code=2)
    assert not (tmp_path / "out").exists()


@pytest.mark.parametrize(("model_type", "stock_class"), TASK_HEADS, ids=head_id)
def test_patch_takes_every_task_head(run, tmp_path, model_type, stock_class):
    changes = {"pad_token_id": None} if model_type != "bert" else {}
    stock_class(small_config(model_type, **changes)).save_pretrained(tmp_path / "stock")
    summary = json.loads(run("patch", tmp_path / "stock", "--out", tmp_path / "new" / "out", "--json"))
    assert summary["largest_output_difference"] == 0
    assert type(load_grown(tmp_path / "new" / "out")) is FAMILIES[model_type].model_classes[stock_class]


def test_patch_passes_over_masks_that_old_checkpoints_hold(run, tmp_path):
    causal_model("gpt2").save_pretrained(tmp_path / "old")
    weights = load_file(tmp_path / "old" / "model.safetensors")
    weights["transformer.h.0.attn.masked_bias"] = torch.tensor(-1e4)
    save_file(weights, tmp_path / "old" / "model.safetensors", metadata={"format": "pt"})
    assert "bit for bit" in run("patch", tmp_path / "old", "--out", tmp_path / "out")


def test_patch_refuses_folders_it_cannot_write(run, tmp_path):
    (tmp_path / "file").write_text("mine")
    assert "is a file" in run("patch", hf_grow.SMALL_MODEL, "--out", tmp_path / "file" / "x", code=2)


def test_inspect_refuses_what_is_no_grown_checkpoint(run, tmp_path):
    assert "nowhere/[v1] is not a folder" in run("inspect", "nowhere/[v1]", code=2)
    assert "no[/v1] is not a folder" in run("inspect", "no[/v1]", code=2)
    causal_model("gpt2").save_pretrained(tmp_path / "stock")
    assert "stock gpt2 checkpoint" in run("inspect", tmp_path / "stock", code=2)


def test_the_demo_runs(run, tmp_path):
    printed = run("demo", "--out", tmp_path / "demo", "--sequences", 8, "--steps", 12)
    assert "growable and stock logits are equal: True" in printed
    assert "reloaded logits are equal, bit for bit: True" in printed
    assert "after the same finetuning" in printed and "\n  10 " in printed and "\n  12 " in printed
    assert {file.name for file in tmp_path.iterdir()} == {"demo"}
    assert {"report.html", "line_search.png", "bottleneck.png", "growth_report.json"} <= {
        file.name for file in (tmp_path / "demo").iterdir()
    }
    assert load_grown(tmp_path / "demo").growth_history["events"][-1]["kind"] == "growth"
    assert "exists and is not empty" in run("demo", "--out", tmp_path / "demo", code=2)
