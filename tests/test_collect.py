"""Exact collection against a slow loop over sequences and heads, and what it leaves behind: nothing."""

import copy

import pytest
import torch
from models import batch, causal_model, fill_new_weights, grow_everything, relative_difference, small_model
from transformers import BertForMaskedLM, BertForSequenceClassification, BertLMHeadModel, GPT2LMHeadModel

from hf_grow import HfGrowError, make_growable
from hf_grow.collect import collect_exact, collect_products
from hf_grow.structure import find_site, read_blocks

CASES = [
    ("gpt2", GPT2LMHeadModel, {}),
    ("gpt2", GPT2LMHeadModel, {"reorder_and_upcast_attn": True}),
    ("bert", BertForMaskedLM, {}),
    ("bert", BertForSequenceClassification, {}),
    ("llama", None, {}),
    ("mistral", None, {"sliding_window": 4}),
    ("qwen2", None, {}),
]
every_case = pytest.mark.parametrize(("model_type", "stock_class", "changes"), CASES, ids=str)


def labelled(model, size=4, length=9):
    """A batch with padding at the end of two sequences and labels that leave the padding out."""
    generator = torch.Generator().manual_seed(4)
    ids = torch.randint(2, 96, (size, length), generator=generator)
    mask = torch.ones_like(ids)
    mask[1::2, -3:] = 0
    if "SequenceClassification" in type(model).__name__:
        return {"input_ids": ids, "attention_mask": mask, "labels": torch.arange(size) % 2}
    return {"input_ids": ids, "attention_mask": mask, "labels": ids.masked_fill(mask == 0, -100)}


def loss_of(model, inputs):
    """The loss in float64: transformers computes that of a causal model in float32."""
    labels = inputs["labels"]
    logits = model(**{name: value for name, value in inputs.items() if name != "labels"}).logits.double()
    if model.loss_type == "ForCausalLM":
        logits, labels = logits[:, :-1], labels[:, 1:]
    return torch.nn.functional.cross_entropy(logits.flatten(0, -2), labels.flatten())


def growable(model_type, stock_class, changes):
    """A growable model in float64."""
    stock = small_model(stock_class, model_type, **changes) if stock_class else causal_model(model_type, **changes)
    return make_growable(stock).double()


def slow_statistics(model, inputs, layer):
    """T by differentiating the loss with respect to new query weights, one head and one key input at a time.

    With key weights e_j and query weights zero, ∂L/∂W_Q = s · T e_j for any kernel: nothing of `collect` is used.
    """
    site = find_site(model, layer)
    heads, inputs_of_query = read_blocks(site)["query"].shape[:2]
    groups, inputs_of_key = read_blocks(site)["key"].shape[:2]
    projections = {role: module for module, roles in site.projections() for role in roles}
    seen = {}
    hooks = [
        projections[role].register_forward_pre_hook(lambda module, args, role=role: seen.update({role: args[0]}))
        for role in ("query", "key")
    ]
    query = torch.zeros(heads, inputs_of_query, inputs_of_key, dtype=torch.float64, requires_grad=True)

    def probe(kernel, queries, keys, values, mask, **kwargs):
        ones = torch.ones_like(seen["query"][..., :1])
        states = {
            role: torch.cat((state, ones), -1)[..., : inputs_of_query if role == "query" else inputs_of_key]
            for role, state in seen.items()
        }
        extra = torch.einsum("bti,hij->bhtj", states["query"], query)
        identity = states["key"][:, None].expand(-1, groups, -1, -1)
        return kernel(torch.cat((queries, extra), -1), torch.cat((keys, identity), -1), values, mask, **kwargs)

    site.attention.observer = probe
    loss = model(**inputs).loss
    (gradient,) = torch.autograd.grad(loss, query)
    del site.attention.observer
    for hook in hooks:
        hook.remove()
    return gradient / site.attention.scaling


@every_case
def test_the_gradient_equals_that_of_probe_columns(model_type, stock_class, changes):
    model = growable(model_type, stock_class, changes)
    inputs = labelled(model)
    for layer in (0, 1):
        expected = slow_statistics(model, inputs, layer)
        found = collect_exact(model, [inputs])[layer].total()
        assert relative_difference(found.gradient / found.sequences, expected) < 1e-5


@every_case
def test_the_first_order_change_of_the_loss_is_the_gradient(model_type, stock_class, changes):
    """A finite difference through real new columns: the oracle that knows nothing of autograd."""
    from hf_grow import widen_query_key

    model = growable(model_type, stock_class, changes)
    inputs = labelled(model)
    sums = collect_exact(model, [inputs])[1].total()
    generator = torch.Generator().manual_seed(6)
    blocks = read_blocks(find_site(model, 1))
    query, key = (torch.randn(*blocks[role].shape[:2], 1, generator=generator).double() for role in ("query", "key"))
    size = 1e-4
    losses = []
    for sign in (1, -1):
        twin = copy.deepcopy(model)
        widen_query_key(twin, 1, 1, query=sign * size * query, key=key)
        losses.append(float(loss_of(twin, inputs)))
    keys = key.repeat_interleave(query.shape[0] // key.shape[0], dim=0)
    slope = torch.einsum("hip,hij,hjp->", query, sums.gradient, keys) * find_site(model, 1).attention.scaling
    assert (losses[0] - losses[1]) / (2 * size) == pytest.approx(float(slope) / sums.sequences, rel=5e-3)


@every_case
@pytest.mark.parametrize("side", ["key", "query"])
def test_probe_columns_give_products_with_the_gradient(model_type, stock_class, changes, side):
    model = growable(model_type, stock_class, changes)
    fill_new_weights(grow_everything(model))
    inputs = labelled(model)
    exact = [found.total().gradient for found in collect_exact(model, [inputs, inputs])]
    generator = torch.Generator().manual_seed(7)
    blocks = [read_blocks(find_site(model, layer)) for layer in (0, 1)]
    probes = [torch.randn(*block[side].shape[:2], 5, generator=generator).double() for block in blocks]
    found = collect_products(model, [inputs, inputs], probes, side)
    for gradient, probe, block, product in zip(exact, probes, blocks, found, strict=True):
        group = block["query"].shape[0] // block["key"].shape[0]
        if side == "key":
            expected = gradient @ probe.repeat_interleave(group, dim=0)
        else:
            expected = (gradient.mT @ probe).unflatten(0, (-1, group)).sum(1)
        assert relative_difference(product, expected) < 1e-5


def test_products_leave_everything_as_found():
    model = make_growable(causal_model("llama")).train()
    probes = [torch.randn(2, 32, 3) for _ in range(2)]
    before = snapshot(model)
    assert any(product.any() for product in collect_products(model, [labelled(model)], probes, "key"))
    assert_equal(snapshot(model), before)
    with pytest.raises(HfGrowError, match="'query' or 'key'"):
        collect_products(model, [labelled(model)], probes, "value")


def test_grams_leave_out_padding():
    model = growable("bert", BertForMaskedLM, {})
    inputs = labelled(model)
    site = find_site(model, 0)
    seen = []
    hook = site.attention.query.register_forward_pre_hook(lambda module, args: seen.append(args[0]))
    model(**inputs)
    hook.remove()
    states = torch.cat((seen[0], torch.ones_like(seen[0][..., :1])), -1)[inputs["attention_mask"].bool()]
    sums = collect_exact(model, [inputs])[0].total()
    for gram in (sums.query_gram, sums.key_gram):
        assert relative_difference(gram, states.T @ states) < 1e-9


def test_one_batch_of_eight_equals_eight_batches_of_one():
    model = growable("llama", None, {})
    whole = labelled(model, size=8)
    whole["attention_mask"] = torch.ones_like(whole["input_ids"])
    whole["labels"] = whole["input_ids"]
    single = [{name: value[index : index + 1] for name, value in whole.items()} for index in range(8)]
    for first, second in zip(collect_exact(model, [whole]), collect_exact(model, single), strict=True):
        for one, other in zip(first.halves, second.halves, strict=True):
            assert one.sequences == other.sequences == 4
            assert relative_difference(one.gradient, other.gradient) < 1e-9
            assert relative_difference(one.query_gram, other.query_gram) < 1e-9


def test_cross_attention_has_a_key_gram_of_its_own():
    model = make_growable(small_model(BertLMHeadModel, "bert", is_decoder=True, add_cross_attention=True)).double()
    inputs = labelled(model)
    inputs["encoder_hidden_states"] = torch.randn(4, 7, 32).double()
    inputs["encoder_attention_mask"] = torch.tensor([[1] * 7, [1] * 4 + [0] * 3] * 2)
    cross = next(found for found in collect_exact(model, [inputs]) if found.kind == "cross").total()
    states = inputs["encoder_hidden_states"][inputs["encoder_attention_mask"].bool()]
    states = torch.cat((states, torch.ones_like(states[:, :1])), -1)
    assert relative_difference(cross.key_gram, states.T @ states) < 1e-9
    assert relative_difference(cross.query_gram, cross.key_gram) > 0.1
    assert cross.gradient.abs().max() > 0


def snapshot(model):
    """Everything collecting could disturb."""
    return {
        "weights": copy.deepcopy(model.state_dict()),
        "gradients": {name: copy.deepcopy(parameter.grad) for name, parameter in model.named_parameters()},
        "learning": [parameter.requires_grad for parameter in model.parameters()],
        "modes": [module.training for module in model.modules()],
        "hooks": [len(module._forward_hooks) + len(module._forward_pre_hooks) for module in model.modules()],
        "attributes": [sorted(module.__dict__) for module in model.modules()],
        "kernel": model.config._attn_implementation,
        "random": torch.get_rng_state(),
    }


def assert_equal(first, second):
    """Deep equality that knows tensors."""
    if isinstance(first, torch.Tensor):
        assert torch.equal(first, second)
    elif isinstance(first, dict):
        assert first.keys() == second.keys()
        for key in first:
            assert_equal(first[key], second[key])
    else:
        assert first == second


@pytest.mark.parametrize("fails", [False, True])
def test_collecting_leaves_everything_as_found(fails):
    model = fill_new_weights(grow_everything(make_growable(causal_model("gpt2")))).train()
    model.transformer.h[0].mlp.eval()
    model.transformer.wte.weight.requires_grad_(False)
    inputs = labelled(model)
    model(**inputs).loss.backward()
    before = snapshot(model)
    if fails:
        with pytest.raises(Exception, match="index out of range"):
            collect_exact(model, [inputs, {**inputs, "input_ids": inputs["input_ids"] + 10_000}])
    else:
        collect_exact(model, [inputs])
    assert_equal(snapshot(model), before)


def test_bad_batches_are_refused_or_counted(caplog):
    model = make_growable(causal_model("gpt2"))
    inputs = labelled(model)
    with pytest.raises(HfGrowError, match="no batch"):
        collect_exact(model, [])
    with pytest.raises(HfGrowError, match="returned no loss"):
        collect_exact(model, [batch(model)])
    with pytest.raises(HfGrowError, match="make_growable"):
        collect_exact(causal_model("gpt2"), [inputs])
    empty = {**inputs, "labels": torch.full_like(inputs["labels"], -100)}
    with pytest.raises(HfGrowError, match="1 of 2 batches"):
        collect_exact(model, [inputs, empty])
    kept = collect_exact(model, [inputs] * 10 + [empty])
    assert "Skipped 1 of 11" in caplog.text
    assert kept[0].total().sequences == 40
