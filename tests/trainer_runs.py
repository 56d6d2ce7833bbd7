"""Runs of transformers' Trainer with growth, on one process or many."""

import shutil

import torch
from models import VOCABULARY, causal_model
from transformers import Trainer, TrainingArguments

from hf_grow import GrowthCallback, GrowthConfig, GrowthSchedule

COLUMNS = GrowthConfig(columns=2)


def rows(count=24, seed=4):
    """A training set of token ids."""
    tokens = torch.randint(2, VOCABULARY, (count, 8), generator=torch.Generator().manual_seed(seed))
    return [{"input_ids": ids, "labels": ids} for ids in tokens]


def arguments(folder, **changes):
    """Six steps of two sequences each."""
    given = {"max_steps": 6, "per_device_train_batch_size": 2, "learning_rate": 1e-2, "save_strategy": "no"}
    quiet = {"report_to": "none", "use_cpu": True, "disable_tqdm": True, "logging_steps": 1}
    return TrainingArguments(folder / "run", **{**given, **quiet, **changes})


def callback(schedule=None, growth=COLUMNS, **options):
    """Growth by two columns, measured on a few sequences."""
    return GrowthCallback(growth, schedule or GrowthSchedule(at=(3,), sequences=8), **options)


def trainer(folder, grower, model=None, optimizers=(None, None), **changes):
    """A Trainer of a small GPT-2 with dropout."""
    data = {"train_dataset": rows(), "eval_dataset": rows(4, seed=5)}
    model = causal_model("gpt2") if model is None else model
    return Trainer(model, arguments(folder, **changes), callbacks=[grower], optimizers=optimizers, **data)


def killed(folder, step, into):
    """A copy of a run's folder as it was when it was killed after a step."""
    for path in (folder / "run").glob("checkpoint-*"):
        if int(path.name.split("-")[1]) <= step:
            shutil.copytree(path, into / "run" / path.name)
