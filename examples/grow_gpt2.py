"""Grow a GPT-2 where some text asks for it, in one call.

    python examples/grow_gpt2.py [MODEL] [FOLDER]

MODEL is a Hub id or a local folder of a GPT-2; by default the small one that comes with hf-grow.
"""

import inspect
import sys
import tempfile

from transformers import AutoModelForCausalLM, AutoTokenizer

import hf_grow

name = sys.argv[1] if len(sys.argv) > 1 else hf_grow.SMALL_MODEL
folder = sys.argv[2] if len(sys.argv) > 2 else "grown"
tokenizer = AutoTokenizer.from_pretrained(name)
model = AutoModelForCausalLM.from_pretrained(name)

# Any batches that give the model a loss: here 32 sequences of Python source, which the small model never saw.
ids = tokenizer(inspect.getsource(tempfile), return_tensors="pt", verbose=False)["input_ids"]
blocks = ids[0, : 32 * 64].view(32, 64)
batches = [{"input_ids": part, "labels": part} for part in blocks.split(8)]

# 2% more parameters: query/key columns, value columns and heads where they promise most.
model, report = hf_grow.grow(model, batches, hf_grow.GrowthConfig(budget="2%"))
print(report)
for layer in report.layers:
    print(f"layer {layer['layer']}:", {kind: layer[kind] for kind in ("columns", "value_columns", "heads")})

hf_grow.save_grown(model, folder, tokenizer=tokenizer, overwrite=True)
again = AutoModelForCausalLM.from_pretrained(folder)  # hf_grow is imported, so transformers knows the class
print(f"{again.num_parameters():,} parameters, saved in {folder}")
