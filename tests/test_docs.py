"""README code blocks and examples are run, so that they stay true."""

import json
import re
import subprocess
import sys
from pathlib import Path

import pytest

ROOT = Path(__file__).parents[1]


def test_readme_code_runs(tmp_path):
    blocks = re.findall(r"```python\n(.*?)```", (ROOT / "README.md").read_text(encoding="utf-8"), flags=re.DOTALL)
    assert len(blocks) >= 2
    script = tmp_path / "readme.py"
    script.write_text("\n".join(blocks), encoding="utf-8")
    done = subprocess.run([sys.executable, script], capture_output=True, text=True, timeout=200, cwd=tmp_path)
    assert done.returncode == 0, done.stderr[-2000:]


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


def test_the_attention_benchmark_prints_its_table():
    command = [sys.executable, ROOT / "scripts" / "bench_attention.py", "--layers", "1", "--lengths", "32"]
    done = subprocess.run([*command, "--rounds", "2"], capture_output=True, text=True, timeout=200)
    assert done.returncode == 0, done.stderr[-2000:]
    assert "ungrown / stock" in done.stdout and "decoding" in done.stdout


def test_the_collection_benchmark_prints_its_tables(tmp_path):
    command = [sys.executable, ROOT / "scripts" / "bench_collect.py", "--layers", "1", "--lengths", "32", "64"]
    shapes = ["--width", "64", "--heads", "4", "--vocabulary", "512", "--json", tmp_path / "rows.json"]
    done = subprocess.run([*command, *shapes, "--rounds", "2"], capture_output=True, text=True, timeout=200)
    assert done.returncode == 0, done.stderr[-2000:]
    assert "key probes" in done.stdout and "32 → 64" in done.stdout and "training steps" in done.stdout
    found = json.loads((tmp_path / "rows.json").read_text(encoding="utf-8"))
    megabytes = {row["step"]: row["megabytes"] for row in found["steps"] if row["n"] == 64 and row["step"] != "again"}
    # At its end a training step holds a gradient for every parameter; of embeddings and one layer there are so many.
    assert megabytes["training"] > 4 * ((512 + 1024) * 64 + 12 * 64**2) / 2**20
    assert megabytes["grams"] < megabytes["key probes"] < megabytes["exact"]
    assert {row["collection"] for row in found["solving"]} == {"sketch", "exact"}


def test_the_comparison_of_choices_prints_its_tables():
    command = [sys.executable, ROOT / "scripts" / "compare_choices.py", "--tables", "sketch"]
    sizes = ["--length", "16", "--sequences", "16"]
    done = subprocess.run([*command, *sizes], capture_output=True, text=True, timeout=200)
    assert done.returncode == 0, done.stderr[-2000:]
    assert "phases='split'" in done.stdout
