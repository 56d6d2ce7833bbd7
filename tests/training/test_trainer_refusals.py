"""What training cannot do is said in one sentence before the first step, with the model as it was."""

import pytest
import torch
from accelerate import Accelerator, DistributedType
from models import causal_model, grow_everything, small_model
from peft import LoraConfig, PromptTuningConfig, get_peft_model
from runs import GROWTH, Stream, adapted, classified_rows, make_trainer, token_rows, values, weights, with_method
from transformers import BertForMaskedLM

from hf_grow import (
    GrowthConfig,
    GrowthSchedule,
    GrowthTrainer,
    HfGrowError,
    TrainConfig,
    make_growable,
    widen_query_key,
)
from hf_grow.surgery.base import base_hash, base_parameters


def unlabelled(rows):
    return [{"input_ids": row["input_ids"]} for row in rows]


def left_out(rows):
    return [{"input_ids": row["input_ids"], "labels": [-100] * len(row["labels"])} for row in rows]


def schedule(**options):
    return GrowthSchedule(**{"sequences": 5, **options})


REFUSED = {
    "no rows": ({"rows": []}, "training data is empty"),
    "an empty stream": ({"rows": Stream([])}, "training data is empty"),
    "text": ({"rows": "text"}, "must be a data set"),
    "no rows to evaluate on": ({"eval_rows": []}, "evaluation data is empty"),
    "no labels": ({"rows": unlabelled(token_rows())}, "batches must hold labels"),
    "no labels to evaluate on": ({"eval_rows": unlabelled(token_rows())}, "batches must hold labels"),
    "all labels left out": ({"rows": left_out(token_rows())}, "training data hold no labels"),
    "all labels left out of evaluation": ({"eval_rows": left_out(token_rows())}, "evaluation data hold no labels"),
    "text that is not tokens": ({"rows": [{"text": "a b"}] * 9}, "tokenise them first"),
    "sequences of several lengths": ({"rows": token_rows(5) + token_rows(5, length=7)}, "a collate function that pads"),
    "long sequences": ({"rows": token_rows(length=36) * 2}, None),
    "labels of another task": ({"rows": classified_rows()}, "does not fit"),
    "a token that is not there": ({"rows": [{"input_ids": [3, 4, 500], "labels": [3, 4, 5]}]}, "does not fit"),
    "growth without a schedule": ({"growth": GROWTH, "only": True}, "needs growth=GrowthConfig"),
    "too many columns": ({"schedule": schedule(at=(2,), max_query_key_dim=9)}, "more than max_query_key_dim=9"),
    "too many parameters": ({"schedule": schedule(at=(2,), max_parameters=10)}, "more than max_parameters=10"),
    "too small a budget": ({"at": (2,), "growth": GrowthConfig(budget=3)}, "is too small"),
    "growth after the last step": ({"at": (2, 6)}, "nothing left to train after growth at step 6 of 6"),
    "growth every so many steps beyond the last": ({"schedule": schedule(every=6)}, "nothing left to train"),
    "a plateau without evaluations": ({"schedule": schedule(plateau=2)}, "needs evaluations on the way"),
    "a plateau without data": ({"schedule": schedule(plateau=2), "eval_every": 1}, "give eval_every and eval_rows"),
    "fp16": ({"precision": "fp16"}, "cpu cannot train in fp16"),
    "nothing new": ({"train": "new"}, "needs something new"),
    "nothing new at first": ({"train": "new", "at": (2,)}, "needs something new"),
    "a base that changes": (
        {"train": "new", "at": (0,), "growth": GrowthConfig(columns=2, strategy="refactor")},
        "leaves the base as it is",
    ),
    "a tracker without a folder": ({"tracker": "tensorboard"}, "needs a folder"),
    "an unknown tracker": ({"tracker": "pigeon", "folder": "runs"}, "Unsupported logging capability"),
    "a tracker that is not installed": ({"tracker": "wandb", "folder": "runs"}, "is not installed"),
    "a config of another kind": ({"schedule": GROWTH}, "Give a GrowthSchedule"),
}


@pytest.mark.parametrize(("options", "words"), REFUSED.values(), ids=REFUSED)
def test_what_cannot_work_is_refused_before_training(options, words, tmp_path, monkeypatch):
    monkeypatch.chdir(tmp_path)
    options = dict(options)
    if words is None:
        options["rows"] = [{name: value * 2 for name, value in row.items()} for row in options["rows"]]
        words = "72 tokens, more than the 64 positions"
    model = causal_model("gpt2")
    start, modes = weights(model), [module.training for module in model.modules()]
    with pytest.raises(HfGrowError, match=words) as caught:
        if options.pop("only", False):
            GrowthTrainer(model, token_rows(), config=TrainConfig(steps=6), growth=GROWTH)
        else:
            make_trainer(model, options.pop("rows", None), options.pop("eval_rows", None), **options)
    assert "\n" not in str(caught.value)
    assert [module.training for module in model.modules()] == modes
    assert all(torch.equal(value, start[key]) for key, value in weights(model).items())
    assert not list(tmp_path.iterdir())


@pytest.mark.parametrize("model_type", ["llama", "bert"])
def test_positions_are_counted_in_every_family(model_type):
    """Rotary models would take longer sequences without a word."""
    model = small_model(BertForMaskedLM, "bert") if model_type == "bert" else causal_model(model_type)
    rows = [{name: value * 7 for name, value in row.items()} for row in token_rows()]
    with pytest.raises(HfGrowError, match="more than the 64 positions"):
        make_trainer(model, rows)


def test_the_first_rows_may_be_without_labels():
    rows = token_rows(6)
    trainer = make_trainer(causal_model("gpt2"), Stream(left_out(rows[:3]) + rows[3:]), rows[:1], batch_size=1)
    assert len(values(trainer.train())) == 3
    assert make_trainer(causal_model("gpt2"), rows, left_out(rows[:3]) + rows[3:], batch_size=1).evaluate() < 100


def test_a_long_sequence_to_evaluate_on_is_refused():
    rows = token_rows(9)
    rows[-1] = {name: value * 7 for name, value in rows[-1].items()}
    with pytest.raises(HfGrowError, match="70 tokens, more than the 64 positions"):
        make_trainer(causal_model("llama"), token_rows(), rows)


def test_a_long_sequence_on_the_way_is_named():
    rows = token_rows(4)
    trainer = make_trainer(causal_model("llama"), rows, batch_size=1, steps=4)
    last = trainer.feed._order(0)[2]
    rows[last] = {name: value * 7 for name, value in rows[last].items()}
    with pytest.raises(HfGrowError, match="70 tokens, more than the 64 positions"):
        trainer.train()
    assert trainer.state.step == 2


def test_a_model_with_live_adapters_grows_beside_them():
    inside = make_growable(causal_model("gpt2"))
    inside.add_adapter(LoraConfig(r=2, target_modules=["c_attn"], fan_in_fan_out=True))
    for model in (adapted(), inside):
        trainer = make_trainer(model, at=(2,))
        before = {name: weight.clone() for name, weight in base_parameters(model)}
        trainer.train()
        assert trainer.inner.active_growth == "default" and len(trainer.state.reports) == 1
        assert all(torch.equal(weight, before[name]) for name, weight in base_parameters(model))


def test_a_model_with_adapters_is_not_sharded():
    with pytest.raises(HfGrowError, match="cannot be sharded"):
        make_trainer(adapted(), shard=lambda model: model)


def test_growth_of_frozen_projections_is_refused():
    model = make_growable(causal_model("gpt2")).requires_grad_(False)
    model.transformer.ln_f.requires_grad_(True)
    with pytest.raises(HfGrowError, match="growth would never learn: use train='new'"):
        make_trainer(model, at=(2,))


def test_a_frozen_base_with_growth_before_the_first_step_trains_what_is_new():
    model = make_growable(causal_model("gpt2")).requires_grad_(False)
    make_trainer(model, at=(0,), train="new").train()
    assert base_hash(model) == model.growth_history["base_hash"]
    inserted = make_growable(causal_model("gpt2")).requires_grad_(False)
    make_trainer(inserted, at=(0,), train="new", steps=1, learning_rate=1e-12).train()
    assert any(not torch.equal(value, weights(inserted)[key]) for key, value in weights(model).items())


def test_prompts_of_peft_are_refused():
    prompted = get_peft_model(
        make_growable(causal_model("gpt2")), PromptTuningConfig(task_type="CAUSAL_LM", num_virtual_tokens=2)
    )
    with pytest.raises(HfGrowError, match="Prompts of PEFT are not trained here"):
        make_trainer(prompted)


def test_optimizers_that_cannot_step_on_shards_are_refused():
    with pytest.raises(HfGrowError, match="Adafactor cannot step on sharded parameters"):
        make_trainer(causal_model("gpt2"), shard=lambda model: model, optimizer="adafactor")


@pytest.mark.parametrize("way", ["FSDP", "DEEPSPEED"])
def test_other_ways_of_accelerate_are_refused(way, monkeypatch):
    monkeypatch.setattr(Accelerator, "distributed_type", property(lambda self: DistributedType[way]))
    with pytest.raises(HfGrowError, match=f"does not train with Accelerate's {way}"):
        make_trainer(causal_model("gpt2"))


def test_half_precision_is_worth_a_warning(caplog):
    make_trainer(causal_model("gpt2").bfloat16())
    assert "lose small steps" in caplog.text


def test_adapters_on_another_growth_of_the_base_are_not_resumed(tmp_path):
    def trainer(seed):
        model = make_growable(causal_model("gpt2"))
        widen_query_key(model, 0, 2, generator=torch.Generator().manual_seed(seed))
        lora = LoraConfig(r=2, target_modules=["c_attn"], fan_in_fan_out=True)
        torch.manual_seed(0)
        return make_trainer(get_peft_model(model, lora), folder=tmp_path / "run")

    trainer(0).train()
    with pytest.raises(HfGrowError, match="is of another model"):
        trainer(1).train(resume=True)


def test_adapters_on_a_stock_model_are_refused():
    stock = get_peft_model(causal_model("gpt2"), LoraConfig(r=2, target_modules=["c_attn"], fan_in_fan_out=True))
    with pytest.raises(HfGrowError, match="growable before PEFT wraps it"):
        make_trainer(stock)


def test_a_model_of_which_nothing_learns_is_refused():
    model = causal_model("gpt2").requires_grad_(False)
    with pytest.raises(HfGrowError, match="No parameter of the model learns"):
        make_trainer(model).train()


def test_growth_that_finds_nothing_leaves_nothing_to_train_alone(monkeypatch):
    """Or all of the base would learn, under the name of the new."""
    monkeypatch.setattr("hf_grow.training.prepared_run.grow_on_schedule", lambda *_, **__: None)
    model = make_growable(causal_model("gpt2"))
    start = weights(model)
    with pytest.raises(HfGrowError, match="needs something new"):
        make_trainer(model, train="new", at=(0,)).train()
    assert all(torch.equal(value, start[key]) for key, value in weights(model).items())


def test_there_is_no_evaluation_without_data():
    with pytest.raises(HfGrowError, match="give eval_rows"):
        make_trainer(causal_model("gpt2")).evaluate()


@pytest.mark.parametrize("where", ["loss", "gradient"])
def test_a_value_that_is_not_finite_ends_training_before_the_step(where, tmp_path):
    """A gradient may overflow where the loss does not."""
    model = causal_model("gpt2")
    trainer = make_trainer(model, steps=6, save_every=1, clip=None, folder=tmp_path)
    kept = {}

    def broken(run, loss, batch):
        if run.state.step != 3:
            return loss(batch)
        kept.update(weights(model))
        return loss(batch) * (float("nan") if where == "loss" else 1.0)

    def overflowing(gradient):
        return gradient * float("inf") if trainer.state.step == 3 else gradient

    if where == "gradient":
        model.transformer.ln_f.weight.register_hook(overflowing)
    words = f"The {where} is not finite in step 3"
    with with_method("loss", broken), pytest.raises(HfGrowError, match=words):
        trainer.train()
    assert all(torch.equal(value, kept[key]) for key, value in weights(model).items())
    assert (tmp_path / "checkpoint-3").is_dir() and not (tmp_path / "checkpoint-4").exists()


def test_a_grown_model_trains_new_weights_without_more_growth():
    model = grow_everything(make_growable(causal_model("gpt2")))
    assert len(values(make_trainer(model, train="new", steps=2).train())) == 2


@pytest.mark.parametrize(
    ("options", "words"),
    [
        ({"steps": 0}, "steps must be"),
        ({"batch_size": 1.5}, "batch_size must be"),
        ({"learning_rate": -1.0}, "learning_rate must be"),
        ({"learning_rate": float("nan")}, "learning_rate must be"),
        ({"clip": 0}, "clip must be"),
        ({"warmup": -1}, "warmup must be"),
        ({"betas": (0.9, 1.0)}, "betas must be"),
        ({"betas": 0.9}, "betas must be"),
        ({"precision": "fp8"}, "precision must be one of no, bf16, fp16"),
        ({"optimizer": "lion"}, "optimizer must be one of"),
        ({"lr_schedule": "step"}, "lr_schedule must be one of"),
        ({"train": "old"}, "train must be one of"),
        ({"eval_every": 0}, "eval_every must be"),
        ({"keep": 0}, "keep must be"),
        ({"new_learning_rate_multiplier": 2.0}, "new_learning_rate_multiplier is gone"),
    ],
)
def test_a_config_checks_its_values(options, words):
    with pytest.raises(HfGrowError, match=words):
        TrainConfig(**options)


def test_a_config_must_be_one():
    with pytest.raises(HfGrowError, match="Give a TrainConfig"):
        GrowthTrainer(causal_model("gpt2"), token_rows(), config={"steps": 3})
