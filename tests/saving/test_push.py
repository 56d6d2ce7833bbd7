"""Pushing: the real Hub client against a Hub on loopback."""

import json
import os
import subprocess
import sys

import pytest
from hub_server import HubServer
from models import assert_same, batch, causal_model, fill_new_weights, grow_everything, tensors
from transformers import AutoModelForCausalLM

import hf_grow
from hf_grow import HfGrowError, make_growable, push_grown, save_grown

pytestmark = pytest.mark.filterwarnings("ignore:Use 'content=:DeprecationWarning")


@pytest.fixture
def model():
    """A grown Llama whose new weights matter."""
    return fill_new_weights(grow_everything(make_growable(causal_model("llama"))))


@pytest.fixture
def folder(model, tmp_path):
    """The same, saved."""
    return save_grown(model, tmp_path / "grown")


def test_a_pushed_model_is_the_saved_folder_and_loads_back(hub, model, folder, tmp_path):
    address = push_grown(model, "user/grown", token="hf_test", private=True)
    repo = hub.repos["user/grown"]
    assert address.startswith(hub.url) and repo.private and len(repo.commits) == 1
    assert set(repo.files) == {file.name for file in folder.iterdir()}
    for file in folder.iterdir():
        assert file.suffix == ".png" or repo.files[file.name] == file.read_bytes(), file.name
    loaded = hf_grow.load_grown("user/grown", cache_dir=tmp_path / "cache", token="hf_test").eval()
    assert_same(tensors(loaded, batch(loaded)), tensors(model, batch(model)))
    assert loaded.growth_history["events"] == model.growth_history["events"]


def test_a_folder_is_pushed_as_it_is(hub, folder):
    push_grown(folder, "user/grown", token="hf_test", commit_message="First")
    assert hub.repos["user/grown"].files == {file.name: file.read_bytes() for file in folder.iterdir()}
    assert hub.repos["user/grown"].head.message == "First"


@pytest.mark.parametrize("how", ["push_to_hub", "save_pretrained"])
def test_transformers_own_push_uploads_code_and_history(hub, model, tmp_path, how):
    if how == "push_to_hub":
        model.push_to_hub("user/plain", token="hf_test")
    else:
        model.save_pretrained(tmp_path / "plain", push_to_hub=True, repo_id="user/plain", token="hf_test")
    files = set(hub.repos["user/plain"].files)
    assert {
        "config.json",
        "model.safetensors",
        "growth.json",
        "growable_attention.py",
        "growable_model.py",
        "growable_rotary.py",
    } <= files
    loaded = AutoModelForCausalLM.from_pretrained("user/plain", cache_dir=tmp_path / "cache", token="hf_test").eval()
    assert_same(tensors(loaded, batch(loaded)), tensors(model, batch(model)))


def test_a_refused_token_is_one_sentence_and_no_commit(hub, folder):
    with pytest.raises(HfGrowError, match=r"was not pushed to user/grown: .*401") as raised:
        push_grown(folder, "user/grown", token="hf_wrong")
    assert "\n" not in str(raised.value)
    assert not hub.repos


@pytest.mark.parametrize("route", ["create_repo", "preupload", "lfs_put", "commit"])
def test_a_network_error_in_the_middle_leaves_no_commit_and_can_be_repeated(hub, folder, route):
    hub.drop_connection_on(route, times=1)
    with pytest.raises(HfGrowError, match="was not pushed to user/grown"):
        push_grown(folder, "user/grown", token="hf_test")
    assert not hub.repos.get("user/grown") or not hub.repos["user/grown"].commits
    push_grown(folder, "user/grown", token="hf_test")
    assert len(hub.repos["user/grown"].commits) == 1


def test_nothing_is_sent_for_a_damaged_folder_or_a_bad_name(hub, folder, tmp_path):
    (folder / "model.safetensors").write_bytes(b"broken")
    with pytest.raises(HfGrowError, match="cannot be loaded"):
        push_grown(folder, "user/grown", token="hf_test")
    with pytest.raises(HfGrowError, match="is not a folder"):
        push_grown(tmp_path / "nowhere", "user/grown", token="hf_test")
    with pytest.raises(HfGrowError, match="make_growable"):
        push_grown(causal_model("llama"), "user/grown", token="hf_test")
    assert not hub.requests


def test_the_command_pushes_and_refuses(folder):
    with HubServer(token="hf_test", user="user") as hub:
        environment = {**os.environ, **hub.client_env(), "HF_HUB_OFFLINE": "0"}

        def push(*arguments):
            command = [sys.executable, "-m", "hf_grow", "push", str(folder), "user/grown", *arguments]
            return subprocess.run(command, capture_output=True, text=True, timeout=120, env=environment)

        refused = push("--token", "hf_wrong")
        assert refused.returncode == 2 and "was not pushed" in refused.stderr and "Traceback" not in refused.stderr
        done = push("--token", "hf_test", "--private")
        assert done.returncode == 0, done.stderr
        assert "pushed to" in done.stdout
        assert hub.repos["user/grown"].private and "growth.json" in hub.repos["user/grown"].files


def test_the_patch_command_takes_a_model_from_the_hub(tmp_path):
    causal_model("gpt2").save_pretrained(tmp_path / "stock")
    with HubServer(token="hf_test", user="user") as hub:
        environment = {**os.environ, **hub.client_env(), "HF_HUB_OFFLINE": "0", "HF_HOME": str(tmp_path / "home")}
        upload = f"""
from huggingface_hub import HfApi
api = HfApi(token="hf_test")
api.create_repo("user/stock")
api.upload_folder(repo_id="user/stock", folder_path={str(tmp_path / "stock")!r})
"""
        subprocess.run([sys.executable, "-c", upload], check=True, timeout=120, env=environment)
        command = [sys.executable, "-m", "hf_grow", "patch", "user/stock", "--out", str(tmp_path / "out"), "--json"]
        done = subprocess.run(command, capture_output=True, text=True, timeout=120, env=environment)
        assert done.returncode == 0, done.stderr
        summary = json.loads(done.stdout)
        assert summary["base_model"] == "user/stock"
        assert summary["base_revision"] == hub.repos["user/stock"].head.oid
        assert "base_model: user/stock" in (tmp_path / "out" / "README.md").read_text()
