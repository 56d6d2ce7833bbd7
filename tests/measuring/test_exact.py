"""The exact form against slow loops and finite differences."""

import copy

import pytest
import torch
from batches import labelled, loss_in_double, sequences_of
from growing import exact_sums
from models import KINDS, every_case, growable, relative_difference
from transformers import BertForMaskedLM

from hf_grow import add_heads, widen_value
from hf_grow.running.passes import Passes
from hf_grow.surgery.blocks import read_blocks
from hf_grow.surgery.structure import find_site


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
        losses.append(loss_in_double(twin, inputs).item())
    keys = key.repeat_interleave(query.shape[0] // key.shape[0], dim=0)
    slope = torch.einsum("hip,hij,hjp->", query, sums.gradient, keys) * find_site(model, 1).attention.scaling
    assert (losses[0] - losses[1]) / (2 * size) == pytest.approx(float(slope) / sums.weight, rel=5e-3)


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
            losses.append(loss_in_double(twin, inputs).item())
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
