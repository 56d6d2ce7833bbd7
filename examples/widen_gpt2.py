"""Widen a GPT-2 without changing what it computes, save it, and load it back like any other model.

    python examples/widen_gpt2.py [MODEL] [FOLDER]

MODEL is a Hub id or a local folder of a GPT-2; by default the small one that comes with hf-grow.
"""

import sys

import torch
from transformers import AutoModelForCausalLM, AutoTokenizer

import hf_grow

name = sys.argv[1] if len(sys.argv) > 1 else hf_grow.SMALL_MODEL
folder = sys.argv[2] if len(sys.argv) > 2 else "widened"
tokenizer = AutoTokenizer.from_pretrained(name)
model = AutoModelForCausalLM.from_pretrained(name).eval()
inputs = tokenizer("The with statement", return_tensors="pt")

with torch.no_grad():
    before = model(**inputs).logits
    hf_grow.make_growable(model)

    # Every head of layer 0 gets 8 more query/key columns, layer 1 a whole new head. Given no weights, growth takes
    # the form that changes nothing yet: training decides what the new weights become.
    hf_grow.widen_query_key(model, layer=0, columns=8)
    hf_grow.add_heads(model, layer=1, heads=1)
    after = model(**inputs).logits

print(f"largest change of a logit: {(after - before).abs().max():.1e}")

hf_grow.save_grown(model, folder, tokenizer=tokenizer, overwrite=True)
again = AutoModelForCausalLM.from_pretrained(folder)  # hf_grow is imported, so transformers knows the class
print(tokenizer.decode(again.generate(**inputs, max_new_tokens=20, do_sample=False)[0]))
