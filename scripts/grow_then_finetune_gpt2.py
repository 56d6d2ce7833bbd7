"""Finetune a GPT-2 (or any causal language model that hf-grow knows) that grows where the text asks for it.

    accelerate launch scripts/grow_then_finetune_gpt2.py --model gpt2 --data wikitext:wikitext-2-raw-v1 --out grown
    accelerate launch scripts/grow_then_finetune_gpt2.py --method grow+lora --budget 5% --data my.txt --out adapted

By default all weights learn, and the model grows by --budget (or --columns) at the steps in --grow-at. With --method
grow, lora or grow+lora the model is frozen, and --budget is for all that learns. Killed? Run it again with --resume.
"""

import argparse
import sys

import torch
from accelerate import PartialState
from transformers import AutoModelForCausalLM, AutoTokenizer

import hf_grow
from hf_grow import AdaptConfig, Evaluation, GrowthConfig, GrowthSchedule, TrainConfig
from hf_grow.data import DataConfig
from hf_grow.finetuning import default_learning_rate
from hf_grow.folders import clear_errors


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--model", default=str(hf_grow.SMALL_MODEL), help="a Hub id or a local folder")
    parser.add_argument("--data", required=True, help="a file, a folder, or a data set of the Hub, name:configuration")
    parser.add_argument("--eval-split", help="split to evaluate on, such as validation; else a twentieth of the data")
    parser.add_argument("--out", required=True, help="folder for the trained model; OUT-checkpoints is kept beside it")
    parser.add_argument("--method", default="full", choices=["full", "grow", "lora", "grow+lora"])
    parser.add_argument("--budget", default="1%", help="parameters, or a percentage of the model's")
    parser.add_argument("--columns", type=int, help="instead of the budget: query/key columns for every head")
    parser.add_argument("--grow-at", type=int, nargs="*", default=[0], help="steps at which to grow, with method full")
    parser.add_argument("--growth-sequences", type=int, default=256, help="to measure growth on")
    parser.add_argument("--steps", type=int, default=1000)
    parser.add_argument("--batch-size", type=int, default=8, help="on each process")
    parser.add_argument("--accumulation", type=int, default=1)
    parser.add_argument("--length", type=int, help="tokens per sequence")
    parser.add_argument("--learning-rate", type=float, help="1e-4, beside a frozen model 3e-3")
    parser.add_argument("--precision", default="no", choices=["no", "bf16", "fp16"])
    parser.add_argument("--every", type=int, default=100, help="steps between evaluations and checkpoints")
    parser.add_argument("--seed", type=int, default=0)
    parser.add_argument("--resume", action="store_true")
    options = parser.parse_args()

    recipe = growth = schedule = None
    if options.method != "full":
        recipe = AdaptConfig(method=options.method, budget=options.budget, columns=options.columns)
    elif options.grow_at:
        amount = {"budget": options.budget} if options.columns is None else {"columns": options.columns}
        growth = GrowthConfig(**amount)
        schedule = GrowthSchedule(at=options.grow_at, sequences=options.growth_sequences)
    with clear_errors(options.model):
        tokenizer = AutoTokenizer.from_pretrained(options.model)
        model = AutoModelForCausalLM.from_pretrained(options.model, dtype=torch.float32)
    result = hf_grow.finetune(
        model,
        tokenizer,
        options.data,
        options.out,
        config=TrainConfig(
            steps=options.steps,
            batch_size=options.batch_size,
            accumulation=options.accumulation,
            learning_rate=options.learning_rate or default_learning_rate(recipe),
            precision=options.precision,
            eval_every=options.every,
            save_every=options.every,
            seed=options.seed,
        ),
        recipe=recipe,
        growth=growth,
        schedule=schedule,
        growth_sequences=options.growth_sequences,
        data_config=DataConfig(length=options.length),
        evaluation=Evaluation(split=options.eval_split),
        resume=options.resume,
        growth_only=recipe is not None,
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
