"""Training against a plain loop, growth on the way, and what training leaves behind."""

import copy
import gc
import math
import sys
import weakref

import pytest
import torch
from accelerate import Accelerator
from models import causal_model
from runs import (
    adapted,
    interrupted_at,
    make_trainer,
    steps_of_growth,
    task,
    token_rows,
    values,
    weights,
    with_method,
    without_dropout,
)

from hf_grow import GrowthConfig, GrowthSchedule, HfGrowError, make_growable, widen_query_key
from hf_grow.modeling.growable_attention import attention_sites
from hf_grow.surgery.base import base_hash, base_parameters
from hf_grow.surgery.blocks import divided, read_blocks


@pytest.mark.parametrize("name", ["gpt2", "llama", "masked", "classification"])
def test_every_task_learns_and_evaluates(name):
    model, rows, options = task(name)
    trainer = make_trainer(
        model, rows, rows[:6], steps=24, at=(8,), learning_rate=3e-3, batch_size=8, eval_every=8, **options
    )
    result = trainer.train()
    losses = values(result)
    assert len(losses) == result.steps == 24 and result.loss == losses[-1]
    assert sum(losses[-5:]) < 0.95 * sum(losses[:5])
    evaluations = values(result, "eval_loss")
    assert len(evaluations) == 3 and evaluations[-1] == result.eval_loss == trainer.evaluate()
    assert evaluations[-1] < evaluations[0]
    assert [report["training_step"] for report in result.reports] == [8] and result.seconds > 0


def oracle(model, feed, config):
    """The same training by hand: the loss over all labels of a step, clipping, AdamW, a rate that rises and falls."""
    state = {parameter: (torch.zeros_like(parameter), torch.zeros_like(parameter)) for parameter in model.parameters()}
    causal = model.loss_type == "ForCausalLM"
    one, two = config.betas
    model.train()
    for step in range(config.steps):
        total, count = 0.0, 0
        for batch in feed.batches(step):
            logits, labels = model(input_ids=batch["input_ids"]).logits, batch["labels"]
            if causal:
                logits, labels = logits[:, :-1], labels[:, 1:]
            logits, labels = logits.flatten(0, -2), labels.flatten()
            total = total + torch.nn.functional.cross_entropy(logits, labels, reduction="sum")
            count += int((labels != -100).sum())
        model.zero_grad()
        (total / count).backward()
        learning = [parameter for parameter in model.parameters() if parameter.grad is not None]
        norm = math.sqrt(sum(float(parameter.grad.pow(2).sum()) for parameter in learning))
        rising, falling = step / config.warmup, (config.steps - step) / (config.steps - config.warmup)
        rate = config.learning_rate * min(rising, falling)
        with torch.no_grad():
            for parameter in learning:
                gradient = parameter.grad * min(1.0, config.clip / norm)
                first, second = state[parameter]
                first.mul_(one).add_(gradient, alpha=1 - one)
                second.mul_(two).add_(gradient**2, alpha=1 - two)
                parameter.mul_(1 - rate * (config.weight_decay if parameter.ndim > 1 else 0.0))
                deviation = (second / (1 - two ** (step + 1))).sqrt()
                parameter.sub_(rate * first / (1 - one ** (step + 1)) / (deviation + 1e-8))
    return weights(model)


@pytest.mark.parametrize("accumulation", [1, 3])
@pytest.mark.parametrize("name", ["gpt2", "llama", "masked", "classification"])
def test_weights_are_those_of_a_plain_loop(name, accumulation):
    """Labels differ in number from batch to batch, and all of them count alike."""
    model, rows, options = task(name)
    twin = copy.deepcopy(without_dropout(model))
    start = weights(model)
    settings = {"accumulation": accumulation, "clip": 0.7, "weight_decay": 0.1, "warmup": 2, "batch_size": 3}
    trainer = make_trainer(model, rows, learning_rate=2e-3, betas=(0.8, 0.95), **settings, **options)
    trainer.train()
    expected = oracle(twin, trainer.feed, trainer.config)
    for key, value in weights(model).items():
        assert (value - expected[key]).abs().max() < 1e-6, key
    assert max(float((value - start[key]).abs().max()) for key, value in expected.items()) > 1e-3


def test_batches_without_labels_take_no_part():
    """Their loss is not a number; a step made of them alone leaves the weights."""
    rows = token_rows(8)
    for row in rows[::2]:
        row["labels"] = [-100] * len(row["labels"])
    model = without_dropout(causal_model("gpt2"))
    twin = copy.deepcopy(model)
    settings = {"batch_size": 1, "accumulation": 4, "steps": 4, "warmup": 1, "clip": 1e9}
    trainer = make_trainer(model, rows, **settings)
    result = trainer.train()
    assert all(math.isfinite(loss) for loss in values(result))
    expected = oracle(twin, trainer.feed, trainer.config)
    assert all((value - expected[key]).abs().max() < 1e-6 for key, value in weights(model).items())
    empty = [{**row, "labels": [-100] * 10} for row in rows]
    model = causal_model("gpt2")
    trainer = make_trainer(model, token_rows(8), steps=2)
    trainer.feed.rows = empty
    start = weights(model)
    assert values(trainer.train()) == []
    assert all(torch.equal(value, start[key]) for key, value in weights(model).items())


def test_the_rate_warms_up_and_decays_over_growth():
    rate = 2e-3
    result = make_trainer(causal_model("gpt2"), at=(3, 6), steps=10, warmup=4, learning_rate=rate).train()
    # That of the next step, as transformers logs it.
    expected = [rate * min(step / 4, (10 - step) / 6) for step in range(1, 11)]
    assert values(result, "learning_rate") == pytest.approx(expected)


@pytest.mark.parametrize(("name", "last"), [("cosine", 0.0), ("constant_with_warmup", 1e-3), ("constant", 1e-3)])
def test_schedules_of_the_rate(name, last):
    result = make_trainer(causal_model("gpt2"), steps=3, lr_schedule=name, warmup=0.3).train()
    assert values(result, "learning_rate")[-1] == pytest.approx(last, abs=1e-12)


@pytest.mark.parametrize("name", ["adamw", "sgd", "adafactor"])
def test_an_optimizer_keeps_its_state_over_growth(name):
    model = causal_model("gpt2")
    trainer = make_trainer(model, at=(3,), steps=6, learning_rate=1e-2, lr_schedule="constant", optimizer=name)
    seen = []

    def watched(run, grow):
        before = copy.deepcopy(run.optimizer.state_dict()["state"])
        grown = grow()
        seen.append((before, copy.deepcopy(run.optimizer.state_dict()["state"])))
        return grown

    with with_method("grow", watched):
        result = trainer.train()
    ((before, after),) = seen
    assert before.keys() == after.keys() and len(before) == len(list(model.parameters()))
    for number, state in before.items():
        for field in state.keys() & {"step", "exp_avg", "exp_avg_sq", "momentum_buffer"}:
            assert float(after[number][field].double().sum()) == pytest.approx(float(state[field].double().sum()))
    assert result.loss < values(result)[0]
    groups = trainer._stage.optimizer.param_groups
    assert {parameter for group in groups for parameter in group["params"]} == {*model.parameters()}


def test_an_optimizer_of_ones_own_may_leave_parameters_out():
    """What it leaves out has no part in clipping, and stays."""
    outcomes = []
    for frozen in (False, True):
        model = make_growable(causal_model("gpt2"))
        chosen = {id(parameter) for site in attention_sites(model) for parameter in site.attention.parameters()}
        if frozen:
            for parameter in model.parameters():
                parameter.requires_grad_(id(parameter) in chosen)
        start = weights(model)

        def make(parameters, chosen=chosen):
            return torch.optim.RMSprop([parameter for parameter in parameters if id(parameter) in chosen], lr=1e-3)

        make_trainer(model, steps=3, clip=0.1, optimizer=make).train()
        assert torch.equal(model.transformer.wte.weight, start["transformer.wte.weight"])
        outcomes.append(weights(model))
    assert all(torch.equal(value, outcomes[1][key]) for key, value in outcomes[0].items())
    assert not torch.equal(
        outcomes[0]["transformer.h.0.attn.c_attn.weight"], start["transformer.h.0.attn.c_attn.weight"]
    )


def widths(model):
    return [site.attention.query_key_dim for site in attention_sites(model)]


@pytest.mark.parametrize(
    ("schedule", "steps"),
    [
        (GrowthSchedule(at=(0, 3, 5), sequences=5), [0, 3, 5]),
        (GrowthSchedule(every=2, sequences=5), [2, 4, 6]),
        (GrowthSchedule(every=2, max_events=2, sequences=5), [2, 4]),
        (GrowthSchedule(every=2, max_query_key_dim=13, sequences=5), [2, 4]),
        (GrowthSchedule(at=(1,), every=4, sequences=5), [1, 4]),
    ],
)
def test_growth_comes_when_it_is_due(schedule, steps):
    model = causal_model("gpt2")
    result = make_trainer(model, schedule=schedule, steps=8).train()
    assert steps_of_growth(result) == steps
    assert widths(model) == [8 + 2 * len(steps)] * 2
    entries = [entry for entry in result.history if entry.get("event") == "growth"]
    assert [entry["step"] for entry in entries] == steps
    for entry, report in zip(entries, result.reports, strict=True):
        assert entry["parameters"] == report["parameters_after"] > report["parameters_before"]
        assert entry["loss_after_growth"] <= entry["loss_before_growth"] == report["loss_before"]


def test_a_plateau_makes_a_model_grow():
    """With a rate of almost nothing the evaluation loss does not fall by enough."""
    schedule = GrowthSchedule(plateau=2, min_improvement=10.0, max_events=1, sequences=5)
    model, rows = causal_model("gpt2"), token_rows()
    result = make_trainer(model, rows, rows[:4], schedule=schedule, steps=8, eval_every=1, learning_rate=1e-9).train()
    assert steps_of_growth(result) == [3]


def test_growth_by_budget_and_of_every_kind():
    model = causal_model("llama")
    growth = GrowthConfig(columns=2, value_columns=1, heads=1)
    result = make_trainer(model, growth=growth, at=(2,), steps=4).train()
    assert steps_of_growth(result) == [2] and widths(model) == [10, 10]
    model = causal_model("gpt2")
    result = make_trainer(model, growth=GrowthConfig(budget="3%"), at=(2,), steps=4).train()
    assert 0 < result.reports[0]["parameters_added"] <= 0.03 * result.reports[0]["parameters_before"]


def test_new_weights_learn_after_growth():
    model = causal_model("gpt2")
    trainer = make_trainer(
        model, growth=GrowthConfig(columns=2, step_size=0.0), at=(2,), steps=5, lr_schedule="constant"
    )
    kept = []
    with with_method("grow", lambda run, grow: (grow(), kept.append(weights(model)))[0]):
        trainer.train()
    for site in attention_sites(model):
        now = divided(read_blocks(site), site.attention.base_dims)
        weight = kept[0][f"{site.name}.c_attn.weight"]
        query = weight[:, : 4 * 10].view(32, 4, 10)[..., 8:]
        assert not torch.equal(query.transpose(0, 1), now["query", "columns"][:, :-1])


def test_bf16_trains_like_float32():
    losses = []
    for precision in ("no", "bf16"):
        model, rows = causal_model("gpt2"), token_rows()
        result = make_trainer(model, rows, rows[:4], at=(0, 3), steps=6, eval_every=3, precision=precision).train()
        assert model.dtype == torch.float32 and "forward" not in vars(model)
        losses.append(values(result) + values(result, "eval_loss"))
    assert losses[0] != losses[1] and losses[1] == pytest.approx(losses[0], rel=0.05)


def test_gradient_checkpointing_changes_nothing():
    outcomes = []
    for checkpointing in (False, True):
        model = without_dropout(causal_model("gpt2"))
        make_trainer(model, at=(2,), steps=4, gradient_checkpointing=checkpointing).train()
        outcomes.append(weights(model))
    assert all(torch.allclose(value, outcomes[1][key], atol=1e-8) for key, value in outcomes[0].items())


@pytest.mark.parametrize("name", ["gpt2", "llama", "masked"])
def test_new_weights_alone_leave_the_base_to_the_bit(name):
    model, rows, options = task(name)
    make_growable(model)
    learned = [parameter.requires_grad for parameter in model.parameters()]
    mark, start = base_hash(model), weights(model)
    settings = {"train": "new", "weight_decay": 0.1, "learning_rate": 1e-2, "at": (0, 4)}
    growth = GrowthConfig(columns=2, heads=1)
    make_trainer(model, rows, steps=8, growth=growth, **settings, **options).train()
    assert base_hash(model) == mark and widths(model) == [12, 12]
    assert [parameter.requires_grad for _, parameter in base_parameters(model)] == learned
    assert all(torch.equal(weights(model)[key], value) for key, value in start.items())
    assert {key.split(".grown.")[0] for key in weights(model).keys() - start.keys()} == {
        site.name for site in attention_sites(model)
    }


@pytest.mark.parametrize("model_type", ["gpt2", "llama"])
def test_adapters_learn_beside_new_weights(tmp_path, model_type):
    def run(folder, stop=None):
        model = adapted(model_type, attach=True)
        mark, start = base_hash(model), weights(model)
        trainer = make_trainer(
            model, None, token_rows(4), steps=6, train="new", learning_rate=1e-2, save_every=2, folder=folder
        )
        if stop is not None:
            with pytest.raises(KeyboardInterrupt), interrupted_at(stop, "take_step"):
                trainer.train()
            return None
        trainer.train(resume=True)
        assert base_hash(model) == mark
        changed = {key for key, value in weights(model).items() if not torch.equal(value, start[key])}
        assert any("lora_A" in key for key in changed) and any(".grown." in key for key in changed)
        assert all("lora_" in key or ".grown." in key for key in changed)
        return weights(model)

    expected = run(tmp_path / "whole")
    run(tmp_path / "broken", stop=3)
    resumed = run(tmp_path / "broken")
    assert all(torch.equal(value, resumed[key]) for key, value in expected.items())


def test_tensorboard_gets_losses_and_growth(tmp_path):
    accumulator = pytest.importorskip("tensorboard.backend.event_processing.event_accumulator")
    rows = token_rows()
    trainer = make_trainer(
        causal_model("gpt2"), rows, rows[:4], at=(0, 2), steps=4, eval_every=2, tracker="tensorboard", folder=tmp_path
    )
    result = trainer.train()
    events = accumulator.EventAccumulator(str(tmp_path / "hf_grow")).Reload()
    assert [event.value for event in events.Scalars("loss")] == pytest.approx(values(result))
    assert [event.step for event in events.Scalars("eval_loss")] == [2, 4]
    assert [event.step for event in events.Scalars("parameters")] == [0, 2]


def test_history_averages_the_losses_between_entries():
    def history(log_every):
        return make_trainer(causal_model("gpt2"), steps=7, log_every=log_every).train().history

    each, three = history(1), history(3)
    assert [entry["step"] for entry in three] == [3, 6, 7]
    single = [entry["loss"] for entry in each]
    assert [entry["loss"] for entry in three] == pytest.approx([sum(single[:3]) / 3, sum(single[3:6]) / 3, single[6]])


def test_progress_is_shown(capsys, monkeypatch):
    monkeypatch.setattr(sys.stderr, "isatty", lambda: True)
    rows = token_rows()
    make_trainer(causal_model("gpt2"), rows, rows[:4], at=(2,), steps=4, progress=True).train()
    shown = capsys.readouterr().err
    for words in ("training: 100%", "4/4", "d_k=10", "events=1", "eval_loss=", "parameters added"):
        assert words in shown, words


@pytest.mark.parametrize("precision", ["no", "bf16"])
@pytest.mark.parametrize("fails", [False, True])
def test_a_model_is_left_as_found(precision, fails):
    """No wrapper, hook, gradient or frozen parameter; every module in its own mode."""
    model = make_growable(causal_model("gpt2"))
    model.transformer.h[0].train()
    model.transformer.wte.requires_grad_(False)
    modes = {module: module.training for module in model.modules()}
    keys = {module: set(vars(module)) for module in model.modules()}
    random = torch.random.get_rng_state()
    trainer = make_trainer(model, at=(0, 2), steps=4, train="new", precision=precision, gradient_checkpointing=True)
    if fails:
        with pytest.raises(KeyboardInterrupt), interrupted_at(0):
            trainer.train()
    else:
        trainer.train()
    assert torch.equal(torch.random.get_rng_state(), random)
    assert type(model).forward is type(model.forward.__self__).forward and "forward" not in vars(model)
    for module in keys:
        assert module.training == modes[module]
        assert not any((module._forward_hooks, module._forward_pre_hooks, module._backward_hooks))
        added = set(vars(module)) - keys[module]
        allowed = ("gradient_checkpointing", "_require_grads_hook", "active_growth")
        assert all(any(part in name for part in allowed) for name in added)
    assert not model.is_gradient_checkpointing
    for name, parameter in model.named_parameters():
        assert parameter.grad is None and not parameter._backward_hooks, name
        assert parameter.requires_grad == ("wte" not in name), name


def test_a_gradient_from_before_has_no_part():
    outcomes = []
    for stale in (False, True):
        model = causal_model("gpt2")
        if stale:
            for parameter in model.parameters():
                parameter.grad = torch.ones_like(parameter)
        make_trainer(model, steps=2).train()
        outcomes.append(weights(model))
    assert all(torch.equal(value, outcomes[1][key]) for key, value in outcomes[0].items())


def test_an_accelerator_of_ones_own_is_left_empty():
    accelerator = Accelerator(cpu=True)
    trainer = make_trainer(causal_model("gpt2"), accelerator=accelerator, steps=2)
    trainer.train()
    assert not accelerator._models and not accelerator._optimizers
    with pytest.raises(HfGrowError, match="leave that to accumulation"):
        make_trainer(causal_model("gpt2"), accelerator=Accelerator(cpu=True, gradient_accumulation_steps=2))


def test_two_trainers_in_a_row_may_differ_in_precision():
    for precision in ("bf16", "no", "bf16"):
        trainer = make_trainer(causal_model("gpt2"), steps=1, precision=precision)
        trainer.train()
        assert trainer.accelerator.mixed_precision == precision


def test_a_model_that_was_grown_before_goes_on_growing():
    model = make_growable(causal_model("gpt2"))
    widen_query_key(model, 0, 3)
    make_trainer(model, at=(1,), steps=2).train()
    assert widths(model) == [13, 10]


def test_another_loop_that_stopped_between_steps_does_not_stop_this_one():
    accelerator = Accelerator(cpu=True, gradient_accumulation_steps=2)
    with accelerator.accumulate(torch.nn.Linear(1, 1)):
        assert not accelerator.sync_gradients
    model = causal_model("gpt2")
    before = weights(model)
    make_trainer(model, steps=2).train()
    assert not torch.equal(before["transformer.wpe.weight"], model.state_dict()["transformer.wpe.weight"])


def test_old_parameters_are_not_held_after_growth():
    """Weights would be in memory twice."""
    model, held = make_growable(causal_model("gpt2")), []
    old = [weakref.ref(parameter) for site in attention_sites(model) for parameter in site.attention.parameters()]

    def look(run, step):
        gc.collect()
        held.append(sum(parameter() is not None for parameter in old))
        step()

    with with_method("take_step", look):
        make_trainer(model, at=(1,), steps=3).train()
    assert held[0] == len(old) and held[1] == held[2] < len(old)
    assert held[2] == sum(parameter() is not None for parameter in old)


def test_what_a_trainer_had_as_attributes_can_still_be_read(tmp_path):
    trainer = make_trainer(causal_model("gpt2"), folder=tmp_path, steps=2)
    trainer.train()
    with pytest.warns(DeprecationWarning, match="optimizer goes with 0.3"):
        assert isinstance(trainer.optimizer, torch.optim.AdamW)
    with pytest.warns(DeprecationWarning):
        assert trainer.scheduler.last_epoch == 2
    for name, value in {"main": True, "folder": tmp_path, "growth": None, "eval_batches": None}.items():
        with pytest.warns(DeprecationWarning, match=name):
            assert getattr(trainer, name) == value
