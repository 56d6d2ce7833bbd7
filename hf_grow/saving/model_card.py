"""The README.md of a grown checkpoint: what it is, how to load it, a table and a plot of its sizes."""

import re
from pathlib import Path

from huggingface_hub import ModelCard, ModelCardData
from matplotlib.backends.backend_agg import FigureCanvasAgg
from matplotlib.figure import Figure
from transformers import PreTrainedModel

from hf_grow.growth.kinds import KINDS, Kind

PLOT_FILE = "growth.png"
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


def write_model_card(model: PreTrainedModel, folder: Path) -> None:
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
    amounts = {kind: [layer.get(name, 0) for layer in layers] for name, kind in KINDS.items()}
    parts = [text for kind, of_layers in amounts.items() if (text := _amounts(of_layers, kind))]
    if strategy == "step":
        parts = [f"a step of the query/key columns in {_count(len(layers), 'layer')}"]
    elif strategy == "refactor":
        parts = [f"all query/key columns anew in {_count(len(layers), 'layer')}", *parts]
    text = f"growth by {', '.join(parts) or 'nothing'}: {event.get('parameters_added', 0):+,} parameters"
    before, after = event.get("loss_before"), event.get("loss_after")
    if before is not None and after is not None:
        text += f", loss {before:.4f} → {after:.4f}"
    return f"{text} ({event.get('form', 'form not recorded')})"


def _amounts(of_layers: list[int], kind: Kind) -> str | None:
    """Of one kind, how much in how many layers; None where nothing."""
    amounts = sorted(amount for amount in of_layers if amount)
    if not amounts:
        return None
    most = _count(amounts[-1], kind.label) + (" per head" if kind.per_head else "")
    return (most if amounts[0] == amounts[-1] else f"{amounts[0]} to {most}") + f" in {_count(len(amounts), 'layer')}"


def _count(number: int, name: str) -> str:
    return f"{number} {name}" + ("" if abs(number) == 1 else "s")


def _event_lines(event: dict) -> str:
    """An event in the list of the card; growth by a plan with a table of its layers."""
    line = f"- {describe_event(event)}"
    if event["kind"] != "growth" or not event.get("layers"):
        return line
    head = ["layer", "attention", *(kind.units for kind in KINDS.values()), "patterns of new heads"]
    head += ["expected decrease of the loss, held out"]
    rows = [head, ["---"] * len(head), *(_growth_row(layer) for layer in event["layers"])]
    # Indented, a table belongs to its place in the list.
    return "\n".join([line, "", *("  | " + " | ".join(row) + " |" for row in rows), ""])


def _growth_row(layer: dict) -> list[str]:
    held_out = layer.get("expected_decrease", {}).get("held_out")
    return [
        str(layer["layer"]),
        str(layer["kind"]),
        *(f"{layer.get(name, 0):+d}" if layer.get(name) else "" for name in KINDS),
        ", ".join(layer.get("head_patterns", [])),
        "" if held_out is None else f"{held_out:.2g}",
    ]


def plot_sizes(summary: dict, file: Path) -> None:
    """Bars of query/key columns, value columns and heads by layer."""
    layers = summary["layers"]
    figure = Figure(figsize=(max(5.0, 1.2 + 0.45 * len(layers)), 3.2), layout="constrained")
    FigureCanvasAgg(figure)
    axes = figure.add_subplot()
    for shift, kind in enumerate(KINDS.values()):
        places = [index + 0.27 * (shift - 1) for index in range(len(layers))]
        axes.bar(places, [layer[kind.size_name] for layer in layers], width=0.25, label=kind.units)
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
