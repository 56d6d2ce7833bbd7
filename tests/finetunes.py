"""Sizes of the runs of `finetune`, and the loss they are judged by."""

import torch
from transformers import AutoTokenizer

import hf_grow
from hf_grow.data import DataConfig, load_batches

LENGTH = 24
BUDGET = 45_000


@torch.no_grad()
def loss_on(model, data):
    """The mean loss on the evaluation data, one sequence after the other."""
    tokenizer = AutoTokenizer.from_pretrained(hf_grow.SMALL_MODEL)
    config = DataConfig(length=LENGTH, max_sequences=4, batch_size=1)
    batches = load_batches(str(data / "other.txt"), tokenizer, hf_grow.small_model(), config=config)
    return sum(float(model.eval()(**batch).loss) for batch in batches) / len(batches)
