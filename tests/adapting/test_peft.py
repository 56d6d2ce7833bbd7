"""PEFT's adapters and growth: one after the other, merged, and both at once."""

import copy

import pytest
import torch
from models import assert_same, batch, causal_model, fill_zeros, grow_everything, relative_difference
from peft import LoraConfig, PeftModel, get_peft_model
from peft.tuners.lora import LoraGAConfig, preprocess_loraga
from runs import make_trainer

import hf_grow
from hf_grow import GrowthConfig, HfGrowError, load_grown, make_growable, save_grown, save_growth
from hf_grow.modeling.growable_attention import attention_sites
from hf_grow.surgery.base import base_hash

TARGETS = {"gpt2": ["c_attn", "attn.c_proj"], "llama": ["q_proj", "k_proj", "v_proj", "o_proj"]}
METHODS = {
    "lora": {},
    "dora": {"use_dora": True},
    "lora_ga": {"init_lora_weights": "lora_ga", "lora_ga_config": LoraGAConfig()},
}
every_family = pytest.mark.parametrize("model_type", TARGETS)
every_method = pytest.mark.parametrize("method", METHODS)


def tokens(model):
    return batch(model, None)["input_ids"]


def loss(model):
    ids = tokens(model)
    return model(input_ids=ids, labels=ids).loss


@torch.no_grad()
def logits(model):
    return model.eval()(input_ids=tokens(model)).logits


def adapted(model, method, **changes):
    """The model with an adapter on all projections of its attention."""
    model_type = model.config.model_type.removeprefix("growable_")
    changes = {"target_modules": TARGETS[model_type], "fan_in_fan_out": model_type == "gpt2", **changes}
    config = LoraConfig(r=2, task_type="CAUSAL_LM", **METHODS[method], **changes)
    torch.manual_seed(0)
    if method == "lora_ga":
        preprocess_loraga(model, config, lambda: loss(model).backward())
    return get_peft_model(model, config).eval()


def train(model, steps=3, optimizer=None):
    """A few steps that move whatever may learn."""
    learning = [parameter for parameter in model.parameters() if parameter.requires_grad]
    optimizer = optimizer or torch.optim.AdamW(learning, lr=0.02)
    for _ in range(steps):
        optimizer.zero_grad()
        loss(model).backward()
        optimizer.step()
    return model


def grown(model_type):
    """A grown causal model whose new weights matter."""
    return fill_zeros(grow_everything(make_growable(causal_model(model_type))))


@every_method
@every_family
def test_a_model_with_a_merged_adapter_grows(model_type, method):
    peft_model = adapted(make_growable(causal_model(model_type)), method)
    start = logits(peft_model)
    learned = logits(train(peft_model))
    assert relative_difference(learned, start) > 1e-3
    merged = peft_model.merge_and_unload()
    assert relative_difference(logits(merged), learned) < 1e-5
    expected = logits(merged)
    assert relative_difference(logits(grow_everything(merged)), expected) < 1e-5
    ids = tokens(merged)
    batches = [{"input_ids": part, "labels": part} for part in ids.split(1)]
    _, report = hf_grow.grow(merged, batches, GrowthConfig(columns=2, heads=1), line_search_batches=batches)
    assert report.loss_after < report.loss_before
    assert report.loss_after == pytest.approx(float(loss(merged)), rel=1e-4)


@every_method
@every_family
def test_an_adapter_on_a_grown_model_merges_and_is_saved_with_it(model_type, method, tmp_path):
    model = grown(model_type)
    before = logits(model)
    peft_model = adapted(model, method)
    assert relative_difference(logits(peft_model), before) < 1e-5
    learned = logits(train(peft_model))
    assert relative_difference(learned, before) > 1e-3
    merged = peft_model.merge_and_unload()
    assert merged is model
    assert relative_difference(logits(merged), learned) < 1e-5
    save_grown(merged, tmp_path / "merged")
    assert torch.equal(logits(load_grown(tmp_path / "merged")), logits(merged))


@every_method
@every_family
def test_a_model_with_a_live_adapter_grows_beside_it_again_and_again(model_type, method):
    """LoRA first; the base and the adapter stay as they are, and what is measured is what they compute together."""
    model = causal_model(model_type)
    peft_model = train(adapted(model, method))
    before = copy.deepcopy(peft_model.state_dict())
    ids = tokens(model)
    batches = [{"input_ids": part, "labels": part} for part in ids.repeat(4, 1).split(1)]
    for amounts in ({"columns": 2}, {"value_columns": 1, "heads": 1}):
        expected = float(loss(peft_model))
        growth = GrowthConfig(**amounts)
        grown_model, report = hf_grow.grow(peft_model, batches, growth, line_search_batches=batches)
        assert grown_model is peft_model and report.loss_before == pytest.approx(expected, rel=1e-4)
        assert report.loss_after < report.loss_before
        assert report.loss_after == pytest.approx(float(loss(peft_model)), rel=1e-4)
    after = peft_model.state_dict()
    assert_same({name: after[name] for name in before}, before)
    if method == "lora_ga":
        # It takes its first step off the base.
        return
    with peft_model.growth_disabled(), peft_model.disable_adapter():
        assert torch.equal(logits(peft_model), logits(causal_model(model_type)))


@pytest.mark.parametrize("first", ["lora", "growth"])
@every_family
def test_adapters_and_growth_in_any_order_are_saved_loaded_and_merged(model_type, first, tmp_path):
    if first == "lora":
        peft_model = adapted(causal_model(model_type), "lora")
        hf_grow.make_growable(peft_model)
        fill_zeros(grow_everything(peft_model.get_base_model()))
    else:
        peft_model = adapted(hf_grow.attach_growth(grown(model_type)), "lora")
    mark = base_hash(peft_model)
    start = copy.deepcopy(peft_model.state_dict())
    train(hf_grow.freeze_base(peft_model))
    assert base_hash(peft_model) == mark == base_hash(causal_model(model_type))
    moved = {name for name, value in peft_model.state_dict().items() if not torch.equal(value, start[name])}
    assert moved == {name for name in start if "lora_" in name or ".grown." in name}
    hf_grow.save_adapted(peft_model, tmp_path / "both")
    restored = hf_grow.load_adapted(causal_model(model_type), tmp_path / "both")
    assert torch.equal(logits(restored), logits(peft_model))
    learned = logits(peft_model)
    with pytest.raises(HfGrowError, match="merge and unload them first"):
        hf_grow.merge_growth(peft_model)
    merged = hf_grow.merge_growth(peft_model.merge_and_unload())
    assert relative_difference(logits(merged), learned) < 1e-5
    save_grown(merged, tmp_path / "whole")
    assert torch.equal(logits(load_grown(tmp_path / "whole")), logits(merged))


@every_family
def test_growth_is_not_taken_off_under_a_live_adapter(model_type):
    peft_model = adapted(grown(model_type), "lora")
    before = copy.deepcopy(peft_model.state_dict())
    with pytest.raises(HfGrowError, match="merge and unload its adapters"):
        hf_grow.remove_growth(peft_model)
    assert_same(peft_model.state_dict(), before)


@pytest.mark.parametrize("method", ["lora", "dora"])
@every_family
def test_growth_and_adapters_learn_together_and_come_back(model_type, method, tmp_path):
    stock_hash = base_hash(causal_model(model_type))
    model = hf_grow.attach_growth(grown(model_type))
    peft_model = adapted(model, method)
    start = copy.deepcopy(peft_model.state_dict())
    hf_grow.freeze_base(peft_model)
    learning = [parameter for parameter in peft_model.parameters() if parameter.requires_grad]
    train(peft_model, optimizer=torch.optim.AdamW(learning, lr=0.02, weight_decay=0.1))
    assert base_hash(peft_model) == base_hash(model) == stock_hash == model.growth_history["base_hash"]
    moved = {name for name, value in peft_model.state_dict().items() if not torch.equal(value, start[name])}
    assert moved == {name for name in start if "lora_" in name or ".grown." in name}

    save_growth(peft_model, tmp_path / "growth")
    peft_model.save_pretrained(tmp_path / "adapter")
    fresh = hf_grow.load_growth(causal_model(model_type), tmp_path / "growth")
    restored = PeftModel.from_pretrained(fresh, tmp_path / "adapter")
    assert_same(restored.state_dict(), peft_model.state_dict())
    assert torch.equal(logits(restored), logits(peft_model))


def test_lora_ga_changes_the_base_so_growth_is_saved_whole(tmp_path):
    """It takes its first step off the base's weights, and says so only here."""
    model = grown("llama")
    peft_model = adapted(model, "lora_ga")
    with pytest.raises(HfGrowError, match=r"weights are not those of the first growth.*use save_grown"):
        save_growth(peft_model, tmp_path / "growth")
    assert not (tmp_path / "growth").exists()
    save_grown(peft_model.merge_and_unload(), tmp_path / "whole")


def test_modules_that_peft_trains_as_copies_are_no_part_of_the_base(tmp_path):
    model = hf_grow.attach_growth(grown("llama"))
    peft_model = hf_grow.freeze_base(adapted(model, "lora", modules_to_save=["lm_head"]))
    head = peft_model.get_base_model().lm_head
    assert not head.original_module.weight.requires_grad
    train(peft_model, steps=1)
    assert not torch.equal(head.modules_to_save["default"].weight, head.original_module.weight)
    model = hf_grow.attach_growth(grown("llama"))
    peft_model = train(adapted(model, "lora", modules_to_save=["lm_head"]))
    assert base_hash(peft_model) == base_hash(causal_model("llama"))
    save_growth(peft_model, tmp_path / "growth")
    peft_model.save_pretrained(tmp_path / "adapter")
    fresh = hf_grow.load_growth(causal_model("llama"), tmp_path / "growth")
    restored = PeftModel.from_pretrained(fresh, tmp_path / "adapter")
    assert torch.equal(logits(restored), logits(peft_model))


def test_growth_is_swapped_beside_adapters(tmp_path):
    save_growth(grown("llama"), tmp_path / "growth")
    peft_model = train(adapted(causal_model("llama"), "lora", target_modules=["down_proj", "q_proj", "o_proj"]))
    before = logits(peft_model)
    assert hf_grow.load_growth(peft_model, tmp_path / "growth") is peft_model
    assert relative_difference(logits(peft_model), before) > 1e-2
    hf_grow.remove_growth(peft_model)
    assert torch.equal(logits(peft_model), before)


@every_family
def test_a_wrapped_model_tells_its_sizes(model_type):
    model = grown(model_type)
    plain = model.growth_summary()
    peft_model = adapted(model, "lora")
    wrapped = peft_model.growth_summary()
    assert wrapped["layers"] == plain["layers"] and wrapped["events"] == plain["events"]
    dims = [site.attention.dims for site in attention_sites(model)]
    assert [site.attention.dims for site in attention_sites(peft_model)] == dims


def test_a_model_with_live_adapters_is_not_saved_as_a_whole(tmp_path):
    model = grown("llama")
    peft_model = adapted(model, "lora")
    for given in (model, peft_model):
        with pytest.raises(HfGrowError, match=r"has adapters, which would be lost: merge and unload"):
            save_grown(given, tmp_path / "model")
    assert not (tmp_path / "model").exists()


def test_dora_on_weights_of_norm_zero_is_refused():
    model = make_growable(causal_model("llama"))
    hf_grow.widen_query_key(model, 0, 2)
    wrapped = get_peft_model(model, LoraConfig(r=2, target_modules=["q_proj", "k_proj"], use_dora=True))
    with pytest.raises(HfGrowError, match="DoRA divides by the norms"):
        make_trainer(wrapped)
