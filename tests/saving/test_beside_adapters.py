"""Growth that learns beside PEFT's adapters is in what PEFT and transformers' Trainer save, and comes back with it."""

import copy
import logging

import pytest
import torch
from growth_beside_base import batches, rows
from models import assert_same, causal_model
from peft import LoraConfig, PeftModel, get_peft_model
from transformers import Trainer, TrainingArguments

import hf_grow
from hf_grow import AdaptConfig, GrowthConfig, HfGrowError

RECIPE = AdaptConfig(method="grow+lora", columns=1, value_columns=2, rank=2)


def adapted(recipe=RECIPE):
    model, _ = hf_grow.adapt(causal_model("llama"), batches(), recipe)
    return model


def wrapped_by_hand():
    """Growth first, then PEFT, then the function that lets growth learn."""
    model = causal_model("llama")
    hf_grow.grow(model, batches(), GrowthConfig(columns=1, value_columns=2, attach=True))
    return hf_grow.freeze_base(get_peft_model(model, LoraConfig(r=2, target_modules=["q_proj", "v_proj"])))


def trainer(model, folder, eval_rows=None, **changes):
    options = {"max_steps": 4, "per_device_train_batch_size": 2, "learning_rate": 1e-2, "save_strategy": "steps"}
    options |= {"save_steps": 2, "report_to": "none", "use_cpu": True, "disable_tqdm": True}
    arguments = TrainingArguments(str(folder), **options | changes)
    return Trainer(model, arguments, train_dataset=rows(), eval_dataset=eval_rows)


@pytest.mark.parametrize("make", [adapted, wrapped_by_hand])
def test_a_run_of_transformers_trainer_goes_on_with_growth_and_adapters(make, tmp_path):
    model = make()
    start = copy.deepcopy(model.state_dict())
    trainer(model, tmp_path / "run").train()
    assert {name for name, value in model.state_dict().items() if not torch.equal(value, start[name])} >= {
        name for name in start if ".grown." in name
    }
    again = make()
    trainer(again, tmp_path / "run").train(resume_from_checkpoint=str(tmp_path / "run" / "checkpoint-2"))
    assert_same(again.state_dict(), model.state_dict())


def test_what_a_trainer_saved_is_loaded_onto_the_base(tmp_path):
    model = adapted()
    run = trainer(model, tmp_path / "run")
    run.train()
    run.save_model(str(tmp_path / "saved"))
    for folder in (tmp_path / "saved", tmp_path / "run" / "checkpoint-4"):
        loaded = hf_grow.load_adapted(causal_model("llama"), folder)
        assert_same(loaded.state_dict(), model.state_dict())
        summary = hf_grow.inspect_checkpoint(folder)
        assert summary["growth_only"] and summary["lora"] and len(summary["events"]) == 1


def test_the_best_checkpoint_is_taken_with_its_growth(tmp_path):
    model = adapted()
    # The highest loss is that of the first step.
    changes = {
        "greater_is_better": True,
        "save_steps": 1,
        "load_best_model_at_end": True,
        "lr_scheduler_type": "constant",
    }
    run = trainer(model, tmp_path / "run", rows()[:4], eval_strategy="steps", eval_steps=1, **changes)
    run.train()
    best = run.state.best_model_checkpoint
    assert not best.endswith("checkpoint-4")
    assert_same(model.state_dict(), hf_grow.load_adapted(causal_model("llama"), best).state_dict())


def test_adapters_and_growth_each_keep_a_folder_of_their_own(tmp_path):
    model = adapted()
    hf_grow.save_adapted(model, tmp_path / "both")
    assert not (tmp_path / "both" / "lora" / "growth").exists()
    model.save_pretrained(tmp_path / "peft")
    assert_same(
        PeftModel.from_pretrained(
            hf_grow.load_growth(causal_model("llama"), tmp_path / "peft" / "growth"), tmp_path / "peft"
        ).state_dict(),
        model.state_dict(),
    )
    with model.get_base_model().growth_disabled():
        model.save_pretrained(tmp_path / "lora alone")
    assert not (tmp_path / "lora alone" / "growth").exists()


def test_growth_of_other_sizes_is_refused_before_anything_is_loaded(tmp_path):
    adapted(AdaptConfig(method="grow+lora", value_columns=3, rank=2)).save_pretrained(tmp_path)
    model = adapted()
    before = copy.deepcopy(model.state_dict())
    with pytest.raises(HfGrowError, match="holds growth of other sizes than this model has"):
        model.load_adapter(str(tmp_path), "default")
    assert_same(model.state_dict(), before)


def test_another_adapter_leaves_growth_as_it_is_and_says_so(tmp_path, caplog):
    model = adapted()
    trainer(model, tmp_path / "run", save_strategy="no").train()
    model.save_pretrained(tmp_path / "saved")
    fresh = adapted()
    before = copy.deepcopy(fresh.state_dict())
    with caplog.at_level(logging.WARNING, logger="hf_grow"):
        fresh.load_adapter(str(tmp_path / "saved"), "second")
    assert "was not loaded with the adapter" in caplog.text
    assert_same({name: fresh.state_dict()[name] for name in before}, before)


def test_lora_without_growth_is_left_to_peft():
    model = hf_grow.freeze_base(get_peft_model(causal_model("llama"), LoraConfig(r=2, target_modules=["q_proj"])))
    assert type(model) is PeftModel
