"""Figures and the HTML report: whole, readable, self-contained, and about the data they were given."""

import base64
import copy
import io
import json
import re
from html.parser import HTMLParser
from pathlib import Path

import numpy as np
import pytest
import torch
from matplotlib.image import imread
from models import VOCABULARY, causal_model

from hf_grow import CollectConfig, GrowthConfig, HfGrowError, collect_statistics, insert_growth, make_growable
from hf_grow.files import write_bytes
from hf_grow.growth.plan import plan_growth
from hf_grow.reporting.figures import (
    figures,
    head_values,
    plot_bottleneck,
    plot_line_search,
    plot_spectra,
    searched,
    spectra,
)
from hf_grow.reporting.html_report import best_kind, plan_table, reading, statistics_table, write_html, write_report

KINDS = ("columns", "value_columns", "heads")
AMOUNTS = {"columns": 3, "value_columns": 2, "heads": 1}


@pytest.fixture(scope="module")
def measured():
    """Statistics, plan and report of a tiny model, on sequences so alike that growth helps held-out ones too."""
    model = make_growable(causal_model("gpt2"))
    generator = torch.Generator().manual_seed(0)
    ids = torch.randint(2, VOCABULARY, (1, 16), generator=generator).repeat(12, 1)
    ids[:, ::5] = torch.randint(2, VOCABULARY, (12, 4), generator=generator)
    batches = [{"input_ids": part, "labels": part} for part in ids.split(4)]
    config = CollectConfig(kinds=KINDS, columns=3, value_columns=2)
    statistics = collect_statistics(model, batches, config)
    plan = plan_growth(statistics, GrowthConfig(columns=3, heads=1))
    return statistics, plan, insert_growth(model, plan, batches[:2])


@pytest.fixture
def statistics(measured):
    """The summary of its statistics, to be changed at will."""
    return json.loads(json.dumps(measured[0].summary()))


@pytest.fixture
def report(measured):
    """What the growth of the tiny model came to, with a curve that a person would like to see."""
    summary = json.loads(json.dumps(measured[2].summary()))
    for layer in summary["layers"]:
        layer["first_order_decrease"] = {"in_sample": {"columns": 0.3}, "held_out": {"columns": 0.2}}
    curve = [(0.0, 4.0), (0.5, 3.9), (1.0, 3.95), (3.0, 6.0), (9.0, float("inf"))]
    return summary | {"curve": curve, "step": 0.5, "loss_before": 4.0, "loss_after": 3.9, "realised": 0.1}


def drawn(draw, *arguments):
    """The bytes of a figure."""
    with io.BytesIO() as file:
        draw(*arguments, file)
        return file.getvalue()


def all_drawn(statistics, report=None):
    return {name: drawn(lambda file, draw=draw: draw(file)) for name, draw in figures(statistics, report).items()}


def many_layers(statistics, count, cross=False):
    """The same with so many layers, whose numbers of heads differ."""
    layers = []
    for number in range(count):
        for kind in ("self", "cross") if cross else ("self",):
            layer = copy.deepcopy(statistics["layers"][number % 2]) | {"layer": number, "kind": kind}
            if number % 2:
                layer["wanted"].append(layer["wanted"][0])
                layer["bottleneck"].append(layer["bottleneck"][0])
            layers.append(layer)
    return statistics | {"layers": layers}


def test_every_figure_is_a_png_of_sensible_size(statistics, report):
    found = all_drawn(statistics, report)
    assert set(found) == {"bottleneck", "expected_decrease", "spectra", "line_search"}
    for name, content in found.items():
        pixels = imread(io.BytesIO(content))
        height, width = pixels.shape[:2]
        assert 200 <= height <= 2000 and 400 <= width <= 2000, name
        assert pixels[..., :3].std() > 0.05, f"{name} is nearly blank"
        assert b"http" not in content


@pytest.mark.parametrize(("count", "cross"), [(1, False), (6, True), (48, False)])
def test_figures_fit_few_and_many_layers(statistics, count, cross):
    for name, content in all_drawn(many_layers(statistics, count, cross)).items():
        height, width = imread(io.BytesIO(content)).shape[:2]
        assert 200 <= height <= 2600 and 400 <= width <= 2600, name


def test_a_figure_changes_with_its_data_and_only_then(statistics, report):
    before = all_drawn(statistics, report)
    assert all_drawn(copy.deepcopy(statistics), copy.deepcopy(report)) == before
    statistics["layers"][0]["bottleneck"][1] *= 0.5
    statistics["layers"][1]["columns"]["held_out"][0][0] *= -3
    statistics["layers"][1]["offers"]["heads"]["held_out"] += 0.01
    report["curve"][1] = (0.5, 3.8)
    after = all_drawn(statistics, report)
    assert all(after[name] != before[name] for name in before)


def test_the_heat_map_is_brightest_where_most_is_missing(statistics):
    for layer in statistics["layers"]:
        layer["bottleneck"], layer["wanted"] = [1e-6] * 4, [1.0] * 4
    statistics["layers"][1]["bottleneck"][3] = 1.0
    pixels = imread(io.BytesIO(drawn(plot_bottleneck, statistics)))[..., :3]
    left = pixels[:, : pixels.shape[1] // 2]
    # The yellow end of the colours, in the right half of the lower half of the left panel.
    yellow = (left[..., 0] > 0.95) & (left[..., 1] > 0.85) & (left[..., 2] < 0.3)
    rows, columns = np.nonzero(yellow[:, : left.shape[1] * 3 // 4])
    assert len(rows) > 300
    assert rows.mean() > 0.45 * left.shape[0] and columns.mean() > 0.5 * left.shape[1]


def test_without_a_bottleneck_the_heat_map_shows_what_columns_promise_held_out(statistics):
    for layer in statistics["layers"]:
        layer["bottleneck"] = layer["wanted"] = []
        layer["columns"] = {"in_sample": [[9.0] * 6] * 4, "held_out": [[1.0, 2.0, 3.0, 50.0, 50.0, 50.0]] * 4}
    name, rows = head_values(statistics)
    assert name == "columns" and rows == [[6.0] * 4] * 2
    assert imread(io.BytesIO(drawn(plot_bottleneck, statistics))).std() > 0.05
    for layer in statistics["layers"]:
        del layer["columns"], layer["value_columns"]
    assert head_values(statistics) is None and "bottleneck" not in figures(statistics, None)


def test_spectra_are_sums_over_heads_and_show_what_is_below_zero(statistics):
    gains = {"in_sample": [[0.3, 0.1], [0.2, 0.1]], "held_out": [[0.2, -0.3], [0.1, 0.1]]}
    for layer in statistics["layers"]:
        layer["columns"] = copy.deepcopy(gains)
    (in_sample, held_out), _ = spectra(statistics)["columns"]
    assert in_sample == pytest.approx([0.5, 0.2]) and held_out == pytest.approx([0.3, -0.2])
    honest = drawn(plot_spectra, statistics)
    for layer in statistics["layers"]:
        layer["columns"]["held_out"][0][1] = -0.1  # the sum is zero then
    assert drawn(plot_spectra, statistics) != honest
    for layer in statistics["layers"]:
        layer["columns"]["held_out"] = layer["value_columns"]["held_out"] = None
    assert imread(io.BytesIO(drawn(plot_spectra, statistics))).shape[1] < imread(io.BytesIO(honest)).shape[1]


def test_the_line_search_figure_leaves_out_what_is_not_finite_and_takes_steps_by_layer(report):
    assert searched(report) == [(0.0, 4.0), (0.5, 3.9), (1.0, 3.95), (3.0, 6.0)]
    shared = drawn(plot_line_search, report)
    by_layer = drawn(plot_line_search, report | {"step": [0.5, 0.1]})
    assert shared != by_layer
    given = report | {"curve": [(0.0, 4.0)], "step": 0.25, "loss_after": 3.97}
    assert searched(given) == [(0.0, 4.0), (0.25, 3.97)]
    assert "line_search" not in figures(None, report | {"curve": [], "loss_before": None, "loss_after": None})


class Page(HTMLParser):
    """Reads a page: its text, its addresses, and whether its elements are closed in order."""

    def __init__(self, text):
        super().__init__()
        self.open, self.addresses, self.elements, self.text = [], [], [], ""
        self.feed(text)

    def handle_starttag(self, tag, attrs):
        self.elements.append(tag)
        self.addresses += [value for name, value in attrs if name in ("src", "href", "action", "data", "srcset")]
        if tag not in ("meta", "img", "br"):
            self.open.append(tag)

    def handle_endtag(self, tag):
        assert self.open.pop() == tag

    def handle_data(self, data):
        self.text += data


def test_the_page_is_whole_and_needs_nothing_else(tmp_path, measured, report):
    write_html(tmp_path / "page.html", measured[0].summary(), measured[1].summary(), report)
    text = (tmp_path / "page.html").read_text(encoding="utf-8")
    page = Page(text)
    assert page.open == [] and "script" not in page.elements and "link" not in page.elements
    assert not re.search(r"https?://|url\(|@import", text)
    assert len(page.addresses) == 4
    for address in page.addresses:
        content = base64.b64decode(address.removeprefix("data:image/png;base64,"), validate=True)
        assert imread(io.BytesIO(content)).ndim == 3
    assert "prefers-color-scheme: dark" in text
    assert "4.0000 → 3.9000 nats" in page.text and f"{report['parameters_added']:,}" in page.text
    assert [file.name for file in tmp_path.iterdir()] == ["page.html"]


def test_the_page_shows_a_plan_that_was_not_carried_out(tmp_path, measured):
    write_html(tmp_path / "page.html", measured[0].summary(), measured[1].summary())
    page = Page((tmp_path / "page.html").read_text(encoding="utf-8"))
    assert "What is planned" in page.text and "What happened" not in page.text
    assert all(cell in page.text for row in plan_table(measured[1].summary()).rows for cell in row)


def test_the_page_escapes_names(tmp_path, statistics):
    hostile = "</title><script>alert('x')</script><img src=http:x onerror=y>"
    statistics["model_type"] = statistics["config"]["collection"] = hostile
    write_html(tmp_path / "page.html", statistics, title=hostile)
    text = (tmp_path / "page.html").read_text(encoding="utf-8")
    page = Page(text)
    assert page.open == [] and "script" not in page.elements
    assert all(address.startswith("data:") for address in page.addresses)
    assert text.count("<img") == 3 and page.text.count(hostile) == 4


def test_a_file_that_cannot_be_written_leaves_the_old_one(tmp_path, monkeypatch):
    file = tmp_path / "page.html"
    write_bytes(file, b"old")

    def broken(self, target):
        raise OSError("disk full")

    monkeypatch.setattr(Path, "replace", broken)
    with pytest.raises(HfGrowError, match=r"page\.html cannot be written: disk full"):
        write_bytes(file, b"new")
    assert file.read_bytes() == b"old" and [left.name for left in tmp_path.iterdir()] == ["page.html"]


def test_a_report_folder_has_the_page_and_its_figures(tmp_path, measured, report):
    write_report(tmp_path, measured[0].summary(), None, report)
    names = {"bottleneck.png", "expected_decrease.png", "spectra.png", "line_search.png", "report.html"}
    assert {file.name for file in tmp_path.iterdir()} == names


@pytest.mark.parametrize("kind", KINDS)
def test_offers_are_what_a_plan_expects(measured, kind):
    found = measured[0]
    plan = plan_growth(found, GrowthConfig(**{kind: AMOUNTS[kind]}, align=1))
    for layer, planned in zip(found.summary()["layers"], plan.summary()["layers"], strict=True):
        offer = layer["offers"][kind]
        assert offer["parameters"] == planned["parameters_added"] and offer["amount"] == AMOUNTS[kind]
        assert offer["in_sample"] == pytest.approx(planned["expected_decrease"]["in_sample"])
        assert offer["held_out"] == pytest.approx(planned["expected_decrease"]["held_out"])


def offering(statistics, **held_out):
    """The same with these held-out decreases in every layer, in sample twice that, 100 parameters each."""
    for layer in statistics["layers"]:
        for kind, value in held_out.items():
            layer["offers"][kind] |= {"held_out": value, "in_sample": 2 * abs(value), "parameters": 100}
    for kind, value in held_out.items():
        statistics["calibrations"][kind] = {"step": max(value, 0.0), "decrease": max(value, 0.0), "first_order": 1.0}
    return statistics


def test_the_best_kind_is_the_best_per_parameter(statistics):
    layer = offering(statistics, columns=0.3, value_columns=0.2, heads=0.1)["layers"][0]
    assert best_kind(layer) == "columns"
    layer["offers"]["columns"]["parameters"] = 1000
    assert best_kind(layer) == "value_columns"
    assert best_kind(offering(statistics, columns=-0.3, value_columns=0.0, heads=-0.1)["layers"][0]) is None


def test_the_table_shows_sizes_shares_and_promises(statistics):
    offering(statistics, columns=0.3, value_columns=0.2, heads=0.1)
    statistics["layers"][0] |= {"reachable_share": 0.25, "wanted": [1.0, 2.0, 3.0, 4.0]}
    statistics["layers"][1] |= {"reachable_share": None, "wanted": []}
    table = statistics_table(statistics)
    assert table.headers[7:] == ["3 query/key columns", "2 value columns", "one head", "best per parameter"]
    promises = ["0.6 → 0.3", "0.4 → 0.2", "0.2 → 0.1", "columns"]
    assert table.rows[0] == ["0", "4", "8", "8", "1.0e+01", "25%", "75%", *promises]
    assert table.rows[1][4:7] == ["–", "–", "–"]


def test_the_reading_says_what_the_numbers_say(statistics):
    for number, layer in enumerate(statistics["layers"]):
        layer["wanted"], layer["bottleneck"] = [1.0] * 4, [0.1 + 0.3 * number] * 4
    text = reading(offering(statistics, columns=0.3, value_columns=0.2, heads=-0.1))
    assert "could express 75%; 25% needs growth, 80% of that in layer 1" in text
    assert "falls by 0.3 nats with 3 query/key columns and 0.2 nats with 2 value columns" in text
    assert "No step along one head lowered it" in text
    assert "Per parameter, 3 query/key columns in layer 0 promise most: 0.3 nats for 100 parameters" in text
    assert "keeps 33% of its promise: much of it fits noise" in text
    for layer in statistics["layers"]:
        for offer in layer["offers"].values():
            offer["held_out"] = None
    assert "No sequences were held out" in reading(statistics)
