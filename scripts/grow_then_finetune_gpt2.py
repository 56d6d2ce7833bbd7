"""Finetune a GPT-2 (or any causal language model that hf-grow knows) that grows where the text asks for it.

    accelerate launch scripts/grow_then_finetune_gpt2.py --model gpt2 --data wikitext:wikitext-2-raw-v1 --out grown
    accelerate launch scripts/grow_then_finetune_gpt2.py --method grow+lora --budget 5% --data my.txt --out adapted

By default all weights learn, and the model grows by --budget (or --columns) at the steps in --grow-at. With --method
grow, lora or grow+lora the model is frozen, and --budget is for all that learns. Killed? Run it again with --resume.
It is `accelerate launch -m hf_grow finetune …` with a few defaults.
"""

import sys

import hf_grow
from hf_grow.cli.script import finetune_script

DEFAULTS = ["--task", "causal"]

if __name__ == "__main__":
    finetune_script(__doc__, sys.argv[1:], DEFAULTS, model=str(hf_grow.SMALL_MODEL), grow_at=0)
