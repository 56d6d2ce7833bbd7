"""Grow a model a little and push it to the Hub, from where it loads with trust_remote_code and without hf-grow.

    python examples/push_to_hub.py [USER/NAME]

Log in with `hf auth login` first. Without a name this is a dry run, which writes the folder that would be pushed.
"""

import sys

from transformers import AutoTokenizer

import hf_grow

model = hf_grow.make_growable(hf_grow.small_model())
tokenizer = AutoTokenizer.from_pretrained(hf_grow.SMALL_MODEL)
hf_grow.widen_query_key(model, layer=0, columns=8)

# Weights, tokenizer, the code of the model, its history, and a card with a table of all sizes.
folder = hf_grow.save_grown(model, "to_push", tokenizer=tokenizer, overwrite=True)
if len(sys.argv) > 1:
    print("pushed to", hf_grow.push_grown(folder, sys.argv[1], private=True))
else:
    print(f"a dry run: {folder} would be pushed, with")
    for file in sorted(folder.iterdir()):
        print(f"  {file.name:<28} {file.stat().st_size:>10,} bytes")
