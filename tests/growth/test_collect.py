"""Collection against slow loops and finite differences, and what it leaves behind: nothing."""

import copy
from math import isfinite

import pytest
import torch
from models import KINDS, batch, causal_model, fill_new_weights, grow_everything, relative_difference, small_model
from transformers import BertForMaskedLM, BertForSequenceClassification, BertLMHeadModel, GPT2LMHeadModel

from hf_grow import CollectConfig, HfGrowError, Statistics, add_heads, collect_statistics, make_growable, widen_value
from hf_grow.measuring.probes import NewHead, OutputRows, driving_inputs, output_products, score_products
from hf_grow.running.passes import Passes, growable_sites, split_sequences
from hf_grow.surgery.blocks import read_blocks
from hf_grow.surgery.structure import find_site

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


def exact_sums(model, batches, **changes):
    """The sums of every attention module over all sequences."""
    config = CollectConfig(collection="exact", **changes)
    return [layer.total() for layer in collect_statistics(model, batches, config).layers]


def sequences_of(inputs):
    """The sequences of a batch, each in a batch of its own."""
    size = len(inputs["input_ids"])
    return [{name: value[index : index + 1] for name, value in inputs.items()} for index in range(size)]


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
def test_the_gradient_equals_an_explicit_loop_over_sequences(model_type, stock_class, changes):
    model = growable(model_type, stock_class, changes)
    sequences = sequences_of(labelled(model))
    sums = exact_sums(model, sequences)
    for layer in (0, 1):
        weights = [Passes(model).weight(sequence) for sequence in sequences]
        expected = sum(
            weight * slow_statistics(model, sequence, layer)
            for sequence, weight in zip(sequences, weights, strict=True)
        )
        assert relative_difference(sums[layer].gradient, expected) < 1e-5


@every_case
def test_the_first_order_change_of_the_loss_is_the_gradient(model_type, stock_class, changes):
    """A finite difference through real new columns: the oracle that knows nothing of autograd."""
    from hf_grow import widen_query_key

    model = growable(model_type, stock_class, changes)
    inputs = labelled(model)
    sums = exact_sums(model, [inputs], held_out=0.0)[1]
    generator = torch.Generator().manual_seed(6)
    blocks = read_blocks(find_site(model, 1))
    query, key = (torch.randn(*blocks[role].shape[:2], 1, generator=generator).double() for role in ("query", "key"))
    size = 1e-4
    losses = []
    for sign in (1, -1):
        twin = copy.deepcopy(model)
        widen_query_key(twin, 1, 1, query=sign * size * query, key=key)
        losses.append(loss_of(twin, inputs).item())
    keys = key.repeat_interleave(query.shape[0] // key.shape[0], dim=0)
    slope = torch.einsum("hip,hij,hjp->", query, sums.gradient, keys) * find_site(model, 1).attention.scaling
    assert (losses[0] - losses[1]) / (2 * size) == pytest.approx(float(slope) / sums.weight, rel=5e-3)


@every_case
@pytest.mark.parametrize("side", ["key", "query"])
def test_probe_columns_give_products_with_the_gradient(model_type, stock_class, changes, side):
    model = growable(model_type, stock_class, changes)
    fill_new_weights(grow_everything(model))
    inputs = labelled(model)
    exact = [sums.mean().gradient for sums in exact_sums(model, [inputs, inputs], held_out=0.0)]
    generator = torch.Generator().manual_seed(7)
    blocks = [read_blocks(find_site(model, layer)) for layer in (0, 1)]
    probes = [torch.randn(*block[side].shape[:2], 5, generator=generator).double() for block in blocks]
    products = score_products(Passes(model), growable_sites(model), [inputs, inputs], probes, side)
    for gradient, probe, block, product in zip(exact, probes, blocks, products, strict=True):
        group = block["query"].shape[0] // block["key"].shape[0]
        if side == "key":
            expected = gradient @ probe.repeat_interleave(group, dim=0)
        else:
            expected = (gradient.mT @ probe).unflatten(0, (-1, group)).sum(1)
        assert relative_difference(product, expected) < 1e-5


def test_grams_leave_out_padding():
    model = growable("bert", BertForMaskedLM, {})
    inputs = labelled(model)
    site = find_site(model, 0)
    seen = []
    hook = site.attention.query.register_forward_pre_hook(lambda module, args: seen.append(args[0]))
    model(**inputs)
    hook.remove()
    states = torch.cat((seen[0], torch.ones_like(seen[0][..., :1])), -1)[inputs["attention_mask"].bool()]
    sums = exact_sums(model, [inputs], held_out=0.0)[0]
    for gram in (sums.query_gram, sums.key_gram):
        assert relative_difference(gram, states.T @ states) < 1e-9


@pytest.mark.parametrize("collection", ["exact", "sketch"])
def test_one_batch_of_eight_equals_eight_batches_of_one(collection):
    """Also with padding: every label counts the same."""
    model = growable("llama", None, {})
    whole = labelled(model, size=8)
    config = CollectConfig(collection=collection, kinds=KINDS, columns=2, value_columns=2, oversampling=2)
    first, second = (collect_statistics(model, batches, config) for batches in ([whole], sequences_of(whole)))
    assert first.sequences == second.sequences == 8
    for one, other in zip(first.layers, second.layers, strict=True):
        assert relative_difference(one.query_gram, other.query_gram) < 1e-9
        assert relative_difference(one.bottleneck, other.bottleneck) < 1e-6
        for name in ("columns", "values", "uniform", "uniform_scores"):
            candidates, expected = getattr(one, name), getattr(other, name)
            assert relative_difference(candidates.gains, expected.gains) < 1e-5, name
            assert relative_difference(candidates.held_out, expected.held_out) < 1e-4, name
        if collection == "exact":
            # transformers computes the loss of a causal model in float32.
            assert relative_difference(one.total().gradient, other.total().gradient) < 1e-6


def test_judges_follow_no_period_of_the_data():
    ids = torch.arange(400)[:, None]
    _, judging = split_sequences([{"input_ids": ids}], 0.25)
    judges = judging[0]["input_ids"][:, 0]
    assert len(judges) == pytest.approx(100, abs=3)
    for period in (2, 3, 4, 5, 8):
        counts = torch.bincount(judges % period, minlength=period)
        assert counts.min() > 0.6 * 100 / period


def test_which_sequences_judge_does_not_depend_on_batches():
    ids = torch.arange(13)[:, None].expand(-1, 4)
    for size in (1, 3, 5, 13):
        batches = [{"input_ids": part, "scale": torch.tensor(2.0)} for part in ids.split(size)]
        choosing, judging = split_sequences(batches, 0.25)
        seen = [torch.cat([batch["input_ids"][:, 0] for batch in part]).tolist() for part in (choosing, judging)]
        assert seen[1] == [1, 4, 9, 12] and sorted(seen[0] + seen[1]) == list(range(13))
        assert all(float(batch["scale"]) == 2.0 for batch in choosing)


def test_cross_attention_has_a_key_gram_of_its_own():
    model = make_growable(small_model(BertLMHeadModel, "bert", is_decoder=True, add_cross_attention=True)).double()
    inputs = labelled(model)
    inputs["encoder_hidden_states"] = torch.randn(4, 7, 32).double()
    inputs["encoder_attention_mask"] = torch.tensor([[1] * 7, [1] * 4 + [0] * 3] * 2)
    config = CollectConfig(collection="exact", kinds=KINDS, columns=2, value_columns=2, held_out=0.0)
    layer = next(
        part for part in collect_statistics(model, [inputs], config).layers if part.place.attention_type == "cross"
    )
    cross = layer.total()
    states = inputs["encoder_hidden_states"][inputs["encoder_attention_mask"].bool()]
    states = torch.cat((states, torch.ones_like(states[:, :1])), -1)
    assert relative_difference(cross.key_gram, states.T @ states) < 1e-9
    assert relative_difference(cross.query_gram, cross.key_gram) > 0.1
    assert cross.gradient.abs().max() > 0
    sketched = collect_statistics(model, [inputs], CollectConfig(columns=28, oversampling=5, held_out=0.0))
    sketch = next(part for part in sketched.layers if part.place.name == layer.place.name)
    assert relative_difference(sketch.key_gram, layer.key_gram) < 1e-9
    assert float(sketch.columns.gains.sum()) == pytest.approx(float(layer.bottleneck.sum()), rel=1e-4)


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
        "cache": model.config.use_cache,
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


@pytest.mark.parametrize("collection", ["exact", "sketch"])
@pytest.mark.parametrize("fails", [False, True])
def test_collecting_leaves_everything_as_found(fails, collection):
    model = fill_new_weights(grow_everything(make_growable(causal_model("gpt2")))).train()
    model.transformer.h[0].mlp.eval()
    model.transformer.wte.weight.requires_grad_(False)
    inputs = labelled(model)
    model(**inputs).loss.backward()
    before = snapshot(model)
    config = CollectConfig(collection=collection, kinds=KINDS, columns=2, value_columns=2)
    if fails:
        with pytest.raises(HfGrowError, match=r"Batch 1 does not fit .*: index out of range"):
            collect_statistics(model, [inputs, {**inputs, "input_ids": inputs["input_ids"] + 10_000}], config)
    else:
        collect_statistics(model, [inputs], config)
    assert_equal(snapshot(model), before)


def test_bad_batches_are_refused_or_counted(caplog):
    model = make_growable(causal_model("gpt2"))
    inputs = labelled(model)
    config = CollectConfig(collection="exact", columns=1, held_out=0.0)
    with pytest.raises(HfGrowError, match="no batch"):
        collect_statistics(model, [], config)
    with pytest.raises(HfGrowError, match="returned no loss"):
        collect_statistics(model, [batch(model)], config)
    with pytest.raises(HfGrowError, match="make_growable"):
        collect_statistics(causal_model("gpt2"), [inputs], config)
    with pytest.raises(HfGrowError, match="iterable of dicts"):
        collect_statistics(model, inputs, config)
    with pytest.raises(HfGrowError, match="dict of tensors"):
        collect_statistics(model, [inputs["input_ids"]], config)
    with pytest.raises(HfGrowError, match="does not fit"):
        collect_statistics(model, [{**inputs, "labels": inputs["labels"][:2]}], config)
    empty = {**inputs, "labels": torch.full_like(inputs["labels"], -100)}
    with pytest.raises(HfGrowError, match="1 of 2 batches"):
        collect_statistics(model, [inputs, empty], config)
    kept = collect_statistics(model, [inputs] * 10 + [empty], config)
    assert caplog.text.count("Skipped 1 of 11") == 1
    assert kept.layers[0].total().sequences == 40


@pytest.mark.parametrize("collection", ["exact", "sketch"])
def test_sequences_without_labels_and_broken_ones_are_passed_over(collection, caplog):
    """Parts of a batch may have no labels, and one batch in twenty a loss that is not finite: the rest counts."""
    model = make_growable(small_model(BertForMaskedLM, "bert"))
    inputs = labelled(model, size=8)
    inputs["labels"][1] = -100  # the second sequence judges, alone in its part of the batch with the fifth
    inputs["labels"][4] = -100
    config = CollectConfig(collection=collection, columns=2)
    statistics = collect_statistics(model, [inputs] * 4, config)
    assert isfinite(statistics.loss) and not caplog.text
    broken = {**inputs, "inputs_embeds": torch.full((8, 9, 32), float("nan"))}
    del broken["input_ids"]
    statistics = collect_statistics(model, [*[inputs] * 30, broken], config)
    assert isfinite(statistics.loss) and "not finite" in caplog.text
    assert all(bool(torch.isfinite(layer.columns.first).all()) for layer in statistics.layers)
    with pytest.raises(HfGrowError, match="not finite"):
        collect_statistics(model, [inputs, broken], config)


def test_inference_mode_does_not_hide_the_gradient():
    model = make_growable(causal_model("gpt2"))
    with torch.inference_mode():
        statistics = collect_statistics(model, [labelled(model, size=8)], CollectConfig(columns=2))
    assert float(statistics.layers[0].wanted.sum()) > 0


def test_unused_cross_attention_is_named():
    model = make_growable(small_model(BertLMHeadModel, "bert", is_decoder=True, add_cross_attention=True))
    for collection in ("exact", "sketch"):
        with pytest.raises(HfGrowError, match=r"crossattention.* needs encoder_hidden_states"):
            collect_statistics(model, [labelled(model)], CollectConfig(collection=collection))


def slow_circuit(model, inputs, layer):
    """R of every head's own pattern and the gram of what it reads, from attention weights and plain hooks."""
    model.set_attn_implementation("eager")
    site = find_site(model, layer)
    seen = {}
    projections = {role: module for module, roles in site.projections() for role in roles}
    hooks = [
        projections["value"].register_forward_pre_hook(lambda module, args: seen.update(states=args[0])),
        projections["output"].register_forward_hook(lambda module, args, output: seen.update(block=output)),
    ]
    output = model(**inputs, output_attentions=True)
    (block,) = torch.autograd.grad(output.loss, seen["block"])
    for hook in hooks:
        hook.remove()
    model.set_attn_implementation("sdpa")
    states = seen["states"]
    if projections["value"].bias is not None:
        states = torch.cat((states, torch.ones_like(states[..., :1])), -1)
    gradients, grams = [], []
    for head in range(site.attention.n_heads):
        gradient, gram = 0.0, 0.0
        for index, mask in enumerate(inputs["attention_mask"].bool()):
            read = (output.attentions[layer][index, head] @ states[index])[mask]
            gradient = gradient + read.T @ block[index][mask]
            gram = gram + read.T @ read
        gradients.append(gradient)
        grams.append(gram)
    return torch.stack(gradients).detach(), torch.stack(grams).detach()


@pytest.mark.parametrize(
    ("model_type", "stock_class", "changes"),
    [case for case in CASES if "reorder_and_upcast_attn" not in case[2]],  # the stock kernel has no float64 there
    ids=str,
)
def test_circuits_equal_an_explicit_loop(model_type, stock_class, changes):
    model = growable(model_type, stock_class, changes)
    inputs = labelled(model)
    sums = exact_sums(model, [inputs], held_out=0.0, kinds=KINDS, columns=1, value_columns=1)
    sites = growable_sites(model)
    generator = torch.Generator().manual_seed(8)
    outputs = [torch.randn(5, 3, 32, generator=generator).double() for _ in sites]
    driving = driving_inputs(Passes(model), sites, [inputs], [OutputRows(part[:-1], part[-1:]) for part in outputs])
    heads, size = sites[0].attention.n_heads, len(inputs["input_ids"])
    for layer in (0, 1):
        gradient, gram = slow_circuit(model, inputs, layer)
        assert relative_difference(sums[layer].mean().value_gradient[:heads], gradient) < 1e-5
        assert relative_difference(sums[layer].pattern_gram[:heads], gram) < 1e-5
        groups = sites[layer].attention.n_kv_heads
        expected = (gradient @ outputs[layer][:-1].mT).reshape(groups, -1, *gradient.shape[1:2], 3).sum(1)
        assert relative_difference(driving[layer][:-1], expected) < 1e-5
        uniform = sums[layer].mean().value_gradient[-1] @ outputs[layer][-1].T
        assert relative_difference(driving[layer][-1], uniform) < 1e-5
        values = [torch.randn(groups + 1, gradient.shape[1], 3, generator=generator).double() for _ in sites]
        products = output_products(Passes(model), sites, [inputs], values, grams=True)[layer]
        repeated = values[layer][:-1].repeat_interleave(heads // groups, dim=0)
        assert relative_difference(products.present.gradient, repeated.mT @ gradient) < 1e-5
        expected = values[layer][-1].T @ sums[layer].mean().value_gradient[-1]
        assert relative_difference(products.uniform.gradient[0], expected) < 1e-5
        assert relative_difference(products.present.gram * size, repeated.mT @ gram @ repeated) < 1e-5


@every_case
def test_the_first_order_change_of_new_value_columns_is_the_circuits_gradient(model_type, stock_class, changes):
    """Finite differences through real new weights: value columns, and a head without scores."""
    model = growable(model_type, stock_class, changes)
    inputs = labelled(model)
    sums = exact_sums(model, [inputs], held_out=0.0, kinds=KINDS, columns=1, value_columns=1)[1].mean()
    blocks = read_blocks(find_site(model, 1))
    generator = torch.Generator().manual_seed(9)
    groups, inner, width = blocks["value"].shape
    heads, size = blocks["query"].shape[0], 1e-5
    value = torch.randn(groups, inner, width, generator=generator).double()
    output = torch.randn(heads, width, 32, generator=generator).double()

    def slope(change):
        losses = []
        for sign in (1, -1):
            twin = copy.deepcopy(model)
            change(twin, sign * size)
            losses.append(loss_of(twin, inputs).item())
        return (losses[0] - losses[1]) / (2 * size)

    repeated = value.repeat_interleave(heads // groups, dim=0)
    wanted = torch.einsum("hio,hik,hko->", sums.value_gradient[:-1], repeated, output)
    measured = slope(lambda twin, step: widen_value(twin, 1, width, value=value, output=step * output))
    assert measured == pytest.approx(float(wanted), rel=1e-2)
    group = heads // groups
    scores = {"query": blocks["query"][:group] * 0 + 1e-3, "key": blocks["key"][:1] * 0}
    new = {**scores, "value": value[:1]}
    wanted = torch.einsum("io,ik,hko->", sums.value_gradient[-1], value[0], output[:group])
    measured = slope(lambda twin, step: add_heads(twin, 1, 1, **new, output=step * output[:group]))
    assert measured == pytest.approx(float(wanted), rel=1e-2)


@every_case
def test_the_scores_of_a_new_head_have_the_gradient_that_finite_differences_show(model_type, stock_class, changes):
    model = growable(model_type, stock_class, changes)
    inputs = labelled(model)
    sites = growable_sites(model)
    blocks = read_blocks(sites[1])
    group = blocks["query"].shape[0] // blocks["key"].shape[0]
    generator = torch.Generator().manual_seed(10)
    rotary = sites[1].attention.rotary_dim
    value = torch.randn(1, *blocks["value"].shape[1:], generator=generator).double()
    output = torch.randn(group, *blocks["output"].shape[1:], generator=generator).double()
    query = torch.randn(group, blocks["query"].shape[1], 2, generator=generator).double()
    key = torch.randn(1, blocks["key"].shape[1], 2, generator=generator).double()
    heads = [NewHead(value, output)] * 2
    product = score_products(Passes(model), sites, [inputs], [key] * 2, "key", heads)[1]
    wanted = sites[1].attention.scaling * float((product * query).sum())
    other = score_products(Passes(model), sites, [inputs], [query] * 2, "query", heads)[1]
    assert sites[1].attention.scaling * float((other * key).sum()) == pytest.approx(wanted, rel=1e-6)
    if rotary:
        return  # real heads of rotary families have rotated columns; the symmetry above must do
    zeros = torch.zeros_like(blocks["query"][:group])
    grown = {}
    # The loss is bilinear in the head's scores and output: a mixed difference has both to first order.
    for signs in ((1, 1), (1, -1), (-1, 1), (-1, -1)):
        twin = copy.deepcopy(model)
        full_query, full_key = zeros.clone(), torch.zeros_like(blocks["key"][:1])
        full_query[..., :2], full_key[..., :2] = signs[0] * 1e-3 * query, key
        add_heads(twin, 1, 1, query=full_query, key=full_key, value=value, output=signs[1] * 1e-3 * output)
        grown[signs] = loss_of(twin, inputs).item()
    mixed = (grown[1, 1] - grown[1, -1] - grown[-1, 1] + grown[-1, -1]) / (4 * 1e-6)
    assert mixed == pytest.approx(wanted, rel=2e-2)


@every_case
def test_a_sketch_as_wide_as_the_model_finds_what_the_exact_form_does(model_type, stock_class, changes):
    model = growable(model_type, stock_class, changes)
    batches = sequences_of(labelled(model, size=8, length=24))
    numbers = {"columns": 20, "value_columns": 20, "oversampling": 13, "kinds": KINDS}
    exact, sketch = (
        collect_statistics(model, batches, CollectConfig(collection=form, **numbers)) for form in ("exact", "sketch")
    )
    for one, other in zip(exact.layers, sketch.layers, strict=True):
        assert relative_difference(other.query_gram, one.query_gram) < 1e-9
        assert relative_difference(other.columns.gains.sum(), one.columns.gains.sum()) < 1e-4
        assert relative_difference(other.columns.held_out.sum(), one.columns.held_out.sum()) < 1e-3
        # Grams without full rank are cut off in other coordinates.
        assert relative_difference(other.values.gains[:, :20].sum(), one.values.gains[:, :20].sum()) < 0.03
        assert relative_difference(other.uniform.gains[:, :20].sum(), one.uniform.gains[:, :20].sum()) < 0.03
        assert float(other.bottleneck.sum()) == pytest.approx(float(one.bottleneck.sum()), rel=0.5)


def test_statistics_are_saved_and_read_back(tmp_path):
    model = make_growable(causal_model("llama"))
    config = CollectConfig(collection="exact", kinds=KINDS, columns=2, value_columns=2)
    statistics = collect_statistics(model, [labelled(model, size=8)], config)
    statistics.save(tmp_path / "statistics.safetensors")
    again = Statistics.load(tmp_path / "statistics.safetensors")
    assert again.config == config and again.steps == statistics.steps and again.summary() == statistics.summary()
    for one, other in zip(statistics.layers, again.layers, strict=True):
        assert torch.equal(one.columns.first, other.columns.first) and one.place == other.place
        assert torch.equal(one.total().gradient, other.total().gradient)
    assert [file.name for file in tmp_path.iterdir()] == ["statistics.safetensors"]
    (tmp_path / "half").write_bytes((tmp_path / "statistics.safetensors").read_bytes()[:1000])
    for name in ("half", "absent"):
        with pytest.raises(HfGrowError, match="cannot be read as statistics"):
            Statistics.load(tmp_path / name)
