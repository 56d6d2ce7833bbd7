"""make_growable: the same outputs, the same keys, nothing else disturbed."""

import copy
import importlib.util
import logging
import shutil
import types

import pytest
import torch
import transformers
from models import (
    CAUSAL_TYPES,
    TASK_HEADS,
    assert_same,
    batch,
    causal_model,
    head_id,
    relative_difference,
    small_config,
    small_model,
    tensors,
)
from torch import nn
from torch.utils._python_dispatch import TorchDispatchMode
from transformers import (
    BertLMHeadModel,
    GPT2LMHeadModel,
    GPT2Model,
    LlamaForCausalLM,
    MambaConfig,
    MambaModel,
    QuantoConfig,
    Trainer,
    TrainingArguments,
)
from transformers.models.auto import modeling_auto

import hf_grow
from hf_grow import HfGrowError, make_growable
from hf_grow.modeling.growable_attention import attention_sites
from hf_grow.surgery.families import FAMILIES

every_head = pytest.mark.parametrize(("model_type", "stock_class"), TASK_HEADS, ids=head_id)


@every_head
@pytest.mark.parametrize("attn", ["eager", "sdpa"])
@pytest.mark.parametrize("padding", [None, "right", "left"])
def test_patched_model_gives_the_same_outputs(model_type, stock_class, attn, padding):
    model = small_model(stock_class, model_type, attn)
    inputs = batch(model, padding)
    stock = tensors(model, inputs, output_hidden_states=True)
    keys = list(model.state_dict())
    assert make_growable(model) is model
    assert_same(tensors(model, inputs, output_hidden_states=True), stock)
    assert list(model.state_dict()) == keys


def test_every_task_head_of_transformers_is_covered():
    names = [name for name in dir(modeling_auto) if name.startswith("MODEL_") and name.endswith("_NAMES")]
    mappings = [getattr(modeling_auto, name) for name in names]
    for model_type, family in FAMILIES.items():
        known = {cls.__name__ for cls in family.model_classes}
        wanted = {mapping[model_type] for mapping in mappings if isinstance(mapping.get(model_type), str)}
        module = getattr(transformers.models, model_type)
        exported = {
            name
            for name in dir(module)
            if isinstance(getattr(module, name), type)
            and issubclass(getattr(module, name), transformers.PreTrainedModel)
            and not name.endswith("PreTrainedModel")
        }
        assert wanted | exported <= known, model_type


@pytest.mark.parametrize("model_type", FAMILIES)
def test_gradients_are_the_same(model_type):
    stock = small_model(next(iter(FAMILIES[model_type].model_classes)), model_type)
    growable = make_growable(copy.deepcopy(stock))
    for model in (stock, growable):
        model(**batch(model)).last_hidden_state.square().sum().backward()
    for (name, first), second in zip(stock.named_parameters(), growable.parameters(), strict=True):
        assert (first.grad is None) == (second.grad is None), name
        assert first.grad is None or torch.equal(first.grad, second.grad), name


@pytest.mark.parametrize("model_type", FAMILIES)
def test_bfloat16_stays_bfloat16_and_close(model_type):
    stock = small_model(next(iter(FAMILIES[model_type].model_classes)), model_type).to(torch.bfloat16)
    expected = tensors(stock, batch(stock))["last_hidden_state"]
    found = tensors(make_growable(stock), batch(stock))["last_hidden_state"]
    assert found.dtype == torch.bfloat16
    assert relative_difference(found.float(), expected.float()) <= 1e-2


@pytest.mark.parametrize("attn", ["eager", "sdpa"])
@pytest.mark.parametrize(
    ("model_type", "changes"),
    [
        ("gpt2", {"scale_attn_by_inverse_layer_idx": True}),
        ("gpt2", {"reorder_and_upcast_attn": True}),
        ("gpt2", {"scale_attn_weights": False}),
        ("gpt2", {"tie_word_embeddings": False}),
        ("llama", {"attention_bias": True}),
        ("llama", {"head_dim": 12}),
        ("llama", {"num_key_value_heads": 4}),
        ("llama", {"tie_word_embeddings": True}),
        ("mistral", {"sliding_window": 4}),
        ("qwen2", {"use_sliding_window": True, "sliding_window": 4, "max_window_layers": 1}),
    ],
    ids=str,
)
def test_variants_of_a_family_give_the_same_outputs(model_type, changes, attn):
    model = causal_model(model_type, attn, **changes)
    expected = tensors(model, batch(model))
    assert_same(tensors(make_growable(model), batch(model)), expected)


@pytest.mark.parametrize("attn", ["eager", "sdpa"])
@pytest.mark.parametrize(
    ("stock_class", "model_type", "changes"),
    [
        (BertLMHeadModel, "bert", {"is_decoder": True}),
        (BertLMHeadModel, "bert", {"is_decoder": True, "add_cross_attention": True}),
        (GPT2LMHeadModel, "gpt2", {"add_cross_attention": True}),
    ],
    ids=head_id,
)
def test_decoders_with_cross_attention_give_the_same_outputs(stock_class, model_type, changes, attn):
    model = small_model(stock_class, model_type, attn, **changes)
    inputs = batch(model)
    if changes.get("add_cross_attention"):
        inputs["encoder_hidden_states"] = torch.randn(2, 7, 32)
        inputs["encoder_attention_mask"] = torch.tensor([[1] * 7, [1] * 5 + [0] * 2])
    expected = tensors(model, inputs)
    assert_same(tensors(make_growable(model), inputs), expected)
    kinds = {site.attention_type for site in attention_sites(model)}
    assert kinds == ({"self", "cross"} if changes.get("add_cross_attention") else {"self"})


@pytest.mark.parametrize("model_type", FAMILIES)
def test_sizes_can_be_read_from_every_attention_module(model_type):
    model = make_growable(small_model(next(iter(FAMILIES[model_type].model_classes)), model_type))
    for site in attention_sites(model):
        attention = site.attention
        assert (attention.n_heads, attention.query_key_dim, attention.value_dim) == (4, 8, 8)
        assert attention.n_kv_heads == (4 if model_type in ("gpt2", "bert") else 2)
        assert attention.scaling == 8**-0.5
    summary = model.growth_summary()
    assert [layer["layer"] for layer in summary["layers"]] == [0, 1]
    assert summary["parameters"] == model.num_parameters()


@pytest.mark.parametrize("model_type", FAMILIES)
def test_a_model_on_the_meta_device_becomes_growable(model_type):
    with torch.device("meta"):
        model = next(iter(FAMILIES[model_type].model_classes))(small_config(model_type))
    make_growable(model)
    hf_grow.widen_query_key(model, 0, 4)
    assert {parameter.device.type for parameter in model.parameters()} == {"meta"}
    assert attention_sites(model)[0].attention.query_key_dim == 12


def test_a_shared_config_object_is_left_alone():
    config = small_config("gpt2")
    first, second = GPT2Model(config), GPT2Model(config)
    make_growable(first)
    assert type(config) is type(second.config) and config.model_type == "gpt2"
    assert first.config.model_type == "growable_gpt2"
    assert first.h[0].attn.config is first.config


def test_output_attentions_work_before_and_after_patching():
    model = causal_model("llama", "eager")
    inputs = batch(model)
    before = model(**inputs, output_attentions=True).attentions
    after = make_growable(model)(**inputs, output_attentions=True).attentions
    assert len(before) == len(after) == 2
    assert all(torch.equal(first, second) for first, second in zip(before, after, strict=True))
    patched_first = make_growable(causal_model("llama", "eager"))
    assert len(patched_first(**inputs, output_attentions=True).attentions) == 2
    base = make_growable(small_model(GPT2Model, "gpt2", "eager"))
    assert len(base(**inputs, output_attentions=True).attentions) == 2


def test_hooks_training_mode_and_frozen_parameters_stay():
    model = causal_model("gpt2")
    calls = []
    model.transformer.h[0].attn.register_forward_hook(lambda *_: calls.append("attention"))
    model.transformer.h[0].attn.c_attn.register_forward_hook(lambda *_: calls.append("projection"))
    model.transformer.h[1].attn.c_attn.weight.requires_grad_(False)
    model.train()
    make_growable(model)
    hf_grow.widen_query_key(model, 0, 2)
    hf_grow.widen_query_key(model, 1, 2)
    model(**batch(model))
    assert calls == ["projection", "attention"]
    assert model.training and model.transformer.h[0].attn.training
    assert model.transformer.h[0].attn.c_attn.weight.requires_grad
    assert not model.transformer.h[1].attn.c_attn.weight.requires_grad
    assert model.transformer.h[1].attn.c_attn.bias.requires_grad


@pytest.mark.parametrize("model_type", CAUSAL_TYPES)
def test_a_model_dispatched_by_accelerate_grows(model_type, tmp_path):
    causal_model(model_type).save_pretrained(tmp_path)
    stock_class = type(causal_model(model_type))
    model = stock_class.from_pretrained(tmp_path, device_map={"": "cpu"})
    from accelerate.hooks import AlignDevicesHook, add_hook_to_module

    for module in model.modules():
        add_hook_to_module(module, AlignDevicesHook(execution_device="cpu"))
    expected = tensors(model, batch(model))
    make_growable(model)
    assert_same(tensors(model, batch(model)), expected)
    hf_grow.widen_query_key(model, 0, 3)
    assert relative_difference(tensors(model, batch(model))["logits"], expected["logits"]) <= 1e-5


def test_patching_twice_changes_nothing_and_says_so(caplog):
    model = make_growable(causal_model("gpt2"))
    summary = model.growth_summary()
    with caplog.at_level(logging.WARNING, logger="hf_grow"):
        assert make_growable(model) is model
    assert "growable already" in caplog.text
    assert model.growth_summary() == summary


def test_a_causal_model_uses_the_causal_loss():
    stock = causal_model("gpt2")
    ids = batch(stock)["input_ids"]
    expected = stock(ids, labels=ids).loss
    assert make_growable(stock).loss_type == "ForCausalLM"
    assert torch.equal(stock(ids, labels=ids).loss, expected)


@pytest.mark.parametrize("model_type", CAUSAL_TYPES)
def test_trainer_smooths_labels_as_for_the_stock_model(model_type, tmp_path):
    stock = causal_model(model_type)
    growable = make_growable(copy.deepcopy(stock))
    arguments = TrainingArguments(tmp_path, label_smoothing_factor=0.1, report_to="none", use_cpu=True)
    ids = batch(stock, None)["input_ids"]
    losses = [
        Trainer(model, arguments).compute_loss(model, {"input_ids": ids, "labels": ids.clone()})
        for model in (stock, growable)
    ]
    assert torch.equal(*losses)


@pytest.mark.parametrize("model_type", FAMILIES)
def test_models_from_one_growable_config_do_not_disturb_each_other(model_type):
    for stock_class in list(FAMILIES[model_type].model_classes)[:3]:
        first = make_growable(small_model(stock_class, model_type))
        second = type(first)(first.config)
        hf_grow.widen_query_key(second, 0, 1)
        assert first.config.hf_grow["layers"][0]["qk_head_dim"] == 8
        assert not first.growth_history["events"] and len(second.growth_history["events"]) == 1
        assert all(module.config is second.config for module in second.modules() if hasattr(module, "config"))


def test_the_folder_of_the_base_model_is_never_told(tmp_path):
    causal_model("gpt2").save_pretrained(tmp_path / "private" / "name")
    model = make_growable(GPT2LMHeadModel.from_pretrained(tmp_path / "private" / "name"))
    shutil.rmtree(tmp_path / "private")
    assert model.growth_history["base_model"] == "name"


def refused(model, message):
    """make_growable raises HfGrowError and leaves classes, config and weights alone."""
    classes = [type(module) for module in model.modules()] if isinstance(model, nn.Module) else None
    with pytest.raises(HfGrowError, match=message):
        make_growable(model)
    if classes is not None:
        assert [type(module) for module in model.modules()] == classes
    return model


def test_an_unknown_model_type_is_refused():
    config = MambaConfig(vocab_size=32, hidden_size=16, num_hidden_layers=1, state_size=4)
    refused(MambaModel(config), r"model_type 'mamba'. Known: bert, gpt2, llama, mistral, qwen2")


def test_what_is_not_a_transformers_model_is_refused():
    refused(nn.Linear(2, 2), "takes a transformers PreTrainedModel, not Linear")
    refused("gpt2", "not str")


def test_a_class_of_the_users_own_is_refused_with_advice():
    class Mine(GPT2Model):
        pass

    refused(Mine(small_config("gpt2")), "Mine is not one of transformers' own classes for 'gpt2'")


def test_projections_that_are_not_understood_are_refused():
    model = causal_model("llama")
    model.model.layers[1].self_attn.k_proj = torch.ao.nn.quantized.dynamic.Linear(32, 16)
    refused(model, "key projection of model.layers.1.self_attn is a torch.ao.* nothing can grow")
    model = causal_model("llama")
    model.model.layers[0].self_attn.q_proj.to(torch.float8_e4m3fn)
    refused(model, "float8_e4m3fn, beside which nothing can grow")
    assert model.config.model_type == "llama"


def test_a_forward_replaced_by_hand_is_refused():
    model = causal_model("gpt2")
    attention = model.transformer.h[0].attn
    attention.forward = types.MethodType(lambda self, *args, **kwargs: None, attention)
    refused(model, "replaced by hand")


@pytest.mark.skipif(importlib.util.find_spec("optimum") is None, reason="needs optimum-quanto (extra: quantized)")
def test_a_model_quantised_while_loading_computes_the_same(tmp_path):
    causal_model("llama").save_pretrained(tmp_path)
    model = LlamaForCausalLM.from_pretrained(tmp_path, quantization_config=QuantoConfig(weights="int8")).eval()
    expected = tensors(model, batch(model))["logits"]
    assert torch.equal(tensors(make_growable(model), batch(model))["logits"], expected)


@pytest.mark.parametrize("model_type", CAUSAL_TYPES)
def test_the_model_inside_a_task_head_is_growable_in_its_own_right(model_type, tmp_path):
    model = make_growable(causal_model(model_type))
    expected = tensors(model, batch(model))["logits"]
    hf_grow.widen_query_key(model.base_model, 0, 2)
    hf_grow.widen_query_key(model, 1, 2)
    assert [event["layer"] for event in model.growth_history["events"]] == [0, 1]
    assert model.base_model.growth_summary()["events"] == model.growth_history["events"]
    assert relative_difference(tensors(model, batch(model))["logits"], expected) <= 1e-5
    hf_grow.save_grown(model.base_model, tmp_path / "base")
    loaded = hf_grow.load_grown(tmp_path / "base").eval()
    assert type(loaded) is type(model.base_model)
    assert_same(tensors(loaded, batch(model)), tensors(model.base_model, batch(model)))


def test_a_new_growable_model_is_initialised_like_a_stock_one():
    torch.manual_seed(0)
    stock = GPT2LMHeadModel(small_config("gpt2", n_embd=64))
    grown = make_growable(copy.deepcopy(stock))
    hf_grow.add_heads(grown, 1, 1)
    for fresh in (type(grown)(grown.config), type(grown.transformer)(grown.config)):
        blocks = fresh.base_model.h
        for name in ("attn.c_proj", "mlp.c_proj"):
            for block in blocks:
                assert float(block.get_submodule(name).weight.detach().std()) == pytest.approx(0.01, rel=0.1), name


class Operations(TorchDispatchMode):
    """Lists the tensor operations that run."""

    def __init__(self):
        super().__init__()
        self.names = []

    def __torch_dispatch__(self, func, types, args=(), kwargs=None):
        # Two names for the same views of GPT-2's fused projection.
        self.names.append(str(func).replace("split_with_sizes.default", "split.Tensor"))
        return func(*args, **(kwargs or {}))


@pytest.mark.parametrize("model_type", CAUSAL_TYPES)
@pytest.mark.parametrize("attn", ["eager", "sdpa"])
def test_an_ungrown_model_runs_the_same_operations(model_type, attn):
    """What timings show only up to noise: patching adds no work to training or decoding."""
    stock = causal_model(model_type, attn)
    listed = []
    for model in (stock, make_growable(copy.deepcopy(stock))):
        ids = batch(model, None)["input_ids"]
        with Operations() as operations:
            model(ids, labels=ids).loss.backward()
            with torch.no_grad():
                cache = model(ids).past_key_values
                model(ids[:, :1], past_key_values=cache)
        listed.append(operations.names)
    # Sorted: GPT-2's queries are viewed as heads a little later than in the stock model.
    assert len(listed[0]) > 100 and sorted(listed[0]) == sorted(listed[1])
