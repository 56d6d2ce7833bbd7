"""`finetune` in Python: the command line's work in one call. What it trains and saves is tested there."""

import pytest
import torch
from test_cli_finetune import BUDGET, LENGTH, data, loss_on  # noqa: F401
from transformers import AutoModelForCausalLM, AutoTokenizer

import hf_grow
from hf_grow import AdaptConfig, Evaluation, GrowthConfig, GrowthSchedule, TrainConfig
from hf_grow.data import DataConfig


@pytest.fixture
def start(data, tmp_path):  # noqa: F811
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


def test_a_stock_model_grows_trains_and_is_saved(start, data):  # noqa: F811
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


@pytest.mark.parametrize(
    ("options", "message"),
    [
        ({"recipe": AdaptConfig(), "growth": GrowthConfig(columns=1)}, "leave growth and schedule out"),
        ({"growth_only": True}, "leave growth_only out"),
        ({"growth": GrowthConfig(columns=1)}, "needs growth=GrowthConfig"),
    ],
)
def test_what_does_not_go_together_is_refused(start, options, message, tmp_path):
    with pytest.raises(hf_grow.HfGrowError, match=message):
        hf_grow.finetune(**start, **options)
    assert not any(tmp_path.iterdir())
