"""Data, models and trainers for the tests of training, on one process or many."""

from functools import partial
from typing import Any
from unittest import mock

import torch
from models import causal_model, fill_new_weights, grow_everything, small_model
from peft import LoraConfig, get_peft_model
from transformers import BertForMaskedLM, BertForSequenceClassification

from hf_grow import (
    CollectConfig,
    GrowthConfig,
    GrowthSchedule,
    GrowthTrainer,
    TrainConfig,
    attach_growth,
    make_growable,
)
from hf_grow.training.run import Run

# Small sketches, as the tests ask what happens and not how well.
COLLECT = CollectConfig(passes=2, oversampling=1)
GROWTH = GrowthConfig(columns=2)


def token_rows(count=24, length=10, seed=0) -> list[dict[str, Any]]:
    """Sequences that count upwards, so that there is something to learn; some labels at the start are left out."""
    generator = torch.Generator().manual_seed(seed)
    rows = []
    for number in range(count):
        start = int(torch.randint(2, 60, (), generator=generator))
        ids = list(range(start, start + length))
        left_out = number % 5
        rows.append({"input_ids": ids, "labels": [-100] * left_out + ids[left_out:]})
    return rows


def classified_rows(count=24, length=8) -> list[dict[str, Any]]:
    """Sequences of two classes."""
    rows = token_rows(count, length)
    return [{"input_ids": row["input_ids"], "labels": int(row["input_ids"][0] > 30)} for row in rows]


def mask_tokens(rows) -> dict[str, torch.Tensor]:
    """A collator that masks by chance."""
    ids = torch.tensor([row["input_ids"] for row in rows])
    masked = torch.rand(ids.shape) < 0.3
    masked[:, 1] = True
    return {"input_ids": ids.masked_fill(masked, 1), "labels": ids.masked_fill(~masked, -100)}


class Stream:
    """Rows that can only be iterated over, again and again."""

    def __init__(self, rows) -> None:
        self.rows = rows

    def __iter__(self):
        return iter(self.rows)


def without_dropout(model) -> Any:
    """A growable model without dropout, in float64 so that maths and rounding are told apart."""
    make_growable(model).double()
    for module in model.modules():
        if isinstance(module, torch.nn.Dropout):
            module.p = 0.0
        for name in ("attn_dropout", "dropout_prob", "attention_dropout"):
            if isinstance(getattr(module, name, None), float):
                setattr(module, name, 0.0)
    return model


def task(name) -> tuple[Any, list[dict[str, Any]], dict[str, Any]]:
    """A model, its rows and what else its trainer needs."""
    if name == "masked":
        return small_model(BertForMaskedLM, "bert"), token_rows(), {"collate": mask_tokens}
    if name == "classification":
        return small_model(BertForSequenceClassification, "bert"), classified_rows(), {}
    return causal_model(name), token_rows(), {}


def make_trainer(model, rows=None, eval_rows=None, *, growth=GROWTH, at=(), schedule=None, **options) -> GrowthTrainer:
    """A trainer without noise; fields of the config are told from arguments of the trainer by their names."""
    known = [name for name in options if name in TrainConfig.__dataclass_fields__ and not callable(options[name])]
    fields = {name: options.pop(name) for name in known}
    config = TrainConfig(**{"steps": 6, "batch_size": 4, "learning_rate": 1e-3, "log_every": 1, **fields})
    if at or schedule:
        schedule = schedule or GrowthSchedule(at=at, sequences=7)
        options = {"collect": COLLECT, "growth": growth, "schedule": schedule, **options}
    rows = token_rows() if rows is None else rows
    return GrowthTrainer(model, rows, eval_rows, config=config, **{"progress": False, **options})


def weights(model) -> dict[str, torch.Tensor]:
    """A copy of all weights."""
    return {name: value.detach().clone() for name, value in model.state_dict().items()}


def with_method(name, method) -> Any:
    """Inside, runs of training have this method, which gets the run and its original method."""
    original = getattr(Run, name)
    return mock.patch.object(Run, name, lambda run, *arguments: method(run, partial(original, run), *arguments))


def interrupted_at(step, name="clip") -> Any:
    """Inside, runs are interrupted where they would call a method in this step."""
    return with_method(name, lambda run, original: interrupt() if run.state.step == step else original())


def interrupt() -> None:
    """As if the user had."""
    raise KeyboardInterrupt


def values(result, name="loss") -> list[float]:
    """What the history says under a name, in the order of steps."""
    return [entry[name] for entry in result.history if name in entry]


def steps_of_growth(result) -> list[int]:
    """When the model grew."""
    return [report["training_step"] for report in result.reports]


def adapted(model_type="gpt2", attach=False) -> Any:
    """A grown model with LoRA beside its growth."""
    model = fill_new_weights(grow_everything(make_growable(causal_model(model_type))))
    if attach:
        attach_growth(model)
    torch.manual_seed(5)
    targets = ["c_attn"] if model_type == "gpt2" else ["q_proj", "v_proj"]
    return get_peft_model(model, LoraConfig(r=2, target_modules=targets, fan_in_fan_out=model_type == "gpt2"))
