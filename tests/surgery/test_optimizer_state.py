"""An optimizer goes on over growth: every old entry keeps its state, groups and schedules stay, or nothing changes."""

import copy
import re

import pytest
import torch
from accelerate import Accelerator
from accelerate.optimizer import AcceleratedOptimizer
from batches import labelled, loss_in_double
from models import causal_model, growable
from plain_training import dims_of, model_of, old_lines, train, trained
from transformers import BertForMaskedLM
from transformers.optimization import Adafactor as TransformersAdafactor

from hf_grow import (
    CollectConfig,
    GrowthConfig,
    HfGrowError,
    add_heads,
    collect_statistics,
    drop_query_key,
    grow,
    insert_growth,
    make_growable,
    plan_growth,
    widen_query_key,
    widen_value,
)
from hf_grow.modeling.growable_attention import attention_sites
from hf_grow.surgery.optimizer_state import swap_parameters


class Lion(torch.optim.Optimizer):
    """Nearly the sign of an average: an optimizer that torch does not know, with a state of the parameter's shape."""

    def __init__(self, parameters, lr=1e-3, beta=0.9):
        super().__init__(parameters, {"lr": lr, "beta": beta})

    @torch.no_grad()
    def step(self, closure=None):
        # Not every key of a state is a parameter.
        self.state["calls"] = self.state.get("calls", 0) + 1
        for group in self.param_groups:
            for parameter in group["params"]:
                if parameter.grad is None:
                    continue
                state = self.state[parameter]
                average = state.setdefault("average", torch.zeros_like(parameter))
                direction = torch.lerp(parameter.grad, average, group["beta"])
                # The sign itself would make a step of the noise where the gradient is zero.
                parameter.sub_(direction / (direction.abs() + 1e-6), alpha=group["lr"])
                average.lerp_(parameter.grad, 1 - group["beta"])


class Foreign(Lion):
    """An optimizer whose state has a shape that nothing is known about."""

    def step(self, closure=None):
        super().step()
        for parameter in self.param_groups[0]["params"]:
            self.state[parameter]["factors"] = torch.ones(3)


ELEMENTWISE = {
    "adamw": lambda parameters: torch.optim.AdamW(parameters, lr=1e-3, weight_decay=0.1),
    "adamw foreach": lambda parameters: torch.optim.AdamW(parameters, lr=1e-3, foreach=True),
    "adamw fused": lambda parameters: torch.optim.AdamW(parameters, lr=1e-3, fused=True),
    "adamw amsgrad": lambda parameters: torch.optim.AdamW(parameters, lr=1e-3, amsgrad=True),
    "sgd": lambda parameters: torch.optim.SGD(parameters, lr=1e-2, momentum=0.9, weight_decay=0.1),
    "rmsprop": lambda parameters: torch.optim.RMSprop(parameters, lr=1e-3, momentum=0.9, centered=True),
    "lion": Lion,
}
FIXED_RATE = {"lr": 1e-3, "relative_step": False, "scale_parameter": False}
OPTIMIZERS = ELEMENTWISE | {
    "adafactor": lambda parameters: torch.optim.Adafactor(parameters, lr=1e-3),
    "transformers adafactor": lambda parameters: TransformersAdafactor(parameters, **FIXED_RATE),
    "transformers adafactor, beta1": lambda parameters: TransformersAdafactor(parameters, beta1=0.9, **FIXED_RATE),
    "transformers adafactor, relative step": lambda parameters: TransformersAdafactor(parameters),
}
MODEL_TYPES = ["gpt2", "bert", "llama", "qwen2"]
every_optimizer = pytest.mark.parametrize("make_optimizer", OPTIMIZERS.values(), ids=OPTIMIZERS)
every_elementwise = pytest.mark.parametrize("make_optimizer", ELEMENTWISE.values(), ids=ELEMENTWISE)
every_model_type = pytest.mark.parametrize("model_type", MODEL_TYPES)

# Growth by hand, in layer 0.
GROWTHS = {
    "query_key": lambda model, optimizer=None: widen_query_key(model, 0, 3, optimizer=optimizer),
    "value": lambda model, optimizer=None: widen_value(model, 0, 2, optimizer=optimizer),
    "heads": lambda model, optimizer=None: add_heads(model, 0, 1, optimizer=optimizer),
}
every_growth = pytest.mark.parametrize("growth", GROWTHS.values(), ids=GROWTHS)

ROWS, COLUMNS = ("row_var", "exp_avg_sq_row"), ("col_var", "exp_avg_sq_col")


def snapshot(model, optimizer):
    """By name: each parameter, its gradient and its state, copied."""
    parts = {}
    for name, parameter in model.named_parameters():
        state = optimizer.state.get(parameter, {})
        parts[name] = copy.deepcopy((parameter.detach(), parameter.grad, dict(state)))
    return parts


def continued(old, axis, lines):
    """A tensor of old lines at their new places, zero elsewhere; None stays None."""
    if old is None:
        return None
    zero = torch.zeros_like(old.select(axis, 0))
    return torch.stack([zero if line is None else old.select(axis, line) for line in lines], dim=axis)


def same(first, second):
    """Equal, to the bit, whatever it is."""
    if isinstance(first, torch.Tensor) or isinstance(second, torch.Tensor):
        return torch.equal(torch.as_tensor(first), torch.as_tensor(second))
    return first == second


def assert_carried(model_type, parts, before, model, optimizer, kept=None):
    """Old entries have their weight, gradient and state still; new ones have gradient and state zero."""
    grown = 0
    for name, parameter in model.named_parameters():
        weight, gradient, state = parts[name]
        old = old_lines(model_type, name, before, dims_of(model), kept)
        now = optimizer.state.get(parameter, {})
        assert now.keys() == state.keys(), name
        if old is None or old[1] == list(range(weight.shape[old[0]])):
            assert same(parameter.detach(), weight) and same(parameter.grad, gradient), name
            assert all(same(now[key], state[key]) for key in state), name
            continue
        grown += 1
        axis, lines = old
        is_old = torch.tensor([line is not None for line in lines])
        places = is_old.nonzero().flatten()
        expected = continued(weight, axis, lines)
        assert same(parameter.detach().index_select(axis, places), expected.index_select(axis, places)), name
        assert same(parameter.grad, continued(gradient, axis, lines)), name
        for key, value in state.items():
            assert same(now[key], expected_state(key, value, weight, axis % weight.ndim, lines)), (name, key)
    assert grown > 0


def expected_state(key, value, weight, axis, lines):
    """What a state should be after growth."""
    if key in (ROWS, COLUMNS)[1 - axis] or not isinstance(value, torch.Tensor) or value.ndim == 0:
        return value
    if key in (ROWS, COLUMNS)[axis]:
        flat = value.flatten()
        mean = torch.stack([flat[line] for line in lines if line is not None]).mean()
        stacked = torch.stack([mean if line is None else flat[line] for line in lines])
        shape = list(value.shape)
        shape[axis if value.ndim == 2 else 0] = len(lines)
        return stacked.reshape(shape)
    assert value.shape == weight.shape
    return continued(value, axis, lines)


@every_model_type
@every_optimizer
@every_growth
def test_old_entries_keep_their_state_and_new_ones_start_at_zero(model_type, make_optimizer, growth):
    model, optimizer = trained(model_type, make_optimizer)
    parts, before = snapshot(model, optimizer), dims_of(model)
    assert any(state for _, _, state in parts.values()) and parts
    growth(model, optimizer)
    assert_carried(model_type, parts, before, model, optimizer)
    train(model, optimizer, 2)
    assert all(torch.isfinite(parameter).all() for parameter in model.parameters())


@every_model_type
@every_optimizer
def test_dropped_columns_take_their_state_with_them(model_type, make_optimizer):
    model, optimizer = trained(model_type, make_optimizer)
    widen_query_key(model, 0, 3, optimizer=optimizer)
    train(model, optimizer, 2)
    parts, before = snapshot(model, optimizer), dims_of(model)
    drop_query_key(model, 0, [8, 10], optimizer=optimizer)
    assert_carried(model_type, parts, before, model, optimizer, kept=[0, 1, 2, 3, 4, 5, 6, 7, 9])
    train(model, optimizer)


@pytest.mark.parametrize("model_type", ["gpt2", "bert"])
def test_dropped_columns_of_the_base_take_their_state_with_them(model_type):
    model, optimizer = trained(model_type, OPTIMIZERS["adamw"])
    parts, before = snapshot(model, optimizer), dims_of(model)
    drop_query_key(model, 0, [2, 5], optimizer=optimizer)
    assert_carried(model_type, parts, before, model, optimizer, kept=[0, 1, 3, 4, 6, 7])
    train(model, optimizer)


def planned(model, **changes):
    """A plan for columns, value columns and a head in every layer."""
    batches = [labelled(model, size=8)]
    config = {"columns": 2, "value_columns": 2, "heads": 1, **changes}
    config = GrowthConfig(**{name: value for name, value in config.items() if value is not None})
    kinds = ("columns", "value_columns", "heads") if config.strategy == "append" else ("columns",)
    collect = CollectConfig(kinds=kinds, columns=2, value_columns=2, oversampling=2, target="gradient")
    return plan_growth(collect_statistics(model, batches, collect), config), batches


@every_model_type
@pytest.mark.parametrize("name", ["adamw", "sgd", "transformers adafactor, beta1"])
@pytest.mark.parametrize("step_size", [None, 0.0])
def test_inserting_a_plan_carries_the_state(model_type, name, step_size):
    model, optimizer = trained(model_type, OPTIMIZERS[name])
    plan, batches = planned(model, step_size=step_size)
    parts, before = snapshot(model, optimizer), dims_of(model)
    tried = insert_growth(model, plan, batches, optimizer=optimizer, dry_run=True)
    assert tried.optimizer is None and dims_of(model) == before
    report = insert_growth(model, plan, batches, optimizer=optimizer)
    assert_carried(model_type, parts, before, model, optimizer)
    grown = [name for name, parameter in model.named_parameters() if parameter.shape != parts[name][0].shape]
    assert report.optimizer == f"the state of {len(grown)} parameters carried"
    assert report.summary()["optimizer"] == report.optimizer
    train(model, optimizer, 2)


def test_growing_a_stock_model_in_one_call_carries_the_state():
    """The optimizer was made before the model became growable."""
    model = causal_model("qwen2").double()
    optimizer = OPTIMIZERS["adamw"](model.parameters())
    train(model, optimizer, 2)
    parts = snapshot(model, optimizer)
    before = dims_of(make_growable(copy.deepcopy(model)))
    _, report = grow(model, [labelled(model, size=8)], GrowthConfig(columns=2), optimizer=optimizer)
    assert_carried("qwen2", parts, before, model, optimizer)
    assert "carried" in report.optimizer
    train(model, optimizer)


def test_without_an_optimizer_the_report_says_nothing_of_one():
    model = model_of("llama")
    plan, batches = planned(model)
    assert insert_growth(model, plan, batches).optimizer is None


def old_entries(model_type, model, before):
    """By name: each parameter without its new lines."""
    parameters = {}
    for name, parameter in model.named_parameters():
        lines = old_lines(model_type, name, before, dims_of(model))
        if lines is not None:
            axis, sources = lines
            places = torch.tensor([place for place, line in enumerate(sources) if line is not None])
            parameter = parameter.index_select(axis, places)
        parameters[name] = parameter.detach()
    return parameters


def freeze_new_entries(model_type, model, before):
    """Zero the gradients of new lines, one by one."""
    for name, parameter in model.named_parameters():
        axis, lines = old_lines(model_type, name, before, dims_of(model)) or (0, [])
        for place, line in enumerate(lines):
            if line is None:
                parameter.grad.select(axis, place).zero_()


def distance(first, second):
    """The largest difference of two sets of weights."""
    assert first.keys() == second.keys()
    return max(float((value - second[name]).abs().max()) for name, value in first.items())


@pytest.mark.parametrize("model_type", ["gpt2", "bert", "qwen2"])
@every_elementwise
def test_old_entries_go_on_as_if_nothing_had_grown(model_type, make_optimizer):
    """Preserving growth whose new entries get no gradient has no part in training: steps are those without growth."""
    (plain, plain_optimizer), (grown, optimizer) = (trained(model_type, make_optimizer) for _ in range(2))
    before = dims_of(grown)
    for growth in GROWTHS.values():
        growth(grown, optimizer)
    for _ in range(3):
        train(plain, plain_optimizer)
        train(grown, optimizer, prepare=lambda: freeze_new_entries(model_type, grown, before))
        assert distance(old_entries(model_type, grown, before), old_entries(model_type, plain, before)) < 1e-9


@pytest.mark.parametrize("model_type", ["gpt2", "bert", "qwen2"])
@every_elementwise
@every_growth
def test_the_first_step_of_old_entries_is_that_without_growth(model_type, make_optimizer, growth):
    """Where one side of the new weights is zero, only this side gets a gradient, and nothing else feels it yet."""
    (plain, plain_optimizer), (grown, optimizer) = (trained(model_type, make_optimizer) for _ in range(2))
    before = dims_of(grown)
    growth(grown, optimizer)
    start = {name: value.clone() for name, value in grown.named_parameters()}
    train(plain, plain_optimizer)
    train(grown, optimizer)
    assert distance(old_entries(model_type, grown, before), old_entries(model_type, plain, before)) < 1e-9
    learned = 0
    for name, parameter in grown.named_parameters():
        axis, lines = old_lines(model_type, name, before, dims_of(grown)) or (0, [])
        for place, line in enumerate(lines):
            moved = parameter.select(axis, place) - start[name].select(axis, place)
            learned += line is None and bool(moved.abs().max() > 1e-6)
    assert learned > 0


def test_a_fresh_optimizer_would_step_otherwise():
    """What the two tests before this one can tell apart."""
    (plain, plain_optimizer), (grown, _) = (trained("gpt2", OPTIMIZERS["adamw"]) for _ in range(2))
    before = dims_of(grown)
    widen_query_key(grown, 0, 3)
    train(plain, plain_optimizer)
    train(grown, OPTIMIZERS["adamw"](grown.parameters()))
    assert distance(old_entries("gpt2", grown, before), old_entries("gpt2", plain, before)) > 1e-4


@pytest.mark.parametrize("name", ["adafactor", "transformers adafactor"])
@pytest.mark.parametrize("model_type", ["gpt2", "bert", "llama"])
def test_adafactor_moves_new_columns_no_further_than_old_ones(model_type, name):
    model, optimizer = trained(model_type, OPTIMIZERS[name], steps=20)
    before = dims_of(model)
    widen_query_key(model, 0, 3, optimizer=optimizer)
    start = snapshot(model, optimizer)
    train(model, optimizer)
    for parameter_name, parameter in model.named_parameters():
        axis, lines = old_lines(model_type, parameter_name, before, dims_of(model)) or (0, [])
        if None in lines and parameter.ndim == 2:
            moved = (parameter - start[parameter_name][0]).detach().movedim(axis, 0).norm(dim=1)
            is_new = torch.tensor([line is None for line in lines])
            assert moved[is_new].max() < 3 * moved[~is_new].max(), parameter_name


def test_adafactor_goes_on_from_a_single_column():
    model = growable("bert", BertForMaskedLM, {"num_attention_heads": 1, "hidden_size": 8})
    optimizer = OPTIMIZERS["adafactor"](model.parameters())
    drop_query_key(model, 0, range(1, 8), optimizer=optimizer)
    train(model, optimizer)
    parts, before = snapshot(model, optimizer), dims_of(model)
    widen_query_key(model, 0, 2, optimizer=optimizer)
    assert_carried("bert", parts, before, model, optimizer)
    train(model, optimizer)


@every_model_type
def test_gradients_present_at_growth_are_carried(model_type):
    model, optimizer = trained(model_type, OPTIMIZERS["adamw"])
    loss_in_double(model, labelled(model)).backward()
    parts, before = snapshot(model, optimizer), dims_of(model)
    assert all(gradient is not None for _, gradient, _ in parts.values())
    for growth in GROWTHS.values():
        growth(model, optimizer)
    assert_carried(model_type, parts, before, model, optimizer)
    optimizer.step()


def test_parameter_groups_keep_their_order_and_settings():
    model = model_of("qwen2")
    named = dict(model.named_parameters())
    attention = [name for name in named if "_proj.weight" in name and "attn" in name]
    biases = [name for name in named if name.endswith("bias")]
    rest = [name for name in named if name not in attention and name not in biases]
    settings = [{"lr": 1e-3, "weight_decay": 0.1}, {"lr": 2e-3, "weight_decay": 0.0}, {"lr": 3e-4, "betas": (0.5, 0.9)}]
    members = [attention, biases, rest]
    groups = [
        {"params": [named[name] for name in names], **setting} for names, setting in zip(members, settings, strict=True)
    ]
    optimizer = torch.optim.AdamW(groups)
    train(model, optimizer)
    kept = [{key: value for key, value in group.items() if key != "params"} for group in optimizer.param_groups]
    parts, before = snapshot(model, optimizer), dims_of(model)
    for growth in GROWTHS.values():
        growth(model, optimizer)
    assert_carried("qwen2", parts, before, model, optimizer)
    names = {parameter: name for name, parameter in model.named_parameters()}
    assert [[names[parameter] for parameter in group["params"]] for group in optimizer.param_groups] == members
    now = [{key: value for key, value in group.items() if key != "params"} for group in optimizer.param_groups]
    assert now == kept and [group["lr"] for group in now] == [1e-3, 2e-3, 3e-4]
    # Nothing of the old parameters is left.
    assert {key for key in optimizer.state} <= set(names)


def test_an_optimizer_of_some_parameters_gets_no_others():
    model = model_of("llama")
    chosen = [model.model.layers[0].self_attn.q_proj.weight, model.lm_head.weight]
    optimizer = OPTIMIZERS["adamw"](chosen)
    train(model, optimizer)
    add_heads(model, 0, 1, optimizer=optimizer)
    held = optimizer.param_groups[0]["params"]
    assert held[0] is model.model.layers[0].self_attn.q_proj.weight and held[1] is chosen[1] and len(held) == 2
    assert set(optimizer.state) == set(held)
    start = held[0].detach().clone()
    train(model, optimizer)
    assert not torch.equal(held[0], start)


def test_an_optimizer_that_never_stepped_trains_the_new_parameters():
    model = model_of("gpt2")
    optimizer = OPTIMIZERS["adamw"](model.parameters())
    plan, batches = planned(model)
    report = insert_growth(model, plan, batches, optimizer=optimizer)
    assert report.optimizer == "the state of 0 parameters carried" and not optimizer.state
    start = {name: parameter.detach().clone() for name, parameter in model.named_parameters()}
    train(model, optimizer)
    assert all(not torch.equal(parameter, start[name]) for name, parameter in model.named_parameters())


def test_frozen_projections_grow_beside_an_optimizer_of_other_weights():
    model = model_of("bert").requires_grad_(False)
    head = model.cls.requires_grad_(True)
    optimizer = OPTIMIZERS["adamw"](head.parameters())
    train(model, optimizer)
    state = copy.deepcopy(optimizer.state_dict())
    widen_value(model, 0, 2, optimizer=optimizer)
    assert_same_state(optimizer.state_dict(), state)


def test_a_schedule_goes_on_with_the_same_rates():
    rates = []
    for growth in (None, GROWTHS["heads"]):
        model = model_of("llama")
        optimizer = OPTIMIZERS["adamw"](model.parameters())
        scheduler = torch.optim.lr_scheduler.LambdaLR(optimizer, lambda step: 1 / (1 + step))
        seen = []
        for step in range(6):
            if step == 3 and growth is not None:
                growth(model, optimizer)
            train(model, optimizer)
            scheduler.step()
            seen.append((optimizer.param_groups[0]["lr"], scheduler.get_last_lr()[0]))
        rates.append(seen)
    assert rates[0] == rates[1] and len(set(rates[0])) == 6


def test_the_saved_state_fits_a_fresh_optimizer_of_the_grown_model():
    model, optimizer = trained("gpt2", OPTIMIZERS["adamw"])
    GROWTHS["heads"](model, optimizer)
    twin = copy.deepcopy(model)
    other = OPTIMIZERS["adamw"](twin.parameters())
    other.load_state_dict(copy.deepcopy(optimizer.state_dict()))
    for pair in ((model, optimizer), (twin, other)):
        train(*pair, 2)
    assert all(torch.equal(first, second) for first, second in zip(model.parameters(), twin.parameters(), strict=True))


def test_the_wrapper_of_accelerate_is_opened():
    model = model_of("bert")
    accelerator = Accelerator(cpu=True)
    optimizer = accelerator.prepare(OPTIMIZERS["adamw"](model.parameters()))
    assert isinstance(optimizer, AcceleratedOptimizer)
    train(model, optimizer, 2)
    parts, before = snapshot(model, optimizer.optimizer), dims_of(model)
    for growth in GROWTHS.values():
        growth(model, optimizer)
    assert_carried("bert", parts, before, model, optimizer.optimizer)
    train(model, optimizer)


@pytest.mark.parametrize(
    ("model_type", "text"),
    [
        ("bert", "the state of 0 parameters carried, of 8 reset"),
        ("gpt2", "the state of 4 parameters carried, partly reset in 4 of them"),
    ],
)
def test_refactoring_resets_what_it_makes_anew_and_says_so(model_type, text):
    """Query and key of both layers, with their biases; GPT-2 keeps them with the values, whose state goes on."""
    model, optimizer = trained(model_type, OPTIMIZERS["adamw"])
    parts = snapshot(model, optimizer)
    changes = {"strategy": "refactor", "columns": 2, "value_columns": None, "heads": None, "step_size": 1e-3}
    plan, batches = planned(model, **changes)
    report = insert_growth(model, plan, batches, optimizer=optimizer)
    assert report.optimizer == text
    for name, parameter in model.named_parameters():
        state, old = optimizer.state.get(parameter, {}), parts[name][2]
        if model_type == "gpt2" and "c_attn" in name:
            width = 4 * 10
            assert not state["exp_avg"][..., : 2 * width].any() and not state["exp_avg_sq"][..., : 2 * width].any()
            assert all(same(state[key][..., 2 * width :], old[key][..., 64:]) for key in ("exp_avg", "exp_avg_sq"))
            assert same(state["step"], old["step"])
        elif re.search(r"self\.(query|key)\.", name):
            assert not state
        else:
            assert all(same(state[key], value) for key, value in old.items()) and state.keys() == old.keys()
    train(model, optimizer, 2)


def assert_same_state(first, second):
    """Two state dicts of an optimizer agree to the bit."""
    assert first["param_groups"] == second["param_groups"] and first["state"].keys() == second["state"].keys()
    for key, state in first["state"].items():
        if isinstance(state, dict):
            assert state.keys() == second["state"][key].keys()
            assert all(same(value, second["state"][key][name]) for name, value in state.items())


def other_optimizer(_):
    """An optimizer of another model."""
    model = model_of("gpt2")
    optimizer = OPTIMIZERS["adamw"](model.parameters())
    train(model, optimizer)
    return optimizer


def foreign(model):
    """An optimizer with a state of unknown shape."""
    optimizer = Foreign(model.parameters())
    train(model, optimizer)
    return optimizer


def odd(model):
    """An optimizer with a state that is no number."""
    optimizer = Lion(model.parameters())
    train(model, optimizer)
    for parameter in model.parameters():
        optimizer.state[parameter]["history"] = [1.0]
    return optimizer


REFUSALS = [
    (lambda model: torch.optim.LBFGS(model.parameters()), "state of LBFGS cannot be carried over growth"),
    (foreign, r"Foreign keeps 'factors' of shape \(3,\) for a parameter of shape"),
    (odd, "Lion keeps 'history' of type list"),
    (other_optimizer, "belongs to another model, or to this one before it grew"),
    (lambda model: "adamw", "state of str cannot be carried"),
    (lambda model: model, "state of GrowableGPT2ForCausalLM cannot be carried"),
    (lambda model: torch.optim.AdamW, "state of type cannot be carried"),
]


REFUSED_IDS = ["lbfgs", "shape", "type", "other", "text", "model", "class"]


@pytest.mark.parametrize(("make", "message"), REFUSALS, ids=REFUSED_IDS)
@pytest.mark.parametrize("way", ["by hand", "planned", "grow"])
def test_what_cannot_go_on_is_refused_before_anything_changes(make, message, way):
    model = model_of("gpt2")
    optimizer = make(model)
    batches = [labelled(model, size=8)]
    plan = planned(model)[0] if way == "planned" else None
    weights = copy.deepcopy(model.state_dict())
    gradients = {name: copy.deepcopy(parameter.grad) for name, parameter in model.named_parameters()}
    members = list(model.parameters())
    kept = (copy.deepcopy(model.config.hf_grow), copy.deepcopy(model.growth_history), dims_of(model))
    state = copy.deepcopy(optimizer.state_dict()) if isinstance(optimizer, torch.optim.Optimizer) else None
    with pytest.raises(HfGrowError, match=message):
        if way == "by hand":
            widen_query_key(model, 0, 2, optimizer=optimizer)
        elif way == "planned":
            insert_growth(model, plan, batches, optimizer=optimizer)
        else:
            grow(model, batches, GrowthConfig(columns=1), optimizer=optimizer)
    assert all(torch.equal(value, weights[name]) for name, value in model.state_dict().items())
    assert all(same(parameter.grad, gradients[name]) for name, parameter in model.named_parameters())
    assert all(now is then for now, then in zip(model.parameters(), members, strict=True))
    assert (model.config.hf_grow, model.growth_history, dims_of(model)) == kept
    if state is not None:
        assert_same_state(optimizer.state_dict(), state)


def test_an_optimizer_left_behind_by_growth_is_refused():
    model, optimizer = trained("llama", OPTIMIZERS["adamw"])
    widen_query_key(model, 0, 2)
    with pytest.raises(HfGrowError, match="this one before it grew"):
        widen_query_key(model, 0, 2, optimizer=optimizer)


def test_fused_momentum_goes_on_after_all_weights_were_made_anew():
    model = growable("bert", BertForMaskedLM, {})
    optimizer = torch.optim.SGD(model.parameters(), lr=1e-3, momentum=0.9, fused=True)
    loss_in_double(model, labelled(model)).backward()
    optimizer.step()
    config = GrowthConfig(columns=2, strategy="refactor")
    grow(model, [labelled(model)], config, collect=CollectConfig(passes=2), optimizer=optimizer)
    loss_in_double(model, labelled(model)).backward()
    optimizer.step()
    buffers = [state["momentum_buffer"] for state in optimizer.state.values()]
    assert all(bool(torch.isfinite(buffer).all()) for buffer in buffers)


@pytest.mark.parametrize(
    ("make", "name", "start"),
    [
        (lambda parameters: torch.optim.Adagrad(parameters, lr=1e-3, initial_accumulator_value=0.1), "sum", 0.1),
        (lambda parameters: torch.optim.Rprop(parameters, lr=1e-3), "step_size", 1e-3),
    ],
    ids=["adagrad", "rprop"],
)
def test_new_entries_start_where_the_optimizer_starts(make, name, start):
    model = growable("llama", None, {})
    optimizer = make(model.parameters())
    loss_in_double(model, labelled(model)).backward()
    optimizer.step()
    site = attention_sites(model)[0]
    old = optimizer.state[site.attention.q_proj.weight][name].clone()
    widen_query_key(model, 0, 2, optimizer=optimizer)
    state = optimizer.state[site.attention.q_proj.weight][name]
    heads, width = site.attention.n_heads, site.attention.query_key_dim
    blocks = state.view(heads, width, -1)
    assert torch.equal(blocks[:, :-2].flatten(0, 1), old)
    assert torch.equal(blocks[:, -2:], torch.full_like(blocks[:, -2:], start))


def test_swapped_parameters_take_the_places_and_what_is_carried():
    kept, dropped, fresh, other = (torch.nn.Parameter(torch.ones(2)) for _ in range(4))
    optimizer = torch.optim.AdamW([{"params": [kept, other]}, {"params": [dropped, fresh], "lr": 0.5}])
    for parameter in (kept, dropped, other):
        parameter.grad = torch.ones(2)
    optimizer.step()
    state = dict(optimizer.state[kept])
    pairs = {old: torch.nn.Parameter(torch.zeros(3)) for old in (kept, dropped, fresh)}
    swap_parameters(optimizer, pairs, lambda new, old_state: old_state if new is pairs[kept] else None)
    first, second = ([id(parameter) for parameter in group["params"]] for group in optimizer.param_groups)
    assert first == [id(pairs[kept]), id(other)] and second == [id(pairs[dropped]), id(pairs[fresh])]
    assert set(optimizer.state) == {pairs[kept], other} and optimizer.state[pairs[kept]] == state
