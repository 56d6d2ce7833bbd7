"""Fine-tune a model with transformers' Trainer and let its attention grow on the way.

    python examples/grow_with_trainer.py [MODEL] [FOLDER]

MODEL is a Hub id or a local folder; by default the small GPT-2 that comes with hf-grow.
"""

import argparse
import inspect
import sys
import textwrap

import torch
from transformers import AutoModelForCausalLM, AutoTokenizer, Trainer, TrainingArguments

import hf_grow

name = sys.argv[1] if len(sys.argv) > 1 else hf_grow.SMALL_MODEL
folder = sys.argv[2] if len(sys.argv) > 2 else "trained"
tokenizer = AutoTokenizer.from_pretrained(name)
model = AutoModelForCausalLM.from_pretrained(name)

# Text that every Python carries, cut into sequences of 64 tokens; the last ones are for evaluation.
text = inspect.getsource(argparse) + inspect.getsource(textwrap)
ids = torch.tensor(tokenizer(text, verbose=False)["input_ids"])
rows = [{"input_ids": part, "labels": part} for part in ids.split(64)[:-1]]
train, held_out = rows[:-32], rows[-32:]

# Before the first step and again after 20, every head gets 4 more query/key columns, where the training data asks for
# them; no head gets wider than 40.
grower = hf_grow.GrowthCallback(
    hf_grow.GrowthConfig(columns=4),
    hf_grow.GrowthSchedule(at=(0, 20), max_query_key_dim=40, sequences=64),
)
arguments = TrainingArguments(
    folder,
    max_steps=40,
    per_device_train_batch_size=8,
    learning_rate=1e-3,
    save_steps=20,
    logging_steps=10,
    report_to="none",
    disable_tqdm=True,
)
trainer = Trainer(model, arguments, train_dataset=train, eval_dataset=held_out, callbacks=[grower])
before = trainer.evaluate()["eval_loss"]
# A killed run goes on with trainer.train(resume_from_checkpoint=True), given the same model as here.
trainer.train()
after = trainer.evaluate()["eval_loss"]

for report in grower.reports:
    print(report)
print(f"loss on held-out text: {before:.3f} before, {after:.3f} after training")
print("query/key columns:", [layer["query_key_dim"] for layer in model.growth_summary()["layers"]])
