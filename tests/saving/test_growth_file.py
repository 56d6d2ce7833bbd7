"""Growth as an adapter file: put onto the base, swapped and taken off bit for bit; refused whole where it cannot be."""

import copy
import json
import pkgutil
from pydoc_data.topics import topics

import pytest
import torch
from hub_server import HubServer
from models import assert_same, batch, causal_class, causal_model, fill_zeros, grow_everything, small_model, tensors
from safetensors.torch import load_file, save_file
from transformers import AutoModelForCausalLM, LlamaForSequenceClassification

import hf_grow
from hf_grow import (
    HfGrowError,
    growth_parameters,
    load_growth,
    make_growable,
    merge_growth,
    remove_growth,
    save_growth,
)
from hf_grow.modeling.growable_attention import attention_sites
from hf_grow.surgery.families import FAMILIES
from hf_grow.surgery.forms import merged_copy

CROSS = {"gpt2": {"add_cross_attention": True}, "bert": {"is_decoder": True, "add_cross_attention": True}}
every_model = pytest.mark.parametrize(
    ("model_type", "changes"),
    [*((model_type, {}) for model_type in FAMILIES), *CROSS.items()],
    ids=[*FAMILIES, *(f"{model_type}-cross" for model_type in CROSS)],
)


def grown(model_type, **changes):
    """A grown causal model whose new weights matter."""
    model = grow_everything(make_growable(causal_model(model_type, **changes)))
    if changes:
        hf_grow.widen_query_key(model, 1, 3, attention_type="cross")
        hf_grow.add_heads(model, 0, 1, attention_type="cross")
        hf_grow.widen_value(model, 0, 2, attention_type="cross")
    return fill_zeros(model)


def grown_otherwise(model_type, **changes):
    """The same base with other growth, smaller in some places and larger in others."""
    model = make_growable(causal_model(model_type, **changes))
    hf_grow.widen_query_key(model, 0, 1)
    hf_grow.widen_value(model, 0, 7)
    hf_grow.add_heads(model, 1, 3)
    return fill_zeros(model, seed=4)


def inputs_of(model, changes):
    inputs = batch(model)
    if changes:
        inputs["encoder_hidden_states"] = torch.randn(2, 7, 32, generator=torch.Generator().manual_seed(6))
    return inputs


def snapshot(model):
    """All that a refusal must leave as it was."""
    history = getattr(model.config, "growth_history", None)
    return (
        type(model),
        copy.deepcopy(model.state_dict()),
        {name: parameter.data_ptr() for name, parameter in model.named_parameters()},
        model.config.to_dict(),
        copy.deepcopy(history),
        [site.attention.dims for site in attention_sites(model)],
    )


def assert_unchanged(model, before):
    after = snapshot(model)
    assert_same(after[1], before[1])
    assert (after[0], *after[2:]) == (before[0], *before[2:])


def assert_equal_models(first, second):
    """Weights, sizes, config and history, once growth is in the projections of both."""
    first, second = (model if model.active_growth is None else merged_copy(model) for model in (first, second))
    assert type(first) is type(second)
    assert_same(first.state_dict(), second.state_dict())
    assert first.config.hf_grow == second.config.hf_grow
    assert first.config.qk_head_dim == second.config.qk_head_dim
    assert first.growth_history == second.growth_history
    sizes = [[site.attention.dims for site in attention_sites(model)] for model in (first, second)]
    assert sizes[0] == sizes[1]


@every_model
def test_growth_put_onto_a_stock_model_gives_the_grown_one(model_type, changes, tmp_path):
    model = grown(model_type, **changes)
    assert save_growth(model, tmp_path / "growth") == tmp_path / "growth"
    fresh = causal_model(model_type, **changes)
    inputs = inputs_of(fresh, changes)
    stock = tensors(fresh, inputs)["logits"]
    random = torch.random.get_rng_state()
    assert load_growth(fresh, tmp_path / "growth") is fresh
    assert torch.equal(torch.random.get_rng_state(), random)
    assert_equal_models(fresh, model)
    outputs = tensors(fresh, inputs)
    for name, wanted in tensors(model, inputs).items():
        assert torch.allclose(outputs[name], wanted, atol=1e-4), name
    assert not torch.allclose(tensors(fresh, inputs)["logits"], stock, atol=1e-2)


@every_model
def test_two_growths_are_swapped_and_taken_off(model_type, changes, tmp_path):
    first, second = grown(model_type, **changes), grown_otherwise(model_type, **changes)
    save_growth(first, tmp_path / "first")
    save_growth(second, tmp_path / "second")
    model = make_growable(causal_model(model_type, **changes))
    never = make_growable(causal_model(model_type, **changes))
    for name, wanted in (("first", first), ("second", second), ("first", first)):
        load_growth(model, tmp_path / name)
        assert_equal_models(model, wanted)
    assert remove_growth(model) is model
    assert_equal_models(model, never)
    load_growth(model, tmp_path / "second")
    assert_equal_models(model, second)


@every_model
def test_the_file_is_as_large_as_what_is_new(model_type, changes, tmp_path):
    model = grown(model_type, **changes)
    save_growth(model, tmp_path / "growth")
    assert {file.name for file in (tmp_path / "growth").iterdir()} == {"growth.json", "growth.safetensors"}
    new = model.num_parameters() - causal_model(model_type, **changes).num_parameters()
    file = tmp_path / "growth" / "growth.safetensors"
    assert sum(part.numel() for part in load_file(file).values()) == new
    assert 4 * new < file.stat().st_size < 4 * new + 8000 < 4 * model.num_parameters()


def test_the_description_says_what_the_growth_is_for(tmp_path):
    model = make_growable(hf_grow.small_model())
    hf_grow.widen_query_key(model, 1, 2)
    save_growth(model, tmp_path / "growth")
    content = json.loads((tmp_path / "growth" / "growth.json").read_text())
    assert content["model_type"] == "gpt2" and content["base_model"] == "small_gpt2" and "base_revision" in content
    assert content["base_dtype"] == "float32" and content["base_hash"] == model.growth_history["base_hash"]
    assert [layer["qk_head_dim"] for layer in content["sizes"]["layers"]] == [16, 18, 16, 16]
    assert [layer["qk_head_dim"] for layer in content["base_sizes"]["layers"]] == [16] * 4
    assert content["events"] == model.growth_history["events"] and "transformers" in content["versions"]
    with pytest.raises(HfGrowError, match=r"holds growth alone.*load_growth"):
        hf_grow.load_grown(tmp_path / "growth")


def test_a_loaded_growth_is_saved_again_to_the_same_bytes(tmp_path):
    save_growth(grown("llama"), tmp_path / "first")
    save_growth(load_growth(causal_model("llama"), tmp_path / "first"), tmp_path / "second")
    for name in ("growth.json", "growth.safetensors"):
        assert (tmp_path / "first" / name).read_bytes() == (tmp_path / "second" / name).read_bytes()


def test_a_whole_checkpoint_gives_its_growth_away(tmp_path):
    model = grown("gpt2")
    hf_grow.save_grown(model, tmp_path / "model")
    save_growth(hf_grow.load_grown(tmp_path / "model"), tmp_path / "growth")
    assert_equal_models(load_growth(causal_model("gpt2"), tmp_path / "growth"), model)


def test_growth_goes_on_after_loading(tmp_path):
    save_growth(grown("llama"), tmp_path / "first")
    model = load_growth(causal_model("llama"), tmp_path / "first")
    hf_grow.widen_value(model, 0, 2, generator=torch.Generator().manual_seed(8))
    save_growth(fill_zeros(model), tmp_path / "second")
    again = load_growth(causal_model("llama"), tmp_path / "second")
    assert_equal_models(again, model)
    assert len(again.growth_history["events"]) == 6


def test_a_new_column_may_be_dropped_again(tmp_path):
    model = grown("gpt2")
    hf_grow.drop_query_key(model, 0, [8])
    save_growth(model, tmp_path / "growth")
    assert_equal_models(load_growth(causal_model("gpt2"), tmp_path / "growth"), model)


def test_a_changed_scale_comes_and_goes_with_the_growth(tmp_path):
    model = grown("gpt2")
    model.transformer.h[0].attn.scaling = 0.5
    save_growth(model, tmp_path / "growth")
    fresh = load_growth(causal_model("gpt2"), tmp_path / "growth")
    assert fresh.transformer.h[0].attn.scaling == 0.5
    assert remove_growth(fresh).transformer.h[0].attn.scaling == 8**-0.5


@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float64])
def test_other_dtypes_come_back_and_are_not_mixed_up(dtype, tmp_path):
    model = fill_zeros(grow_everything(make_growable(causal_model("llama").to(dtype))))
    save_growth(model, tmp_path / "growth")
    assert {part.dtype for part in load_file(tmp_path / "growth" / "growth.safetensors").values()} == {dtype}
    assert_equal_models(load_growth(causal_model("llama").to(dtype), tmp_path / "growth"), model)
    stock = causal_model("llama")
    before = snapshot(stock)
    name = str(dtype).removeprefix("torch.")
    with pytest.raises(HfGrowError, match=f"growth of {name} weights, and the model's are float32: load it as {name}"):
        load_growth(stock, tmp_path / "growth")
    assert_unchanged(stock, before)


def test_after_removal_the_base_may_learn_and_grow_anew(tmp_path):
    model = remove_growth(grown("llama"))
    with torch.no_grad():
        model.model.embed_tokens.weight.add_(1)
    trained = copy.deepcopy(model)
    hf_grow.widen_query_key(model, 0, 2)
    save_growth(model, tmp_path / "growth")
    assert_equal_models(load_growth(trained, tmp_path / "growth"), model)
    with pytest.raises(HfGrowError, match="with other weights than this model has"):
        load_growth(causal_model("llama"), tmp_path / "growth")


def test_removing_nothing_changes_nothing():
    model = make_growable(causal_model("gpt2"))
    before = snapshot(model)
    assert_unchanged(remove_growth(model), before)


def test_what_is_removed_does_not_stay_in_memory():
    for model_type in ("gpt2", "llama"):
        for parameter in remove_growth(grown(model_type)).parameters():
            assert parameter.untyped_storage().nbytes() == parameter.numel() * parameter.element_size()


@pytest.mark.parametrize("model_type", ["gpt2", "llama"])
def test_an_optimizer_goes_on_with_the_state_of_the_base(model_type, tmp_path):
    save_growth(grown(model_type), tmp_path / "growth")
    model = make_growable(causal_model(model_type))
    optimizer = torch.optim.AdamW(model.parameters(), lr=0.0, weight_decay=0.0)
    ids = batch(model, None)["input_ids"]
    model(ids, labels=ids).loss.backward()
    optimizer.step()
    names = {parameter: name for name, parameter in model.named_parameters()}
    before = {names[parameter]: state["exp_avg"].clone() for parameter, state in optimizer.state.items()}
    load_growth(model, tmp_path / "growth", optimizer=optimizer)
    held = {parameter for group in optimizer.param_groups for parameter in group["params"]}
    assert held == set(model.parameters())
    assert {parameter for parameter in held if parameter not in optimizer.state} == set(growth_parameters(model))
    remove_growth(model, optimizer=optimizer)
    after = {name: optimizer.state[parameter]["exp_avg"] for name, parameter in model.named_parameters()}
    assert_same(after, before)


def stock_model():
    return causal_model("llama")


def ungrown():
    return make_growable(causal_model("llama"))


def dropped():
    model = grown("gpt2")
    hf_grow.drop_query_key(model, 1, [0, 5, 8, 9])
    return model


def dropped_and_widened():
    """As wide as the base, and not the base."""
    model = make_growable(causal_model("gpt2"))
    hf_grow.drop_query_key(model, 1, [0])
    hf_grow.widen_query_key(model, 1, 3)
    return model


def by_strategy(strategy, **amounts):
    model = causal_model("gpt2")
    ids = batch(model, None)["input_ids"]
    config = hf_grow.GrowthConfig(strategy=strategy, step_size=1.0, **amounts)
    return hf_grow.grow(model, [{"input_ids": ids, "labels": ids}] * 2, config)[0]


def refactored():
    return by_strategy("refactor", columns=2)


def stepped():
    return by_strategy("step")


def trained():
    model = grown("llama")
    with torch.no_grad():
        model.model.layers[0].self_attn.q_proj.weight[0, 0] += 1e-3
    return model


def trained_elsewhere():
    model = grown("llama")
    with torch.no_grad():
        model.model.norm.weight[3] += 1e-3
    return model


def exploded():
    model = grown("llama")
    with torch.no_grad():
        model.model.layers[0].self_attn.q_proj.weight[-1] = torch.inf
    return model


def of_unknown_base():
    model = grown("llama")
    del model.growth_history["base_hash"]
    return model


NOT_REMOVABLE = [
    (stock_model, "LlamaForCausalLM is not growable: call hf_grow.make_growable"),
    (dropped, "Columns of the base were dropped in transformer.h.1.attn, .* use save_grown"),
    (dropped_and_widened, "not those of the first growth any more .* use save_grown"),
    (refactored, "grew with strategy='refactor', .* use save_grown"),
    (stepped, "grew with strategy='step', .* use save_grown"),
    (trained, "all weights were trained.* use save_grown"),
    (trained_elsewhere, "all weights were trained.* use save_grown"),
    (of_unknown_base, "history does not say what the base's weights were"),
]


@pytest.mark.parametrize(
    ("make", "message"),
    [
        *NOT_REMOVABLE,
        (ungrown, "Nothing was grown yet"),
        (exploded, "weights of model.layers.0.self_attn are not finite"),
    ],
    ids=lambda part: getattr(part, "__name__", ""),
)
def test_what_cannot_be_told_from_the_base_is_not_saved(make, message, tmp_path):
    model = make()
    before = snapshot(model)
    with pytest.raises(HfGrowError, match=message) as raised:
        save_growth(model, tmp_path / "new" / "growth")
    assert "\n" not in str(raised.value)
    assert list(tmp_path.iterdir()) == []
    assert_unchanged(model, before)


def test_growth_that_exploded_can_be_taken_off():
    assert_equal_models(remove_growth(exploded()), ungrown())


@pytest.mark.parametrize(("make", "message"), NOT_REMOVABLE, ids=lambda part: getattr(part, "__name__", ""))
def test_what_cannot_be_told_from_the_base_is_not_removed(make, message):
    model = make()
    before = snapshot(model)
    with pytest.raises(HfGrowError, match=message):
        remove_growth(model)
    assert_unchanged(model, before)


def edit(folder, change):
    """Rewrite growth.json after a change."""
    content = json.loads((folder / "growth.json").read_text())
    change(content)
    (folder / "growth.json").write_text(json.dumps(content))


def rewrite(folder, change):
    """Rewrite growth.safetensors after a change, with a hash that fits."""
    from hf_grow.saving.growth_file import _file_hash

    file = folder / "growth.safetensors"
    weights = load_file(file)
    change(weights)
    save_file(weights, file)
    edit(folder, lambda content: content.update(weights_hash=_file_hash(file)))


def flip_a_bit(folder):
    content = bytearray((folder / "growth.safetensors").read_bytes())
    content[-2] ^= 1
    (folder / "growth.safetensors").write_bytes(content)


def truncate(folder):
    content = (folder / "growth.safetensors").read_bytes()
    (folder / "growth.safetensors").write_bytes(content[:-100])


def one_input_less(weights):
    weights["self.0.query.columns"] = weights["self.0.query.columns"][..., 1:].contiguous()


def not_finite(weights):
    weights["self.1.output.heads"][0, 0, 0] = torch.inf


DAMAGES = {
    "nothing there": (lambda folder: [file.unlink() for file in folder.iterdir()], "holds no growth"),
    "no json": (lambda folder: (folder / "growth.json").unlink(), "there is no growth.json"),
    "no weights": (lambda folder: (folder / "growth.safetensors").unlink(), "there is no growth.safetensors"),
    "half a json": (
        lambda folder: (folder / "growth.json").write_text('{"format": 1,'),
        "growth.json of .* cannot be read",
    ),
    "a list": (lambda folder: (folder / "growth.json").write_text("[]"), "it is not an object"),
    "no kind": (lambda folder: edit(folder, lambda it: it.pop("kind")), "holds no growth by itself.*load_grown"),
    "newer": (
        lambda folder: edit(folder, lambda it: it.update(format=99)),
        "format 99 is newer than 2: update hf-grow",
    ),
    "no hash": (lambda folder: edit(folder, lambda it: it.pop("base_hash")), "it has no 'base_hash'"),
    "no sizes": (lambda folder: edit(folder, lambda it: it.update(sizes=3)), "sizes is not an object"),
    "odd events": (lambda folder: edit(folder, lambda it: it.update(events=[{}])), "growth.json of .* cannot be read"),
    "odd size": (
        lambda folder: edit(folder, lambda it: it["sizes"]["layers"][0].update(qk_head_dim=-3)),
        "qk_head_dim must be a positive integer, not -3",
    ),
    "other size": (
        lambda folder: edit(folder, lambda it: it["sizes"]["layers"][0].update(qk_head_dim=12)),
        "not of the sizes that growth.json names",
    ),
    "a layer less": (
        lambda folder: edit(folder, lambda it: it["sizes"]["layers"].pop()),
        "not of the sizes that growth.json names",
    ),
    "other heads": (
        lambda folder: edit(
            folder, lambda it: [it[name]["layers"][0].update(scaling=0.25) for name in ("base_sizes", "sizes")]
        ),
        "whose layers or heads have other sizes",
    ),
    "other weights": (flip_a_bit, "is damaged: growth.safetensors is not the one"),
    "truncated": (truncate, "cannot be loaded"),
    "a weight less": (
        lambda folder: rewrite(folder, lambda weights: weights.pop("self.0.key.columns")),
        "not of the sizes that growth.json names",
    ),
    "an input less": (lambda folder: rewrite(folder, one_input_less), "query columns do not fit to"),
    "not finite": (lambda folder: rewrite(folder, not_finite), "its weights are not finite"),
    "another family": (lambda folder: edit(folder, lambda it: it.update(model_type="bert")), "growth of a bert model"),
    "another base": (
        lambda folder: edit(folder, lambda it: it.update(base_hash="0" * 32)),
        "with other weights than this model has",
    ),
}


@pytest.mark.parametrize("target", ["stock", "growable", "grown"])
@pytest.mark.parametrize("damage", DAMAGES)
def test_a_refused_file_leaves_the_model_as_it_was(damage, target, tmp_path):
    save_growth(grown("gpt2"), tmp_path / "growth")
    change, message = DAMAGES[damage]
    change(tmp_path / "growth")
    model = grown_otherwise("gpt2") if target == "grown" else causal_model("gpt2")
    if target == "growable":
        make_growable(model)
    before = snapshot(model)
    with pytest.raises(HfGrowError, match=message) as raised:
        load_growth(model, tmp_path / "growth")
    assert "\n" not in str(raised.value)
    assert_unchanged(model, before)


def test_models_that_are_not_the_base_are_refused(tmp_path):
    save_growth(grown("llama"), tmp_path / "growth")
    hf_grow.save_grown(grown("llama"), tmp_path / "model")
    other_heads = causal_model("llama", num_attention_heads=8, num_key_value_heads=4, head_dim=4)
    assert hf_grow.surgery.base.base_hash(other_heads) == hf_grow.surgery.base.base_hash(causal_model("llama"))
    cases = [
        (causal_model("gpt2"), "growth", "growth of a llama model, not of a gpt2"),
        (small_model(LlamaForSequenceClassification, "llama"), "growth", "other weights than this model has"),
        (trained(), "growth", "other weights than this model has"),
        (dropped(), "growth", "growth of a llama model, not of a gpt2"),
        (other_heads, "growth", "whose layers or heads have other sizes"),
        (causal_model("llama"), "model", "load a whole model with hf_grow.load_grown"),
        (causal_model("llama"), "nowhere", "nowhere cannot be loaded"),
    ]
    for model, name, message in cases:
        before = snapshot(model)
        with pytest.raises(HfGrowError, match=message) as raised:
            load_growth(model, tmp_path / name)
        assert "\n" not in str(raised.value)
        assert_unchanged(model, before)
    with pytest.raises(HfGrowError, match="takes a transformers model, not Linear"):
        load_growth(torch.nn.Linear(2, 2), tmp_path / "growth")
    with pytest.raises(HfGrowError, match="named by a folder or a Hub id, not None"):
        load_growth(causal_model("llama"), None)
    with torch.device("meta"):
        empty = causal_class("llama")(causal_model("llama").config)
    with pytest.raises(HfGrowError, match="not all in memory"):
        load_growth(empty, tmp_path / "growth")


@pytest.mark.parametrize(
    ("act", "allocate", "calls_before"),
    [
        (load_growth, "hf_grow.saving.growth_file.new_weights", 1),
        (load_growth, "hf_grow.modeling.growable_attention.new_parameter", 5),
        (lambda model, _: remove_growth(model), "hf_grow.modeling.growable_attention.new_parameter", 5),
    ],
    ids=["load", "load instead", "remove"],
)
def test_no_memory_in_the_middle_leaves_the_model_as_it_was(act, allocate, calls_before, tmp_path, monkeypatch):
    save_growth(grown("llama"), tmp_path / "growth")
    model = grown_otherwise("llama")
    before = snapshot(model)
    real, calls = pkgutil.resolve_name(allocate), []

    def fail_later(*args):
        calls.append(1)
        if len(calls) > calls_before:
            raise MemoryError
        return real(*args)

    monkeypatch.setattr(allocate, fail_later)
    with pytest.raises(MemoryError):
        act(model, tmp_path / "growth")
    assert_unchanged(model, before)


def contents(folder):
    return {file.name: file.read_bytes() for file in folder.iterdir()}


@pytest.mark.parametrize("moment", ["weights", "json", "extras", "interrupt"])
def test_a_save_that_fails_leaves_the_old_growth_whole(moment, tmp_path, monkeypatch):
    model = grown("gpt2")
    save_growth(model, tmp_path / "growth")
    before = contents(tmp_path / "growth")
    hf_grow.widen_query_key(model, 0, 1)

    def fail(*args, **kwargs):
        raise KeyboardInterrupt if moment == "interrupt" else OSError("disk full")

    if moment in ("weights", "interrupt"):
        monkeypatch.setattr("hf_grow.saving.growth_file.save_file", fail)
    if moment == "json":
        monkeypatch.setattr("pathlib.Path.write_text", fail)
    extras = fail if moment == "extras" else None
    with pytest.raises((HfGrowError, KeyboardInterrupt)) as raised:
        save_growth(model, tmp_path / "growth", overwrite=True, extras=extras)
    assert moment == "interrupt" or "cannot be written: disk full" in str(raised.value)
    with pytest.raises((HfGrowError, KeyboardInterrupt)):
        save_growth(model, tmp_path / "new" / "growth", extras=extras)
    assert contents(tmp_path / "growth") == before
    assert [file.name for file in tmp_path.iterdir()] == ["growth"]


def test_a_folder_is_overwritten_only_if_asked_and_only_if_it_is_ours(tmp_path):
    model = grown("gpt2")
    save_growth(model, tmp_path / "growth")
    with pytest.raises(HfGrowError, match="exists and is not empty"):
        save_growth(model, tmp_path / "growth")
    hf_grow.save_grown(model, tmp_path / "growth", overwrite=True)
    assert_equal_models(hf_grow.load_grown(tmp_path / "growth"), model)
    save_growth(model, tmp_path / "growth", overwrite=True)
    assert set(contents(tmp_path / "growth")) == {"growth.json", "growth.safetensors"}
    (tmp_path / "thesis").mkdir()
    (tmp_path / "thesis" / "chapter.tex").write_text("mine")
    with pytest.raises(HfGrowError, match="holds no model, so it is not overwritten"):
        save_growth(model, tmp_path / "thesis", overwrite=True)
    assert contents(tmp_path / "thesis") == {"chapter.tex": b"mine"}


def test_inspection_counts_what_is_new_and_finds_damage(tmp_path):
    model = grown("gpt2", **CROSS["gpt2"])
    save_growth(model, tmp_path / "growth")
    summary = hf_grow.inspect_checkpoint(tmp_path / "growth")
    stock = make_growable(causal_model("gpt2", **CROSS["gpt2"])).growth_summary()
    assert summary["growth_only"] and summary["events"] == model.growth_history["events"]
    assert summary["parameters"] == model.num_parameters() - stock["parameters"]
    sizes = {(layer["kind"], layer["layer"]): layer for layer in summary["layers"]}
    for now, before in zip(model.growth_summary()["layers"], stock["layers"], strict=True):
        found = sizes.pop((now["kind"], now["layer"]))
        assert found["parameters"] == now["parameters"] - before["parameters"]
        same = ("n_heads", "n_kv_heads", "query_key_dim", "value_dim", "scaling")
        assert [found[name] for name in same] == [now[name] for name in same]
    assert not sizes
    flip_a_bit(tmp_path / "growth")
    with pytest.raises(HfGrowError, match="is damaged"):
        hf_grow.inspect_checkpoint(tmp_path / "growth")


@pytest.fixture
def hub(monkeypatch, tmp_path):
    """A Hub with one user, and this process's client pointed at it."""
    with HubServer(token="hf_test", user="user") as server:
        server.redirect_client(monkeypatch, max_retries=0)
        monkeypatch.setattr("huggingface_hub.constants.HF_HUB_CACHE", str(tmp_path / "cache"))
        yield server


def test_growth_is_pushed_in_one_commit_and_loaded_from_the_hub(hub, tmp_path):
    model = grown("llama")
    folder = save_growth(model, tmp_path / "growth")
    hf_grow.push_grown(folder, "user/growth", token="hf_test", private=True)
    repo = hub.repos["user/growth"]
    assert len(repo.commits) == 1 and repo.files == contents(folder)
    assert_equal_models(load_growth(causal_model("llama"), "user/growth", token="hf_test"), model)
    first = repo.head.oid
    save_growth(grown_otherwise("llama"), folder, overwrite=True)
    hf_grow.push_grown(folder, "user/growth", token="hf_test")
    assert_equal_models(load_growth(causal_model("llama"), "user/growth", token="hf_test", revision=first), model)
    with pytest.raises(HfGrowError, match="user/nothing cannot be loaded"):
        load_growth(causal_model("llama"), "user/nothing", token="hf_test")


def test_damaged_growth_is_not_pushed(hub, tmp_path):
    folder = save_growth(grown("llama"), tmp_path / "growth")
    flip_a_bit(folder)
    with pytest.raises(HfGrowError, match="is damaged"):
        hf_grow.push_grown(folder, "user/growth", token="hf_test")
    assert not hub.requests


def test_the_commands_save_growth_alone_and_put_it_onto_the_model(run, hub, tmp_path, monkeypatch):
    saved = []

    def save(model, *args, **kwargs):
        saved.append(copy.deepcopy(model.state_dict()))
        return save_growth(model, *args, **kwargs)

    monkeypatch.setattr("hf_grow.cli.grow.save_growth", save)
    (tmp_path / "topics.txt").write_text(topics["assert"] + topics["numbers"], encoding="utf-8")
    small = ("--length", 32, "--max-sequences", 8, "--batch-size", 4, "--columns", "2", "--heads", "1")
    grow = ("grow", hf_grow.SMALL_MODEL, "--data", tmp_path / "topics.txt", *small)
    report = json.loads(run(*grow, "--out", tmp_path / "growth", "--growth-only", "--json"))
    names = set(contents(tmp_path / "growth"))
    assert {"growth.json", "growth.safetensors", "growth_report.json", "report.html", "line_search.png"} <= names
    assert not {"config.json", "model.safetensors", "tokenizer.json"} & names
    printed = run("patch", hf_grow.SMALL_MODEL, "--growth", tmp_path / "growth", "--out", tmp_path / "patched")
    assert f"{tmp_path / 'growth'} is in it" in printed and "growth by 2 query/key columns" in printed
    (whole,) = saved
    assert_same(hf_grow.load_grown(tmp_path / "patched").state_dict(), whole)
    assert (tmp_path / "patched" / "tokenizer.json").exists()
    inspected = run("inspect", tmp_path / "growth")
    assert f"{report['parameters_added']:,} new parameters, base model small_gpt2" in inspected
    run("push", tmp_path / "growth", "user/growth", "--token", "hf_test")
    assert hub.repos["user/growth"].files == contents(tmp_path / "growth")
    stock = AutoModelForCausalLM.from_pretrained(hf_grow.SMALL_MODEL)
    assert_same(merge_growth(load_growth(stock, tmp_path / "growth")).state_dict(), whole)


def test_the_commands_refuse_with_one_sentence(run, tmp_path):
    (tmp_path / "topics.txt").write_text(topics["assert"], encoding="utf-8")
    out = ("--out", tmp_path / "out")
    grow = ("--data", tmp_path / "topics.txt", "--columns", "2", "--growth-only")
    refused = run("grow", hf_grow.SMALL_MODEL, *grow, *out, "--strategy", "refactor", code=2)
    assert "--strategy refactor changes the present weights" in refused
    hf_grow.save_grown(trained_elsewhere(), tmp_path / "trained")
    assert "all weights were trained" in run("grow", tmp_path / "trained", *grow, *out, code=2)
    save_growth(grown("llama"), tmp_path / "growth")
    patch = ("patch", hf_grow.SMALL_MODEL, *out, "--growth")
    assert "growth of a llama model" in run(*patch, tmp_path / "growth", code=2)
    assert "nowhere cannot be loaded" in run(*patch, tmp_path / "nowhere", code=2)
    flip_a_bit(tmp_path / "growth")
    assert "is damaged" in run("inspect", tmp_path / "growth", code=2)
    assert not (tmp_path / "out").exists()
