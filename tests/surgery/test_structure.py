"""Structural growth: exact preservation, the right effect of given weights, and nothing half done."""

import copy

import pytest
import torch
from models import batch, causal_model, fill_new_weights, grow_everything, relative_difference, small_model, tensors
from torch import nn
from transformers import BertLMHeadModel, BertModel, GPT2LMHeadModel

from hf_grow import HfGrowError, add_heads, drop_query_key, make_growable, widen_query_key, widen_value
from hf_grow.modeling import growable_attention
from hf_grow.modeling.growable_attention import AttentionDims, AttentionSite, Layout, attention_sites
from hf_grow.surgery.blocks import fuse_rows, read_blocks
from hf_grow.surgery.families import FAMILIES
from hf_grow.surgery.structure import find_site

every_family = pytest.mark.parametrize("model_type", FAMILIES)


def base_model(model_type, attn="eager", **changes):
    """The growable base model of a family."""
    return make_growable(small_model(next(iter(FAMILIES[model_type].model_classes)), model_type, attn, **changes))


def observe(model, inputs, layer=0):
    """What enters the projections, the attention weights, and what leaves the output projection, in one layer."""
    site = find_site(model, layer)
    first, last = (list(site.projections())[index][0] for index in (0, -1))
    seen = {}
    hooks = [
        first.register_forward_hook(lambda module, args, output: seen.update(inputs=args[0])),
        last.register_forward_hook(lambda module, args, output: seen.update(output=output)),
    ]
    with torch.no_grad():
        seen["weights"] = model(**inputs, output_attentions=True).attentions[layer]
    for hook in hooks:
        hook.remove()
    return seen


def augment(states, weights):
    """A column of ones for the bias, where the weights have a row for it."""
    if weights.shape[1] == states.shape[-1]:
        return states
    return torch.cat((states, torch.ones_like(states[..., :1])), dim=-1)


def random_weights(model, layer, heads=None, columns=None):
    """Random new weights of the right shapes for every role."""
    blocks = read_blocks(find_site(model, layer))
    generator = torch.Generator().manual_seed(5)
    new = {}
    for role, block in blocks.items():
        shape = list(block.shape)
        if columns is not None:
            shape[1 if role == "output" else 2] = columns
        if heads is not None:
            shape[0] = heads * shape[0] // blocks["key"].shape[0]
        new[role] = torch.randn(shape, generator=generator) * 0.3
    return new


def centred(scores, allowed):
    """Scores without what softmax ignores: a constant per row, over the entries that are not masked."""
    scores = scores.masked_fill(~allowed, 0)
    mean = scores.sum(-1, keepdim=True) / allowed.sum(-1, keepdim=True)
    return (scores - mean).masked_fill(~allowed, 0)


@every_family
def test_new_query_key_columns_add_their_scores(model_type):
    model = base_model(model_type)
    inputs = batch(model, padding=None)
    new = random_weights(model, 0, columns=3)
    before = observe(model, inputs)
    widen_query_key(model, 0, 3, query=new["query"], key=new["key"])
    after = observe(model, inputs)
    states = before["inputs"]
    queries = torch.einsum("bti,hic->bhtc", augment(states, new["query"]), new["query"])
    keys = torch.einsum("bti,hic->bhtc", augment(states, new["key"]), new["key"])
    keys = keys.repeat_interleave(queries.shape[1] // keys.shape[1], dim=1)
    added = find_site(model, 0).attention.scaling * queries @ keys.transpose(2, 3)
    allowed = before["weights"] > 0
    found = centred(after["weights"].log() - before["weights"].log(), allowed)
    assert relative_difference(found, centred(added, allowed)) < 1e-4


@every_family
def test_new_value_columns_add_their_output(model_type):
    model = base_model(model_type)
    inputs = batch(model)
    new = random_weights(model, 0, columns=5)
    before = observe(model, inputs)
    widen_value(model, 0, 5, value=new["value"], output=new["output"])
    after = observe(model, inputs)
    values = torch.einsum("bti,hic->bhtc", augment(before["inputs"], new["value"]), new["value"])
    values = values.repeat_interleave(before["weights"].shape[1] // values.shape[1], dim=1)
    added = torch.einsum("bhqk,bhkc,hco->bqo", before["weights"], values, new["output"])
    assert relative_difference(after["output"] - before["output"], added) < 1e-4


@pytest.mark.parametrize("model_type", ["gpt2", "bert"])
def test_a_new_head_adds_its_output(model_type):
    model = base_model(model_type)
    inputs = batch(model)
    new = random_weights(model, 0, heads=1)
    before = observe(model, inputs)
    add_heads(model, 0, 1, **new)
    after = observe(model, inputs)
    states = augment(before["inputs"], new["query"])
    query, key, value = (torch.einsum("bti,hic->bhtc", states, new[role]) for role in ("query", "key", "value"))
    scores = find_site(model, 0).attention.scaling * query @ key.transpose(2, 3)
    scores = scores.masked_fill(before["weights"][:, :1] == 0, -torch.inf)
    added = torch.einsum("bhqk,bhkc,hco->bqo", scores.softmax(-1), value, new["output"])
    assert relative_difference(after["output"] - before["output"], added) < 1e-4


@every_family
def test_a_copied_head_with_the_opposite_output_cancels_the_first(model_type):
    model = base_model(model_type)
    inputs = batch(model)
    blocks = read_blocks(find_site(model, 0))
    group = blocks["query"].shape[0] // blocks["key"].shape[0]
    first = {role: block[: group if role in ("query", "output") else 1] for role, block in blocks.items()}
    without = copy.deepcopy(model)
    projection = list(find_site(without, 0).projections())[-1][0]
    width = group * blocks["output"].shape[1]
    with torch.no_grad():
        weight = projection.weight
        (weight[:width] if model_type == "gpt2" else weight[:, :width]).zero_()
    first["output"] = -first["output"]
    add_heads(model, 0, 1, **first)
    assert relative_difference(observe(model, inputs)["output"], observe(without, inputs)["output"]) < 1e-4


@every_family
@pytest.mark.parametrize("attn", ["eager", "sdpa"])
def test_preserving_growth_changes_no_output(model_type, attn):
    model = base_model(model_type, attn)
    inputs = batch(model)
    before = tensors(model, inputs)["last_hidden_state"]
    grow_everything(model)
    sizes = [(site.attention.n_kv_heads, site.attention.query_key_dim) for site in attention_sites(model)]
    stock = 4 if model_type in ("gpt2", "bert") else 2
    assert sizes == [(stock + 2, 11), (stock + 1, 10)]
    assert relative_difference(tensors(model, inputs)["last_hidden_state"], before) <= 1e-5


@every_family
def test_padded_kernels_and_plain_ones_agree_on_a_grown_model(model_type):
    model = fill_new_weights(grow_everything(base_model(model_type, "eager")))
    inputs = batch(model, padding="left")
    eager = tensors(model, inputs)["last_hidden_state"]
    model.set_attn_implementation("sdpa")
    kept = inputs["attention_mask"].bool()
    assert relative_difference(tensors(model, inputs)["last_hidden_state"][kept], eager[kept]) <= 1e-4


@every_family
def test_every_new_weight_gets_a_gradient_within_three_steps(model_type):
    """One step wakes output rows of new heads, the next their key columns, the third their query columns."""
    model = grow_everything(base_model(model_type)).double()
    inputs = batch(model)
    optimizer = torch.optim.SGD(model.parameters(), lr=1e-2)
    for _ in range(3):
        optimizer.zero_grad()
        model(**inputs).last_hidden_state.square().mean().backward()
        optimizer.step()
    for site in attention_sites(model):
        for projection, roles in site.projections():
            gradient = projection.weight.grad.T if model_type == "gpt2" else projection.weight.grad
            lines = gradient.abs().sum(0 if roles == ("output",) else 1)
            assert (lines > 0).all(), (site.name, roles)


@pytest.mark.parametrize(
    ("stock_class", "model_type"), [(BertLMHeadModel, "bert"), (GPT2LMHeadModel, "gpt2")], ids=["bert", "gpt2"]
)
def test_cross_attention_grows_too(stock_class, model_type):
    changes = {"is_decoder": True} if model_type == "bert" else {}
    model = make_growable(small_model(stock_class, model_type, add_cross_attention=True, **changes))
    inputs = {**batch(model), "encoder_hidden_states": torch.randn(2, 7, 32)}
    before = tensors(model, inputs)["logits"]
    widen_query_key(model, 0, 3, attention_type="cross")
    widen_value(model, 1, 2, attention_type="cross")
    add_heads(model, 1, 1, attention_type="cross")
    assert relative_difference(tensors(model, inputs)["logits"], before) <= 1e-5
    assert model.config.hf_grow["cross_layers"][0]["qk_head_dim"] == 11
    assert model.config.hf_grow["layers"][0]["qk_head_dim"] == 8
    changed = tensors(fill_new_weights(model), inputs)["logits"]
    assert relative_difference(changed, before) > 1e-3


@every_family
def test_dropping_what_was_added_gives_the_model_back(model_type):
    model = base_model(model_type)
    before = copy.deepcopy(model.state_dict())
    new = random_weights(model, 1, columns=2)
    widen_query_key(model, 1, 2, query=new["query"], key=new["key"])
    drop_query_key(model, 1, [8, 9])
    assert all(torch.equal(value, before[name]) for name, value in model.state_dict().items())
    assert find_site(model, 1).attention.query_key_dim == 8


def test_dropping_columns_removes_their_scores():
    model = base_model("bert")
    blocks = read_blocks(find_site(model, 0))
    zeroed = copy.deepcopy(model)
    with torch.no_grad():
        for head in range(4):
            find_site(zeroed, 0).attention.query.weight[head * 8 + 3] = 0
            find_site(zeroed, 0).attention.query.bias[head * 8 + 3] = 0
    drop_query_key(model, 0, [3])
    assert read_blocks(find_site(model, 0))["query"].shape == (4, blocks["query"].shape[1], 7)
    first, second = (tensors(each, batch(each))["last_hidden_state"] for each in (model, zeroed))
    assert relative_difference(first, second) < 1e-5


@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float16, torch.float64])
def test_dtype_and_device_stay(dtype):
    model = base_model("llama").to(dtype)
    grow_everything(model)
    assert {parameter.dtype for parameter in model.parameters()} == {dtype}
    assert tensors(model, batch(model))["last_hidden_state"].dtype == dtype


def test_feature_counts_stay_true_for_peft():
    llama, gpt2 = grow_everything(base_model("llama")), grow_everything(base_model("gpt2"))
    for site in attention_sites(llama):
        for projection, _ in site.projections():
            assert (projection.out_features, projection.in_features) == tuple(projection.weight.shape)
    for site in attention_sites(gpt2):
        for projection, _ in site.projections():
            assert (projection.nx, projection.nf) == tuple(projection.weight.shape)
            assert projection.bias.shape == (projection.nf,)


def test_hooks_on_a_parameter_move_to_its_successor():
    model = base_model("gpt2")
    weight = model.h[0].attn.c_attn.weight
    seen = []
    handle = weight.register_hook(lambda gradient: seen.append(tuple(gradient.shape)))
    widen_query_key(model, 0, 1)
    loss = model(**batch(model)).last_hidden_state.square().sum()
    loss.backward(retain_graph=True)
    assert seen == [(32, 32 * 3 + 8)]
    handle.remove()
    loss.backward()
    assert len(seen) == 1


def test_growth_is_recorded_in_config_and_history():
    model = base_model("llama")
    widen_query_key(model, 1, 4)
    add_heads(model, 0, 1)
    first, second = model.config.hf_grow["layers"]
    assert (first["num_attention_heads"], first["num_key_value_heads"], first["qk_head_dim"]) == (6, 3, 8)
    assert (second["num_attention_heads"], second["qk_head_dim"], second["scaling"]) == (4, 12, 8**-0.5)
    events = [(event["kind"], event["layer"], event["count"]) for event in model.growth_history["events"]]
    assert events == [("query_key_columns", 1, 4), ("heads", 0, 1)]


def test_the_same_seed_gives_the_same_new_weights():
    first, second = base_model("gpt2"), base_model("gpt2")
    for model in (first, second):
        grow_everything(model)
    assert all(torch.equal(value, second.state_dict()[name]) for name, value in first.state_dict().items())


def test_fused_projections_with_heads_in_turn_are_understood():
    """The order of GPT-NeoX: query, key and value of one head, then of the next."""
    attention = nn.Module()
    attention.qkv, attention.dense = nn.Linear(6, 2 * (3 + 3 + 4)), nn.Linear(8, 6)
    attention.dims = attention.own_dims = AttentionDims(2, 2, 3, 4, 1.0)
    attention.growth = None
    layout = Layout(inputs={"qkv": ("query", "key", "value")}, output="dense", per_head=True)
    site = AttentionSite("attention", attention, attention, layout)
    blocks = read_blocks(site)
    states = torch.randn(5, 6)
    per_head = attention.qkv(states).view(5, 2, 10)
    ones = torch.cat((states, torch.ones(5, 1)), dim=1)
    for role, part in zip(("query", "key", "value"), per_head.split([3, 3, 4], dim=2), strict=True):
        assert torch.allclose(torch.einsum("ti,hic->thc", ones, blocks[role]), part, atol=1e-6)
    expected = torch.cat((attention.qkv.weight, attention.qkv.bias[:, None]), dim=1)
    assert torch.equal(fuse_rows(site, blocks, ("query", "key", "value")), expected)


BAD = torch.full((4, 33, 2), torch.nan)
RIGHT = torch.ones(4, 33, 2)


@pytest.mark.parametrize(
    ("call", "message"),
    [
        (lambda model: widen_query_key(model, 0, 0), "columns must be a positive integer, not 0"),
        (lambda model: widen_query_key(model, 0, -1), "columns must be a positive integer, not -1"),
        (lambda model: widen_query_key(model, 0, 1.5), "columns must be a positive integer, not 1.5"),
        (lambda model: widen_value(model, 0, True), "columns must be a positive integer, not True"),
        (lambda model: add_heads(model, 0, "1"), "heads must be a positive integer, not '1'"),
        (lambda model: widen_query_key(model, 2, 1), "no self-attention in layer 2: the model has 2"),
        (lambda model: widen_query_key(model, 0, 1, attention_type="cross"), "no cross-attention in layer 0"),
        (lambda model: widen_query_key(model, 0, 1, attention_type="both"), "attention_type must be 'self' or 'cross'"),
        (lambda model: widen_query_key(model, 0, 2, query=RIGHT[:3]), r"shape \(4, 33, 2\), not \(3, 33, 2\)"),
        (lambda model: widen_query_key(model, 0, 2, key=BAD), "key weights for h.0.attn are not all finite"),
        (lambda model: widen_query_key(model, 0, 2, key=[1.0]), "must be a tensor of floating-point numbers, not list"),
        (lambda model: widen_query_key(model, 0, 2, key=RIGHT.cfloat()), "numbers, not torch.complex64"),
        (lambda model: widen_query_key(model, 0, 2, generator=3), "generator must be a torch.Generator, not int"),
        (lambda model: widen_query_key(model, torch.tensor([0, 1]), 2), "no self-attention in layer tensor"),
        (lambda model: drop_query_key(model, 0, 3), "must be a list of column numbers, not 3"),
        (lambda model: widen_query_key(model, 0, 2, query=RIGHT * 0), "both zero: they could never learn"),
        (lambda model: widen_value(model, 0, 2, output=RIGHT), r"output weights .* must have shape \(4, 2, 32\)"),
        (lambda model: drop_query_key(model, 0, [8]), "numbered 0 to 7"),
        (lambda model: drop_query_key(model, 0, []), "Name some, but not all"),
        (lambda model: drop_query_key(model, 0, range(8)), "Name some, but not all"),
    ],
)
def test_bad_input_is_refused_and_changes_nothing(call, message):
    model = base_model("gpt2")
    before = copy.deepcopy(model.state_dict())
    config, history = copy.deepcopy(model.config.hf_grow), copy.deepcopy(model.growth_history)
    with pytest.raises(HfGrowError, match=message):
        call(model)
    assert all(torch.equal(value, before[name]) for name, value in model.state_dict().items())
    assert model.config.hf_grow == config and model.growth_history == history


def test_rotated_columns_cannot_be_dropped():
    with pytest.raises(HfGrowError, match="first 8 query/key columns"):
        drop_query_key(base_model("llama"), 0, [7])


def test_a_stock_model_cannot_be_grown():
    with pytest.raises(HfGrowError, match="make_growable"):
        widen_query_key(small_model(BertModel, "bert"), 0, 1)


@pytest.mark.parametrize("model_type", ["gpt2", "llama"])
@pytest.mark.parametrize("target", ["torch.cat", "hf_grow.modeling.growable_attention.new_parameter"])
@pytest.mark.parametrize("call", [1, 2, 3, 4])
def test_a_failure_in_the_middle_leaves_the_model_as_it_was(monkeypatch, model_type, target, call):
    model = base_model(model_type)
    before = copy.deepcopy(model.state_dict())
    real = torch.cat if target == "torch.cat" else growable_attention.new_parameter
    calls = []

    def fail_later(*args, **kwargs):
        calls.append(1)
        if len(calls) == call:
            raise MemoryError
        return real(*args, **kwargs)

    monkeypatch.setattr(target, fail_later)
    failed = False
    try:
        add_heads(model, 0, 1)
    except MemoryError:
        failed = True
    monkeypatch.undo()
    assert failed or (target, call) == ("hf_grow.modeling.growable_attention.new_parameter", 4)
    if not failed:
        return
    assert all(torch.equal(value, before[name]) for name, value in model.state_dict().items())
    assert find_site(model, 0).attention.n_heads == 4


def test_growth_of_a_projection_with_an_adapter_is_attached():
    from peft import LoraConfig, get_peft_model

    model = make_growable(causal_model("llama"))
    get_peft_model(model, LoraConfig(target_modules=["q_proj"]))
    widen_query_key(model, 0, 1)
    assert model.active_growth == "default" and model.model.layers[0].self_attn.q_proj.base_layer.out_features == 32


def test_growth_inside_inference_mode_can_be_trained_later():
    model = base_model("llama")
    with torch.inference_mode():
        grow_everything(model)
    model(**batch(model)).last_hidden_state.square().sum().backward()


def test_new_query_columns_are_not_zero_where_the_present_ones_are():
    model = base_model("llama")
    with torch.no_grad():
        model.layers[0].self_attn.q_proj.weight.zero_()
    widen_query_key(model, 0, 2)
    assert read_blocks(find_site(model, 0))["query"][..., 8:].abs().min() > 0
