"""Train a BERT classifier that grows on the way.

    python examples/grow_bert_classifier.py [MODEL] [FOLDER]

MODEL is a Hub id or a local folder of a BERT, such as bert-base-uncased; by default a tiny one with random weights. It
learns to tell Python's help topics from the source of Python's library, line by line.
"""

import sys
import textwrap
from pathlib import Path
from pydoc_data.topics import topics

import torch
from tokenizers import Tokenizer, models, normalizers, pre_tokenizers, processors, trainers
from transformers import (
    AutoModelForSequenceClassification,
    AutoTokenizer,
    BertConfig,
    BertForSequenceClassification,
    DataCollatorWithPadding,
    PreTrainedTokenizerFast,
)

import hf_grow
from hf_grow import GrowthConfig, GrowthSchedule, GrowthTrainer, TrainConfig

prose = [line for name in sorted(topics)[:20] for line in topics[name].splitlines() if len(line.split()) > 4]
code = [line for line in Path(textwrap.__file__).read_text().splitlines() if len(line.split()) > 4]
count = min(len(prose), len(code), 150)
texts, labels = prose[:count] + code[:count], [0] * count + [1] * count


def tiny_tokenizer():
    """Words of these texts, as BERT has them."""
    tokenizer = Tokenizer(models.WordPiece(unk_token="[UNK]"))
    tokenizer.normalizer, tokenizer.pre_tokenizer = normalizers.Lowercase(), pre_tokenizers.BertPreTokenizer()
    special = ["[PAD]", "[UNK]", "[CLS]", "[SEP]", "[MASK]"]
    tokenizer.train_from_iterator(texts, trainers.WordPieceTrainer(vocab_size=500, special_tokens=special))
    tokenizer.post_processor = processors.BertProcessing(("[SEP]", 3), ("[CLS]", 2))
    names = {"pad_token": "[PAD]", "unk_token": "[UNK]", "cls_token": "[CLS]", "sep_token": "[SEP]"}
    return PreTrainedTokenizerFast(tokenizer_object=tokenizer, mask_token="[MASK]", **names)


torch.manual_seed(0)
if len(sys.argv) > 1:
    tokenizer = AutoTokenizer.from_pretrained(sys.argv[1])
    model = AutoModelForSequenceClassification.from_pretrained(sys.argv[1], num_labels=2)
else:
    tokenizer = tiny_tokenizer()
    sizes = {"hidden_size": 64, "num_hidden_layers": 2, "num_attention_heads": 4, "intermediate_size": 128}
    model = BertForSequenceClassification(BertConfig(vocab_size=len(tokenizer), initializer_range=0.1, **sizes))

rows = [
    {**tokenizer(text, truncation=True, max_length=48), "labels": label}
    for text, label in zip(texts, labels, strict=True)
]
held_out = rows[::5]
trainer = GrowthTrainer(
    model,
    [row for number, row in enumerate(rows) if number % 5],
    held_out,
    collate=DataCollatorWithPadding(tokenizer),
    config=TrainConfig(steps=60, batch_size=16, learning_rate=1e-3),
    # A random head gives attention nothing to improve: let it learn first.
    growth=GrowthConfig(columns=4),
    schedule=GrowthSchedule(at=30, sequences=64),
    progress=False,
)
print(f"loss on other lines before training: {trainer.evaluate():.4f}")
result = trainer.train()
for report in result.reports:
    losses = f"{report['loss_before']:.4f} → {report['loss_after']:.4f}"
    print(f"step {report['training_step']}: {report['parameters_added']:,} parameters added, loss {losses}")
print(f"loss on other lines after {result.steps} steps: {result.eval_loss:.4f}")

with torch.no_grad():
    batch = DataCollatorWithPadding(tokenizer)(held_out)
    right = trainer.model.eval()(**batch).logits.argmax(-1) == batch["labels"]
print(f"{right.float().mean():.0%} of them are told apart")
folder = sys.argv[2] if len(sys.argv) > 2 else "classifier"
hf_grow.save_grown(trainer.model, folder, tokenizer=tokenizer, overwrite=True)
