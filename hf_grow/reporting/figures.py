"""Pictures of what was measured and what happened, each from a plain summary: PNG files without a display."""

import math
from collections.abc import Callable, Sequence
from pathlib import Path
from typing import IO, Any

import numpy as np
from matplotlib import colormaps
from matplotlib.axes import Axes
from matplotlib.backends.backend_agg import FigureCanvasAgg
from matplotlib.cm import ScalarMappable
from matplotlib.colors import ListedColormap, Normalize, PowerNorm
from matplotlib.figure import Figure
from matplotlib.image import AxesImage
from matplotlib.ticker import MaxNLocator, PercentFormatter

from hf_grow.growth.kinds import COLUMN_KINDS, KINDS

File = Path | IO[bytes]
Summary = dict[str, Any]

# Okabe and Ito's colours, told apart with any eyes and on any printer.
BLUE, ORANGE, GREEN, PURPLE = "#0072B2", "#E69F00", "#009E73", "#CC79A7"
GREY, RED = "#777777", "#D55E00"
COLOURS = dict(zip(KINDS, (BLUE, ORANGE, GREEN, PURPLE), strict=False))
# With more lines than this a legend is longer than the picture.
LEGEND_LINES = 8
# With more cells than this the numbers in them are too small to read.
WRITTEN_CELLS = 160
LUMINANCE = (0.299, 0.587, 0.114)


def figures(statistics: Summary | None, report: Summary | None) -> dict[str, Callable[[File], None]]:
    """By name: how to draw each figure that these summaries have something to show in."""
    drawings: dict[str, Callable[[File], None]] = {}
    if statistics is not None:
        if head_values(statistics) is not None:
            drawings["bottleneck"] = lambda file: plot_bottleneck(statistics, file)
        if any(layer["offers"] for layer in statistics["layers"]):
            drawings["expected_decrease"] = lambda file: plot_expected(statistics, file)
        if spectra(statistics):
            drawings["spectra"] = lambda file: plot_spectra(statistics, file)
    if report is not None and len(searched(report)) > 1:
        drawings["line_search"] = lambda file: plot_line_search(report, file)
    return drawings


def layer_label(layer: Summary) -> str:
    """The name of an attention module on an axis."""
    return f"{layer['layer']}" + ("×" if layer["kind"] == "cross" else "")


def layer_axis(layers: Sequence[Summary]) -> str:
    """What such names are."""
    return "layer (× cross-attention)" if any(layer["kind"] == "cross" for layer in layers) else "layer"


def head_values(statistics: Summary) -> tuple[str, list[list[float]]] | None:
    """What a heat map of heads can show and its name: the bottleneck, or else what new columns promise held out."""
    layers = statistics["layers"]
    bottleneck = [layer["bottleneck"] for layer in layers]
    if any(value > 0 for row in bottleneck for value in row):
        return "bottleneck", bottleneck
    for kind in COLUMN_KINDS:
        rows = [_head_sums(layer.get(kind), statistics["config"][kind]) for layer in layers]
        if any(value != 0 for row in rows for value in row):
            return kind, rows
    return None


def _head_sums(gains: Summary | None, count: int) -> list[float]:
    if gains is None:
        return []
    return [sum(row[:count]) for row in gains["held_out"] or gains["in_sample"]]


def plot_bottleneck(statistics: Summary, file: File) -> None:
    """Heat maps of layers and heads: each head's part of the bottleneck, and how much of its wish needs growth."""
    shown = head_values(statistics)
    assert shown is not None
    name, rows = shown
    layers = statistics["layers"]
    widest = max(len(row) for row in rows)
    both = name == "bottleneck"
    cell = min(0.42, 7.0 / widest)
    size = ((2 if both else 1) * (1.9 + max(2.0, cell * widest)), 1.6 + max(1.5, min(0.3, 11 / len(rows)) * len(rows)))
    figure = _figure(size)
    panels = figure.subplots(1, 2 if both else 1, squeeze=False, sharey=True)[0]
    if both:
        total = sum(sum(row) for row in rows)
        _heat_map(panels[0], [[value / total for value in row] for row in rows], "of the model's bottleneck")
        panels[0].set_title("Where columns are missing")
        needs = [_ratios(row, layer["wanted"]) for row, layer in zip(rows, layers, strict=True)]
        _heat_map(panels[1], needs, "of the head's wanted change", most=1.0)
        panels[1].set_title("What only growth can express")
    else:
        _heat_map(panels[0], rows, "expected decrease (nats)", percent=False)
        panels[0].set_title(f"What new {KINDS[name].units} promise")
    _layer_ticks(panels[0], layers)
    _save(figure, file)


def _ratios(part: Sequence[float], whole: Sequence[float]) -> list[float]:
    return [
        min(one / all_of_it, 1.0) if all_of_it > 0 else math.nan for one, all_of_it in zip(part, whole, strict=True)
    ]


def _heat_map(
    axes: Axes, rows: Sequence[Sequence[float]], label: str, most: float | None = None, percent: bool = True
) -> None:
    widest = max(len(row) for row in rows)
    values = np.array([[*row, *[math.nan] * (widest - len(row))] for row in rows])
    colours = colormaps["viridis"].with_extremes(bad="#e8e8e8")
    if most is not None:
        options: dict[str, Any] = {"vmin": 0.0, "vmax": most}
    elif np.nanmin(values) >= 0:
        # Few heads hold most of it; the root lets the others be seen beside them.
        options = {"norm": PowerNorm(0.5, vmin=0.0, vmax=float(np.nanmax(values)))}
    else:
        reach = float(np.nanmax(np.abs(values)))
        colours = colormaps["PuOr"].with_extremes(bad="#e8e8e8")
        options = {"vmin": -reach, "vmax": reach}
    image = axes.imshow(values, aspect="auto", cmap=colours, interpolation="nearest", **options)
    assert axes.figure is not None
    bar = axes.figure.colorbar(image, ax=axes, pad=0.02, aspect=15 if len(rows) < 12 else 40)
    if percent:
        bar.ax.yaxis.set_major_formatter(lambda value, _: f"{100 * value:.3g} %")
    if len(rows) * widest <= WRITTEN_CELLS:
        _write_cells(axes, values, image, percent)
    bar.set_label(label)
    bar.outline.set_visible(False)
    axes.set_xlabel("head")
    axes.xaxis.set_major_locator(MaxNLocator(nbins=min(widest, 12), integer=True))
    axes.spines[:].set_visible(False)
    axes.set_xticks(np.arange(widest + 1) - 0.5, minor=True)
    axes.set_yticks(np.arange(len(rows) + 1) - 0.5, minor=True)
    axes.grid(which="minor", color="white", linewidth=0.8)
    axes.tick_params(which="minor", length=0)


def _write_cells(axes: Axes, values: np.ndarray, image: AxesImage, percent: bool) -> None:
    """The number in each cell, dark on light and light on dark."""
    for (row, column), value in np.ndenumerate(values):
        if not math.isnan(value):
            light = sum(weight * part for weight, part in zip(LUMINANCE, image.to_rgba(value)[:3], strict=True)) > 0.5
            text = (
                f"{100 * value:.2g}" if percent and value < 0.1 else f"{100 * value:.0f}" if percent else f"{value:.1g}"
            )
            axes.text(column, row, text, ha="center", va="center", fontsize=7, color="black" if light else "white")


def _layer_ticks(axes: Axes, layers: Sequence[Summary]) -> None:
    axes.set_yticks(range(len(layers)), [layer_label(layer) for layer in layers])
    axes.tick_params(axis="y", labelsize=9 if len(layers) <= 24 else 7)
    axes.set_ylabel(layer_axis(layers))


def spectra(statistics: Summary) -> dict[str, list[tuple[list[float], list[float] | None]]]:
    """By kind, for each layer: the decrease by column number, summed over heads, in sample and held out."""
    by_kind = {}
    for kind in COLUMN_KINDS:
        layers = [layer[kind] for layer in statistics["layers"] if kind in layer]
        if any(value > 0 for layer in layers for row in layer["in_sample"] for value in row):
            by_kind[kind] = [
                (_over_heads(layer["in_sample"]), None if layer["held_out"] is None else _over_heads(layer["held_out"]))
                for layer in layers
            ]
    return by_kind


def _over_heads(rows: Sequence[Sequence[float]]) -> list[float]:
    return [sum(column) for column in zip(*rows, strict=True)]


def plot_spectra(statistics: Summary, file: File) -> None:
    """The expected decrease by column number and layer: on the data that chose the columns, and on other data."""
    by_kind = spectra(statistics)
    layers = statistics["layers"]
    judged = any(held_out is not None for lines in by_kind.values() for _, held_out in lines)
    figure = _figure((4.2 * (2 if judged else 1) + 1.0, 3.0 * len(by_kind) + 0.5))
    grid = figure.subplots(len(by_kind), 2 if judged else 1, squeeze=False, sharey="row", sharex="row")
    shades = colormaps["viridis"](np.linspace(0.0, 0.9, len(layers)))
    many = len(layers) > LEGEND_LINES
    for panels, (kind, lines) in zip(grid, by_kind.items(), strict=True):
        for panel, which in zip(panels, ("on the data that chose them", "on other data"), strict=False):
            panel.set_title(f"{KINDS[kind].units}, {which}".capitalize(), fontsize=10)
            panel.set_xlabel(f"{KINDS[kind].label}, strongest first")
            panel.axvline(statistics["config"][kind] + 0.5, color=GREY, linewidth=0.8, linestyle=":")
        _beyond(panels[0], statistics["config"][kind])
        for line, shade, layer in zip(lines, shades, layers, strict=True):
            for panel, values in zip(panels, line, strict=False):
                if values is not None:
                    numbers = range(1, len(values) + 1)
                    panel.plot(numbers, values, "-", color=shade, linewidth=1.2, alpha=0.25 if many else 1.0)
                    panel.plot(numbers, values, ".", color=shade, markersize=4 if many else 6, label=layer_label(layer))
        _signed_log(panels, [value for line in lines for values in line if values is not None for value in values])
        panels[0].set_ylabel("expected decrease (nats)")
    _name_lines(figure, grid, layers)
    _save(figure, file)


def _signed_log(panels: Sequence[Axes], values: Sequence[float]) -> None:
    """A logarithmic scale that goes on below zero, where a column would raise the loss."""
    largest = max(abs(value) for value in values)
    smallest = min((value for value in values if value > 0), default=largest)
    # All that is positive on the logarithmic part, as far as three powers of ten go.
    linear = 10 ** math.floor(math.log10(max(smallest, 1e-3 * largest)))
    lowest = min(values)
    for panel in panels:
        panel.set_yscale("symlog", linthresh=linear, linscale=0.5)
        panel.xaxis.set_major_locator(MaxNLocator(integer=True))
        panel.grid(axis="y", color="#eeeeee")
        panel.set_axisbelow(True)
        if lowest <= 0:
            panel.axhline(0, color="black", linewidth=0.8)
            bottom = min(1.5 * lowest, -0.3 * linear)
            panel.axhspan(bottom, 0, color=RED, alpha=0.08, linewidth=0)
            panel.set_ylim(bottom=bottom)
    if lowest <= 0:
        place: dict[str, Any] = {"xycoords": "axes fraction", "ha": "left", "va": "bottom"}
        panels[0].annotate("below zero: would raise the loss", (0.02, 0.02), fontsize=8, color=RED, **place)


def _beyond(axes: Axes, count: int) -> None:
    """Say what lies right of the dotted line."""
    place: dict[str, Any] = {"xycoords": ("data", "axes fraction"), "ha": "left", "va": "top"}
    axes.annotate(f"more than the {count}\nlooked for", (count + 0.8, 0.97), fontsize=8, color=GREY, **place)


def _name_lines(figure: Figure, grid: Any, layers: Sequence[Summary]) -> None:
    """A legend for few layers, a bar of colours for many."""
    if len(layers) <= LEGEND_LINES:
        handles, names = grid[0][0].get_legend_handles_labels()
        figure.legend(handles, names, title=layer_axis(layers), loc="outside right upper", frameon=False)
        return
    shades = ListedColormap(colormaps["viridis"](np.linspace(0.0, 0.9, len(layers))))
    mappable = ScalarMappable(Normalize(-0.5, len(layers) - 0.5), shades)
    bar = figure.colorbar(mappable, ax=grid.ravel().tolist(), pad=0.02, aspect=40)
    marks = [round(place) for place in np.linspace(0, len(layers) - 1, min(len(layers), 12))]
    bar.set_ticks(marks, labels=[layer_label(layers[mark]) for mark in marks])
    bar.set_label(layer_axis(layers))


def searched(report: Summary) -> list[tuple[float, float]]:
    """Every step with its loss, finite and in order, among them the one that was taken."""
    points = {float(step): float(loss) for step, loss in report["curve"] if loss is not None and math.isfinite(loss)}
    if isinstance(report["step"], (int, float)) and report["loss_after"] is not None:
        points.setdefault(float(report["step"]), report["loss_after"])
    return sorted(points.items())


def plot_line_search(report: Summary, file: File) -> None:
    """The loss by step, the step taken, and what the gradient alone promised."""
    points = searched(report)
    before, after = report["loss_before"], report["loss_after"]
    shared = isinstance(report["step"], (int, float))
    step = float(report["step"]) if shared else min(points, key=lambda point: point[1])[0]
    farthest = max(3.2 * step, points[1][0]) if step > 0 else points[-1][0]
    shown = [point for point in points if point[0] <= farthest]
    figure = _figure((6.4, 4.0))
    axes = figure.add_subplot()
    axes.axhline(before, color=GREY, linewidth=1, label=f"before: {before:.4f}")
    axes.plot(*zip(*shown, strict=True), "o-", color=BLUE, markersize=5, label="tried")
    low, high = _visible([loss for _, loss in shown] + ([after] if after is not None else []), before)
    right = 1.05 * shown[-1][0]
    _tangents(axes, report, right)
    if after is not None:
        _mark_chosen(axes, report, step if shared else None)
    hidden = sum(not low <= loss <= high for _, loss in shown) + len(points) - len(shown)
    if hidden:
        axes.set_title(
            f"{hidden} further {'try lies' if hidden == 1 else 'tries lie'} outside",
            fontsize=8,
            loc="right",
            color=GREY,
        )
    axes.set(xlim=(-0.03 * right, right), ylim=(low, high))
    axes.set_xlabel("step, as a multiple of the planned one")
    axes.set_ylabel("loss (nats)")
    axes.set_title("How far to step", loc="left")
    axes.spines[["top", "right"]].set_visible(False)
    axes.legend(fontsize=8, framealpha=0.9, edgecolor="none")
    _save(figure, file)


def _visible(losses: Sequence[float], before: float) -> tuple[float, float]:
    """Limits that show the valley, not how high the far wall is."""
    low = min(*losses, before)
    depth = max(before - low, 1e-3 * abs(before), 1e-6)
    return low - 0.35 * depth, min(max(*losses, before), before + 1.2 * depth) + 0.15 * depth


def _tangents(axes: Axes, report: Summary, right: float) -> None:
    """First-order lines from the loss before; the frame cuts them off."""
    for which, style in (("held_out", "--"), ("in_sample", ":")):
        parts = [layer["first_order_decrease"][which] for layer in report["layers"]]
        if None not in parts and parts:
            slope = sum(sum(part.values()) for part in parts)
            name = f"first order, {which.replace('_', '-' if which == 'held_out' else ' ')}"
            before = report["loss_before"]
            axes.plot([0, right], [before, before - slope * right], style, color=RED, linewidth=1.2, label=name)


def _mark_chosen(axes: Axes, report: Summary, step: float | None) -> None:
    """The step taken; with a step for each layer there is no one place for it, only a loss."""
    after, colour = report["loss_after"], GREEN
    label = f"after: {after:.4f}"
    if step is None:
        axes.axhline(after, color=colour, linewidth=1.5, label=f"{label} (a step for each layer)")
    else:
        axes.plot([step], [after], "*", color=colour, markersize=15, label=f"{label} (step {step:.3g})", zorder=5)


def plot_expected(statistics: Summary, file: File) -> None:
    """Bars by layer: the decrease that each kind of growth promises, and which share of the wish needs growth."""
    layers = statistics["layers"]
    shares = [layer["reachable_share"] for layer in layers]
    with_shares = any(share is not None for share in shares)
    figure = _figure((max(6.8, min(1.8 + 0.55 * len(layers), 15.0)), 5.4 if with_shares else 3.4))
    panels = figure.subplots(
        2 if with_shares else 1, 1, squeeze=False, sharex=True, height_ratios=[3, 2][: 1 + with_shares]
    )
    offers, bottom = panels[0][0], panels[-1][0]
    _offer_bars(offers, layers)
    if with_shares:
        _share_bars(bottom, shares)
    bottom.set_xticks(range(len(layers)), [layer_label(layer) for layer in layers])
    bottom.tick_params(axis="x", labelsize=9 if len(layers) <= 30 else 7)
    bottom.set_xlabel(layer_axis(layers))
    bottom.set_xlim(-0.6, len(layers) - 0.4)
    _save(figure, file)


def _offer_bars(axes: Axes, layers: Sequence[Summary]) -> None:
    kinds = [kind for kind in KINDS if any(kind in layer["offers"] for layer in layers)]
    width = 0.8 / len(kinds)
    judged = False
    for number, kind in enumerate(kinds):
        offers = [layer["offers"].get(kind, {"amount": 0, "in_sample": 0.0, "held_out": None}) for layer in layers]
        places = [index + width * (number - (len(kinds) - 1) / 2) for index in range(len(layers))]
        in_sample = [offer["in_sample"] for offer in offers]
        held_out = [offer["held_out"] for offer in offers]
        name = KINDS[kind].in_words(max(offer["amount"] for offer in offers))
        best = in_sample if None in held_out else held_out
        axes.bar(places, best, width=0.9 * width, color=COLOURS[kind], label=name)
        if None not in held_out:
            judged = True
            axes.bar(places, in_sample, width=0.9 * width, facecolor="none", edgecolor=GREY, linewidth=0.7)
    if judged:
        axes.bar([0], [0], facecolor="none", edgecolor=GREY, linewidth=0.7, label="on the data that chose it")
    axes.axhline(0, color="black", linewidth=0.8)
    axes.set_ylabel("expected decrease\nof the loss (nats)")
    axes.set_title("What growth promises, if all layers get it", loc="left", pad=22)
    axes.spines[["top", "right"]].set_visible(False)
    _legend_above(axes)


def _share_bars(axes: Axes, shares: Sequence[float | None]) -> None:
    places = [index for index, share in enumerate(shares) if share is not None]
    reachable = [share for share in shares if share is not None]
    axes.bar(places, reachable, color="#9ecae1", label="training the present columns can express")
    axes.bar(places, [1 - share for share in reachable], bottom=reachable, color=RED, label="only growth can")
    axes.set_ylim(0, 1)
    axes.yaxis.set_major_formatter(PercentFormatter(1.0))
    axes.set_ylabel("wanted change\nof the scores")
    axes.spines[["top", "right"]].set_visible(False)
    _legend_above(axes)


def _legend_above(axes: Axes) -> None:
    place: dict[str, Any] = {"loc": "lower left", "bbox_to_anchor": (0.0, 0.99), "borderpad": 0.0}
    axes.legend(frameon=False, fontsize=8, ncols=4, columnspacing=1.2, handlelength=1.4, **place)


def _figure(size: tuple[float, float]) -> Figure:
    figure = Figure(figsize=size, layout="constrained")
    FigureCanvasAgg(figure)
    return figure


def _save(figure: Figure, file: File) -> None:
    # Without the name and address that matplotlib writes into every file.
    figure.savefig(file, dpi=130, format="png", metadata={"Software": None})
