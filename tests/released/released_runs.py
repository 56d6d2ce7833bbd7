"""The model, the data and the runs whose files are kept for every release, written with exported names alone."""

from pathlib import Path
from typing import Any

import torch
from tokenizers import Tokenizer
from tokenizers.models import WordLevel
from tokenizers.pre_tokenizers import WhitespaceSplit
from transformers import GPT2Config, GPT2LMHeadModel, PreTrainedTokenizerFast, Trainer, TrainingArguments

import hf_grow
from hf_grow import (
    AdaptConfig,
    CollectConfig,
    GrowthCallback,
    GrowthConfig,
    GrowthSchedule,
    GrowthTrainer,
    TrainConfig,
)

VOCABULARY = 32
STEPS, SAVED_STEP = 6, 3
AMOUNTS = {"columns": 2, "value_columns": {0: 1}, "heads": {1: 1}}
# The gradient of a key's bias is rounding alone, which AdamW makes into whole steps, on each machine others. They
# change no score, but the span of the key columns, which growth by the bottleneck looks at.
COLLECT = CollectConfig(target="gradient", oversampling=2, held_out=0.25)
SCHEDULE = GrowthSchedule(at=(2, 4), sequences=8)
RECIPE = AdaptConfig(method="grow+lora", columns=1, value_columns=1, rank=1, collect=COLLECT)
TRAIN = {
    "steps": STEPS,
    "batch_size": 4,
    "learning_rate": 1e-2,
    "log_every": 1,
    "save_every": SAVED_STEP,
    "keep": STEPS,
}


def new_base() -> GPT2LMHeadModel:
    """A stock model that has learned a little, so that attention matters and growth promises something."""
    torch.manual_seed(0)
    sizes = {"vocab_size": VOCABULARY, "n_positions": 16, "n_embd": 8, "n_layer": 2, "n_head": 2, "n_inner": 8}
    sizes["initializer_range"] = 0.3
    # Random numbers may differ between kinds of processors.
    no_dropout = {"attn_pdrop": 0.0, "embd_pdrop": 0.0, "resid_pdrop": 0.0}
    model = GPT2LMHeadModel(GPT2Config(**sizes, **no_dropout, bos_token_id=0, eos_token_id=0))
    optimizer = torch.optim.AdamW(model.parameters(), lr=2e-2)
    for _ in range(6):
        for batch in token_batches():
            model(**batch).loss.backward()
            optimizer.step()
            optimizer.zero_grad()
    return model.eval()


def load_base(folder: Path) -> GPT2LMHeadModel:
    """The stored stock model; where it lies goes into no file."""
    model = GPT2LMHeadModel.from_pretrained(folder / "base").eval()
    model.name_or_path = model.config.name_or_path = "base"
    return model


def attention_alone(model: Any) -> Any:
    """The same model, in which nothing else learns: the state of an optimizer is small then."""
    for name, parameter in model.named_parameters():
        parameter.requires_grad_(".attn." in name)
    return model


def token_rows(count: int = 16, first: int = 0) -> list[dict[str, list[int]]]:
    """Sequences that count upwards by steps of their own, so that there is something to learn."""
    rows = [
        [(3 * row + place * (1 + row % 3)) % VOCABULARY for place in range(8)] for row in range(first, first + count)
    ]
    return [{"input_ids": ids, "labels": ids} for ids in rows]


def token_batches() -> list[dict[str, torch.Tensor]]:
    """The same, four at once."""
    ids = torch.tensor([row["input_ids"] for row in token_rows()])
    return [{"input_ids": part, "labels": part} for part in ids.split(4)]


@torch.no_grad()
def logits(model: Any) -> torch.Tensor:
    """What a model computes for the first sequences."""
    return model.eval()(input_ids=token_batches()[0]["input_ids"][:2]).logits


def growth_run(model: Any, folder: Path) -> GrowthTrainer:
    """A run of GrowthTrainer that grows before and after its stored checkpoint, by what a line search finds best."""
    return GrowthTrainer(
        attention_alone(model),
        token_rows(),
        token_rows(4, first=40),
        config=TrainConfig(**TRAIN, eval_every=3),
        growth=GrowthConfig(columns={0: 1}, value_columns=1),
        schedule=SCHEDULE,
        collect=COLLECT,
        folder=folder,
        progress=False,
    )


def adapted_run(model: Any, folder: Path, out: Path, **options: Any) -> hf_grow.FinetuneResult:
    """A run of `finetune` on a frozen model, with its checkpoints in a folder."""
    text = out.with_name("text.txt")
    text.write_text(" ".join(str(token) for row in token_rows(24) for token in row["input_ids"]), encoding="utf-8")
    return hf_grow.finetune(
        model,
        number_tokenizer(),
        str(text),
        out,
        config=TrainConfig(**TRAIN),
        recipe=RECIPE,
        growth_sequences=8,
        checkpoints=folder,
        progress=False,
        **options,
    )


def number_tokenizer() -> PreTrainedTokenizerFast:
    """Every number is the token of that number."""
    words = Tokenizer(WordLevel({str(token): token for token in range(VOCABULARY)}, unk_token="0"))
    words.pre_tokenizer = WhitespaceSplit()
    return PreTrainedTokenizerFast(tokenizer_object=words, eos_token="0")


def callback_run(model: Any, folder: Path) -> tuple[Trainer, GrowthCallback]:
    """A run of transformers' Trainer that grows before and after its stored checkpoint."""
    grower = GrowthCallback(GrowthConfig(columns=1, step_size=0.0), SCHEDULE, collect=COLLECT)
    arguments = TrainingArguments(
        folder,
        max_steps=STEPS,
        per_device_train_batch_size=4,
        learning_rate=1e-2,
        save_steps=SAVED_STEP,
        logging_steps=1,
        report_to="none",
        use_cpu=True,
        disable_tqdm=True,
    )
    return Trainer(attention_alone(model), arguments, callbacks=[grower], train_dataset=token_rows()), grower


def losses(history: list[dict[str, Any]]) -> list[float]:
    """Of a run, step by step."""
    return [entry["loss"] for entry in history if "loss" in entry]
