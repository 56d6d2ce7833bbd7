"""Files as users of the present version will have them: run by hand at a release, so that later ones read them.

python tests/released/write_files.py tests/released/VERSION
"""

import json
import shutil
import sys
import tempfile
from dataclasses import replace
from pathlib import Path
from typing import Any

import torch
from released_runs import (
    AMOUNTS,
    COLLECT,
    RECIPE,
    SAVED_STEP,
    adapted_run,
    callback_run,
    growth_run,
    load_base,
    logits,
    losses,
    new_base,
    token_batches,
)
from safetensors.torch import save_file

import hf_grow
from hf_grow import CollectConfig, GrowthConfig

# What is large and needed neither to load nor to resume.
LEFT_OUT = ("*.py", "README.md", "*.png", "tokenizer*", "generation_config.json", "training_args.bin", "rng_state.pth")


def main(folder: Path) -> None:
    """All files of a release."""
    torch.set_num_threads(1)
    new_base().save_pretrained(folder / "base")
    outputs = {"input_ids": token_batches()[0]["input_ids"][:2].contiguous(), "base": logits(load_base(folder))}
    expected: dict[str, Any] = {"base": {"parameters": load_base(folder).num_parameters()}}
    for name, model in write_models(folder).items():
        outputs[name] = logits(model).contiguous()
        expected[name] = {"parameters": sum(parameter.numel() for parameter in model.parameters())}
    for name, loss in write_measurements(folder).items():
        expected[name] = loss
    for write in (write_growth_run, write_adapted_run, write_callback_run):
        with tempfile.TemporaryDirectory() as aside:
            expected |= write(folder, Path(aside))
    save_file(outputs, folder / "logits.safetensors")
    (folder / "expected.json").write_text(json.dumps(expected, indent=1) + "\n", encoding="utf-8")
    for pattern in LEFT_OUT:
        for file in folder.rglob(pattern):
            file.unlink()


def write_models(folder: Path) -> dict[str, Any]:
    """A grown model, growth alone and an adapter, each as saved."""
    collect = replace(COLLECT, target=None)
    grown, _ = hf_grow.grow(load_base(folder), token_batches(), GrowthConfig(**AMOUNTS), collect=collect)
    hf_grow.widen_query_key(grown, 0, 1, generator=torch.Generator().manual_seed(0))
    hf_grow.save_grown(grown, folder / "grown")
    bought, _ = hf_grow.grow(load_base(folder), token_batches(), GrowthConfig(budget="10%"), collect=collect)
    hf_grow.save_growth(bought, folder / "growth")
    # With a step, as otherwise nothing would be seen of it.
    recipe = replace(RECIPE, step_size=1.0)
    adapted, _ = hf_grow.adapt(load_base(folder), token_batches(), recipe)
    with torch.no_grad():
        for name, parameter in adapted.named_parameters():
            if "lora_B" in name:
                parameter.normal_(generator=torch.Generator().manual_seed(1))
    hf_grow.save_adapted(adapted, folder / "adapted", config=recipe)
    return {"grown": grown, "growth": bought, "adapted": adapted}


def write_measurements(folder: Path) -> dict[str, Any]:
    """Statistics and plans, and what inserting the plans does."""
    expected: dict[str, Any] = {}
    model = hf_grow.make_growable(load_base(folder))
    collect = replace(COLLECT, target=None, kinds=("columns", "value_columns", "heads"), columns=2, value_columns=2)
    statistics = hf_grow.collect_statistics(model, token_batches(), collect)
    statistics.save(folder / "statistics.safetensors")
    plan = hf_grow.plan_growth(statistics, GrowthConfig(**AMOUNTS))
    expected["statistics"] = {
        "loss": statistics.loss,
        "steps": statistics.step_sizes,
        "sequences": statistics.sequences,
    }
    exact = hf_grow.collect_statistics(model, token_batches(), CollectConfig(collection="exact"))
    refactored = hf_grow.plan_growth(exact, GrowthConfig(columns=1, strategy="refactor"))
    for name, one in {"plan": plan, "plan-refactor": refactored}.items():
        one.save(folder / f"{name}.safetensors")
        report = hf_grow.insert_growth(hf_grow.make_growable(load_base(folder)), one, token_batches())
        kept = ("form", "step", "loss_before", "loss_after", "parameters_before", "parameters_after")
        expected[name] = {field: getattr(report, field) for field in kept}
    return expected


def write_growth_run(folder: Path, aside: Path) -> dict[str, Any]:
    """The checkpoint half way of a run that went on to its end, and that end."""
    trainer = growth_run(load_base(folder), aside / "run")
    result = trainer.train()
    _keep_half_way(aside / "run", folder / "run")
    return {
        "run": {
            "losses": losses(result.history),
            "eval_loss": result.eval_loss,
            "growth_steps": [report["training_step"] for report in result.reports],
            "parameters": trainer.model.num_parameters(),
        }
    }


def write_adapted_run(folder: Path, aside: Path) -> dict[str, Any]:
    """As above, of `finetune` on a frozen model."""
    result = adapted_run(load_base(folder), aside / "run", aside / "out")
    _keep_half_way(aside / "run", folder / "adapted-run")
    kept = ("loss", "eval_before", "eval_after", "parameters", "trainable_parameters")
    return {"adapted-run": {field: getattr(result, field) for field in kept}}


def write_callback_run(folder: Path, aside: Path) -> dict[str, Any]:
    """As above, of transformers' Trainer."""
    trainer, grower = callback_run(load_base(folder), aside / "run")
    trainer.train()
    _keep_half_way(aside / "run", folder / "trainer-run")
    return {
        "trainer-run": {
            "losses": losses(trainer.state.log_history),
            "events": grower.progress.events,
            "parameters": trainer.model.num_parameters(),
        }
    }


def _keep_half_way(run: Path, into: Path) -> None:
    """A run's folder as it was when it saved its first checkpoint."""
    for place in run.iterdir():
        if place.name in ("start", f"checkpoint-{SAVED_STEP}"):
            shutil.copytree(place, into / place.name)


if __name__ == "__main__":
    main(Path(sys.argv[1]))
