"""Finetune a BERT that grows where the data asks for it: to classify texts, or with --mlm to fill in masked words.

    accelerate launch scripts/grow_then_finetune_bert.py --model bert-base-uncased --data glue:sst2 \\
        --text-column sentence --labels 2 --eval-split validation --out grown
    accelerate launch scripts/grow_then_finetune_bert.py --mlm --model my_bert --data my.txt --out grown

The model grows by --budget (or --columns) at the steps in --grow-at; without steps it does not. A new head knows
nothing, so let it learn for some steps before growth. Killed? Run it again with --resume.
"""

import argparse
import sys

import torch
from accelerate import PartialState
from transformers import AutoModelForMaskedLM, AutoModelForSequenceClassification, AutoTokenizer

import hf_grow
from hf_grow import Evaluation, GrowthConfig, GrowthSchedule, TrainConfig
from hf_grow.data import DataConfig
from hf_grow.folders import clear_errors


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--model", required=True, help="a Hub id or a local folder of a BERT")
    parser.add_argument("--mlm", action="store_true", help="train the masked language model, not a classifier")
    parser.add_argument("--labels", type=int, default=2, help="how many classes there are")
    parser.add_argument("--data", required=True, help="a file, a folder, or a data set of the Hub, name:configuration")
    parser.add_argument("--text-column", help="with the text, or two for pairs: premise,hypothesis")
    parser.add_argument("--label-column")
    parser.add_argument("--eval-split", help="split to evaluate on, such as validation; else a twentieth of the data")
    parser.add_argument("--out", required=True, help="folder for the trained model; OUT-checkpoints is kept beside it")
    parser.add_argument("--budget", default="1%", help="new parameters, or a percentage of the model's, at each step")
    parser.add_argument("--columns", type=int, help="instead of the budget: query/key columns for every head")
    parser.add_argument("--grow-at", type=int, nargs="*", default=[100], help="steps at which to grow")
    parser.add_argument("--growth-sequences", type=int, default=256, help="to measure growth on")
    parser.add_argument("--steps", type=int, default=1000)
    parser.add_argument("--batch-size", type=int, default=16, help="on each process")
    parser.add_argument("--accumulation", type=int, default=1)
    parser.add_argument("--length", type=int, help="tokens per text at most")
    parser.add_argument("--learning-rate", type=float, default=5e-5)
    parser.add_argument("--precision", default="no", choices=["no", "bf16", "fp16"])
    parser.add_argument("--every", type=int, default=100, help="steps between evaluations and checkpoints")
    parser.add_argument("--seed", type=int, default=0)
    parser.add_argument("--resume", action="store_true")
    options = parser.parse_args()

    # A new head is random: all processes, and a run that is resumed, must begin with the same.
    torch.manual_seed(options.seed)
    with clear_errors(options.model):
        tokenizer = AutoTokenizer.from_pretrained(options.model)
        if options.mlm:
            model = AutoModelForMaskedLM.from_pretrained(options.model, dtype=torch.float32)
        else:
            model = AutoModelForSequenceClassification.from_pretrained(
                options.model, num_labels=options.labels, dtype=torch.float32
            )
    growth = schedule = None
    if options.grow_at:
        amount = {"budget": options.budget} if options.columns is None else {"columns": options.columns}
        growth = GrowthConfig(**amount)
        schedule = GrowthSchedule(at=options.grow_at, sequences=options.growth_sequences)
    result = hf_grow.finetune(
        model,
        tokenizer,
        options.data,
        options.out,
        config=TrainConfig(
            steps=options.steps,
            batch_size=options.batch_size,
            accumulation=options.accumulation,
            learning_rate=options.learning_rate,
            precision=options.precision,
            eval_every=options.every,
            save_every=options.every,
            seed=options.seed,
        ),
        growth=growth,
        schedule=schedule,
        data_config=DataConfig(
            text_column=options.text_column, label_column=options.label_column, length=options.length
        ),
        evaluation=Evaluation(split=options.eval_split, max_sequences=1000),
        resume=options.resume,
    )
    if PartialState().is_main_process:
        print(f"{result}\nsaved in {result.out}")
    PartialState().destroy_process_group()


if __name__ == "__main__":
    try:
        main()
    except hf_grow.HfGrowError as error:
        print(f"Error: {error}", file=sys.stderr)
        sys.exit(2)
