"""The searches on matrices that are known: what a few passes find beside the best there is."""

import pytest
import torch
from models import relative_difference

from hf_grow import linalg
from hf_grow.measuring.circuit_search import CircuitProbes, CircuitSearch
from hf_grow.measuring.collector import PresentColumns, Sides
from hf_grow.measuring.probes import Answers
from hf_grow.measuring.score_search import RandomProbes, Reached, ScoreSearch

HEADS, GROUPS, INPUTS, OUTPUTS = 4, 2, 60, 50


def random(*shape, seed):
    return torch.randn(*shape, generator=torch.Generator().manual_seed(seed), dtype=torch.float64)


def gram_of(size, seed):
    """A gram whose eigenvalues fall over two orders of magnitude, as those of hidden states do."""
    basis = torch.linalg.qr(random(size, size, seed=seed)).Q
    return basis @ torch.diag(torch.logspace(1, -1, size, dtype=torch.float64)) @ basis.T


def decaying(matrix):
    """The matrices with singular values that fall like those of score gradients."""
    left, values, right = torch.linalg.svd(matrix, full_matrices=False)
    return (left * torch.arange(1, values.shape[-1] + 1).double() ** -0.8) @ right


class Layer:
    """A layer whose score gradients are known; what is asked of it is answered exactly."""

    def __init__(self, bottleneck):
        self.gradient = decaying(random(HEADS, INPUTS, INPUTS, seed=1))
        grams = gram_of(INPUTS, 2), gram_of(INPUTS, 3)
        self.present = PresentColumns(random(HEADS, INPUTS, 6, seed=4), random(GROUPS, INPUTS, 6, seed=5))
        factors = [linalg.whitening(gram) for gram in grams]
        self.whole = Sides(
            linalg.side(grams[0], factors[0], self.present.query, GROUPS),
            linalg.side(grams[1], factors[1], self.present.key),
        )
        self.sides = self.whole if bottleneck else self.whole.free()
        self.wanted = linalg.whiten(self.gradient, self.whole.free().query, self.whole.free().key)
        self.searched = linalg.whiten(self.gradient, self.sides.query, self.sides.key)

    def answers(self, key, query):
        """As the model would answer."""
        return Answers(
            key=self.gradient @ linalg.repeat_groups(key, HEADS),
            query=(self.gradient.mT @ query).unflatten(0, (GROUPS, -1)).sum(1),
        )

    def search(self, passes, width=10):
        """What so many passes find."""
        generator = torch.Generator().manual_seed(0)
        sizes = {"query": INPUTS, "key": INPUTS}
        first = RandomProbes.draw(HEADS, GROUPS, sizes, width, self.gradient, generator)
        present = self.answers(self.present.key, self.present.query)
        reached = Reached.by(self.present, self.whole, Answers(present_query=present.key, present_key=present.query))
        reached = reached if self.sides is self.whole else None
        search = ScoreSearch(first, self.answers(first.key, first.query), self.whole, self.sides, reached)
        for number in range(1, passes):
            probes = search.ask(generator if number == 1 else None)
            search.take(probes, self.answers(probes.key_weights, probes.query_weights))
        return search

    def gain(self, found, rank=4):
        """What the strongest directions found lower the loss by, as a share of the best possible."""
        change = linalg.Directions(found.first[..., :rank], found.second[..., :rank])
        best = linalg.directions(self.wanted, self.sides.query, self.sides.key, rank, groups=GROUPS)
        return float(linalg.first_order_gains(self.gradient, change).sum()) / float(
            linalg.first_order_gains(self.gradient, best).sum()
        )


@pytest.mark.parametrize("bottleneck", [True, False])
def test_every_pass_finds_better_directions(bottleneck):
    layer = Layer(bottleneck)
    shares = [layer.gain(layer.search(passes).solve(4)) for passes in (2, 3, 4, 8)]
    assert shares == sorted(shares) and shares[1] > 0.95 and shares[3] > 0.999


@pytest.mark.parametrize("bottleneck", [True, False])
def test_gains_and_energies_are_those_of_the_gradient(bottleneck):
    layer = Layer(bottleneck)
    search = layer.search(6)
    found = search.solve(4)
    change = linalg.Directions(found.first, found.second)
    assert relative_difference(found.gains, linalg.first_order_gains(layer.gradient, change)) < 0.01
    wanted, bottleneck_energy = (
        part.square().sum() for part in (layer.wanted, linalg.project(layer.wanted, layer.whole.query, layer.whole.key))
    )
    assert float(search.energies.wanted.sum()) == pytest.approx(float(wanted), rel=0.35)
    assert float(search.energies.bottleneck.sum()) == pytest.approx(float(bottleneck_energy), rel=0.35)


def test_directions_outside_the_present_columns_stay_outside():
    layer = Layer(bottleneck=True)
    found = layer.search(3).solve(4)
    whitened = layer.whole.query.whitened(found.first)
    assert relative_difference(layer.whole.query.project(whitened), whitened) < 1e-6
    whitened = layer.whole.key.whitened(found.second)
    assert relative_difference(layer.whole.key.project(whitened), whitened) < 1e-6


def circuits(passes, ridge=0.05, width=6):
    """What so many passes find for known R and N, and the best value columns there are, by their gain."""
    gradient = decaying(random(HEADS, INPUTS, OUTPUTS, seed=6))
    metric = torch.stack([gram_of(INPUTS, seed) for seed in range(7, 7 + HEADS)])
    pooled = metric.unflatten(0, (GROUPS, -1)).mean(1)
    patterns = slice(None)

    def answers(probes):
        columns = linalg.repeat_groups(probes.columns, HEADS)
        rows = probes.output(HEADS)
        driven = None if rows is None else (gradient @ rows.mT).unflatten(0, (GROUPS, -1)).sum(1)
        known = (metric @ columns).unflatten(0, (GROUPS, -1)).sum(1)
        return Answers(value=columns.mT @ gradient, read=columns.mT @ metric @ columns, metric=known, output=driven)

    generator = torch.Generator().manual_seed(0)
    first = CircuitProbes.draw(HEADS, GROUPS, INPUTS, OUTPUTS, width, gradient, generator)
    search = CircuitSearch(first, answers(first), patterns, width, ridge)
    for number in range(1, passes):
        probes = search.ask(last=number == passes - 1)
        search.take(probes, answers(probes))
    identity = torch.eye(INPUTS, dtype=torch.float64)
    factor = linalg.whitening(pooled + ridge * identity)
    best = linalg.value_gains(gradient, *linalg.value_directions(gradient, factor, 4, GROUPS))
    span = search.gram + ridge * torch.eye(search.gram.shape[-1], dtype=torch.float64)
    found = search.solve(linalg.whitening(span), 4)
    assert relative_difference(found.gains, linalg.value_gains(gradient, found.first, found.second)) < 1e-6
    return float(found.gains.sum() / best.sum())


def test_every_pass_finds_better_value_columns():
    shares = [circuits(passes) for passes in (2, 3, 4, 6)]
    assert shares == sorted(shares) and shares[1] > 0.9 and shares[3] > 0.999


def test_nothing_is_asked_twice_and_exhausted_inputs_are_left_alone():
    """With probes as wide as there are inputs everything is known at once, and later ones are zero."""
    layer = Layer(bottleneck=False)
    search = layer.search(1, width=INPUTS)
    probes = search.ask()
    assert not probes.key.any() and float(probes.query.abs().max()) < 1 + 1e-6
    assert layer.gain(layer.search(3, width=INPUTS).solve(4)) == pytest.approx(1, abs=1e-6)
