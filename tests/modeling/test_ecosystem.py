"""What a transformers user does with a model still works after growth."""

import copy
import importlib.util
import pickle

import pytest
import torch
from models import (
    CAUSAL_TYPES,
    assert_same,
    batch,
    causal_model,
    fill_new_weights,
    grow_everything,
    relative_difference,
    small_model,
    tensors,
)
from transformers import AttentionInterface, AutoTokenizer, pipeline
from transformers.integrations.sdpa_attention import sdpa_attention_forward
from transformers.masking_utils import ALL_MASK_ATTENTION_FUNCTIONS, AttentionMaskInterface
from transformers.modeling_utils import ALL_ATTENTION_FUNCTIONS

import hf_grow
from hf_grow import make_growable
from hf_grow.assets import SMALL_MODEL
from hf_grow.modeling.growable_attention import attention_sites
from hf_grow.surgery.families import FAMILIES

every_family = pytest.mark.parametrize("model_type", FAMILIES)
every_causal = pytest.mark.parametrize("model_type", CAUSAL_TYPES)


def grown_base(model_type, attn="sdpa", **changes):
    """A grown base model whose new weights matter."""
    stock = small_model(next(iter(FAMILIES[model_type].model_classes)), model_type, attn, **changes)
    return fill_new_weights(grow_everything(make_growable(stock)))


def grown_causal(model_type, attn="sdpa", **changes):
    """A grown causal model whose new weights matter."""
    return fill_new_weights(grow_everything(make_growable(causal_model(model_type, attn, **changes))))


@every_family
def test_output_attentions_have_the_new_heads(model_type):
    model = grown_base(model_type, "eager")
    attentions = model(**batch(model), output_attentions=True).attentions
    assert [layer.shape[1] for layer in attentions] == [site.attention.n_heads for site in attention_sites(model)]


@every_family
def test_gradient_checkpointing_gives_the_same_gradients(model_type):
    plain = grown_base(model_type).train()
    for module in plain.modules():
        if isinstance(module, torch.nn.Dropout):
            module.p = 0.0
    checkpointed = copy.deepcopy(plain)
    checkpointed.gradient_checkpointing_enable()
    for model in (plain, checkpointed):
        model(**batch(model), use_cache=False).last_hidden_state.square().sum().backward()
    for (name, first), second in zip(plain.named_parameters(), checkpointed.parameters(), strict=True):
        assert first.grad is None or torch.equal(first.grad, second.grad), name


@every_family
def test_deepcopy_and_pickled_state_dicts_carry_the_growth(model_type):
    model = grown_base(model_type)
    expected = tensors(model, batch(model))
    twin = copy.deepcopy(model)
    hf_grow.widen_query_key(twin, 0, 1)
    assert attention_sites(model)[0].attention.query_key_dim == 11
    assert model.config.hf_grow["layers"][0]["qk_head_dim"] == 11
    fresh = type(model)(copy.deepcopy(model.config)).eval()
    fresh.load_state_dict(pickle.loads(pickle.dumps(model.state_dict())))
    assert_same(tensors(fresh, batch(model)), expected)


@every_family
def test_moving_between_dtypes_keeps_the_model_growable(model_type):
    model = grown_base(model_type)
    expected = tensors(model, batch(model))["last_hidden_state"]
    half = tensors(model.to(torch.bfloat16), batch(model))["last_hidden_state"]
    assert half.dtype == torch.bfloat16
    assert float((half.float() - expected).norm() / expected.norm()) < 0.1
    hf_grow.widen_value(model.to(torch.float32), 0, 1)
    assert tensors(model, batch(model))["last_hidden_state"].dtype == torch.float32


@pytest.mark.slow
@pytest.mark.parametrize("model_type", ["bert", "llama", "mistral", "qwen2"])
def test_flex_attention_agrees_with_eager(model_type):
    model = grown_base(model_type, "eager")
    inputs = batch(model, padding=None)
    expected = tensors(model, inputs)["last_hidden_state"]
    model.set_attn_implementation("flex_attention")
    assert relative_difference(tensors(model, inputs)["last_hidden_state"], expected) < 1e-4


@every_family
def test_other_kernels_get_heads_of_one_width(model_type):
    """What flash attention asks for; here a stand-in, as it needs a GPU."""
    widths = []

    def kernel(module, query, key, value, attention_mask, **kwargs):
        widths.append({query.shape[-1], key.shape[-1], value.shape[-1]})
        return sdpa_attention_forward(module, query, key, value, attention_mask, **kwargs)

    model = grown_base(model_type, "sdpa")
    inputs = batch(model, padding=None)
    expected = tensors(model, inputs)["last_hidden_state"]
    ALL_ATTENTION_FUNCTIONS.register("one_width", kernel)
    ALL_MASK_ATTENTION_FUNCTIONS.register("one_width", ALL_MASK_ATTENTION_FUNCTIONS["sdpa"])
    try:
        model.set_attn_implementation("one_width")
        assert relative_difference(tensors(model, inputs)["last_hidden_state"], expected) < 1e-6
    finally:
        del AttentionInterface._global_mapping["one_width"], AttentionMaskInterface._global_mapping["one_width"]
    assert widths == [{11}, {13}]


@pytest.mark.slow
@every_family
def test_compile_takes_the_whole_graph(model_type):
    model = grown_base(model_type)
    inputs = batch(model)
    expected = tensors(model, inputs)["last_hidden_state"]
    compiled = torch.compile(model, fullgraph=True)
    with torch.no_grad():
        assert relative_difference(compiled(**inputs).last_hidden_state, expected) < 1e-4


@pytest.mark.slow
@every_causal
def test_compiled_training_step_takes_the_whole_graph(model_type):
    model = grown_causal(model_type)
    ids = batch(model, None)["input_ids"]
    expected = model(ids, labels=ids).loss
    compiled = torch.compile(model, fullgraph=True)
    loss = compiled(ids, labels=ids).loss
    loss.backward()
    assert relative_difference(loss, expected) < 1e-4
    assert all(parameter.grad is not None for parameter in model.parameters() if parameter.requires_grad)


@every_family
def test_export_with_a_dynamic_length_agrees(model_type):
    model = grown_base(model_type)
    ids = batch(model, None)["input_ids"]
    length = torch.export.Dim("length", min=4, max=32)
    exported = torch.export.export(
        model, (), {"input_ids": ids, "use_cache": False}, dynamic_shapes={"input_ids": {1: length}, "use_cache": None}
    )
    other = ids[:, :7]
    with torch.no_grad():
        found = exported.module()(input_ids=other, use_cache=False).last_hidden_state
        assert relative_difference(found, model(other, use_cache=False).last_hidden_state) < 1e-4


class LogitsOnly(torch.nn.Module):
    """ONNX takes tensors in and out."""

    def __init__(self, model):
        super().__init__()
        self.model = model

    def forward(self, input_ids):
        """The first output of the model."""
        return self.model(input_ids, use_cache=False)[0]


@pytest.mark.slow
@pytest.mark.skipif(importlib.util.find_spec("onnxruntime") is None, reason="needs onnx (extra: export)")
@every_family
def test_onnx_export_runs_and_agrees(model_type, tmp_path):
    import onnxruntime

    model = LogitsOnly(grown_base(model_type)).eval()
    ids = batch(model.model, None)["input_ids"]
    file = tmp_path / "model.onnx"
    torch.onnx.export(model, (ids,), file, dynamo=True, verbose=False)
    session = onnxruntime.InferenceSession(file, providers=["CPUExecutionProvider"])
    (found,) = session.run(None, {session.get_inputs()[0].name: ids.numpy()})
    with torch.no_grad():
        assert relative_difference(torch.from_numpy(found), model(ids)) < 1e-4


def test_pipelines_take_a_grown_model(tmp_path):
    tokenizer = AutoTokenizer.from_pretrained(SMALL_MODEL)
    model = make_growable(hf_grow.small_model())
    prompt = "The statement"
    expected = pipeline("text-generation", model=hf_grow.small_model(), tokenizer=tokenizer)
    kwargs = {"max_new_tokens": 8, "do_sample": False}
    text = pipeline("text-generation", model=grow_everything(model), tokenizer=tokenizer)(prompt, **kwargs)
    assert text == expected(prompt, **kwargs)
    hf_grow.save_grown(model, tmp_path / "grown", tokenizer=tokenizer)
    assert pipeline("text-generation", model=str(tmp_path / "grown"))(prompt, **kwargs) == text


@pytest.mark.parametrize(
    ("model_type", "targets"),
    [("gpt2", ["c_attn", "attn.c_proj"]), ("llama", ["q_proj", "k_proj", "v_proj", "o_proj"])],
)
def test_lora_on_grown_projections_trains_and_merges(model_type, targets):
    from peft import LoraConfig, get_peft_model

    model = grown_causal(model_type)
    ids = batch(model, None)["input_ids"]
    expected = model(ids).logits
    adapted = get_peft_model(model, LoraConfig(r=4, target_modules=targets, task_type="CAUSAL_LM")).eval()
    assert torch.equal(adapted(ids).logits, expected)
    trainable = [parameter for parameter in adapted.parameters() if parameter.requires_grad]
    optimizer = torch.optim.SGD(trainable, lr=1.0)
    for _ in range(3):
        optimizer.zero_grad()
        adapted(ids, labels=ids).loss.backward()
        optimizer.step()
    learned = adapted(ids).logits
    assert relative_difference(learned, expected) > 1e-4
    merged = adapted.merge_and_unload()
    assert merged is model
    assert relative_difference(merged(ids).logits, learned) < 1e-4
    hf_grow.widen_query_key(merged, 0, 1)


def test_a_lora_adapter_saved_on_a_grown_model_loads_again(tmp_path):
    from peft import LoraConfig, PeftModel, get_peft_model

    model = grown_causal("llama")
    hf_grow.save_grown(model, tmp_path / "base")
    ids = batch(model, None)["input_ids"]
    adapted = get_peft_model(model, LoraConfig(r=2, target_modules=["q_proj"], init_lora_weights=False)).eval()
    expected = adapted(ids).logits
    adapted.save_pretrained(tmp_path / "adapter")
    again = PeftModel.from_pretrained(hf_grow.load_grown(tmp_path / "base"), tmp_path / "adapter").eval()
    assert torch.equal(again(ids).logits, expected)


def test_scaling_is_data_and_not_recomputed():
    model = make_growable(causal_model("gpt2", scale_attn_by_inverse_layer_idx=True))
    before = [site.attention.scaling for site in attention_sites(model)]
    assert before == [8**-0.5, 8**-0.5 / 2]
    grow_everything(model)
    assert [site.attention.scaling for site in attention_sites(model)] == before


def test_a_model_trains_with_transformers_trainer_and_resumes(tmp_path):
    from transformers import Trainer, TrainingArguments

    model = grown_causal("gpt2")
    rows = [{"input_ids": ids, "labels": ids} for ids in torch.randint(2, 90, (8, 10))]
    arguments = TrainingArguments(
        tmp_path / "run", max_steps=4, save_steps=2, per_device_train_batch_size=2, report_to="none", use_cpu=True
    )
    Trainer(model, arguments, train_dataset=rows).train()
    final = copy.deepcopy(model.state_dict())
    again = grown_causal("gpt2")
    Trainer(again, arguments, train_dataset=rows).train(resume_from_checkpoint=str(tmp_path / "run" / "checkpoint-2"))
    assert all(torch.equal(value, final[name]) for name, value in again.state_dict().items())
