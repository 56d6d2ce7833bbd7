"""Growth that learns beside PEFT's adapters is in what PEFT and transformers' Trainer save, and comes back with it."""

import copy
import logging
import pickle

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


def wrapped_by_hand(name="mine", **changes):
    """Growth first, then PEFT with an adapter of a name, then the function that lets growth learn."""
    model = causal_model("llama")
    hf_grow.grow(model, batches(), GrowthConfig(columns=1, value_columns=2, attach=True))
    config = LoraConfig(r=2, target_modules=["q_proj", "v_proj"], **changes)
    torch.manual_seed(0)
    return hf_grow.freeze_base(get_peft_model(model, config, name))


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


@pytest.mark.parametrize("make", [adapted, wrapped_by_hand])
def test_what_a_trainer_saved_is_loaded_onto_the_base(make, tmp_path):
    model = make()
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


def test_an_adapter_of_any_name_is_saved_and_loaded(tmp_path):
    model = wrapped_by_hand()
    hf_grow.save_adapted(model, tmp_path / "one")
    assert_same(hf_grow.load_adapted(causal_model("llama"), tmp_path / "one").state_dict(), model.state_dict())
    model.add_adapter("second", LoraConfig(r=2, target_modules=["q_proj"]))
    with pytest.raises(HfGrowError, match="several adapters"):
        hf_grow.save_adapted(model, tmp_path / "two")
    model.save_pretrained(tmp_path / "two")
    with pytest.raises(HfGrowError, match="several adapters"):
        hf_grow.load_adapted(causal_model("llama"), tmp_path / "two")
    with pytest.raises(HfGrowError, match="would be saved where growth is"):
        wrapped_by_hand("growth")


def test_growth_that_is_gone_is_not_left_in_the_folder(tmp_path):
    model = adapted()
    model.save_pretrained(tmp_path)
    hf_grow.remove_growth(model)
    model.save_pretrained(tmp_path)
    assert not (tmp_path / "growth").exists()


def test_growth_that_is_not_finite_is_refused_before_anything_is_written(tmp_path):
    model = adapted()
    with torch.no_grad():
        hf_grow.growth_parameters(model)[0].fill_(float("nan"))
    with pytest.raises(HfGrowError, match="not finite"):
        model.save_pretrained(tmp_path / "saved")
    assert not (tmp_path / "saved").exists()


def test_a_model_with_growth_beside_adapters_is_pickled():
    model = adapted()
    again = pickle.loads(pickle.dumps(model))
    assert type(again) is type(model) and isinstance(again, PeftModel)
    assert_same(again.state_dict(), model.state_dict())


def test_tokens_that_learn_beside_growth_are_no_part_of_the_base(tmp_path):
    model = wrapped_by_hand("default", trainable_token_indices=[3, 4])
    trainer(model, tmp_path / "run", save_strategy="no").train()
    hf_grow.save_adapted(model, tmp_path / "saved")
    assert_same(hf_grow.load_adapted(causal_model("llama"), tmp_path / "saved").state_dict(), model.state_dict())


def test_adapters_that_would_be_saved_without_growth_are_refused():
    model = causal_model("llama")
    hf_grow.grow(model, batches(), GrowthConfig(columns=1, attach=True))
    model.add_adapter(LoraConfig(r=2, target_modules=["q_proj"]))
    with pytest.raises(HfGrowError, match="not in a PeftModel"):
        hf_grow.freeze_base(model)
