"""`finetune` in Python: the command line's work in one call. What it trains and saves is tested there."""

from dataclasses import replace

import pytest
import torch
from finetunes import BUDGET, LENGTH, loss_on
from transformers import AutoModelForCausalLM, AutoTokenizer

import hf_grow
from hf_grow import AdaptConfig, Evaluation, GrowthConfig, GrowthSchedule, TrainConfig, finetuning
from hf_grow.data import DataConfig
from hf_grow.finetuning import training_config


@pytest.fixture
def start(data, tmp_path):
    """The arguments that every call has."""
    return {
        "model": AutoModelForCausalLM.from_pretrained(hf_grow.SMALL_MODEL),
        "tokenizer": AutoTokenizer.from_pretrained(hf_grow.SMALL_MODEL),
        "data": str(data / "train.txt"),
        "out": tmp_path / "out",
        "config": TrainConfig(steps=3, batch_size=4, learning_rate=1e-3),
        "data_config": DataConfig(length=LENGTH),
        "evaluation": Evaluation(data=str(data / "other.txt"), max_sequences=4),
        "growth_sequences": 8,
        "progress": False,
    }


def test_a_stock_model_grows_trains_and_is_saved(start, data):
    events = {"growth": GrowthConfig(columns=2), "schedule": GrowthSchedule(at=(0, 2), sequences=8)}
    result = hf_grow.finetune(**start, **events)
    saved = hf_grow.load_grown(start["out"])
    assert result.model is start["model"]
    for name, value in result.model.state_dict().items():
        assert torch.equal(saved.state_dict()[name], value), name
    assert result.eval_before == pytest.approx(loss_on(hf_grow.small_model(), data), rel=1e-5)
    assert result.eval_after == pytest.approx(loss_on(saved, data), rel=1e-5)
    assert [event["training_step"] for event in result.growth] == [0, 2]
    assert "growth at step 2" in str(result) and "model" not in result.summary()
    with pytest.raises(hf_grow.HfGrowError, match="exists and is not empty"):
        hf_grow.finetune(**start, **events)


def test_a_frozen_model_gets_an_adapter(start):
    recipe = AdaptConfig(method="grow+lora", budget=BUDGET)
    result = hf_grow.finetune(**start, recipe=recipe, growth_only=True)
    assert 0 < result.trainable_parameters == hf_grow.trainable_parameters(result.model) <= BUDGET
    assert hf_grow.trainable_parameters(hf_grow.load_adapted(hf_grow.small_model(), start["out"])) <= BUDGET


def test_lora_is_merged_into_the_model_that_is_saved(start):
    result = hf_grow.finetune(**start, recipe=AdaptConfig(method="lora", budget=BUDGET))
    saved = hf_grow.load_grown(start["out"]).state_dict()
    found = result.model.state_dict()
    assert found.keys() == saved.keys() and all(torch.equal(value, saved[name]) for name, value in found.items())


def test_what_the_user_says_of_training_holds_without_a_recipe(start):
    events = {"growth": GrowthConfig(columns=2), "schedule": GrowthSchedule(at=(0,), sequences=8)}
    settings = replace(start["config"], train="new")
    result = hf_grow.finetune(**{**start, "config": settings}, **events)
    layers, heads, columns, inputs = 4, 8, 2, 129
    assert result.trainable_parameters == layers * heads * columns * inputs * 2
    stock = hf_grow.small_model().transformer.wte.weight
    assert torch.equal(hf_grow.load_grown(start["out"]).transformer.wte.weight, stock)


def test_without_a_config_training_follows_from_the_recipe_and_the_data():
    data_config, recipe = DataConfig(batch_size=3), AdaptConfig()
    wanted = TrainConfig(batch_size=3, learning_rate=3e-3, train="new")
    assert training_config(None, recipe, data_config) == wanted
    assert training_config(None, None, data_config) == TrainConfig(batch_size=3)
    assert training_config(TrainConfig(learning_rate=1e-5), recipe, DataConfig()).learning_rate == 1e-5


def test_one_trainer_does_all(start, monkeypatch):
    made = []
    monkeypatch.setattr(
        finetuning, "GrowthTrainer", lambda *given, **more: made.append(more) or hf_grow.GrowthTrainer(*given, **more)
    )
    hf_grow.finetune(**start, recipe=AdaptConfig(method="lora", budget=BUDGET))
    assert len(made) == 1


@pytest.mark.parametrize(
    ("options", "message"),
    [
        ({"recipe": AdaptConfig(), "growth": GrowthConfig(columns=1)}, "leave growth and schedule out"),
        ({"growth_only": True}, "leave growth_only out"),
        ({"growth": GrowthConfig(columns=1)}, "needs growth=GrowthConfig"),
        ({"data_config": DataConfig(length=LENGTH, batch_size=2)}, "has batch_size=2, the TrainConfig 4"),
        (
            {"recipe": AdaptConfig(method="lora"), "config": TrainConfig(train="new")},
            "train='new' has no meaning with method='lora'",
        ),
        ({"config": TrainConfig(train="new")}, "train='new' needs something new"),
        ({"config": {"steps": 3}}, "Give a TrainConfig"),
    ],
)
def test_what_does_not_go_together_is_refused(start, options, message, tmp_path):
    with pytest.raises(hf_grow.HfGrowError, match=message):
        hf_grow.finetune(**{**start, **options})
    assert not any(tmp_path.iterdir())


@pytest.mark.parametrize(
    ("events", "message"),
    [
        ({"growth": GrowthConfig(columns=1)}, "needs growth=GrowthConfig"),
        ({"growth": GrowthConfig(columns=1), "schedule": GrowthSchedule(at=(3,))}, "nothing left to train"),
    ],
)
def test_what_needs_no_model_is_refused_before_one_is_touched(start, events, message):
    arguments = start | {"model": None, "tokenizer": None, "data": "no such file.txt"}
    with pytest.raises(hf_grow.HfGrowError, match=message):
        hf_grow.finetune(**arguments, **events)


def test_nothing_is_drawn_to_measure_on_where_nothing_grows(start, monkeypatch):
    monkeypatch.setattr(finetuning.Feed, "sample", lambda *_: pytest.fail("LoRA needs no measuring"))
    hf_grow.finetune(**start, recipe=AdaptConfig(method="lora", budget=BUDGET), growth_only=True)
