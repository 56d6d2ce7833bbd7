"""Finetune a BERT that grows where the data asks for it: to classify texts, or with --mlm to fill in masked words.

    accelerate launch scripts/grow_then_finetune_bert.py --model bert-base-uncased --data glue:sst2 \\
        --text-column sentence --labels 2 --eval-split validation --out grown
    accelerate launch scripts/grow_then_finetune_bert.py --mlm --model my_bert --data my.txt --out grown

The model grows by --budget (or --columns) at the steps in --grow-at; without steps it does not. A new head knows
nothing, so let it learn for some steps before growth. Killed? Run it again with --resume.
It is `accelerate launch -m hf_grow finetune …` with a few defaults.
"""

import sys

from hf_grow.cli.script import finetune_script

DEFAULTS = ["--batch-size", "16", "--learning-rate", "5e-5", "--max-eval-sequences", "1000"]
CLASSIFIER = ["--task", "classification", "--labels", "2"]

if __name__ == "__main__":
    words = [word for word in sys.argv[1:] if word != "--mlm"]
    task = ["--task", "masked"] if "--mlm" in sys.argv else CLASSIFIER
    finetune_script(__doc__, words, [*DEFAULTS, *task], grow_at=100)
