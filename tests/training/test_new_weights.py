"""Training what growth added: alone, with the base untouched to the bit, or at a rate of its own."""

import pytest
import torch
from batches import labelled, loss_in_double
from models import fill_new_weights, grow_everything
from plain_training import dims_of, model_of, old_lines, trained

from hf_grow import HfGrowError, NewWeights, add_heads, widen_query_key, widen_value
from hf_grow.surgery.base import base_hash
from hf_grow.surgery.families import FAMILIES

every_family = pytest.mark.parametrize("model_type", FAMILIES)
OPTIMIZERS = {
    "adamw": lambda parameters: torch.optim.AdamW(parameters, lr=1e-2, weight_decay=0.1),
    "adamw fused": lambda parameters: torch.optim.AdamW(parameters, lr=1e-2, weight_decay=0.1, fused=True),
    "sgd": lambda parameters: torch.optim.SGD(parameters, lr=1e-2, momentum=0.9, weight_decay=0.1),
}
every_optimizer = pytest.mark.parametrize("make_optimizer", OPTIMIZERS.values(), ids=OPTIMIZERS)


def grown(model_type):
    """A model with new columns and heads in both layers, and the sizes it had before."""
    model = model_of(model_type)
    before = dims_of(model)
    return fill_new_weights(grow_everything(model)), before


def new_masks(model_type, model, before):
    """By name: where the new entries of each parameter are, line by line."""
    masks = {}
    for name, parameter in model.named_parameters():
        masks[name] = torch.zeros(parameter.shape, dtype=torch.bool)
        axis, lines = old_lines(model_type, name, before, dims_of(model)) or (0, [])
        for place, line in enumerate(lines):
            if line is None:
                masks[name].select(axis, place).fill_(True)
    return masks


def weights_of(model):
    """By name: each parameter, copied."""
    return {name: parameter.detach().clone() for name, parameter in model.named_parameters()}


def train(model, optimizer, steps, clip=None):
    """Plain steps on one batch, with what is asked for between backward and step."""
    for _ in range(steps):
        optimizer.zero_grad()
        loss_in_double(model, labelled(model)).backward()
        if clip is not None:
            torch.nn.utils.clip_grad_norm_(model.parameters(), clip)
        optimizer.step()


def train_by_hand(model, optimizer, masks, steps, clip=None):
    """The same for new entries alone: full gradients, and what is old put back after each step."""
    for _ in range(steps):
        optimizer.zero_grad()
        loss_in_double(model, labelled(model)).backward()
        start = weights_of(model)
        with torch.no_grad():
            for name, parameter in model.named_parameters():
                parameter.grad[~masks[name]] = 0
            if clip is not None:
                norm = sum(float(parameter.grad.square().sum()) for parameter in model.parameters()) ** 0.5
                for parameter in model.parameters():
                    parameter.grad.mul_(min(1.0, clip / (norm + 1e-6)))
            optimizer.step()
            for name, parameter in model.named_parameters():
                parameter[~masks[name]] = start[name][~masks[name]]


@every_family
@every_optimizer
@pytest.mark.parametrize("clip", [None, 0.05])
def test_only_new_entries_learn_and_as_they_would_by_hand(model_type, make_optimizer, clip):
    (model, before), (twin, _) = grown(model_type), grown(model_type)
    masks, start, mark = new_masks(model_type, model, before), weights_of(model), base_hash(model)
    # Also an optimizer that holds every parameter leaves the old ones alone.
    optimizer = make_optimizer(model.parameters())
    NewWeights(model).attach(optimizer)
    train(model, optimizer, 3, clip)
    train_by_hand(twin, make_optimizer(twin.parameters()), masks, 3, clip)
    expected = weights_of(twin)
    for name, value in weights_of(model).items():
        assert torch.equal(value[~masks[name]], start[name][~masks[name]]), name
        assert torch.allclose(value[masks[name]], expected[name][masks[name]], rtol=1e-9, atol=1e-12), name
        assert not masks[name].any() or not torch.equal(value, start[name]), name
    assert base_hash(model) == mark


@every_family
def test_new_weights_are_the_new_lines(model_type):
    model, before = grown(model_type)
    masks = new_masks(model_type, model, before)
    new_weights = NewWeights(model)
    names = {parameter: name for name, parameter in model.named_parameters()}
    with_new = {names[parameter] for parameter in new_weights.parameters()}
    assert with_new == {name for name, mask in masks.items() if mask.any()}
    assert new_weights.count == sum(int(mask.sum()) for mask in masks.values()) > 0
    stock = model_of(model_type)
    assert new_weights.count == model.num_parameters() - stock.num_parameters()
    assert {names[parameter] for parameter in model.parameters() if parameter.requires_grad} == with_new


@every_family
def test_the_loss_falls_with_new_entries_alone(model_type):
    model, _ = grown(model_type)
    new_weights = NewWeights(model)
    optimizer = torch.optim.AdamW(new_weights.parameters(), lr=1e-2)
    new_weights.attach(optimizer)
    start = float(loss_in_double(model, labelled(model)).detach())
    train(model, optimizer, 10)
    assert float(loss_in_double(model, labelled(model)).detach()) < start - 1e-3


@pytest.mark.parametrize("model_type", ["gpt2", "bert", "qwen2"])
@pytest.mark.parametrize("multiplier", [0.3, 1, 3.0])
@pytest.mark.parametrize("momentum", [0.0, 0.9])
def test_new_entries_move_a_multiple_of_the_way(model_type, multiplier, momentum):
    """One step of SGD beside one of its twin without a multiplier."""
    (model, before), (twin, _) = grown(model_type), grown(model_type)
    masks, start = new_masks(model_type, model, before), weights_of(model)
    for each, multiple in ((model, multiplier), (twin, 1.0)):
        optimizer = torch.optim.SGD(each.parameters(), lr=1e-2, momentum=momentum, weight_decay=0.1)
        NewWeights(each, train="all", learning_rate_multiplier=multiple).attach(optimizer)
        train(each, optimizer, 1)
    plain = weights_of(twin)
    for name, value in weights_of(model).items():
        mask = masks[name]
        assert torch.equal(value[~mask], plain[name][~mask]), name
        expected = multiplier * (plain[name] - start[name])[mask]
        assert torch.allclose((value - start[name])[mask], expected, rtol=1e-9, atol=1e-15), name
        assert not mask.any() or expected.abs().max() > 1e-6, name


def test_without_a_multiplier_training_all_is_plain_training():
    (model, _), (twin, _) = grown("llama"), grown("llama")
    optimizer, plain = (OPTIMIZERS["adamw"](each.parameters()) for each in (model, twin))
    new_weights = NewWeights(model, train="all").attach(optimizer)
    train(model, optimizer, 3)
    train(twin, plain, 3)
    assert all(torch.equal(first, second) for first, second in zip(model.parameters(), twin.parameters(), strict=True))
    assert new_weights.count > 0 and all(parameter.requires_grad for parameter in model.parameters())


def test_new_entries_alone_can_have_a_multiplier_too():
    (model, before), (twin, _) = grown("gpt2"), grown("gpt2")
    masks, start = new_masks("gpt2", model, before), weights_of(model)
    for each, multiple in ((model, 5.0), (twin, 1.0)):
        optimizer = torch.optim.SGD(each.parameters(), lr=1e-2)
        NewWeights(each, learning_rate_multiplier=multiple).attach(optimizer)
        train(each, optimizer, 1)
    plain = weights_of(twin)
    for name, value in weights_of(model).items():
        expected = torch.where(masks[name], start[name] + 5 * (plain[name] - start[name]), start[name])
        assert torch.allclose(value, expected, rtol=1e-9, atol=1e-15), name
        assert torch.equal(value[~masks[name]], start[name][~masks[name]]), name


SECOND_GROWTHS = {
    "the same layer": lambda model, optimizer: widen_query_key(model, 0, 2, optimizer=optimizer),
    "another layer": lambda model, optimizer: widen_value(model, 1, 2, optimizer=optimizer),
    "heads": lambda model, optimizer: add_heads(model, 1, 1, optimizer=optimizer),
}


@pytest.mark.parametrize("model_type", ["gpt2", "bert", "llama"])
@pytest.mark.parametrize("second", SECOND_GROWTHS.values(), ids=SECOND_GROWTHS)
@pytest.mark.parametrize("train_what", ["new", "all"])
def test_a_second_growth_needs_a_refresh_and_then_learns_too(model_type, second, train_what):
    model = model_of(model_type)
    before = dims_of(model)
    widen_query_key(model, 0, 3)
    optimizer = OPTIMIZERS["adamw"](model.parameters())
    new_weights = NewWeights(model, train=train_what, learning_rate_multiplier=2.0).attach(optimizer)
    train(model, optimizer, 2)
    first = new_weights.count
    second(model, optimizer)
    with pytest.raises(HfGrowError, match="call refresh"):
        train(model, optimizer, 1)
    new_weights.refresh()
    masks, start = new_masks(model_type, fill_new_weights(model), before), weights_of(model)
    assert new_weights.count == sum(int(mask.sum()) for mask in masks.values()) > first
    train(model, optimizer, 2)
    for name, value in weights_of(model).items():
        assert not masks[name].any() or not torch.equal(value[masks[name]], start[name][masks[name]]), name
        if train_what == "new":
            assert torch.equal(value[~masks[name]], start[name][~masks[name]]), name


def test_after_detaching_steps_are_plain_again():
    (model, _), (twin, _) = grown("gpt2"), grown("gpt2")
    optimizer, plain = (OPTIMIZERS["adamw"](each.parameters()) for each in (model, twin))
    new_weights = NewWeights(model, learning_rate_multiplier=3.0).attach(optimizer)
    new_weights.detach()
    assert not all(parameter.requires_grad for parameter in model.parameters())
    model.requires_grad_(True)
    train(model, optimizer, 2)
    train(twin, plain, 2)
    assert all(torch.equal(first, second) for first, second in zip(model.parameters(), twin.parameters(), strict=True))


def test_gradients_of_old_entries_are_zero_before_any_step():
    """So that the norm of the gradient, by which it is clipped, is that of what learns."""
    model, before = grown("bert")
    NewWeights(model)
    loss_in_double(model, labelled(model)).backward()
    for name, mask in new_masks("bert", model, before).items():
        gradient = model.get_parameter(name).grad
        assert (gradient is not None) == bool(mask.any()), name
        assert gradient is None or (not gradient[~mask].any() and gradient[mask].any()), name


def test_adapters_learn_beside_new_weights():
    from peft import LoraConfig, get_peft_model

    model, _ = grown("llama")
    mark = base_hash(model)
    adapted = get_peft_model(model, LoraConfig(target_modules=["q_proj", "o_proj"], init_lora_weights=False))
    optimizer = OPTIMIZERS["adamw"](adapted.parameters())
    NewWeights(adapted).attach(optimizer)
    start = weights_of(adapted)
    train(adapted, optimizer, 2)
    moved = {name for name, value in weights_of(adapted).items() if not torch.equal(value, start[name])}
    assert {name for name in start if "lora_" in name} <= moved
    assert {name for name in start if "base_layer" in name} <= moved
    assert base_hash(adapted) == base_hash(model) == mark


@pytest.mark.parametrize(
    ("call", "message"),
    [
        (lambda model: NewWeights(model_of("gpt2")), "needs something new: grow the model first, or train='all'"),
        (lambda model: NewWeights(model, train="old"), "train must be one of all, new, not 'old'"),
        (lambda model: NewWeights(model, learning_rate_multiplier=0), "must be a positive number, not 0"),
        (lambda model: NewWeights(model, learning_rate_multiplier=-1.0), "must be a positive number, not -1.0"),
        (lambda model: NewWeights(model, learning_rate_multiplier="2"), "must be a positive number, not '2'"),
        (lambda model: NewWeights(model, learning_rate_multiplier=True), "must be a positive number, not True"),
        (lambda model: NewWeights(model, learning_rate_multiplier=float("inf")), "must be a positive number, not inf"),
        (lambda model: NewWeights(model, learning_rate_multiplier=float("nan")), "must be a positive number, not nan"),
        (lambda model: NewWeights(model, train="all").attach("adamw"), "str"),
        (lambda model: NewWeights(model, train="all").attach(torch.optim.LBFGS(model.parameters())), "LBFGS"),
    ],
)
def test_bad_input_is_refused_and_freezes_nothing(call, message):
    model, _ = grown("gpt2")
    with pytest.raises(HfGrowError, match=message):
        call(model)
    assert all(parameter.requires_grad for parameter in model.parameters())


def test_all_of_an_ungrown_model_can_be_trained():
    (model, twin), optimizers = (model_of("gpt2"), model_of("gpt2")), []
    for each in (model, twin):
        optimizers.append(OPTIMIZERS["sgd"](each.parameters()))
    new_weights = NewWeights(model, train="all", learning_rate_multiplier=4.0).attach(optimizers[0])
    assert new_weights.count == 0 and new_weights.parameters() == []
    train(model, optimizers[0], 1)
    train(twin, optimizers[1], 1)
    assert all(torch.equal(first, second) for first, second in zip(model.parameters(), twin.parameters(), strict=True))


def test_several_optimizers_can_be_corrected():
    model, before = grown("bert")
    masks, start = new_masks("bert", model, before), weights_of(model)
    new_weights = NewWeights(model)
    parameters = new_weights.parameters()
    first, second = OPTIMIZERS["adamw"](parameters[::2]), OPTIMIZERS["sgd"](parameters[1::2])
    new_weights.attach(first).attach(second)
    loss_in_double(model, labelled(model)).backward()
    first.step()
    second.step()
    for name, value in weights_of(model).items():
        assert torch.equal(value[~masks[name]], start[name][~masks[name]]), name
        assert not masks[name].any() or not torch.equal(value, start[name]), name


def test_optimizer_state_and_new_weights_go_together():
    """Growth in the middle of a run: the state is carried, and from then on only what is new learns."""
    model, optimizer = trained("gpt2", OPTIMIZERS["adamw"])
    before = dims_of(model)
    widen_query_key(model, 0, 3, optimizer=optimizer)
    new_weights = NewWeights(model).attach(optimizer)
    mark, start = base_hash(model), weights_of(model)
    train(model, optimizer, 3)
    masks = new_masks("gpt2", model, before)
    assert base_hash(model) == mark and new_weights.count == sum(int(mask.sum()) for mask in masks.values())
    changed = {name for name, value in weights_of(model).items() if not torch.equal(value, start[name])}
    assert changed == {name for name, mask in masks.items() if mask.any()}


def test_gradients_from_before_do_not_move_the_base():
    model = model_of("gpt2")
    optimizer = OPTIMIZERS["adamw"](model.parameters())
    train(model, optimizer, steps=2)
    loss_in_double(model, labelled(model)).backward()
    widen_query_key(model, 0, 2, optimizer=optimizer)
    NewWeights(model).attach(optimizer)
    before = base_hash(model)
    optimizer.step()
    assert base_hash(model) == before
