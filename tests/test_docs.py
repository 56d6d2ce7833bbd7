"""Code blocks of README and docs/api.md, and the examples, are run, so that they stay true."""

import ast
import importlib
import inspect
import os
import pkgutil
import re
import subprocess
import sys
from pathlib import Path

import pytest
from hub_server import HubServer

import hf_grow

ROOT = Path(__file__).parents[1]
BLOCK = re.compile(r"```python\n(.*?)```", flags=re.DOTALL)
# Whoever follows the page must not be told that its names will go.
STRICT = "import warnings\nwarnings.filterwarnings('error', category=DeprecationWarning, module='__main__|hf_grow')\n"


def text_of(document):
    return (ROOT / document).read_text(encoding="utf-8")


def run_blocks(document, folder, before="", **environment):
    """All blocks of Python in a document, one after another in one program."""
    blocks = BLOCK.findall(text_of(document))
    assert len(blocks) >= 2
    script = folder / "blocks.py"
    script.write_text("\n".join([before, *blocks]), encoding="utf-8")
    options = {"capture_output": True, "text": True, "timeout": 200, "cwd": folder}
    done = subprocess.run([sys.executable, script], env={**os.environ, **environment}, **options)
    assert done.returncode == 0, done.stderr[-2000:]


def test_readme_code_runs(tmp_path):
    run_blocks("README.md", tmp_path)


def test_api_code_runs_and_pushes(tmp_path):
    with HubServer(token="hf_test", user="user") as hub:
        run_blocks("docs/api.md", tmp_path, STRICT, **hub.client_env(), HF_HOME=str(tmp_path / "home"))
    (repo,) = hub.repos.values()
    assert repo.private and len(repo.commits) == 1
    assert repo.files == {file.name: file.read_bytes() for file in (tmp_path / "grown").iterdir()}


def test_api_shows_every_public_name():
    text = text_of("docs/api.md")
    parsed = ast.parse("\n".join(BLOCK.findall(text)))
    used = {
        node.attr
        for node in ast.walk(parsed)
        if isinstance(node, ast.Attribute) and ast.unparse(node.value) == "hf_grow"
    }
    described = set(re.findall(r"^- `(\w+)", text, flags=re.MULTILINE))
    assert set(hf_grow.__all__) - used == set()
    assert set(hf_grow.__all__) - described == set()


@pytest.mark.parametrize("example", sorted((ROOT / "examples").glob("*.py")), ids=lambda file: file.name)
def test_examples_run(example, tmp_path):
    done = subprocess.run([sys.executable, example], capture_output=True, text=True, timeout=200, cwd=tmp_path)
    assert done.returncode == 0, done.stderr[-2000:]
    assert done.stdout.strip()


def test_commands_in_the_readme_exist():
    text = (ROOT / "README.md").read_text(encoding="utf-8")
    targets = set(re.findall(r"`?make ([a-z-]+)", text)) - {"it"}
    makefile = (ROOT / "Makefile").read_text(encoding="utf-8")
    assert targets and all(re.search(rf"^{target}:", makefile, flags=re.MULTILINE) for target in targets)


def test_names_in_the_maths_are_those_of_the_code():
    text, classes = text_of("docs/maths.md"), {}
    for module in pkgutil.walk_packages(hf_grow.__path__, "hf_grow."):
        if not module.name.endswith("__main__"):
            members = vars(importlib.import_module(module.name)).items()
            classes |= {name: value for name, value in members if isinstance(value, type)}
    dotted = re.findall(r"`([A-Z]\w+)\.(\w+)", text)
    assert len(dotted) > 10
    for name, attribute in dotted:
        fields = {key for cls in classes[name].__mro__ for key in vars(cls).get("__annotations__", ())}
        own = f"self.{attribute}" in inspect.getsource(classes[name])
        assert own or attribute in fields or hasattr(classes[name], attribute), f"{name}.{attribute}"
    assert all(hasattr(hf_grow.linalg, name) for name in re.findall(r"`linalg\.(\w+)", text))
