"""Finetune a GPT-2 (or any causal language model that hf-grow knows) that grows where the text asks for it.

    accelerate launch scripts/grow_then_finetune_gpt2.py --model gpt2 --data wikitext:wikitext-2-raw-v1 --out grown
    accelerate launch scripts/grow_then_finetune_gpt2.py --method grow+lora --budget 5% --data my.txt --out adapted

By default all weights learn, and the model grows by --budget (or --columns) at the steps in --grow-at. With --method
grow, lora or grow+lora the model is frozen, and --budget is for all that learns. Killed? Run it again with --resume.
"""

import argparse

import torch
from transformers import AutoModelForCausalLM, AutoTokenizer

import hf_grow
from hf_grow import AdaptConfig, GrowthConfig, GrowthSchedule, GrowthTrainer, TrainConfig
from hf_grow.checkpoint import check_out_folder
from hf_grow.data import DataConfig, load_sequences, split_rows
from hf_grow.feed import Feed
from hf_grow.training_setup import make_accelerator


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
    parser.add_argument("--learning-rate", type=float, default=1e-4)
    parser.add_argument("--precision", default="no", choices=["no", "bf16", "fp16"])
    parser.add_argument("--every", type=int, default=100, help="steps between evaluations and checkpoints")
    parser.add_argument("--seed", type=int, default=0)
    parser.add_argument("--resume", action="store_true")
    options = parser.parse_args()
    check_out_folder(options.out, overwrite=False)

    recipe = None
    if options.method != "full":
        recipe = AdaptConfig(method=options.method, budget=options.budget, columns=options.columns)
    config = TrainConfig(
        steps=options.steps,
        batch_size=options.batch_size,
        accumulation=options.accumulation,
        learning_rate=options.learning_rate,
        precision=options.precision,
        train="all" if recipe is None else recipe.train,
        eval_every=options.every,
        save_every=options.every,
        seed=options.seed,
    )
    checkpoints = f"{options.out}-checkpoints"
    accelerator = make_accelerator(config, checkpoints)

    tokenizer = AutoTokenizer.from_pretrained(options.model)
    model = hf_grow.make_growable(AutoModelForCausalLM.from_pretrained(options.model, dtype=torch.float32))
    wanted = DataConfig(length=options.length, batch_size=options.batch_size)
    data = load_sequences(options.data, tokenizer, model, config=wanted)
    if options.eval_split:
        other = DataConfig(split=options.eval_split, length=options.length, max_sequences=256)
        rows, eval_rows = data.rows, load_sequences(options.data, tokenizer, model, config=other).rows
    else:
        rows, eval_rows = split_rows(data.rows, 0.05, options.seed)

    growth = schedule = None
    if recipe is not None:
        # The frozen model gets its new weights before training; a run that is resumed, those it began with.
        me, all_of_us = accelerator.process_index, accelerator.num_processes
        feed = Feed(rows, data.collate, options.batch_size, processes=all_of_us, process=me, seed=options.seed)
        batches = feed.sample(options.growth_sequences, 0)
        start = {"resume": options.resume, "accelerator": accelerator}
        model = hf_grow.adapt_or_resume(model, batches, recipe, f"{checkpoints}/start", **start)
    elif options.grow_at:
        amount = {"budget": options.budget} if options.columns is None else {"columns": options.columns}
        growth, schedule = (
            GrowthConfig(**amount),
            GrowthSchedule(at=options.grow_at, sequences=options.growth_sequences),
        )

    trainer = GrowthTrainer(
        model,
        rows,
        eval_rows,
        collate=data.collate,
        config=config,
        growth=growth,
        schedule=schedule,
        folder=checkpoints,
        tokenizer=tokenizer,
        accelerator=accelerator,
    )
    before = trainer.evaluate()
    result = trainer.train(resume=options.resume)

    if accelerator.is_main_process:
        if recipe is None:
            hf_grow.save_grown(trainer.model, options.out, tokenizer=tokenizer)
        else:
            hf_grow.save_adapted(trainer.model, options.out, config=recipe)
        print(f"evaluation loss {before:.4f} → {result.eval_loss:.4f} in {result.steps} steps, saved in {options.out}")
    accelerator.end_training()


if __name__ == "__main__":
    try:
        main()
    except hf_grow.HfGrowError as error:
        raise SystemExit(f"Error: {error}") from error
