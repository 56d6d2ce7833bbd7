"""What was measured, planned and done, for people to read: words, tables, and one HTML file that holds everything."""

import base64
import html
import io
import os
from collections.abc import Sequence
from dataclasses import dataclass
from math import isnan
from pathlib import Path

from hf_grow.files import write_bytes
from hf_grow.growth.kinds import HEADS, KINDS, QUERY_KEY_COLUMNS, VALUE_COLUMNS
from hf_grow.reporting.figures import Summary, figures, layer_label

HTML_FILE = "report.html"
CAPTIONS = {
    "bottleneck": "Each head's part of what the present query/key columns cannot express, and the share of its wish "
    "that only growth can express. Grey: no such head.",
    "expected_decrease": "What each kind of growth promises in each layer. Filled: on held-out data. Outlined: on the "
    "data that chose it, which is always too much.",
    "spectra": "What each further column adds, summed over the heads of a layer. Where the right side falls to zero, "
    "more columns only fit noise.",
    "line_search": "The loss at every step tried, and the straight line that the gradient alone promises.",
}
WORDS = {
    "nats": "the unit of the loss: natural logarithms, per predicted token of a language model",
    "wanted": "how strongly the loss asks for other attention scores in a layer; compare layers by it, it has no unit",
    "reachable": "the share of that wish that training or LoRA could meet with the query/key columns that are there",
    "only growth": "the rest, which no training of the present columns can express: the expressivity bottleneck",
    "expected decrease": "how much lower the loss is likely to be with this growth and the steps found, in nats",
    "in sample": "measured on the sequences that chose the new weights, so somewhat too good",
    "held out": "measured on other sequences: believe this one",
    "step": "how far to go along the gradient, found by trying; 0 changes nothing until training",
    "first order": "what the gradient alone promises for a step; far steps realise only a part of it",
    "stepped, preserving": "new weights lower the loss at once, or change no output until they are trained",
}
STYLE = """
:root { color-scheme: light dark; --text: #1c1c1c; --soft: #5f6368; --page: #ffffff; --card: #f4f5f7; --line: #d9dce1; }
@media (prefers-color-scheme: dark) {
  :root { --text: #e6e6e6; --soft: #a2a7ad; --page: #16181b; --card: #222529; --line: #3a3f45; }
}
body { font: 16px/1.5 system-ui, sans-serif; color: var(--text); background: var(--page); max-width: 72rem;
  margin: 2rem auto; padding: 0 1rem; overflow-wrap: anywhere; }
h1 { line-height: 1.2; } h2 { margin-top: 2.5rem; border-bottom: 1px solid var(--line); }
.facts { display: grid; grid-template-columns: repeat(auto-fit, minmax(11rem, 1fr)); gap: 0.75rem; margin: 1rem 0; }
.facts div { background: var(--card); border-radius: 8px; padding: 0.6rem 0.8rem; }
.facts dt { color: var(--soft); font-size: 0.8rem; } .facts dd { margin: 0; font-size: 1.15rem; }
.wide { overflow-x: auto; } table { border-collapse: collapse; font-size: 0.9rem; font-variant-numeric: tabular-nums; }
th, td { padding: 0.3rem 0.7rem; text-align: right; border-bottom: 1px solid var(--line); white-space: nowrap; }
th { white-space: normal; overflow-wrap: normal; vertical-align: bottom; color: var(--soft); font-weight: 600; }
figure { margin: 1.5rem 0; } figcaption { color: var(--soft); font-size: 0.9rem; }
img { max-width: 100%; background: #ffffff; border-radius: 8px; padding: 0.5rem; box-sizing: border-box; }
.words dt { font-weight: 600; } .words dd { margin: 0 0 0.4rem 1.2rem; }
"""


@dataclass(frozen=True)
class TextTable:
    """A table of finished text."""

    headers: list[str]
    rows: list[list[str]]


def write_report(
    folder: str | os.PathLike,
    statistics: Summary,
    plan: Summary | None = None,
    report: Summary | None = None,
    *,
    title: str = "Growth report",
) -> None:
    """Write report.html and its figures as PNG files into a folder."""
    images = _images(statistics, report)
    for name, content in images.items():
        write_bytes(Path(folder) / f"{name}.png", content)
    write_bytes(Path(folder) / HTML_FILE, _page(statistics, plan, report, title, images))


def write_html(
    path: str | os.PathLike,
    statistics: Summary,
    plan: Summary | None = None,
    report: Summary | None = None,
    *,
    title: str = "Growth report",
) -> None:
    """Write one HTML file that needs no other: what was measured, and what was planned and done where that is given."""
    write_bytes(Path(path), _page(statistics, plan, report, title, _images(statistics, report)))


def _images(statistics: Summary, report: Summary | None) -> dict[str, bytes]:
    """The PNG files of all figures, by name."""
    images = {}
    for name, draw in figures(statistics, report).items():
        with io.BytesIO() as content:
            draw(content)
            images[name] = content.getvalue()
    return images


def _page(
    statistics: Summary, plan: Summary | None, report: Summary | None, title: str, images: dict[str, bytes]
) -> bytes:
    parts = [f"<h1>{html.escape(title)}</h1>"]
    pictures = {name: _picture(name, content) for name, content in images.items()}
    if report is not None:
        tried = " (a dry run: nothing was changed)" if report["dry_run"] else ""
        parts += [f"<h2>What happened{tried}</h2>", _facts(report_facts(report)), _table(plan_table(report))]
        parts.append(pictures.pop("line_search", ""))
    parts.append(f"<h2>What was measured{'' if report is None else ' before'}</h2>")
    parts.append(f"<p>{html.escape(reading(statistics))}</p>")
    parts += [_facts(statistics_facts(statistics)), _table(statistics_table(statistics)), *pictures.values()]
    if plan is not None and report is None:
        parts += ["<h2>What is planned</h2>", _facts(plan_facts(plan)), _table(plan_table(plan))]
    words = "".join(f"<dt>{html.escape(word)}</dt><dd>{html.escape(text)}</dd>" for word, text in WORDS.items())
    parts += ["<h2>What the words mean</h2>", f'<dl class="words">{words}</dl>']
    head = (
        '<meta charset="utf-8"><meta name="viewport" content="width=device-width, initial-scale=1">'
        f"<title>{html.escape(title)}</title><style>{STYLE}</style>"
    )
    body = "\n".join(parts)
    return f'<!doctype html>\n<html lang="en">\n<head>{head}</head>\n<body>\n{body}\n</body>\n</html>\n'.encode()


def _picture(name: str, content: bytes) -> str:
    caption = html.escape(CAPTIONS[name])
    source = f"data:image/png;base64,{base64.b64encode(content).decode('ascii')}"
    return f'<figure><img alt="{caption}" src="{source}"><figcaption>{caption}</figcaption></figure>'


def _facts(facts: dict[str, str]) -> str:
    cells = "".join(
        f"<div><dt>{html.escape(name)}</dt><dd>{html.escape(text)}</dd></div>" for name, text in facts.items()
    )
    return f'<dl class="facts">{cells}</dl>'


def _table(table: TextTable) -> str:
    head = "".join(f"<th>{html.escape(name)}</th>" for name in table.headers)
    rows = ("".join(f"<td>{html.escape(cell)}</td>" for cell in row) for row in table.rows)
    body = "".join(f"<tr>{row}</tr>" for row in rows)
    return f'<div class="wide"><table><thead><tr>{head}</tr></thead><tbody>{body}</tbody></table></div>'


def statistics_facts(statistics: Summary) -> dict[str, str]:
    """What was measured with."""
    config = statistics["config"]
    facts = {
        "model type": str(statistics["model_type"]),
        "parameters": f"{statistics['parameters']:,}",
        "sequences": f"{statistics['sequences']:,}",
        "loss": "–" if isnan(statistics["loss"]) else f"{statistics['loss']:.4f} nats",
        "collection": str(config["collection"]),
        "seconds": f"{sum(statistics['seconds'].values()):.1f}",
    }
    for kind, calibration in statistics["calibrations"].items():
        facts[f"step for {kind.replace('_', ' ')}"] = f"{calibration['step']:.3g}, −{_decrease(calibration)}"
    return facts


def _decrease(calibration: Summary) -> str:
    """The decrease that was found, and how far it may be off by chance."""
    error = calibration.get("error")
    return _nats(calibration["decrease"]) if error is None else f"{calibration['decrease']:.3g} ± {_nats(error)}"


def plan_facts(plan: Summary) -> dict[str, str]:
    """What a plan comes to."""
    added = plan["parameters_added"]
    expected = [layer["expected_decrease"] for layer in plan["layers"]]
    return {
        "parameters": f"{added:,} new ({added / plan['parameters']:.2%})",
        "strategy": str(plan["config"]["strategy"]),
        "loss": f"{plan['loss']:.4f} nats",
        "expected decrease, in sample": _nats(_total(expected, "in_sample")),
        "expected decrease, held out": _nats(_total(expected, "held_out")),
    }


def report_facts(report: Summary) -> dict[str, str]:
    """What an insertion came to."""
    added, predicted = report["parameters_added"], report["predicted"]
    expected = [layer["expected_decrease"] for layer in report["layers"]]
    step = report["step"]
    facts = {
        "parameters": f"{report['parameters_before']:,} → {report['parameters_after']:,}",
        "added": f"{added:,} ({added / report['parameters_before']:.2%})",
        "form": str(report["form"]),
        "step": f"{step:.3g}" if isinstance(step, (int, float)) else f"{min(step):.3g} to {max(step):.3g}",
    }
    if report["loss_before"] is not None and report["loss_after"] is not None:
        facts |= {
            "loss": f"{report['loss_before']:.4f} → {report['loss_after']:.4f} nats",
            "realised decrease": _nats(report["realised"]),
        }
    facts |= {
        "expected decrease, held out": _nats(_total(expected, "held_out")),
        "first order, held out": _nats(predicted["held_out"]),
    }
    if "line_search_sequences" in report:
        facts["sequences that gave the loss"] = f"{report['line_search_sequences']:,}"
    return facts | {"seconds": f"{sum(report['seconds'].values()):.1f}"}


def _total(parts: Sequence[dict[str, float | None]], which: str) -> float | None:
    values = [part[which] for part in parts]
    return None if None in values else sum(value for value in values if value is not None)


def statistics_table(statistics: Summary) -> TextTable:
    """A row for each attention module: its sizes, its wish, and what each kind of growth promises."""
    layers = statistics["layers"]
    kinds = [kind for kind in KINDS if any(kind in layer["offers"] for layer in layers)]
    headers = ["layer", "heads", "query/key", "value", "wanted", "reachable", "only growth"]
    for kind in kinds:
        headers.append(KINDS[kind].in_words(max(layer["offers"][kind]["amount"] for layer in layers)))
    # Measured, but how far to step is not known: when somebody interrupted.
    compared = [kind for kind in KINDS if kind not in kinds and any(kind in layer["first_order"] for layer in layers)]
    headers += [f"share of {KINDS[kind].units}" for kind in compared]
    rows = []
    for layer in layers:
        share = layer["reachable_share"]
        rows.append(
            [
                layer_label(layer),
                *(str(layer[size]) for size in ("n_heads", "query_key_dim", "value_dim")),
                f"{sum(layer['wanted']):.1e}" if layer["wanted"] else "–",
                *(("–", "–") if share is None else (f"{share:.0%}", f"{1 - share:.0%}")),
                *(_promise(layer["offers"][kind]) for kind in kinds),
                *(_share(kind, layer, layers) for kind in compared),
                (best_kind(layer) or ("none" if kinds else "–")).replace("_", " "),
            ]
        )
    return TextTable([*headers, "best per parameter"], rows)


def _share(kind: str, layer: Summary, layers: Sequence[Summary]) -> str:
    """Of all that one kind promises for small steps, the part of one layer."""
    promises = [max(one["first_order"].get(kind, 0.0), 0.0) for one in layers]
    return f"{max(layer['first_order'].get(kind, 0.0), 0.0) / sum(promises):.0%}" if sum(promises) > 0 else "–"


def _promise(offer: Summary) -> str:
    """The decrease in sample, and what is left of it held out."""
    return f"{offer['in_sample']:.2g}" + ("" if offer["held_out"] is None else f" → {offer['held_out']:.2g}")


def _honest(offer: Summary) -> float:
    return offer["in_sample"] if offer["held_out"] is None else offer["held_out"]


def best_kind(layer: Summary) -> str | None:
    """The kind of growth that promises most per parameter in a layer, None if none promises anything."""
    offers = {kind: offer for kind, offer in layer["offers"].items() if _honest(offer) > 0}
    return max(offers, key=lambda kind: _honest(offers[kind]) / offers[kind]["parameters"], default=None)


def plan_table(plan: Summary) -> TextTable:
    """A row for each attention module that grows, from a plan or a report."""
    kinds = (HEADS, QUERY_KEY_COLUMNS, VALUE_COLUMNS)
    headers = ["layer", "heads", "query/key", "value", "patterns of new heads", "new parameters", "expected decrease"]
    rows = []
    for layer in plan["layers"]:
        share, expected = layer["reachable_share"], layer["expected_decrease"]
        rows.append(
            [
                layer_label(layer),
                *(_grown(layer[kind.size_name], layer[kind.name]) for kind in kinds),
                ", ".join(layer["head_patterns"]) or "–",
                f"{layer['parameters_added']:,}",
                _promise(expected),
                *(("–", "–") if share is None else (f"{share:.0%}", f"{1 - share:.0%}")),
            ]
        )
    return TextTable([*headers, "reachable", "only growth"], rows)


def _grown(size: int, more: int) -> str:
    return f"{size} {'+' if more > 0 else '-'} {abs(more)}" if more else f"{size}"


def reading(statistics: Summary) -> str:
    """What the table of a measurement says, in one paragraph."""
    layers, config = statistics["layers"], statistics["config"]
    judged = config["held_out"] > 0 and all(
        offer["held_out"] is not None for layer in layers for offer in layer["offers"].values()
    )
    if isnan(statistics["loss"]):
        shares = "The shares say in which layers small steps promise most, on the sequences that chose them."
        return " ".join(["Measuring was interrupted.", *_scores_reading(layers), shares])
    said = [f"On {statistics['sequences']:,} sequences the loss is {statistics['loss']:.3f} nats."]
    said += _scores_reading(layers)
    said += _steps_reading(statistics, judged)
    best = [(layer, kind) for layer in layers if (kind := best_kind(layer)) is not None]
    if best:
        layer, kind = max(best, key=lambda pair: _per_parameter(*pair))
        offer = layer["offers"][kind]
        said.append(
            f"Per parameter, {KINDS[kind].in_words(offer['amount'])} in layer {layer_label(layer)} "
            f"{'promise' if KINDS[kind].per_head else 'promises'} most: {_nats(_honest(offer))} for "
            f"{offer['parameters']:,} parameters."
        )
    said += (
        _trust_reading(layers) if judged else ["No sequences were held out, so all decreases are too good to be true."]
    )
    return " ".join(said)


def _per_parameter(layer: Summary, kind: str) -> float:
    return _honest(layer["offers"][kind]) / layer["offers"][kind]["parameters"]


def _scores_reading(layers: Sequence[Summary]) -> list[str]:
    wanted = [sum(layer["wanted"]) for layer in layers]
    missing = [sum(layer["bottleneck"]) for layer in layers]
    if sum(wanted) <= 0:
        return []
    share = min(sum(missing) / sum(wanted), 1.0)
    most = max(range(len(layers)), key=lambda index: missing[index])
    return [
        f"Of the change of attention scores that it asks for, training the present query/key columns could express "
        f"{1 - share:.0%}; {share:.0%} needs growth, {missing[most] / max(sum(missing), 1e-300):.0%} of that in layer "
        f"{layer_label(layers[most])}."
    ]


def _steps_reading(statistics: Summary, judged: bool) -> list[str]:
    """What happened when each kind was tried."""
    layers, calibrations = statistics["layers"], statistics["calibrations"]
    names = {
        kind: KINDS[kind].in_words(max(layer["offers"][kind]["amount"] for layer in layers))
        for kind in KINDS
        if kind in calibrations and layers
    }
    good = [f"{_decrease(calibrations[kind])} with {names[kind]}" for kind in names if calibrations[kind]["step"] > 0]
    bad = [names[kind] for kind in names if calibrations[kind]["step"] <= 0]
    said = []
    if good:
        where = "held-out" if judged else "the same"
        falls = " and ".join(filter(None, (", ".join(good[:-1]), good[-1])))
        said.append(f"Tried in all layers at once on {where} sequences, it falls by {falls}.")
        said += _sureness_reading([calibrations[kind] for kind in names if calibrations[kind]["step"] > 0])
    if bad:
        said.append(f"No step along {' or '.join(bad)} lowered it: do not grow there, or measure on more data.")
    return said


def _sureness_reading(calibrations: Sequence[Summary]) -> list[str]:
    """How far the decreases may be off by chance."""
    if any(calibration.get("error") is None for calibration in calibrations):
        return ["There were too few batches to say how sure that is."]
    if any(calibration["decrease"] < 2 * calibration["error"] for calibration in calibrations):
        return ["Not all of that is clearly more than chance: measure on more sequences."]
    return []


def _trust_reading(layers: Sequence[Summary]) -> list[str]:
    """How much of what was chosen holds elsewhere."""
    offers = [offer for layer in layers for offer in layer["offers"].values()]
    in_sample, held_out = (sum(offer[which] for offer in offers) for which in ("in_sample", "held_out"))
    if in_sample <= 0:
        return []
    kept = held_out / in_sample
    advice = "" if kept >= 0.5 else ": much of it fits noise, so measure on more sequences"
    return [f"On sequences that did not choose it, growth keeps {max(kept, 0.0):.0%} of its promise{advice}."]


def _nats(value: float | None) -> str:
    return "–" if value is None else f"{value:.3g} nats"
