"""The README.md of a grown checkpoint: what it is, how to load it, a table and a plot of its sizes."""

import re
from pathlib import Path
from typing import Any

from huggingface_hub import ModelCard, ModelCardData
from matplotlib.backends.backend_agg import FigureCanvasAgg
from matplotlib.figure import Figure

PLOT_FILE = "growth.png"
KINDS = {"columns": "query/key column", "value_columns": "value column", "heads": "head"}
TEMPLATE = """---
{metadata}
---

# {title}

{origin} Its attention was made growable with hf-grow: heads, query/key columns and value columns may differ from
layer to layer, and the softmax scale is the one the model was trained with.

```python
from transformers import AutoTokenizer, {auto_class}

model = {auto_class}.from_pretrained("path or repository", trust_remote_code=True)
tokenizer = AutoTokenizer.from_pretrained("path or repository", trust_remote_code=True)
```

With hf-grow installed, `hf_grow.load_grown(...)` does the same without `trust_remote_code`.

| layer | attention | heads | key heads | query/key columns | value columns | scale | parameters |
|---|---|---|---|---|---|---|---|
{rows}

{parameters:,} parameters in all.

![Sizes by layer]({plot})

## What was grown

{events}

The full record is in `growth.json`.
"""


def write_model_card(model: Any, folder: Path) -> None:
    """Write README.md and its plot into the folder of a checkpoint."""
    summary = model.growth_summary()
    plot_sizes(summary, folder / PLOT_FILE)
    base = summary["base_model"]
    # The Hub accepts only repository names here, not the name of a local folder.
    hub_name = base if base and re.fullmatch(r"[\w.-]+/[\w.-]+", base) else None
    metadata = ModelCardData(library_name="transformers", base_model=hub_name, tags=["hf-grow", "growing-networks"])
    text = TEMPLATE.format(
        metadata=metadata.to_yaml(),
        title=f"Grown {base or summary['model_type'].removeprefix('growable_')}",
        origin=f"This model grew out of `{base}`." if base else "This model has no named base model.",
        auto_class=type(model).auto_classes[0],
        rows="\n".join(_row(layer) for layer in summary["layers"]),
        parameters=summary["parameters"],
        plot=PLOT_FILE,
        events="\n".join(_event_lines(event) for event in summary["events"]) or "Nothing yet.",
    )
    ModelCard(text).save(folder / "README.md")


def describe_event(event: dict) -> str:
    """One growth event in words."""
    if event["kind"] == "growth" and "layers" in event:
        return _describe_growth(event)
    what = event["kind"].replace("query_key", "query/key").replace("_", " ")
    if "count" not in event:
        return what
    return f"{event['count']:+d} {what} in the {event['attention']}-attention of layer {event['layer']}"


def _describe_growth(event: dict) -> str:
    """What was added in how many layers, what it cost and what it did to the loss."""
    layers = event["layers"]
    strategy = event.get("config", {}).get("strategy", "append")
    parts = [text for kind, name in KINDS.items() if (text := _amounts([layer.get(kind, 0) for layer in layers], name))]
    if strategy == "step":
        parts = [f"a step of the query/key columns in {_count(len(layers), 'layer')}"]
    elif strategy == "refactor":
        parts = [f"all query/key columns anew in {_count(len(layers), 'layer')}", *parts]
    text = f"growth by {', '.join(parts) or 'nothing'}: {event.get('parameters_added', 0):+,} parameters"
    before, after = event.get("loss_before"), event.get("loss_after")
    if before is not None and after is not None:
        text += f", loss {before:.4f} → {after:.4f}"
    return f"{text} ({event.get('form', 'form not recorded')})"


def _amounts(amounts: list[int], name: str) -> str | None:
    """Of one kind, how much in how many layers; None where nothing."""
    found = sorted(amount for amount in amounts if amount)
    if not found:
        return None
    most = _count(found[-1], name) if name == "head" else f"{_count(found[-1], name)} per head"
    return (most if found[0] == found[-1] else f"{found[0]} to {most}") + f" in {_count(len(found), 'layer')}"


def _count(number: int, name: str) -> str:
    return f"{number} {name}" + ("" if abs(number) == 1 else "s")


def _event_lines(event: dict) -> str:
    """An event in the list of the card; growth by a plan with a table of its layers."""
    line = f"- {describe_event(event)}"
    if event["kind"] != "growth" or not event.get("layers"):
        return line
    head = ["layer", "attention", "query/key columns", "value columns", "heads", "patterns of new heads"]
    head += ["expected decrease of the loss, held out"]
    rows = [head, ["---"] * len(head), *(_growth_row(layer) for layer in event["layers"])]
    # Indented, a table belongs to its place in the list.
    return "\n".join([line, "", *("  | " + " | ".join(row) + " |" for row in rows), ""])


def _growth_row(layer: dict) -> list[str]:
    held_out = layer.get("expected_decrease", {}).get("held_out")
    return [
        str(layer["layer"]),
        str(layer["kind"]),
        *(f"{layer.get(kind, 0):+d}" if layer.get(kind) else "" for kind in KINDS),
        ", ".join(layer.get("head_patterns", [])),
        "" if held_out is None else f"{held_out:.2g}",
    ]


def plot_sizes(summary: dict, file: Path) -> None:
    """Bars of query/key columns, value columns and heads by layer."""
    layers = summary["layers"]
    figure = Figure(figsize=(max(5.0, 1.2 + 0.45 * len(layers)), 3.2), layout="constrained")
    FigureCanvasAgg(figure)
    axes = figure.add_subplot()
    series = (("query/key columns", "query_key_dim"), ("value columns", "value_dim"), ("heads", "n_heads"))
    for shift, (label, key) in enumerate(series):
        places = [index + 0.27 * (shift - 1) for index in range(len(layers))]
        axes.bar(places, [layer[key] for layer in layers], width=0.25, label=label)
    names = [f"{layer['layer']}" + ("×" if layer["kind"] == "cross" else "") for layer in layers]
    axes.set_xticks(range(len(layers)), names)
    axes.set_xlabel("layer (× cross-attention)" if any(layer["kind"] == "cross" for layer in layers) else "layer")
    axes.set_ylabel("size")
    axes.spines[["top", "right"]].set_visible(False)
    axes.legend(frameon=False, ncols=3, loc="lower center", bbox_to_anchor=(0.5, 1.0))
    figure.savefig(file, dpi=120)


def _row(layer: dict) -> str:
    cells = (
        layer["layer"],
        layer["kind"],
        layer["n_heads"],
        layer["n_kv_heads"],
        layer["query_key_dim"],
        layer["value_dim"],
        f"{layer['scaling']:.4g}",
        f"{layer['parameters']:,}",
    )
    return "| " + " | ".join(str(cell) for cell in cells) + " |"
