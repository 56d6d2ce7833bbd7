"""Checkpoints: three ways back in a fresh process, whole or absent, loud when they should be."""

import json
import os
import subprocess
import sys
from pathlib import Path

import pytest
import torch
from models import (
    TASK_HEADS,
    assert_same,
    batch,
    causal_model,
    fill_new_weights,
    grow_everything,
    small_config,
    small_model,
    tensors,
)
from processes import TESTS
from safetensors.torch import load_file, save_file
from transformers import AutoModelForCausalLM, AutoModelForSequenceClassification, AutoTokenizer, GPT2LMHeadModel

import hf_grow
from hf_grow import HfGrowError, load_grown, make_growable, save_grown
from hf_grow.assets import SMALL_MODEL
from hf_grow.surgery.families import FAMILIES

CROSS = {"gpt2": {"add_cross_attention": True}, "bert": {"is_decoder": True, "add_cross_attention": True}}


@pytest.fixture
def grown():
    """A grown GPT-2 whose new weights matter."""
    return fill_new_weights(grow_everything(make_growable(causal_model("gpt2"))))


def run_fresh(folder, way):
    """Load every case of the folder in a process of its own."""
    script = TESTS / "reload.py"
    environment = {**os.environ, "HF_MODULES_CACHE": str(folder / "modules")}
    done = subprocess.run(
        [sys.executable, script, folder, way], capture_output=True, text=True, timeout=280, env=environment
    )
    assert done.returncode == 0, done.stderr[-2000:]


@pytest.fixture(scope="module")
def every_checkpoint(tmp_path_factory):
    """Grown checkpoints of every task head, with inputs and the outputs before saving."""
    folder = tmp_path_factory.mktemp("checkpoints")
    cases = []
    for model_type, stock_class in TASK_HEADS:
        cases.append((stock_class.__name__, stock_class, model_type, {}))
        if stock_class.__name__ in ("GPT2LMHeadModel", "BertLMHeadModel"):
            cases.append((f"{stock_class.__name__}-cross", stock_class, model_type, CROSS[model_type]))
    listed = []
    for name, stock_class, model_type, changes in cases:
        model = fill_new_weights(grow_everything(make_growable(small_model(stock_class, model_type, **changes))))
        inputs = batch(model)
        if changes:
            hf_grow.widen_query_key(model, 1, 3, attention_type="cross", key=torch.randn(4, 33, 3))
            inputs["encoder_hidden_states"] = torch.randn(2, 7, 32)
        save_file(inputs, folder / f"{name}.inputs")
        save_file({key: value.contiguous() for key, value in tensors(model, inputs).items()}, folder / f"{name}.saved")
        save_grown(model, folder / name)
        listed.append({"name": name, "auto_class": type(model).auto_classes[0]})
    (folder / "cases.json").write_text(json.dumps(listed))
    return folder


@pytest.mark.parametrize("way", ["load_grown", "auto", "remote_code"])
def test_every_task_head_reloads_bitwise_in_a_fresh_process(every_checkpoint, way):
    run_fresh(every_checkpoint, way)
    cases = json.loads((every_checkpoint / "cases.json").read_text())
    assert len(cases) == len(TASK_HEADS) + 2
    for case in cases:
        saved, found = (load_file(every_checkpoint / f"{case['name']}.{kind}") for kind in ("saved", way))
        if "mc_logits" in saved:
            # One dot product: its last bit depends on where in memory the weights lie, in the stock model too.
            assert torch.allclose(saved.pop("mc_logits"), found.pop("mc_logits"), rtol=0, atol=1e-6)
        assert_same(found, saved)


def test_save_pretrained_and_shards_reload_bitwise(grown, tmp_path):
    grown.save_pretrained(tmp_path / "plain")
    grown.save_pretrained(tmp_path / "shards", max_shard_size="20KB")
    assert len(list((tmp_path / "shards").glob("*.safetensors"))) > 2
    for name in ("plain", "shards"):
        assert_same(tensors(load_grown(tmp_path / name).eval(), batch(grown)), tensors(grown, batch(grown)))


def test_a_reloaded_model_grows_and_saves_again(grown, tmp_path):
    save_grown(grown, tmp_path / "first")
    again = load_grown(tmp_path / "first").eval()
    hf_grow.widen_value(again, 0, 2)
    save_grown(again, tmp_path / "second")
    third = load_grown(tmp_path / "second").eval()
    assert_same(tensors(third, batch(third)), tensors(again, batch(again)))
    assert len(third.growth_history["events"]) == len(grown.growth_history["events"]) + 1


def test_a_model_loaded_with_remote_code_can_be_saved_and_adopted(grown, tmp_path):
    """On a machine that has hf-grow, after loading the checkpoint's own code."""
    save_grown(grown, tmp_path / "first")
    script = f"""
import sys
sys.modules["hf_grow"] = None
from transformers import AutoModelForCausalLM
model = AutoModelForCausalLM.from_pretrained({str(tmp_path / "first")!r}, trust_remote_code=True).eval()
assert type(model).__module__.startswith("transformers_modules")
model.save_pretrained({str(tmp_path / "second")!r})
del sys.modules["hf_grow"]
import hf_grow, torch
ids = torch.arange(2, 12)[None]
before = model(ids).logits
hf_grow.make_growable(model)
assert type(model).__module__.startswith("hf_grow.")
hf_grow.widen_query_key(model, 0, 2)
assert (model(ids).logits - before).abs().max() < 1e-4
model.save_pretrained({str(tmp_path / "third")!r})
"""
    done = subprocess.run([sys.executable, "-c", script], capture_output=True, text=True, timeout=120)
    assert done.returncode == 0, done.stderr[-2000:]
    assert_same(tensors(load_grown(tmp_path / "second").eval(), batch(grown)), tensors(grown, batch(grown)))
    assert load_grown(tmp_path / "third").growth_summary()["layers"][0]["query_key_dim"] == 13


def test_attached_growth_of_a_model_with_code_of_its_own_is_taken_over(tmp_path):
    model = hf_grow.attach_growth(grow_everything(hf_grow.make_growable(causal_model("llama"))))
    model.save_pretrained(tmp_path / "attached")
    script = f"""
import sys
sys.modules["hf_grow"] = None
from transformers import AutoModelForCausalLM
model = AutoModelForCausalLM.from_pretrained({str(tmp_path / "attached")!r}, trust_remote_code=True).eval()
assert type(model).__module__.startswith("transformers_modules")
del sys.modules["hf_grow"]
import hf_grow, torch
ids = torch.arange(2, 12)[None]
hf_grow.make_growable(model)
before = model(ids).logits
assert len(hf_grow.growth_parameters(model)) == {len(hf_grow.growth_parameters(model))}
hf_grow.save_growth(model, {str(tmp_path / "growth")!r})
hf_grow.attach_growth(hf_grow.merge_growth(model))
assert (model(ids).logits - before).abs().max() < 1e-4
hf_grow.remove_growth(model)
model.set_growth(None)
model.save_pretrained({str(tmp_path / "base")!r})
"""
    done = subprocess.run([sys.executable, "-c", script], capture_output=True, text=True, timeout=120)
    assert done.returncode == 0, done.stderr[-2000:]
    base = causal_model("llama")
    assert_same(load_grown(tmp_path / "base").state_dict(), base.state_dict())
    assert_same(hf_grow.load_growth(base, tmp_path / "growth").state_dict(), model.state_dict())


def test_bfloat16_reloads_as_bfloat16(grown, tmp_path):
    save_grown(grown.to(torch.bfloat16), tmp_path / "half")
    loaded = load_grown(tmp_path / "half").eval()
    assert {parameter.dtype for parameter in loaded.parameters()} == {torch.bfloat16}
    assert_same(tensors(loaded, batch(grown)), tensors(grown, batch(grown)))


def test_a_grown_backbone_takes_a_new_task_head(grown, tmp_path):
    save_grown(grown, tmp_path / "model")
    script = f"""
import sys
sys.modules["hf_grow"] = None
from transformers import AutoModelForTokenClassification
AutoModelForTokenClassification.from_pretrained({str(tmp_path / "model")!r}, trust_remote_code=True)
"""
    subprocess.run([sys.executable, "-c", script], check=True, timeout=120)
    classifier = AutoModelForSequenceClassification.from_pretrained(tmp_path / "model", num_labels=3)
    assert torch.equal(classifier.transformer.h[0].attn.c_attn.weight, grown.transformer.h[0].attn.c_attn.weight)
    assert classifier(**batch(grown)).logits.shape == (2, 3)


@pytest.mark.parametrize("model_type", FAMILIES)
def test_a_growable_model_can_be_built_from_a_config_alone(model_type):
    torch.manual_seed(0)
    family = FAMILIES[model_type]
    grown = grow_everything(make_growable(next(iter(family.model_classes))(small_config(model_type))))
    fresh = type(grown)(grown.config)
    shapes = {name: value.shape for name, value in grown.state_dict().items()}
    assert {name: value.shape for name, value in fresh.state_dict().items()} == shapes
    for name, value in fresh.state_dict().items():
        assert torch.isfinite(value).all(), name
        if name.endswith("weight") and value.ndim == 2 and "embed" not in name:
            assert 0.001 < value.std() < 0.1, name


def test_the_folder_holds_what_the_design_promises(tmp_path):
    model = grow_everything(make_growable(hf_grow.small_model()))
    save_grown(model, tmp_path / "model", tokenizer=AutoTokenizer.from_pretrained(SMALL_MODEL))
    files = {file.name for file in (tmp_path / "model").iterdir()}
    assert {"config.json", "model.safetensors", "growth.json", "README.md", "growth.png", "tokenizer.json"} <= files
    assert {"growable_attention.py", "growable_model.py", "modeling_growable_gpt2.py"} <= files
    config = json.loads((tmp_path / "model" / "config.json").read_text())
    assert config["model_type"] == "growable_gpt2"
    assert set(config["hf_grow"]["layers"][0]) == {
        "num_attention_heads",
        "num_key_value_heads",
        "qk_head_dim",
        "v_head_dim",
        "scaling",
    }
    history = json.loads((tmp_path / "model" / "growth.json").read_text())
    assert history["base_model"] == "small_gpt2" and len(history["events"]) == 5
    card = (tmp_path / "model" / "README.md").read_text()
    assert "AutoModelForCausalLM" in card and "| 0 | self | 10 | 10 |" in card and str(tmp_path) not in card
    assert AutoTokenizer.from_pretrained(tmp_path / "model")("The")["input_ids"]


def test_a_stock_load_fails_loudly_even_when_shapes_coincide(tmp_path):
    model = make_growable(causal_model("gpt2"))
    model.transformer.h[0].attn.scaling = 1.0
    save_grown(model, tmp_path / "model")
    assert load_grown(tmp_path / "model").transformer.h[0].attn.scaling == 1.0
    with pytest.raises(Exception, match="grown by hf-grow"):
        GPT2LMHeadModel.from_pretrained(tmp_path / "model")
    script = f"""
import sys
sys.modules["hf_grow"] = None
from transformers import AutoModelForCausalLM
AutoModelForCausalLM.from_pretrained({str(tmp_path / "model")!r}, trust_remote_code=False)
"""
    done = subprocess.run([sys.executable, "-c", script], capture_output=True, text=True, timeout=120)
    assert done.returncode != 0 and "trust_remote_code=True" in done.stderr


def test_no_stock_class_takes_a_growable_checkpoint(every_checkpoint):
    for _, stock_class in TASK_HEADS:
        with pytest.raises(Exception, match="grown by hf-grow"):
            stock_class.from_pretrained(every_checkpoint / stock_class.__name__)


def test_an_existing_folder_is_kept_unless_asked(grown, tmp_path):
    save_grown(grown, tmp_path / "model")
    marker = tmp_path / "model" / "notes.txt"
    marker.write_text("mine")
    with pytest.raises(HfGrowError, match="exists and is not empty"):
        save_grown(grown, tmp_path / "model")
    assert marker.read_text() == "mine"
    save_grown(grown, tmp_path / "model", overwrite=True)
    assert not marker.exists()
    (tmp_path / "thesis").mkdir()
    (tmp_path / "thesis" / "chapter.tex").write_text("mine")
    with pytest.raises(HfGrowError, match="holds no model, so it is not overwritten"):
        save_grown(grown, tmp_path / "thesis", overwrite=True)
    with pytest.raises(HfGrowError, match="named by a path, not None"):
        save_grown(grown, None)
    (tmp_path / "file").write_text("mine")
    with pytest.raises(HfGrowError, match="is a file"):
        save_grown(grown, tmp_path / "file", overwrite=True)


@pytest.mark.parametrize("moment", ["safetensors.torch.save_file", "hf_grow.saving.checkpoint.write_model_card"])
def test_a_save_that_fails_leaves_the_old_checkpoint_whole(grown, tmp_path, monkeypatch, moment):
    save_grown(grown, tmp_path / "model")
    before = {file.name: file.read_bytes() for file in (tmp_path / "model").iterdir()}

    def fail(*args, **kwargs):
        raise OSError("disk full")

    target = "transformers.modeling_utils.safe_save_file" if "safetensors" in moment else moment
    monkeypatch.setattr(target, fail)
    hf_grow.widen_query_key(grown, 0, 1)
    with pytest.raises(HfGrowError, match="cannot be written: disk full"):
        save_grown(grown, tmp_path / "model", overwrite=True)
    with pytest.raises(HfGrowError, match="disk full"):
        save_grown(grown, tmp_path / "new" / "parent" / "model")
    assert {file.name: file.read_bytes() for file in (tmp_path / "model").iterdir()} == before
    assert [file.name for file in tmp_path.iterdir()] == ["model"]


def test_an_interrupt_while_folders_change_places_keeps_the_old_one(grown, tmp_path, monkeypatch):
    save_grown(grown, tmp_path / "model")
    before = {file.name: file.read_bytes() for file in (tmp_path / "model").iterdir()}
    real, calls = Path.rename, []

    def interrupt_second(self, target):
        calls.append(1)
        if len(calls) == 2:
            raise KeyboardInterrupt
        return real(self, target)

    monkeypatch.setattr(Path, "rename", interrupt_second)
    with pytest.raises(KeyboardInterrupt):
        save_grown(grown, tmp_path / "model", overwrite=True)
    assert {file.name: file.read_bytes() for file in (tmp_path / "model").iterdir()} == before
    assert [file.name for file in tmp_path.iterdir()] == ["model"]


def test_links_and_the_working_folder_can_be_saved_to(grown, tmp_path, monkeypatch):
    (tmp_path / "real").mkdir()
    (tmp_path / "link").symlink_to(tmp_path / "real")
    save_grown(grown, tmp_path / "link")
    assert (tmp_path / "link").is_symlink() and (tmp_path / "real" / "config.json").exists()
    assert {file.name for file in tmp_path.iterdir()} == {"real", "link"}
    (tmp_path / "here").mkdir()
    monkeypatch.chdir(tmp_path / "here")
    save_grown(grown, ".")
    assert (tmp_path / "here" / "config.json").exists()


def edit_config(folder, change):
    """Rewrite config.json after a change."""
    config = json.loads((folder / "config.json").read_text())
    change(config)
    (folder / "config.json").write_text(json.dumps(config))


def damage_truncate(folder):
    file = folder / "model.safetensors"
    file.write_bytes(file.read_bytes()[:-1000])


def damage_header(folder):
    (folder / "model.safetensors").write_bytes(b"not a safetensors file")


def damage_missing_file(folder):
    (folder / "model.safetensors").unlink()


def damage_missing_weight(folder):
    weights = load_file(folder / "model.safetensors")
    del weights["transformer.h.1.attn.c_attn.weight"]
    save_file(weights, folder / "model.safetensors", metadata={"format": "pt"})


def damage_config_json(folder):
    (folder / "config.json").write_text((folder / "config.json").read_text()[:200])


def damage_dimensions(folder):
    edit_config(folder, lambda config: config["hf_grow"]["layers"][0].update(qk_head_dim=-3))


def damage_scaling(folder):
    edit_config(folder, lambda config: config["hf_grow"]["layers"][0].update(scaling=None))


def damage_layers(folder):
    edit_config(folder, lambda config: config["hf_grow"]["layers"].pop())


def damage_depth(folder):
    def drop_a_layer(config):
        config["n_layer"] = 1
        config["hf_grow"]["layers"].pop()

    edit_config(folder, drop_a_layer)


def damage_record(folder):
    edit_config(folder, lambda config: config.update(hf_grow=None))


def damage_record_type(folder):
    edit_config(folder, lambda config: config.update(hf_grow="x"))


def damage_field_type(folder):
    edit_config(folder, lambda config: config.update(n_embd="a"))


def damage_model_type(folder):
    edit_config(folder, lambda config: config.pop("model_type"))


def damage_shape(folder):
    edit_config(folder, lambda config: config["hf_grow"]["layers"][0].update(qk_head_dim=12))


def damage_newer_history(folder):
    (folder / "growth.json").write_text(json.dumps({"format": 99, "events": []}))


def damage_history_events(folder):
    (folder / "growth.json").write_text(json.dumps({"format": 1, "events": [{}]}))


def damage_history(folder):
    (folder / "growth.json").write_text("{")


@pytest.mark.parametrize(
    ("damage", "message"),
    [
        (damage_truncate, "cannot be loaded"),
        (damage_header, "cannot be loaded"),
        (damage_missing_file, "cannot be loaded|is damaged"),
        (damage_missing_weight, "incomplete|is damaged"),
        (damage_config_json, "cannot be loaded"),
        (damage_dimensions, "qk_head_dim must be a positive integer, not -3"),
        (damage_scaling, "scaling must be a finite number, not None"),
        (damage_layers, "has 1 entries for 2 self-attention modules"),
        (damage_depth, "weights that its config knows nothing of"),
        (damage_record, "has lost its record of sizes"),
        (damage_record_type, "cannot be loaded"),
        (damage_field_type, "cannot be loaded"),
        (damage_model_type, "cannot be loaded"),
        (damage_shape, "cannot be loaded|is damaged"),
        (damage_newer_history, "format 99 is newer than 2: update hf-grow"),
        (damage_history, "growth.json of .* cannot be read"),
        (damage_history_events, "growth.json of .* cannot be read"),
    ],
)
def test_a_damaged_checkpoint_is_refused_in_one_sentence(grown, tmp_path, damage, message):
    save_grown(grown, tmp_path / "model")
    damage(tmp_path / "model")
    for read in (load_grown, hf_grow.inspect_checkpoint):
        with pytest.raises(HfGrowError, match=message) as raised:
            read(tmp_path / "model")
        assert "\n" not in str(raised.value)


def test_a_newer_history_stops_from_pretrained_too(grown, tmp_path):
    save_grown(grown, tmp_path / "model")
    damage_newer_history(tmp_path / "model")
    with pytest.raises(ValueError, match="newer than 2: update"):
        AutoModelForCausalLM.from_pretrained(tmp_path / "model")


def test_stock_folders_and_stock_models_are_refused_with_advice(tmp_path):
    stock = causal_model("gpt2")
    stock.save_pretrained(tmp_path / "stock")
    with pytest.raises(HfGrowError, match="stock gpt2 checkpoint: load it with transformers"):
        load_grown(tmp_path / "stock")
    with pytest.raises(HfGrowError, match="make_growable"):
        save_grown(stock, tmp_path / "new")
    assert not (tmp_path / "new").exists()
    with pytest.raises(HfGrowError, match="cannot be loaded"):
        load_grown(tmp_path / "nowhere")
