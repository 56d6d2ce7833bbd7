"""The scripts that measure run at tiny sizes and give numbers for every cell."""

import json
import math
import subprocess
import sys
from pathlib import Path

import pytest
from models import minilm_folder

pytestmark = pytest.mark.slow
ROOT = Path(__file__).parents[1]
SIZES = "--layers 1 --width 16 --heads 2 --length 16 --batch-size 2 --steps 6 --warmup 2 --growth-sequences 8"
AMOUNTS = "--grow-at 2 4 --columns 2 --checkpoints 1 2 3 --seeds 2"


def test_the_growth_benchmark_prints_its_tables_and_writes_every_number(tmp_path):
    files = ["--json", tmp_path / "rows.json", "--figure", tmp_path / "starts.png"]
    command = [sys.executable, ROOT / "scripts" / "bench_growth.py", *SIZES.split(), *AMOUNTS.split(), *files]
    done = subprocess.run(command, capture_output=True, text=True, timeout=250)
    assert done.returncode == 0, done.stderr[-2000:]
    assert "Part a, growth during training" in done.stdout and "against no growth" in done.stdout
    assert done.stdout.count("Part b, start of new columns") == 4

    found = json.loads((tmp_path / "rows.json").read_text(encoding="utf-8"))
    small, grown, random, by_chance, large = (rows[0] for rows in found["a"]["runs"].values())
    assert small["query_key"] == [1, 1] and grown["query_key"] == random["query_key"] == by_chance["query_key"] == [
        1,
        8,
    ]
    # Growth ends at the size of the large model.
    assert grown["parameters"] == by_chance["parameters"] == [small["parameters"][0], large["parameters"][0]]
    for run in found["a"]["summary"].values():
        assert all(math.isfinite(run[name][part]) for name in ("loss", "difference") for part in ("mean", "spread"))

    starts = found["b"]["summary"]
    assert set(starts) == {"all", "new"} and all(len(rows) == 5 for rows in starts.values())
    for cells in (cells for rows in starts.values() for cells in rows.values()):
        assert list(cells) == ["0", "1", "2", "3"]
        numbers = [cell[name][part] for cell in cells.values() for name in cell for part in ("mean", "spread")]
        assert all(math.isfinite(number) for number in numbers)
    # Both forms with zero keys leave the function as it is.
    insertion = {start: cells["0"]["loss"]["mean"] for start, cells in starts["new"].items()}
    for start in ("SVD queries, zero keys", "random queries, zero keys"):
        assert math.isclose(insertion[start], insertion["no growth"], rel_tol=1e-6)
    assert (tmp_path / "starts.png").read_bytes().startswith(b"\x89PNG")


def test_the_adapter_benchmark_counts_what_learns(tmp_path):
    """Its runs end with an error if LoRA touches GPT-2's values, which are not counted."""
    command = [sys.executable, ROOT / "scripts" / "bench_adapters.py", "--steps", "0", "2", "--seeds", "1"]
    sizes = ["--rates", "1e-3", "--sequences", "8", "--length", "16", "--blocks", "16", "--json", tmp_path / "out.json"]
    done = subprocess.run([*command, *sizes], capture_output=True, text=True, timeout=250)
    assert done.returncode == 0, done.stderr[-2000:]
    (found,) = json.loads((tmp_path / "out.json").read_text(encoding="utf-8"))
    assert len(found["methods"]) == 13
    counts = [entry["trainable"] for entry in found["methods"].values()]
    assert max(counts) == 16_512 and min(counts) > 0.85 * max(counts)
    shown = subprocess.run(
        [*command[:2], "--read", tmp_path / "out.json", "--figure", tmp_path / "out.png"],
        capture_output=True,
        text=True,
        timeout=100,
    )
    assert shown.returncode == 0, shown.stderr[-2000:]
    assert "whitened columns" in shown.stdout and (tmp_path / "out.png").stat().st_size > 10_000


def test_the_benchmark_of_carried_state_prints_its_tables(tmp_path):
    command = [sys.executable, ROOT / "scripts" / "bench_optimizer_state.py", "--seeds", "1", "--rates", "1e-3"]
    sizes = ["--warmup", "2", "--steps", "2", "--length", "16", "--batch", "2", "--sequences", "8", "--held-out", "2"]
    more = ["--columns", "1", "--multipliers", "3", "--json", tmp_path / "rows.json"]
    done = subprocess.run([*command, *sizes, *more], capture_output=True, text=True, timeout=200)
    assert done.returncode == 0, done.stderr[-2000:]
    assert "new optimizer" in done.stdout and "train='new'" in done.stdout and "10,000 steps" in done.stdout
    rows = json.loads((tmp_path / "rows.json").read_text(encoding="utf-8"))["rows"]
    assert len(rows) == 3 * 2 * 2
    assert {row["table"] for row in rows} == {"carry", "variance", "multiplier"}
    assert all(0 < row["training"] < 20 for row in rows)


def test_the_benchmark_of_adapter_costs_prints_its_tables_and_writes_every_number(tmp_path):
    command = [sys.executable, ROOT / "scripts" / "bench_adapter_cost.py", "--model", "small", "--threads", "1"]
    sizes = ["--length", "16", "--rounds", "2", "--repeats", "1", "--new-tokens", "2", "--json", tmp_path / "out.json"]
    done = subprocess.run([*command, *sizes], capture_output=True, text=True, timeout=250)
    assert done.returncode == 0, done.stderr[-2000:]
    assert "Training, base frozen: a tiny Llama" in done.stdout and "peak memory above the model" in done.stdout
    assert "value columns, merged" in done.stdout

    results = json.loads((tmp_path / "out.json").read_text(encoding="utf-8"))
    rows = results["training"]
    assert list(rows) == ["LoRA on q, k, v, o", "value columns", "query/key and value columns"]
    for row in rows.values():
        for what in ("step", "peak", "activation", "state"):
            assert row[f"{what}_ratio"] > 0
        assert min(row["step_ms"], row["peak_bytes"], row["state_bytes"]) > 0
        # What is counted agrees with the formulas in the script's first lines.
        assert row["trainable"] == row["trainable_by_formula"]
        assert row["own_activation_bytes_per_token"] == row["own_activation_bytes_per_token_by_formula"]
        assert math.isclose(row["state_per_number"], 8, rel_tol=0.01)
    for times in (results["forward"], results["decoding"]):
        assert len(times) == 6 and all(row["ms"] > 0 and row["ratio"] > 0 for row in times.values())


def test_the_paper_numbers_of_adapter_costs_are_those_of_the_formulas():
    command = [sys.executable, ROOT / "scripts" / "bench_adapter_cost.py", "--paper"]
    done = subprocess.run(command, capture_output=True, text=True, timeout=100)
    assert done.returncode == 0, done.stderr[-2000:]
    # 32 layers · 2 · 4096 · 32 heads · 8 columns, and 32 · 16 · 4 · 8192.
    assert "67,108,864" in done.stdout and "16,777,216" in done.stdout


def test_the_comparison_of_scales_prints_its_tables_and_writes_every_number(tmp_path):
    command = [sys.executable, ROOT / "scripts" / "bench_scale.py", "--seeds", "1", "--steps", "0", "1"]
    sizes = ["--sequences", "8", "--batch", "2", "--length", "16", "--blocks", "64", "--json", tmp_path / "out.json"]
    done = subprocess.run([*command, *sizes], capture_output=True, text=True, timeout=250)
    assert done.returncode == 0, done.stderr[-2000:]
    results = json.loads((tmp_path / "out.json").read_text(encoding="utf-8"))
    assert list(results) == ["frozen base", "all weights"]
    for losses in results.values():
        assert list(losses) == ["frozen", "learnable", "learnable_per_head"]
        # The scale starts where it was, and then learns.
        assert losses["frozen"]["0"] == pytest.approx(losses["learnable"]["0"], rel=1e-5)
        assert losses["frozen"]["1"] != losses["learnable"]["1"]


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
    assert "first pass" in done.stdout and "32 → 64" in done.stdout and "training steps" in done.stdout
    results = json.loads((tmp_path / "rows.json").read_text(encoding="utf-8"))
    megabytes = {row["step"]: row["megabytes"] for row in results["steps"] if row["n"] == 64 and row["step"] != "again"}
    # At its end a training step holds a gradient for every parameter; of embeddings and one layer there are so many.
    assert megabytes["training"] > 4 * ((512 + 1024) * 64 + 12 * 64**2) / 2**20
    assert 0 < megabytes["last pass"] < megabytes["first pass"] and megabytes["exact"] > 0
    assert {row["collection"] for row in results["solving"]} == {"sketch", "exact"}


def test_the_comparison_of_choices_prints_its_tables():
    command = [sys.executable, ROOT / "scripts" / "compare_choices.py", "--tables", "sketch"]
    sizes = ["--length", "16", "--sequences", "16"]
    done = subprocess.run([*command, *sizes], capture_output=True, text=True, timeout=200)
    assert done.returncode == 0, done.stderr[-2000:]
    assert "3 passes" in done.stdout


@pytest.mark.skipif(minilm_folder() is None, reason="needs the extra real-weights")
def test_what_the_sketch_finds_is_compared_with_the_optimum(tmp_path):
    command = [sys.executable, ROOT / "scripts" / "bench_sketch.py", "--sequences", "32", "--seeds", "1"]
    done = subprocess.run(
        [*command, "--passes", "2", "--json", tmp_path / "rows.json"], capture_output=True, text=True, timeout=250
    )
    assert done.returncode == 0, done.stderr[-2000:]
    rows = json.loads((tmp_path / "rows.json").read_text(encoding="utf-8"))
    assert [row["model"] for row in rows] == ["small GPT-2"] * 2 + ["MiniLM"] * 2
    assert all(0.5 < row["columns"] < 1.5 for row in rows[:2])


def test_the_benchmark_of_whole_collections_shows_what_was_before(tmp_path):
    command = [sys.executable, ROOT / "scripts" / "bench_collect.py", "--whole", "--layers", "1", "--lengths", "16"]
    shapes = ["--width", "32", "--heads", "2", "--vocabulary", "64", "--batches", "4"]
    for extra in (["--json", tmp_path / "rows.json"], ["--before", tmp_path / "rows.json"]):
        done = subprocess.run([*command, *shapes, *extra], capture_output=True, text=True, timeout=250)
        assert done.returncode == 0, done.stderr[-2000:]
    rows = json.loads((tmp_path / "rows.json").read_text(encoding="utf-8"))
    assert [row["kinds"] for row in rows] == ["columns", "all kinds"]
    assert all(row["steps"] > 1 and row["memory"] > 0 for row in rows)
    assert f"{rows[1]['steps']:.2f}" in done.stdout
