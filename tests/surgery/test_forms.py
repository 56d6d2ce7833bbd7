"""Growth attached beside the projections or merged into them computes the same; switched off, the base to the bit."""

import copy

import pytest
import torch
from models import (
    CASES,
    assert_same,
    batch,
    causal_model,
    every_case,
    fill_zeros,
    grow_everything,
    growable,
    relative_difference,
    tensors,
)
from transformers import LlamaForCausalLM

import hf_grow
from hf_grow import GrowthConfig, HfGrowError, attach_growth, make_growable, merge_growth
from hf_grow.modeling.attached_growth import AttachedGrowth
from hf_grow.modeling.growable_attention import attention_sites
from hf_grow.surgery.base import base_hash, growth_parameters
from hf_grow.surgery.families import FAMILIES

CROSS = {"gpt2": {"add_cross_attention": True}, "bert": {"is_decoder": True, "add_cross_attention": True}}
DECODER = {"bert": {"is_decoder": True}}
SCALINGS = ("learnable", "learnable_per_head")


def wide(model_type, stock_class=None, changes=None):
    """A model in float64 with growth of all kinds in its projections, which matters."""
    changes = changes or {}
    model = grow_everything(growable(model_type, stock_class, changes))
    if changes.get("add_cross_attention"):
        hf_grow.widen_query_key(model, 1, 3, attention_type="cross")
        hf_grow.add_heads(model, 0, 1, attention_type="cross")
        hf_grow.widen_value(model, 0, 2, attention_type="cross")
    return fill_zeros(model)


def inputs_of(model):
    inputs = batch(model)
    if getattr(model.config, "add_cross_attention", False):
        states = torch.randn(2, 7, 32, generator=torch.Generator().manual_seed(6), dtype=torch.float64)
        inputs["encoder_hidden_states"] = states
    return inputs


def sequences(count=8, length=11):
    ids = torch.randint(2, 90, (count, length), generator=torch.Generator().manual_seed(4))
    return [{"input_ids": part, "labels": part} for part in ids.split(2)]


def planned(model):
    """A model, a plan for it, and batches to try it on."""
    statistics = hf_grow.collect_statistics(model, sequences(16), hf_grow.CollectConfig(kinds=("columns", "heads")))
    plan = hf_grow.plan_growth(statistics, GrowthConfig(columns=2, heads=1, step_size=1.0))
    return model, plan, sequences(16)


def assert_near(first, second, most=1e-10):
    assert first.keys() == second.keys()
    for name, value in first.items():
        assert relative_difference(value, second[name]) < most, name


@pytest.mark.parametrize(
    ("model_type", "stock_class", "changes"),
    [*CASES, *((model_type, None, changes) for model_type, changes in CROSS.items())],
    ids=str,
)
def test_both_forms_compute_the_same_and_go_back_to_the_bit(model_type, stock_class, changes):
    model = wide(model_type, stock_class, changes)
    base = make_growable(hf_grow.remove_growth(copy.deepcopy(model)))
    inputs, parameters = inputs_of(model), model.num_parameters()
    merged, weights = tensors(model, inputs), copy.deepcopy(model.state_dict())
    history = copy.deepcopy(model.growth_history)
    assert attach_growth(model) is model and model.active_growth == "default"
    assert model.num_parameters() == parameters and model.growth_history == history
    assert_near(tensors(model, inputs), merged)
    names = base.state_dict().keys()
    assert_same({name: model.state_dict()[name] for name in names}, base.state_dict())
    assert all(".grown.default." in name for name in model.state_dict().keys() - names)
    with model.growth_disabled():
        assert model.active_growth is None
        assert_same(tensors(model, inputs), tensors(base, inputs))
    assert_near(tensors(model, inputs), merged)
    assert merge_growth(model) is model and model.active_growth is None
    assert_same(model.state_dict(), weights)
    assert model.growth_history == history


@every_case
@pytest.mark.parametrize("attn", ["eager", "sdpa"])
def test_growth_one_event_after_another_is_the_same_in_both_forms(model_type, stock_class, changes, attn):
    if stock_class is not None and "Classification" in stock_class.__name__:
        pytest.skip("its batches have other labels")
    if attn == "eager" and changes.get("reorder_and_upcast_attn"):
        pytest.skip("the stock kernel does not take float64")
    reports = {}
    for attach in (True, False):
        model = growable(model_type, stock_class, changes)
        model.set_attn_implementation(attn)
        for amounts in ({"columns": 2, "heads": 1}, {"value_columns": {1: 2}}, {"columns": {0: 1}, "heads": {1: 1}}):
            _, report = hf_grow.grow(model, sequences(), GrowthConfig(**amounts, attach=attach or None))
            reports.setdefault(attach, []).append((report.loss_before, report.loss_after))
        assert (model.active_growth == "default") is attach and len(model.growth_history["events"]) == 3
    assert torch.allclose(torch.tensor(reports[True]), torch.tensor(reports[False]), rtol=1e-4)


@pytest.mark.parametrize("model_type", ["gpt2", "llama"])
def test_an_optimizer_goes_on_when_attached_growth_grows(model_type):
    """Its state for present entries is carried, and groups are in the order that a fresh optimizer would have."""
    model = make_growable(causal_model(model_type))
    hf_grow.grow(model, sequences(), GrowthConfig(columns={0: 2}, attach=True))
    hf_grow.freeze_base(model)
    optimizer = torch.optim.AdamW(growth_parameters(model), lr=0.0)
    model(**sequences()[0]).loss.backward()
    optimizer.step()
    growth = attention_sites(model)[0].growth
    before = optimizer.state[growth.query_columns]["exp_avg"].view(4, 2, -1).clone()
    hf_grow.grow(model, sequences(), GrowthConfig(columns=1, value_columns=1), optimizer=optimizer)
    growth = attention_sites(model)[0].growth
    after = optimizer.state[growth.query_columns]["exp_avg"].view(4, 3, -1)
    assert torch.equal(after[:, :2], before) and not after[:, 2:].any() and before.any()
    (group,) = optimizer.param_groups
    wanted = [parameter for parameter in model.parameters() if parameter.requires_grad]
    assert len(wanted) > 4 and all(one is other for one, other in zip(group["params"], wanted, strict=True))


@pytest.mark.parametrize(
    ("model_type", "scaling"), [*((name, SCALINGS[1]) for name in FAMILIES), ("llama", SCALINGS[0])]
)
def test_a_learnable_scale_starts_where_it_was_and_is_merged_into_the_queries(model_type, scaling):
    models = []
    for attach in (True, False):
        model = make_growable(causal_model(model_type, **DECODER.get(model_type, {}))).double()
        config = GrowthConfig(columns=2, heads=1, step_size=0.0, scaling=scaling, attach=attach or None)
        before = tensors(model, inputs_of(model))["logits"]
        hf_grow.grow(model, sequences(), config)
        assert relative_difference(tensors(model, inputs_of(model))["logits"], before) < 1e-10
        for site in attention_sites(model):
            scale = site.growth.scale if attach else site.attention.score_scale
            assert scale.shape == ((1, 1) if scaling == "learnable" else (site.attention.n_heads, 1))
            assert scale.requires_grad and not scale.any()
            with torch.no_grad():
                scale.copy_(torch.linspace(-0.3, 0.4, scale.shape[0], dtype=scale.dtype)[:, None])
        changed = tensors(model, inputs_of(model))["logits"]
        assert relative_difference(changed, before) > 1e-3
        models.append(model)
    logits = [tensors(model, inputs_of(model))["logits"] for model in models]
    assert relative_difference(logits[0], logits[1]) < 1e-10
    for number, model in enumerate(models):
        # It grows on: what is measured and inserted knows of the scale.
        hf_grow.grow(model, sequences(16), GrowthConfig(columns=1, heads=1, step_size=1.0))
        tried = hf_grow.insert_growth(*planned(model), dry_run=True)
        done = hf_grow.insert_growth(*planned(model))
        assert done.loss_after == pytest.approx(tried.loss_after, rel=1e-5)
        logits[number] = tensors(model, inputs_of(model))["logits"]
    assert relative_difference(logits[0], logits[1]) < 1e-2
    merged = tensors(merge_growth(models[0]), inputs_of(models[0]))["logits"]
    assert relative_difference(merged, logits[0]) < 1e-10
    assert not any("scale" in name for name in models[0].state_dict())
    folded = merge_growth(copy.deepcopy(models[1]))
    assert relative_difference(tensors(folded, inputs_of(folded))["logits"], logits[1]) < 1e-10
    assert not any("scale" in name for name in folded.state_dict())
    attached = tensors(attach_growth(models[1]), inputs_of(models[1]))["logits"]
    assert relative_difference(attached, logits[1]) < 1e-10


@pytest.mark.parametrize("scaling", ["frozen", *SCALINGS])
@pytest.mark.parametrize("attach", [True, False])
def test_either_form_is_saved_loaded_and_exported_whole(scaling, attach, tmp_path):
    model = causal_model("llama")
    hf_grow.grow(model, sequences(), GrowthConfig(columns=2, heads={0: 1}, scaling=scaling, attach=attach or None))
    with torch.no_grad():
        for name, parameter in model.named_parameters():
            if name.endswith("scale"):
                parameter.fill_(0.2)
    expected = tensors(model, batch(model))["logits"]
    model.save_pretrained(tmp_path / "as it is")
    loaded = type(model).from_pretrained(tmp_path / "as it is").eval()
    assert_same(loaded.state_dict(), model.state_dict())
    assert torch.equal(tensors(loaded, batch(model))["logits"], expected)
    assert loaded.growth_history == model.growth_history and loaded.active_growth == model.active_growth
    before = copy.deepcopy(model.state_dict())
    hf_grow.save_grown(model, tmp_path / "whole")
    assert_same(model.state_dict(), before)
    whole = hf_grow.load_grown(tmp_path / "whole").eval()
    assert whole.active_growth is None and relative_difference(tensors(whole, batch(model))["logits"], expected) < 1e-5
    assert len(whole.growth_history["events"]) == 1
    assert hf_grow.inspect_checkpoint(tmp_path / "as it is")["parameters"] == model.num_parameters()


def test_growth_beside_half_precision_is_kept_in_float32(tmp_path):
    causal_model("llama").save_pretrained(tmp_path / "base")
    model = make_growable(LlamaForCausalLM.from_pretrained(tmp_path / "base", dtype=torch.bfloat16).eval())
    hf_grow.grow(model, sequences(), GrowthConfig(columns=2, value_columns=1, attach=True))
    assert {parameter.dtype for parameter in growth_parameters(model)} == {torch.float32}
    expected = tensors(model, batch(model))["logits"]
    assert expected.dtype == torch.bfloat16
    model.save_pretrained(tmp_path)
    loaded = type(model).from_pretrained(tmp_path, dtype=torch.bfloat16).eval()
    assert {parameter.dtype for parameter in growth_parameters(loaded)} == {torch.float32}
    assert torch.equal(tensors(loaded, batch(model))["logits"], expected)


def test_growth_attached_to_a_grown_model_leaves_that_as_it_is(tmp_path):
    model = fill_zeros(grow_everything(make_growable(causal_model("llama"))))
    grown, mark = copy.deepcopy(model), base_hash(model, growth=True)
    before = tensors(model, batch(model))
    hf_grow.grow(model, sequences(), GrowthConfig(columns=1, value_columns=1, attach=True))
    assert base_hash(model) == mark and len(model.growth_history["events"]) == 1
    with model.growth_disabled():
        assert_same(tensors(model, batch(model)), before)
    hf_grow.save_growth(model, tmp_path / "growth")
    again = hf_grow.load_growth(copy.deepcopy(grown), tmp_path / "growth")
    assert_same(tensors(again, batch(model)), tensors(model, batch(model)))
    assert len(merge_growth(again).growth_history["events"]) == len(grown.growth_history["events"]) + 1
    assert_same(hf_grow.remove_growth(model).state_dict(), grown.state_dict())


def test_growths_are_switched_by_name(tmp_path):
    outputs = {}
    for seed, name in enumerate(("code", "law")):
        model = fill_zeros(grow_everything(make_growable(causal_model("gpt2"))), seed=seed)
        hf_grow.save_growth(model, tmp_path / name)
        outputs[name] = tensors(hf_grow.load_growth(causal_model("gpt2"), tmp_path / name), batch(model))
    model = make_growable(causal_model("gpt2"))
    outputs[None] = tensors(model, batch(model))
    pointers = {name: parameter.data_ptr() for name, parameter in model.named_parameters()}
    for name in ("code", "law"):
        hf_grow.load_growth(model, tmp_path / name, name=name)
    for name in ("law", "code", None, "law"):
        model.set_growth(name)
        assert_same(tensors(model, batch(model)), outputs[name])
    model.save_pretrained(tmp_path / "both")
    loaded = type(model).from_pretrained(tmp_path / "both").eval()
    assert_same(tensors(loaded, batch(model)), outputs["law"])
    loaded.set_growth("code")
    assert_same(tensors(loaded, batch(model)), outputs["code"])
    with pytest.raises(HfGrowError, match="would lose its base: remove code first"):
        merge_growth(model)
    hf_grow.remove_growth(model, name="code")
    with pytest.raises(ValueError, match="no attached growth of the name 'code'; attached are: law"):
        model.set_growth("code")
    now = dict(model.named_parameters())
    assert all(now[name].data_ptr() == pointer for name, pointer in pointers.items())
    assert relative_difference(tensors(merge_growth(model), batch(model))["logits"], outputs["law"]["logits"]) < 1e-5


def test_bad_input_gets_one_sentence_and_changes_nothing(tmp_path):
    grown = fill_zeros(grow_everything(make_growable(causal_model("llama"))))
    hf_grow.save_growth(grown, tmp_path / "growth")
    attached = hf_grow.load_growth(causal_model("llama"), tmp_path / "growth", name="code")
    other = causal_model("llama")
    with torch.no_grad():
        other.lm_head.weight.add_(1)
    stock = make_growable(causal_model("llama"))
    for model, act, message in (
        (other, lambda: hf_grow.load_growth(other, tmp_path / "growth"), "with other weights than this model has"),
        (
            attached,
            lambda: hf_grow.load_growth(attached, tmp_path / "growth", name="code"),
            "Growth of the name 'code' is attached already",
        ),
        (attached, lambda: hf_grow.load_growth(attached, tmp_path / "growth", name="a.b"), "named by letters, digits"),
        (attached, lambda: attach_growth(attached), "Growth is attached already: code"),
        (attached, lambda: hf_grow.remove_growth(attached, name="law"), "no attached growth of the name 'law'"),
        (stock, lambda: merge_growth(stock), "no attached growth that is active"),
        (stock, lambda: attach_growth(stock), "nothing to attach"),
        (grown, lambda: grown.set_growth(None), "merged into its weights and cannot be switched off"),
        (grown, lambda: grown.growth_disabled().__enter__(), "merged into its weights and cannot be switched off"),
        (
            attached,
            lambda: hf_grow.grow(attached, sequences(), GrowthConfig(columns=1, attach=False)),
            "beside which nothing is widened: merge it first",
        ),
        (
            attached,
            lambda: hf_grow.grow(attached, sequences(), GrowthConfig(columns=1, strategy="refactor")),
            "makes present columns anew",
        ),
        (attached, lambda: hf_grow.drop_query_key(attached, 0, [0]), "rotated and cannot be dropped"),
    ):
        before = copy.deepcopy(model.state_dict())
        with pytest.raises(ValueError, match=message) as raised:
            act()
        assert "\n" not in str(raised.value)
        assert_same(model.state_dict(), before)
        if hasattr(model.config, "growths"):
            assert model.active_growth == ("code" if model is attached else None)


def test_new_columns_of_attached_growth_are_dropped():
    model = attach_growth(fill_zeros(grow_everything(make_growable(causal_model("gpt2")))))
    merged = merge_growth(copy.deepcopy(model))
    for each in (model, merged):
        hf_grow.drop_query_key(each, 0, [9])
    assert_near(tensors(model, batch(model)), tensors(merged, batch(model)), 1e-5)
    with pytest.raises(HfGrowError, match="only columns of attached growth can be dropped, those from 8 on"):
        hf_grow.drop_query_key(model, 0, [3])


def test_modules_of_growth_say_what_they_hold():
    model = attach_growth(fill_zeros(grow_everything(make_growable(causal_model("gpt2")))))
    growths = [module for module in model.modules() if isinstance(module, AttachedGrowth)]
    assert len(growths) == 2 and "query_columns=(12, 32)" in repr(growths[0])


def test_growth_of_some_layers_is_merged_whole(tmp_path):
    model = causal_model("llama")
    hf_grow.grow(model, sequences(), GrowthConfig(columns={1: 2}, attach=True))
    merge_growth(model)
    assert model.active_growth is None and not model.config.growths
    hf_grow.save_grown(model, tmp_path / "grown")
    hf_grow.grow(model, sequences(), GrowthConfig(columns={0: 1}))
    assert not any(".grown." in name for name in model.state_dict())


def test_growth_takes_no_name_that_modules_of_torch_have():
    model = make_growable(causal_model("llama"))
    with pytest.raises(HfGrowError, match="cannot be named 'train'"):
        hf_grow.grow(model, sequences(), GrowthConfig(columns=1, attach="train"))
    assert not any(".grown" in name for name, _ in model.named_modules())


@pytest.mark.parametrize("amounts", [{"columns": 2}, {"columns": 2, "heads": 1}], ids=str)
def test_all_new_columns_of_attached_growth_are_dropped(amounts):
    model = causal_model("gpt2")
    hf_grow.grow(model, sequences(), GrowthConfig(**amounts, attach=True))
    optimizer = torch.optim.AdamW(model.parameters(), lr=1e-3)
    hf_grow.drop_query_key(model, 0, [8, 9], optimizer=optimizer)
    assert attention_sites(model)[0].attention.query_key_dim == 8 and model.active_growth == "default"
    assert set(optimizer.param_groups[0]["params"]) == set(model.parameters())
    model(**sequences()[0]).loss.backward()


def test_growth_that_half_precision_does_not_reach_is_not_merged():
    model = make_growable(causal_model("llama").half())
    hf_grow.widen_query_key(model, 0, 1)
    attach_growth(model)
    with torch.no_grad():
        attention_sites(model)[0].growth.query_columns.fill_(1e5)
    with pytest.raises(HfGrowError, match="would not be finite; nothing was changed"):
        merge_growth(model)
    assert model.active_growth == "default"


def test_of_several_growths_the_active_one_is_saved_with_the_whole_model(tmp_path):
    model = causal_model("llama")
    for name in ("code", "law"):
        hf_grow.grow(model, sequences(), GrowthConfig(columns=1, attach=name))
        expected = tensors(model, batch(model))["logits"]
        model.set_growth(None)
    model.set_growth("law")
    hf_grow.save_grown(model, tmp_path / "whole")
    assert list(model.config.growths) == ["code", "law"] and model.active_growth == "law"
    whole = hf_grow.load_grown(tmp_path / "whole").eval()
    assert not whole.config.growths and relative_difference(tensors(whole, batch(model))["logits"], expected) < 1e-5


def test_a_scale_of_a_layer_that_is_as_wide_as_before_is_attached_too():
    model = growable("gpt2", None, {})
    before = tensors(model, batch(model))["logits"]
    hf_grow.grow(model, sequences(), GrowthConfig(columns=1, scaling="learnable", step_size=0.0))
    hf_grow.drop_query_key(model, 0, [8])
    with torch.no_grad():
        for site in attention_sites(model):
            site.attention.score_scale.fill_(0.2)
    with attach_growth(model).growth_disabled():
        assert relative_difference(tensors(model, batch(model))["logits"], before) < 1e-12


def test_a_learnt_scale_beside_half_precision_is_kept_in_float32(tmp_path):
    model = make_growable(causal_model("llama").bfloat16())
    hf_grow.grow(model, sequences(), GrowthConfig(columns=1, scaling="learnable"))
    with torch.no_grad():
        for site in attention_sites(model):
            site.attention.score_scale.fill_(0.1234)
    model.save_pretrained(tmp_path)
    assert_same(hf_grow.load_grown(tmp_path).state_dict(), model.state_dict())
