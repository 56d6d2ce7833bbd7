"""The maths against brute force: optimality of the whitened step, inverses, projections, refactoring."""

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st

from hf_grow import HfGrowError, linalg


def score_change_norm(change, query_gram, key_gram):
    """‖X_q D X_kᵀ‖ of a unit step for each head, when both grams belong to one sequence: (heads,)."""
    query = change.query.mT @ query_gram @ change.query
    key = linalg.repeat_groups(change.key.mT @ key_gram @ change.key, change.query.shape[0])
    return (query * key).sum((-2, -1)).clamp(min=0).sqrt()


def draw(*shape, seed=0):
    """Normal numbers in float64."""
    return torch.randn(*shape, dtype=torch.float64, generator=torch.Generator().manual_seed(seed))


def inputs_with_condition(tokens, size, condition, seed):
    """A (tokens, size) matrix whose gram has about this condition number."""
    left, _, right = torch.linalg.svd(draw(tokens, size, seed=seed), full_matrices=False)
    values = torch.logspace(0, -0.5 * torch.log10(torch.tensor(condition)).item(), left.shape[1], dtype=torch.float64)
    return (left * values) @ right


def instance(seed, condition=100.0, size=6, tokens=12, heads=2):
    """One sequence: inputs and score gradients, and the statistics that follow from them."""
    states = inputs_with_condition(tokens, size, condition, seed)
    score_gradient = draw(heads, tokens, tokens, seed=seed + 1)
    gradient = states.T @ score_gradient @ states
    return states, gradient, states.T @ states


def sides(query_gram, key_gram, present=(None, None), **numerics):
    """Both sides of the scores, inverted without a cut-off unless told otherwise."""
    grams = (query_gram, key_gram)
    factors = [linalg.whitening(gram, **{"cutoff": 1e-14, **numerics}) for gram in grams]
    return tuple(linalg.side(*parts) for parts in zip(grams, factors, present, strict=True))


def find(gradient, gram, rank, groups=1, metric="whitened", **kwargs):
    """The directions for one sequence, whose grams are the same."""
    query, key = sides(gram, gram, **kwargs)
    whitened = linalg.whiten(gradient, query, key)
    return linalg.directions(whitened, query, key, rank, groups=groups, metric=metric)


def decrease_per_norm(change, gradient, gram):
    """First-order decrease for a score change of norm one, all heads together."""
    norm = score_change_norm(change, gram, gram).square().sum().sqrt()
    return float(linalg.first_order_gains(gradient, change).sum() / norm)


@settings(max_examples=40, deadline=None)
@given(seed=st.integers(0, 10_000), power=st.floats(0, 6), rank=st.integers(1, 5))
def test_the_whitened_step_beats_the_other_truncations(seed, power, rank):
    _, gradient, gram = instance(seed, condition=10.0**power, heads=1)
    whitened, euclidean, plain = (
        decrease_per_norm(find(gradient, gram, rank, metric=metric), gradient, gram) for metric in linalg.METRICS
    )
    assert whitened >= euclidean * (1 - 1e-6)
    assert whitened >= plain * (1 - 1e-6)


@pytest.mark.parametrize("rank", [1, 2, 3])
@pytest.mark.parametrize("condition", [1.0, 1e3])
def test_the_whitened_step_is_what_a_brute_force_optimiser_finds(rank, condition):
    states, gradient, gram = instance(3, condition, heads=1)
    best = decrease_per_norm(find(gradient, gram, rank), gradient, gram)
    reached = 0.0
    for start in range(4):
        left, right = (draw(6, rank, seed=10 * start + side).requires_grad_() for side in (1, 2))
        optimizer = torch.optim.LBFGS(
            [left, right], max_iter=2000, line_search_fn="strong_wolfe", tolerance_change=1e-14
        )

        def loss(left=left, right=right, optimizer=optimizer):
            optimizer.zero_grad()
            change = left @ right.T
            value = -(gradient[0] * change).sum() / (states @ change @ states.T).norm()
            value.backward()
            return value

        optimizer.step(loss)
        reached = max(reached, -loss().item())
    assert reached <= best * (1 + 1e-6)
    assert reached >= best * (1 - 1e-3)


def test_at_full_rank_whitened_and_euclidean_agree():
    _, gradient, gram = instance(5, condition=50.0)
    first, second = (find(gradient, gram, 6, groups=2, metric=metric) for metric in ("whitened", "euclidean"))
    assert torch.allclose(first.query @ first.key.mT, second.query @ second.key.mT, atol=1e-9)
    inverse = torch.linalg.inv(gram)
    assert torch.allclose(first.query @ first.key.mT, inverse @ gradient @ inverse, rtol=1e-8)


def test_gains_are_squared_singular_values_of_the_whitened_gradient():
    _, gradient, gram = instance(7)
    change = find(gradient, gram, 3, groups=2)
    root = linalg.symmetric_power(gram, -0.5, 1e-14)
    values = torch.linalg.svdvals(root @ gradient @ root)[:, :3]
    assert torch.allclose(linalg.first_order_gains(gradient, change), values**2, rtol=1e-8)


def test_a_group_shares_its_key_columns_in_the_best_way():
    _, gradient, gram = instance(9, heads=4)
    change = find(gradient, gram, 2, groups=2)
    assert change.query.shape == (4, 6, 2) and change.key.shape == (2, 6, 2)
    root = linalg.symmetric_power(gram, -0.5, 1e-14)
    whitened = root @ gradient @ root
    for group in range(2):
        stacked = torch.cat((whitened[2 * group], whitened[2 * group + 1]))
        values = torch.linalg.svdvals(stacked)[:2]
        gains = linalg.first_order_gains(gradient, change)[2 * group : 2 * group + 2].sum(0)
        assert torch.allclose(gains, values**2, rtol=1e-8)


def test_new_columns_change_the_scores_by_the_step():
    states, gradient, gram = instance(11)
    change = find(gradient, gram, 2, groups=2)
    query, key = linalg.new_columns(change, step=0.3, scaling=0.25)
    added = 0.25 * (states @ query) @ (states @ key).mT
    assert torch.allclose(added, -0.3 * states @ change.query @ change.key.mT @ states.T)


@pytest.mark.parametrize("groups", [1, 2])
def test_the_bottleneck_is_what_training_the_present_columns_cannot_reach(groups):
    """Least squares over all changes of W_Q and W_K leaves exactly the bottleneck, also where heads share W_K."""
    heads, size, columns = 2, 5, 2
    whitened = draw(heads, size, size, seed=1)
    query, key = draw(heads, size, columns, seed=2), draw(groups, size, columns, seed=3)
    identity = torch.eye(size, dtype=torch.float64)
    left, right = linalg.side(identity, identity, query, groups), linalg.side(identity, identity, key)
    rest = linalg.whiten(whitened, left, right)
    reached = []
    for role, count in (("query", heads), ("key", groups)):
        for owner in range(count):
            for place in range(size * columns):
                unit = torch.zeros(count, size, columns, dtype=torch.float64)
                unit[owner].view(-1)[place] = 1
                keys, change = linalg.repeat_groups(key, heads), linalg.repeat_groups(unit, heads)
                product = unit @ keys.mT if role == "query" else query @ change.mT
                reached.append(product.flatten())
    basis = torch.stack(reached, dim=1)
    solution = torch.linalg.lstsq(basis, whitened.flatten()[:, None], driver="gelsd").solution
    assert torch.allclose(rest.flatten(), whitened.flatten() - (basis @ solution).flatten(), atol=1e-10)


def test_directions_of_the_bottleneck_avoid_the_present_columns():
    _, gradient, gram = instance(13)
    present = draw(2, 6, 2, seed=4), draw(2, 6, 2, seed=5)
    for metric in linalg.METRICS:
        change = find(gradient, gram, 2, groups=2, metric=metric, present=present)
        assert torch.isfinite(change.query).all() and torch.isfinite(change.key).all()
    change = find(gradient, gram, 2, groups=2, present=present)
    assert (linalg.first_order_gains(gradient, change) > 0).all()
    overlap = change.query.mT @ gram @ present[0]
    assert overlap.abs().max() < 1e-8


def step_of(gradient, gram):
    """A⁺TB⁺ as columns: itself and the identity."""
    inverse = linalg.inverse(gram, cutoff=1e-14)
    identity = torch.eye(gram.shape[0], dtype=gram.dtype).expand(gradient.shape[0], -1, -1)
    return linalg.Directions(inverse @ gradient @ inverse, identity)


@pytest.mark.parametrize("columns", [3, 5])
def test_refactor_at_step_zero_gives_the_scores_back(columns):
    states, gradient, gram = instance(15)
    query, key = draw(2, 6, 3, seed=6), draw(2, 6, 3, seed=7)
    new_query, new_key = linalg.refactor(
        query, key, step_of(gradient, gram), gram, gram, columns, step=0.0, scaling=0.5
    )
    assert new_query.shape == (2, 6, columns)
    before = states @ query @ key.mT @ states.T
    after = states @ new_query @ new_key.mT @ states.T
    assert (after - before).norm() <= 1e-5 * before.norm()


def test_refactor_with_fewer_columns_keeps_the_largest_part_of_the_scores():
    states, gradient, gram = instance(17)
    query, key = draw(2, 6, 3, seed=6), draw(2, 6, 3, seed=7)
    new_query, new_key = linalg.refactor(query, key, step_of(gradient, gram), gram, gram, 2, step=0.0, scaling=0.5)
    before = states @ query @ key.mT @ states.T
    after = states @ new_query @ new_key.mT @ states.T
    lost = torch.linalg.svdvals(before)[:, 2]
    assert torch.allclose((after - before).norm(dim=(1, 2)), lost, rtol=1e-6)


def test_refactor_with_a_step_and_room_for_it_takes_the_full_step():
    states, gradient, gram = instance(19)
    query, key = draw(2, 6, 3, seed=6), draw(2, 6, 3, seed=7)
    new_query, new_key = linalg.refactor(query, key, step_of(gradient, gram), gram, gram, 6, step=0.1, scaling=0.5)
    inverse = linalg.inverse(gram, cutoff=1e-14)
    wanted = 0.5 * query @ key.mT - 0.1 * inverse @ gradient @ inverse
    assert torch.allclose(0.5 * states @ new_query @ new_key.mT @ states.T, states @ wanted @ states.T, atol=1e-8)


@pytest.mark.parametrize("scaling", [0.5, -0.5])
@pytest.mark.parametrize("groups", [2, 1])
def test_the_plain_step_follows_the_gradient_and_has_unit_size(groups, scaling):
    states, gradient, gram = instance(21)
    query, key = draw(2, 6, 3, seed=6).requires_grad_(), draw(groups, 6, 3, seed=7).requires_grad_()
    product = query @ key.repeat_interleave(2 // groups, dim=0).mT
    wanted = torch.autograd.grad(scaling * (gradient * product).sum(), (query, key))
    changes = linalg.plain_step(query.detach(), key.detach(), gradient, gram, gram, scaling=scaling)
    for change, slope in zip(changes, wanted, strict=True):
        assert torch.nn.functional.cosine_similarity(change.flatten(), -slope.flatten(), dim=0) > 1 - 1e-9
    query, key, product, small = query.detach(), key.detach(), product.detach(), 1e-6
    moved = (query + small * changes[0]) @ (key + small * changes[1]).repeat_interleave(2 // groups, dim=0).mT
    assert (0.5 * states @ (moved - product) @ states.T).norm() / small == pytest.approx(1.0, rel=1e-4)


def test_all_inverses_agree_on_full_rank_input():
    _, _, gram = instance(23, condition=1e4)
    exact = torch.linalg.inv(gram)
    for method in linalg.INVERSES:
        # Newton–Schulz always has a small ridge, which bounds the number of steps it needs.
        tolerance = 1e-4 if method == "newton_schulz" else 1e-7
        inverse = linalg.inverse(gram, method, cutoff=1e-10)
        assert (inverse - exact).norm() <= tolerance * exact.norm(), method
        factor = linalg.whitening(gram, method, cutoff=1e-10)
        assert (factor @ factor.mT - exact).norm() <= tolerance * exact.norm(), method
        assert (factor.mT @ gram @ factor - torch.eye(6, dtype=torch.float64)).abs().max() <= tolerance, method
    for function in (linalg.inverse, linalg.whitening):
        with pytest.raises(HfGrowError, match="eigh, pinv, solve, newton_schulz"):
            function(gram, "magic")


@pytest.mark.parametrize("method", linalg.INVERSES)
def test_columns_do_not_depend_on_how_grams_are_inverted(method):
    _, gradient, gram = instance(29)
    present = draw(2, 6, 2, seed=4), draw(2, 6, 2, seed=5)
    expected = find(gradient, gram, 2, groups=2, present=present)
    change = find(gradient, gram, 2, groups=2, present=present, method=method, cutoff=1e-10)
    product, wanted = change.query @ change.key.mT, expected.query @ expected.key.mT
    assert (product - wanted).norm() <= 1e-5 * wanted.norm()


@pytest.mark.parametrize("shape", [(2, 300, 280), (1, 280, 900)])
def test_large_matrices_have_the_same_strongest_directions(shape):
    matrix = draw(*shape, seed=31) * torch.logspace(0, -2, shape[-1], dtype=torch.float64)
    left, values, right = linalg.top_svd(matrix, 8)
    exact = torch.linalg.svdvals(matrix)[..., :8]
    assert torch.allclose(values, exact, rtol=1e-3)
    assert float(values.square().sum()) >= 0.999 * float(exact.square().sum())
    assert torch.allclose(left.mT @ matrix @ right, torch.diag_embed(values), atol=1e-6 * float(exact.max()))


@pytest.mark.parametrize("groups", [1, 2])
def test_value_columns_are_what_a_brute_force_optimiser_finds(groups):
    """Decrease per size of the change of the block's output, for heads that share value columns in groups."""
    heads, inputs, outputs, rank = 2, 5, 4, 2
    read = draw(heads, 12, inputs, seed=33)
    if groups == 1:  # the metric of a group is pooled, which is exact when its heads read alike
        read = read[:1].expand(heads, -1, -1)
    wanted = draw(heads, 12, outputs, seed=34)
    gradient = read.mT @ wanted
    grams = (read.mT @ read).reshape(groups, -1, inputs, inputs).mean(1)
    value, output = linalg.value_directions(gradient, linalg.whitening(grams, cutoff=1e-14), rank, groups)
    assert value.shape == (groups, inputs, rank) and output.shape == (heads, rank, outputs)

    def rate(value, output):
        change = linalg.repeat_groups(value, heads) @ output
        return (gradient * change).sum() / (read @ change).norm()

    best = float(rate(value, output))
    assert float(linalg.value_gains(gradient, value, output).sum()) == pytest.approx(
        float((gradient * (linalg.repeat_groups(value, heads) @ output)).sum())
    )
    reached = 0.0
    for start in range(3):
        parts = [draw(*part.shape, seed=40 + start).requires_grad_() for part in (value, output)]
        optimizer = torch.optim.LBFGS(parts, max_iter=2000, line_search_fn="strong_wolfe", tolerance_change=1e-14)

        def loss(parts=parts, optimizer=optimizer):
            optimizer.zero_grad()
            result = -rate(*parts)
            result.backward()
            return result

        optimizer.step(loss)
        reached = max(reached, -loss().item())
    assert reached <= best * (1 + 1e-6)
    assert reached >= best * (1 - 1e-2)


def test_rank_deficient_grams_give_finite_results_or_a_refusal():
    states = torch.cat((draw(3, 5, seed=1), torch.ones(3, 1, dtype=torch.float64)), dim=1)
    gram = states.T @ states
    pseudo = torch.linalg.pinv(gram, hermitian=True)
    for method in ("eigh", "pinv"):
        assert torch.allclose(linalg.inverse(gram, method), pseudo, atol=1e-6 * float(pseudo.abs().max()))
    with pytest.raises(HfGrowError, match="not of full rank"):
        linalg.inverse(torch.zeros(3, 3), "solve")
    gradient = draw(2, 6, 6, seed=2)
    change = find(states.T @ draw(2, 3, 3, seed=3) @ states, gram, 5, groups=2, cutoff=1e-6)
    assert torch.isfinite(change.query).all() and torch.isfinite(change.key).all()
    nothing = find(gradient * 0, gram * 0, 2, groups=2, present=(gradient[..., :2],) * 2)
    assert not nothing.query.any() and torch.isfinite(nothing.key).all()


@pytest.mark.parametrize("condition", [1.0, 1e2, 1e4])
@pytest.mark.parametrize("dtype", [torch.float32, torch.float64])
def test_newton_schulz_agrees_with_eigh(condition, dtype):
    _, _, gram = instance(25, condition)
    batched = torch.stack((gram, 3 * gram)).to(dtype)
    expected = linalg.symmetric_power(batched.double(), -0.5, cutoff=0.0, ridge=1e-5)
    root = linalg.inverse_root_newton_schulz(batched, ridge=1e-5).double()
    tolerance = 1e-9 if dtype == torch.float64 else 1e-2
    assert (root - expected).norm() <= tolerance * expected.norm()


def test_the_exact_step_solves_its_equation():
    sequences = [inputs_with_condition(9, 4, 30.0, seed) for seed in range(3)]
    grams = torch.stack([states.T @ states for states in sequences])
    gradients = torch.stack([states.T @ draw(2, 9, 9, seed=9) @ states for states in sequences])
    step = linalg.exact_step(gradients, grams, grams, ridge=1e-10)
    dense = sum(torch.kron(gram, gram) for gram in grams)
    for head in range(2):
        expected = torch.linalg.solve(dense, gradients.sum(0)[head].flatten())
        assert torch.allclose(step[head].flatten(), expected, rtol=1e-4, atol=1e-6 * float(expected.abs().max()))


def test_conjugate_gradients_stop_at_a_zero_right_side():
    assert not linalg.conjugate_gradients(lambda change: change, torch.zeros(2, 3, 3)).any()


def test_an_unknown_metric_is_named():
    _, gradient, gram = instance(27)
    with pytest.raises(HfGrowError, match="whitened, euclidean, none"):
        find(gradient, gram, 1, groups=2, metric="cosine")
