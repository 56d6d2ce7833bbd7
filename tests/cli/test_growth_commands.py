"""`hf-grow analyze` and `hf-grow grow`: what they print, write, refuse, and whether their numbers are true."""

import json
from pydoc_data.topics import topics

import pytest
import torch
from commands import call, succeed
from transformers import AutoTokenizer

import hf_grow
from hf_grow import CollectConfig, GrowthPlan, HfGrowError, Statistics, collect_statistics, load_grown, save_grown
from hf_grow.cli.output import to_json
from hf_grow.growth.collect import split_batches
from hf_grow.growth.insert import insert_growth
from hf_grow.saving.model_card import describe_event

LENGTH, SEQUENCES = 32, 16
SMALL = ("--length", LENGTH, "--max-sequences", SEQUENCES, "--batch-size", 4)


@pytest.fixture(scope="module")
def text():
    """Help topics, of which the small model has seen most."""
    return "\n\n".join(topics[name] for name in ("assert", "bitwise", "comparisons", "numbers", "slicings"))


@pytest.fixture(scope="module")
def data(text, tmp_path_factory):
    """The same as a file."""
    file = tmp_path_factory.mktemp("data") / "topics.txt"
    file.write_text(text, encoding="utf-8")
    return file


@pytest.fixture(scope="module")
def blocks(text):
    """The sequences that the commands should read, made without hf-grow."""
    ids = AutoTokenizer.from_pretrained(hf_grow.SMALL_MODEL)(text, verbose=False)["input_ids"]
    return torch.tensor(ids[: LENGTH * SEQUENCES]).view(SEQUENCES, LENGTH)


@pytest.fixture(scope="module")
def judging(blocks):
    """Those of them that do not choose the new weights."""
    _, parts = split_batches([{"input_ids": blocks}], CollectConfig())
    found = torch.cat([part["input_ids"] for part in parts])
    assert 2 <= len(found) <= SEQUENCES // 2
    return found


@torch.no_grad()
def mean_loss(model, blocks):
    """The mean loss over sequences, one by one."""
    losses = [float(model.eval()(block[None], labels=block[None]).loss) for block in blocks]
    return sum(losses) / len(losses)


@pytest.fixture(scope="module")
def analysis(data, tmp_path_factory):
    """What `analyze` printed and wrote."""
    folder = tmp_path_factory.mktemp("analysis") / "new" / "folder"
    return succeed("analyze", hf_grow.SMALL_MODEL, "--data", data, *SMALL, "--out", folder), folder


def test_analyze_prints_a_table_and_what_it_says(analysis):
    printed, folder = analysis
    for words in ("query/key", "reachable", "only", "best per", "one head", "step for value columns", "falls by"):
        assert words in printed
    summary = json.loads((folder / "statistics.json").read_text())
    for layer in summary["layers"]:
        offer = layer["offers"]["columns"]
        assert f"{offer['in_sample']:.2g} → {offer['held_out']:.2g}" in printed
        assert f"{layer['reachable_share']:.0%}" in printed


def test_analyze_writes_numbers_figures_and_a_page(analysis):
    _, folder = analysis
    figures = {"bottleneck.png", "expected_decrease.png", "spectra.png"}
    assert {file.name for file in folder.iterdir()} == {
        "statistics.json",
        "statistics.safetensors",
        "report.html",
        *figures,
    }
    summary = json.loads((folder / "statistics.json").read_text())
    assert json.loads(to_json(Statistics.load(folder / "statistics.safetensors").summary())) == summary
    assert summary["sequences"] == SEQUENCES and summary["config"]["kinds"] == ["columns", "value_columns", "heads"]
    assert f"{summary['loss']:.4f} nats" in (folder / "report.html").read_text(encoding="utf-8")


def test_analyze_prints_one_json_document_that_python_would_give(data, blocks, judging, tmp_path):
    options = ("--kinds", "columns", "--columns", "2", "--collection", "exact", "--json")
    found = json.loads(succeed("analyze", hf_grow.SMALL_MODEL, "--data", data, *SMALL, *options))
    model = hf_grow.make_growable(hf_grow.small_model())
    batches = [{"input_ids": part, "labels": part} for part in blocks.split(4)]
    config = CollectConfig(collection="exact", kinds=("columns",), columns=2)
    wanted = collect_statistics(model, batches, config).summary()
    assert found["loss"] == pytest.approx(wanted["loss"], rel=1e-5)
    assert found["loss"] == pytest.approx(mean_loss(hf_grow.small_model(), judging), rel=1e-5)
    for layer, other in zip(found["layers"], wanted["layers"], strict=True):
        assert layer["wanted"] == pytest.approx(other["wanted"], rel=1e-2)
        assert set(layer["offers"]) == {"columns"}
    assert list(tmp_path.iterdir()) == []


AMOUNTS = {
    "columns": ("--columns", "3"),
    "value_columns": ("--value-columns", "2"),
    "heads": ("--heads", "1"),
    "budget": ("--budget", "1.5%"),
}


@pytest.fixture(scope="module", params=AMOUNTS.values(), ids=AMOUNTS)
def grown(request, data, tmp_path_factory):
    """What `grow` printed as JSON, and the folder it saved."""
    folder = tmp_path_factory.mktemp("grown") / "model"
    printed = succeed("grow", hf_grow.SMALL_MODEL, "--data", data, *SMALL, *request.param, "--out", folder, "--json")
    return json.loads(printed), folder


def test_the_saved_model_has_the_reported_sizes_and_loss(grown, judging):
    report, folder = grown
    model = load_grown(folder)
    assert model.num_parameters() == report["parameters_after"] > report["parameters_before"]
    assert report["parameters_added"] == sum(layer["parameters_added"] for layer in report["layers"]) > 0
    sizes = model.growth_summary()["layers"]
    for layer in report["layers"]:
        now = sizes[layer["layer"]]
        assert now["query_key_dim"] == layer["query_key_dim"] + layer["columns"] == layer["new_query_key_dim"]
        assert now["value_dim"] == layer["value_dim"] + layer["value_columns"] == layer["new_value_dim"]
        assert now["n_heads"] == layer["n_heads"] + layer["heads"] == layer["new_n_heads"]
    assert report["line_search_sequences"] == len(judging)
    assert report["loss_before"] == pytest.approx(mean_loss(hf_grow.small_model(), judging), rel=1e-5)
    assert report["loss_after"] == pytest.approx(mean_loss(model, judging), rel=1e-5)
    assert report["loss_after"] <= report["loss_before"]


def test_the_saved_folder_holds_the_report(grown, data):
    report, folder = grown
    kept = json.loads((folder / "growth_report.json").read_text())
    assert kept == {name: value for name, value in report.items() if name not in ("model", "data", "out")}
    page = (folder / "report.html").read_text(encoding="utf-8")
    assert f"{report['loss_before']:.4f} → {report['loss_after']:.4f} nats" in page
    assert "How small_gpt2 grew for topics.txt" in page and str(data.parent) not in page
    assert (folder / "line_search.png").exists() and (folder / "tokenizer.json").exists()
    (event,) = load_grown(folder).growth_history["events"]
    described = describe_event(event)
    assert f"{report['parameters_added']:+,} parameters" in described
    assert f"loss {report['loss_before']:.4f} → {report['loss_after']:.4f}" in described
    card = (folder / "README.md").read_text(encoding="utf-8")
    assert f"- {described}" in card and "expected decrease of the loss, held out" in card


def test_grow_prints_the_plan_and_what_happened_and_takes_grown_models(data, tmp_path):
    first, second = tmp_path / "first", tmp_path / "second"
    options = ("--data", data, *SMALL, "--collection", "exact")
    printed = succeed("grow", hf_grow.SMALL_MODEL, *options, "--columns", "0:2,3:4", "--out", first)
    assert "16 + 2" in printed and "16 + 4" in printed and "realised decrease" in printed
    assert "sequences that gave the loss" in printed and f"saved in {first}" in printed
    succeed("grow", first, *options, "--columns", "1:1", "--step-size", "0", "--out", second)
    model = load_grown(second)
    assert [layer["query_key_dim"] for layer in model.growth_summary()["layers"]] == [18, 17, 16, 20]
    assert [event["form"] for event in model.growth_history["events"]][1] == "preserving"
    inspected = succeed("inspect", second)
    assert "growth by 2 to 4 query/key columns per head in 2 layers" in inspected
    assert "growth by 1 query/key column per head in 1 layer: +2,064 parameters" in inspected


@pytest.mark.parametrize("step_scope", ["--step-scope", "--steps"])
def test_every_option_reaches_its_config(data, step_scope):
    """Also under the name it had in 0.1.0."""
    growing = {"align": 5, "step_scope": "per_layer", "line_search": "full_rank"}
    collecting = {"collection": "exact", "target": "gradient", "metric": "euclidean", "estimator": "per_sequence"}
    collecting |= {"passes": 2, "ridge": 0.01, "seed": 3}
    options = [
        part for name, value in (growing | collecting).items() for part in (f"--{name.replace('_', '-')}", value)
    ]
    options[options.index("--step-scope")] = step_scope
    command = ("grow", hf_grow.SMALL_MODEL, "--data", data, *SMALL, "--columns", "2", "--dry-run", "--json", *options)
    report = json.loads(succeed(*command))
    assert {name: report["config"][name] for name in growing} == growing
    assert {name: report["collected"][name] for name in collecting} == collecting
    assert [layer["new_query_key_dim"] for layer in report["layers"]] == [20] * 4
    assert isinstance(report["step"], list) or report["step"] == 0


def test_a_dry_run_writes_nothing_but_the_plan_it_is_asked_for(data, judging, tmp_path):
    command = ("grow", hf_grow.SMALL_MODEL, "--data", data, *SMALL, "--heads", "1", "--dry-run")
    before = {file.name: file.stat().st_mtime_ns for file in hf_grow.SMALL_MODEL.iterdir()}
    printed = succeed(*command, "--out", tmp_path / "out", "--save-plan", tmp_path / "plan.safetensors")
    assert "nothing was changed or saved" in printed
    assert [file.name for file in tmp_path.iterdir()] == ["plan.safetensors"]
    assert {file.name: file.stat().st_mtime_ns for file in hf_grow.SMALL_MODEL.iterdir()} == before
    report = json.loads(succeed(*command, "--json"))
    assert report["dry_run"] and report["out"] is None
    model = hf_grow.make_growable(hf_grow.small_model())
    batches = [{"input_ids": judging, "labels": judging}]
    done = insert_growth(model, GrowthPlan.load(tmp_path / "plan.safetensors"), batches)
    assert done.loss_after == pytest.approx(report["loss_after"], rel=1e-4)


GROW = ("grow", hf_grow.SMALL_MODEL)
ANALYZE = ("analyze", hf_grow.SMALL_MODEL)


@pytest.mark.parametrize(
    ("arguments", "message"),
    [
        ((*GROW, "--columns", "2"), "Missing option '--data'"),
        ((*GROW, "DATA", "OUT"), "Say how much to grow"),
        ((*GROW, "DATA", "OUT", "--columns", "2", "--budget", "1%"), "Say how much to grow"),
        ((*GROW, "DATA", "OUT", "--columns", "many"), "--columns must be a whole number or numbers by layer"),
        (
            (*GROW, "DATA", "OUT", "--columns", "2", "--strategy", "shrink"),
            "one of append, refactor, step, not 'shrink'",
        ),
        ((*GROW, "DATA", "OUT", "--columns", "2", "--estimator", "exact"), "use collection='exact'"),
        ((*GROW, "DATA", "OUT", "--columns", "2", "--step-size", "-1"), "step_size must be a number"),
        ((*GROW, "DATA", "OUT", "--columns", "2", "--length", "999"), "exceeds the 256 positions"),
        ((*GROW, "DATA", "OUT", "--columns", "2", "--device", "toaster"), "There is no device 'toaster'"),
        ((*GROW, "DATA", "OUT", "--columns", "9:2"), "columns names layer 9; the model has layers 0 to 3"),
        ((*GROW, "DATA", "OUT", "--budget", "10"), "A budget of 10 parameters is too small"),
        ((*GROW, "DATA", "OUT", "--budget", "lots"), "budget must be a positive number of parameters or a percentage"),
        ((*GROW, "DATA", "--columns", "2"), "Say where to save the grown model with --out"),
        ((*GROW, "DATA", "--out", "FULL", "--columns", "2"), "exists and is not empty"),
        ((*GROW, "--data", "nowhere.txt", "OUT", "--columns", "2"), "There is no file or folder 'nowhere.txt'"),
        (("grow", "nowhere/at/all", "DATA", "OUT", "--columns", "2"), "nowhere/at/all cannot be loaded"),
        ((*ANALYZE,), "Missing option '--data'"),
        ((*ANALYZE, "DATA", "OUT", "--kinds", "columns,legs"), "one of columns, value_columns, heads, not 'legs'"),
        ((*ANALYZE, "DATA", "OUT", "--kinds", ","), "kinds must name at least one"),
        ((*ANALYZE, "DATA", "--out", "FULL"), "exists and is not empty"),
        ((*ANALYZE, "--data", "nowhere.txt", "OUT"), "There is no file or folder 'nowhere.txt'"),
    ],
    ids=lambda value: None if isinstance(value, tuple) else value[:30],
)
def test_bad_input_ends_with_one_sentence_and_nothing_written(arguments, message, data, tmp_path):
    full = tmp_path / "full"
    full.mkdir()
    (full / "mine.txt").write_text("mine")
    places = {"DATA": ("--data", data, *SMALL), "OUT": ("--out", tmp_path / "out"), "FULL": (full,)}
    words = [part for word in arguments for part in (places.get(word, (word,)) if isinstance(word, str) else (word,))]
    code, out, err = call(*words)
    assert code == 2 and out == ""
    assert message in " ".join(err.replace("│", " ").split())
    assert {file.name for file in tmp_path.rglob("*")} == {"full", "mine.txt"}


def test_analyze_replaces_only_its_own_files(data, tmp_path):
    (tmp_path / "mine.txt").write_text("mine")
    command = (*ANALYZE, "--data", data, *SMALL, "--kinds", "columns", "--columns", 1, "--out", tmp_path)
    (tmp_path / "statistics.json").write_text("old")
    succeed(*command, "--overwrite")
    assert (tmp_path / "mine.txt").read_text() == "mine"
    assert json.loads((tmp_path / "statistics.json").read_text())["config"]["columns"] == 1


def test_a_save_whose_extra_files_fail_leaves_nothing(tmp_path):
    model = hf_grow.make_growable(hf_grow.small_model())

    def broken(folder):
        (folder / "half.txt").write_text("half")
        raise HfGrowError("no report")

    with pytest.raises(HfGrowError, match="no report"):
        save_grown(model, tmp_path / "model", extras=broken)
    assert list(tmp_path.iterdir()) == []
    save_grown(model, tmp_path / "model", extras=lambda folder: (folder / "more.txt").write_text("more"))
    assert (tmp_path / "model" / "more.txt").read_text() == "more" and (tmp_path / "model" / "config.json").exists()


def test_help_lists_the_values_of_options():
    printed = " ".join(succeed("grow", "--help").replace("│", " ").split())
    for values in ("append, refactor, step", "sketch, exact", "pooled, per_sequence", "low_rank, full_rank"):
        assert values in printed


@pytest.mark.parametrize(
    ("event", "words"),
    [
        ({"kind": "growth"}, "growth"),
        ({"kind": "growth", "layers": []}, "growth by nothing: +0 parameters (form not recorded)"),
        (
            {
                "kind": "growth",
                "layers": [{"columns": -4}],
                "config": {"strategy": "refactor"},
                "parameters_added": -80,
            },
            "all query/key columns anew in 1 layer, -4 query/key columns per head in 1 layer: -80 parameters",
        ),
        (
            {"kind": "growth", "layers": [{"columns": 0}] * 2, "config": {"strategy": "step"}, "form": "stepped"},
            "growth by a step of the query/key columns in 2 layers: +0 parameters (stepped)",
        ),
    ],
)
def test_growth_events_are_described_in_words(event, words):
    assert words in describe_event(event)


def test_json_holds_no_number_that_json_does_not_have():
    assert json.loads(to_json({"curve": [(1.0, float("inf")), (2.0, float("nan"))]})) == {
        "curve": [[1.0, None], [2.0, None]]
    }
