"""Adapt a frozen Llama by grown columns and LoRA, within one budget, and save only what was added.

    python examples/grow_llama_with_lora.py [MODEL] [FOLDER]

MODEL is a Hub id or a local folder of a Llama, such as HuggingFaceTB/SmolLM2-135M; by default a tiny one with random
weights.
"""

import argparse as some_module
import inspect
import sys
import tempfile
from pathlib import Path

import torch
from transformers import AutoModelForCausalLM, AutoTokenizer, LlamaConfig, LlamaForCausalLM

import hf_grow
from hf_grow import AdaptConfig, GrowthTrainer, TrainConfig
from hf_grow.data import DataConfig, load_sequences, split_rows

name = sys.argv[1] if len(sys.argv) > 1 else None
folder = sys.argv[2] if len(sys.argv) > 2 else "adapted"
tokenizer = AutoTokenizer.from_pretrained(name or hf_grow.SMALL_MODEL)


def load_model():
    """The pretrained model, or the tiny one."""
    if name:
        return AutoModelForCausalLM.from_pretrained(name)
    torch.manual_seed(0)
    sizes = {"hidden_size": 64, "num_hidden_layers": 2, "num_attention_heads": 4, "num_key_value_heads": 2}
    return LlamaForCausalLM(LlamaConfig(vocab_size=len(tokenizer), intermediate_size=128, **sizes))


model = load_model()
with tempfile.TemporaryDirectory() as place:
    text = Path(place, "source.txt")
    text.write_text(inspect.getsource(some_module), encoding="utf-8")
    data = load_sequences(str(text), tokenizer, model, config=DataConfig(length=64))
rows, held_out = split_rows(data.rows, 0.1, seed=0)

# Half of 5% of the parameters for new columns, half for LoRA on query and key projections; the base is frozen.
recipe = AdaptConfig(method="grow+lora", budget="5%")
batches = [data.collate([rows[number] for number in range(start, start + 8)]) for start in range(0, 32, 8)]
model, report = hf_grow.adapt(model, batches, recipe)
print(report)
print(f"{hf_grow.trainable_parameters(model):,} parameters learn")

config = TrainConfig(steps=30, batch_size=8, learning_rate=3e-3, train=recipe.train)
trainer = GrowthTrainer(model, rows, held_out, collate=data.collate, config=config, progress=False)
before = trainer.evaluate()
result = trainer.train()
print(f"loss on other text: {before:.4f} → {result.eval_loss:.4f} in {result.steps} steps")

# growth/ is what save_growth writes, lora/ what PEFT does. One whole model: save_grown(model.merge_and_unload(), …).
hf_grow.save_adapted(trainer.model, folder, overwrite=True)
again = hf_grow.load_adapted(load_model(), folder)
with torch.no_grad():
    batch = data.collate([held_out[0]])
    same = torch.equal(again.eval()(**batch).logits, trainer.model.eval()(**batch).logits)
size = sum(file.stat().st_size for file in Path(folder).rglob("*.safetensors"))
print(f"saved in {folder}: {size:,} bytes; put onto the base again it computes the same: {same}")
