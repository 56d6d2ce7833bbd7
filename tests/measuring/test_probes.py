"""Probes through the model give products with gradients that loops and finite differences show."""

import copy

import pytest
import torch
from batches import labelled, loss_in_double
from growing import exact_sums
from models import CASES, KINDS, every_case, fill_new_weights, grow_everything, growable, relative_difference

from hf_grow import add_heads
from hf_grow.measuring.probes import NewHead, Question, ask
from hf_grow.running.passes import Passes
from hf_grow.surgery.blocks import read_blocks
from hf_grow.surgery.patch import growable_sites
from hf_grow.surgery.place import input_sizes
from hf_grow.surgery.structure import find_site


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
    answers = ask(Passes(model), growable_sites(model), [inputs, inputs], [Question(**{side: part}) for part in probes])
    for gradient, probe, block, answer in zip(exact, probes, blocks, answers, strict=True):
        product = getattr(answer, side)
        group = block["query"].shape[0] // block["key"].shape[0]
        if side == "key":
            expected = gradient @ probe.repeat_interleave(group, dim=0)
        else:
            expected = (gradient.mT @ probe).unflatten(0, (-1, group)).sum(1)
        assert relative_difference(product, expected) < 1e-5


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
    driving = [part.output for part in ask(Passes(model), sites, [inputs], [Question(output=part) for part in outputs])]
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
        answers = ask(Passes(model), sites, [inputs], [Question(value=part, metric=True) for part in values])[layer]
        repeated = values[layer][:-1].repeat_interleave(heads // groups, dim=0)
        assert relative_difference(answers.value[:-1], repeated.mT @ gradient) < 1e-5
        expected = values[layer][-1].T @ sums[layer].mean().value_gradient[-1]
        assert relative_difference(answers.value[-1], expected) < 1e-5
        assert relative_difference(answers.read[:-1] * size, repeated.mT @ gram @ repeated) < 1e-5
        expected = (gram @ repeated).unflatten(0, (groups, -1)).sum(1)
        assert relative_difference(answers.metric[:-1] * size, expected) < 1e-5
        uniform_gram = sums[layer].pattern_gram[-1]
        assert relative_difference(answers.metric[-1] * size, uniform_gram @ values[layer][-1]) < 1e-5


@every_case
def test_all_questions_at_once_have_the_answers_of_each_alone(model_type, stock_class, changes):
    """And the model's loss is what it is without."""
    model = growable(model_type, stock_class, changes)
    fill_new_weights(grow_everything(model))
    inputs = [labelled(model), labelled(model, size=2)]
    sites, generator = growable_sites(model), torch.Generator().manual_seed(9)

    def random(*shape):
        return torch.randn(*shape, generator=generator).double()

    questions = []
    for site in sites:
        sizes, dims = input_sizes(site), site.attention.dims
        groups, heads = dims.num_key_value_heads, dims.num_attention_heads
        questions.append(
            Question(
                key=random(groups, sizes["key"], 3),
                query=random(heads, sizes["query"], 2),
                present=True,
                value=random(groups + 1, sizes["value"], 4),
                metric=True,
                output=random(heads + 1, 3, sizes["output"]),
                grams=True,
            )
        )
    together = ask(Passes(model), sites, inputs, questions)
    parts = {"key": ("key",), "query": ("query",), "output": ("output",), "value": ("value", "read", "metric")}
    for name, answered in parts.items():
        asked = [Question(**{name: getattr(question, name)}, metric=name == "value") for question in questions]
        for one, other in zip(together, ask(Passes(model), sites, inputs, asked), strict=True):
            for answer in answered:
                assert relative_difference(getattr(one, answer), getattr(other, answer)) < 1e-6, answer
    # The present columns, as plain gradients of the weights would have them.
    for site, question, answer in zip(sites, questions, together, strict=True):
        blocks = read_blocks(site)
        if site.attention.rotary_dim:
            continue
        asked = [Question(key=blocks["key"].double(), query=blocks["query"].double())] * len(sites)
        alone = ask(Passes(model), [site], inputs, asked[:1])[0]
        assert relative_difference(answer.present_query, alone.key) < 1e-6
        assert relative_difference(answer.present_key, alone.query) < 1e-6
        assert question.grams and answer.grams is not None


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
    product = ask(Passes(model), sites, [inputs], [Question(key=key, head=head) for head in heads])[1].key
    wanted = sites[1].attention.scaling * float((product * query).sum())
    other = ask(Passes(model), sites, [inputs], [Question(query=query, head=head) for head in heads])[1].query
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
        grown[signs] = loss_in_double(twin, inputs).item()
    mixed = (grown[1, 1] - grown[1, -1] - grown[-1, 1] + grown[-1, -1]) / (4 * 1e-6)
    assert mixed == pytest.approx(wanted, rel=2e-2)
