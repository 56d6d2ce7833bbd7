"""A model grows inside transformers' Trainer as it would in a loop written by hand, and a killed run goes on."""

import copy
import json
import shutil

import pytest
import torch
from models import batch, causal_model
from processes import launch
from trainer_runs import COLUMNS, arguments, callback, killed, rows, trainer
from transformers import Trainer, TrainerCallback, get_linear_schedule_with_warmup

import hf_grow
from hf_grow import CollectConfig, GrowthCallback, GrowthConfig, GrowthSchedule, HfGrowError, make_growable
from hf_grow.modeling.growable_attention import attention_sites
from hf_grow.modeling.growable_model import GrowableModel

NO_DROPOUT = {"attn_pdrop": 0.0, "embd_pdrop": 0.0, "resid_pdrop": 0.0}


def widths(model):
    """The query/key width of every layer."""
    return [site.attention.query_key_dim for site in attention_sites(model)]


def assert_same_weights(first, second):
    """Two models have the same weights, to the bit."""
    one, other = first.state_dict(), second.state_dict()
    assert one.keys() == other.keys()
    for name, value in one.items():
        assert torch.equal(value, other[name]), name


class Recorder(TrainerCallback):
    """Keeps the width after every step."""

    def __init__(self):
        self.widths = []

    def on_step_begin(self, args, state, control, model=None, **kwargs):
        """Before the step, so that what the last one did is seen."""
        self.widths.append(widths(model)[0])


@pytest.mark.parametrize(
    ("schedule", "expected"),
    [
        ({"at": (0, 4)}, [10, 10, 10, 10, 12, 12]),
        ({"every": 2}, [8, 8, 10, 10, 12, 12]),
        ({"every": 2, "max_events": 1}, [8, 8, 10, 10, 10, 10]),
        ({"at": (1,), "every": 4}, [8, 10, 10, 10, 12, 12]),
    ],
)
def test_a_model_grows_at_the_steps_of_its_schedule(tmp_path, schedule, expected):
    seen = Recorder()
    grower = callback(GrowthSchedule(**schedule, sequences=8))
    run = trainer(tmp_path, grower)
    run.add_callback(seen)
    run.train()
    assert seen.widths == expected
    assert isinstance(run.model, GrowableModel) and len(grower.reports) == grower.progress.events
    logged = [entry for entry in run.state.log_history if "growth_loss_after" in entry]
    assert [entry["parameters"] for entry in logged] == [report.parameters_after for report in grower.reports]


def test_a_model_grows_when_the_evaluation_loss_stops_falling(tmp_path):
    """Without a learning rate only growth changes the loss."""
    seen = Recorder()
    grower = callback(
        GrowthSchedule(plateau=2, min_improvement=1e-3, sequences=8), growth=GrowthConfig(columns=2, step_size=0)
    )
    run = trainer(tmp_path, grower, learning_rate=0.0, eval_strategy="steps", eval_steps=1, max_steps=7)
    run.add_callback(seen)
    run.train()
    # The first evaluation is the best; the second and third are no better; then counting starts anew.
    assert seen.widths == [8, 8, 8, 10, 10, 12, 12]


def test_evaluations_outside_training_do_not_count(tmp_path):
    grower = callback(GrowthSchedule(plateau=1, sequences=8))
    run = trainer(tmp_path, grower, eval_strategy="steps", eval_steps=6)
    for _ in range(3):
        run.evaluate()
    assert widths(run.model) == [8, 8] and grower.progress.evaluated is None


def test_training_goes_on_as_in_a_loop_written_by_hand(tmp_path):
    """Optimizer state and learning rate are carried: the same batches, growth and steps give the same weights."""
    inputs = []

    class Recording(Trainer):
        def training_step(self, model, batch, *rest):
            """As in the Trainer, and remembered."""
            inputs.append({name: value.clone() for name, value in batch.items()} | {"num_items_in_batch": rest[0]})
            return super().training_step(model, batch, *rest)

    grower = callback()
    model = causal_model("gpt2", **NO_DROPOUT)
    plain = copy.deepcopy(model).train()
    # Adam would make steps of full length out of the rounding errors of gradients that are zero.
    given = arguments(tmp_path, max_grad_norm=0.0, adam_epsilon=1e-2)
    run = Recording(model, given, callbacks=[grower], train_dataset=rows())
    run.train()

    make_growable(plain)
    optimizer = torch.optim.AdamW(plain.parameters(), lr=1e-2, weight_decay=0.0, eps=1e-2)
    rates = get_linear_schedule_with_warmup(optimizer, 0, 6)
    for step, given in enumerate(inputs, 1):
        plain(**given).loss.backward()
        optimizer.step()
        rates.step()
        optimizer.zero_grad()
        if step == 3:
            drawn = grower._draw(run.args, run.get_train_dataloader(), 3, 8)
            hf_grow.grow(plain, drawn, COLUMNS, optimizer=optimizer)
    assert widths(plain) == widths(model) == [10, 10]
    for (name, one), other in zip(plain.named_parameters(), model.parameters(), strict=True):
        # New columns come from products in single precision.
        assert torch.allclose(one, other, rtol=0, atol=5e-5), name


def test_growth_leaves_data_order_and_learning_rates_alone(tmp_path):
    def curve(*callbacks):
        seen = []

        class Recording(Trainer):
            def training_step(self, model, batch, *rest):
                seen.append(batch["input_ids"])
                return super().training_step(model, batch, *rest)

        run = Recording(causal_model("gpt2"), arguments(tmp_path), callbacks=list(callbacks), train_dataset=rows())
        run.train()
        return torch.stack(seen), [entry["learning_rate"] for entry in run.state.log_history if "loss" in entry]

    plain, grown = curve(), curve(callback(GrowthSchedule(every=2, sequences=8)))
    assert torch.equal(plain[0], grown[0]) and plain[1] == grown[1] and len(plain[1]) == 6


def finished(folder, **options):
    """A whole run that saved a checkpoint after every step."""
    run = trainer(folder, callback(**options), save_strategy="steps", save_steps=1)
    run.train()
    return run


@pytest.mark.parametrize("schedule", [{"at": (0, 3)}, {"every": 2}], ids=["at", "every"])
def test_a_killed_run_ends_like_one_that_was_not(tmp_path, schedule):
    """Resumed before, at and after an event, on the base model, in another folder."""
    schedule = GrowthSchedule(**schedule, sequences=8)
    whole = finished(tmp_path, schedule=schedule)
    for step in (2, 3, 4):
        again = tmp_path / str(step)
        killed(tmp_path, step, again)
        run = trainer(again, callback(schedule), save_strategy="steps", save_steps=1)
        run.train(resume_from_checkpoint=True)
        assert_same_weights(run.model, whole.model)
        assert run.model.growth_summary()["layers"] == whole.model.growth_summary()["layers"]
        events = [[event["kind"] for event in each.model.growth_history["events"]] for each in (run, whole)]
        assert events[0] == events[1] and len(events[0]) >= 2
        assert run.state.stateful_callbacks["GrowthCallback"] == whole.state.stateful_callbacks["GrowthCallback"]


def test_a_run_resumes_from_a_named_checkpoint_and_smaller_than_the_model_at_hand(tmp_path):
    """The same Trainer goes back to a checkpoint from before growth; its optimizer takes the smaller parameters."""
    whole = finished(tmp_path)
    final = copy.deepcopy(whole.model)
    whole.train(resume_from_checkpoint=str(tmp_path / "run" / "checkpoint-2"))
    assert_same_weights(whole.model, final)
    whole.train(resume_from_checkpoint=str(tmp_path / "run" / "checkpoint-5"))
    assert_same_weights(whole.model, final)


def test_an_optimizer_that_was_given_takes_the_sizes_of_a_checkpoint(tmp_path):
    def run_with_optimizer(folder):
        model = causal_model("gpt2")
        optimizer = torch.optim.AdamW(model.parameters(), lr=1e-2)
        rates = get_linear_schedule_with_warmup(optimizer, 0, 6)
        return trainer(folder, callback(), model, (optimizer, rates), save_strategy="steps", save_steps=1)

    whole = run_with_optimizer(tmp_path)
    whole.train()
    killed(tmp_path, 4, tmp_path / "again")
    again = run_with_optimizer(tmp_path / "again")
    again.train(resume_from_checkpoint=True)
    assert_same_weights(again.model, whole.model)


def test_a_run_resumes_from_a_sharded_checkpoint(tmp_path):
    whole = finished(tmp_path)
    killed(tmp_path, 4, tmp_path / "again")
    folder = tmp_path / "again" / "run" / "checkpoint-4"
    model = hf_grow.load_grown(folder)
    (folder / "model.safetensors").unlink()
    model.save_pretrained(folder, max_shard_size="20KB")
    assert len(list(folder.glob("*.safetensors"))) > 2
    run = trainer(tmp_path / "again", callback())
    run.train(resume_from_checkpoint=True)
    assert_same_weights(run.model, whole.model)


def test_counting_for_a_plateau_survives(tmp_path):
    schedule = GrowthSchedule(plateau=3, min_improvement=100.0, sequences=8)
    evaluated = {"eval_strategy": "steps", "eval_steps": 1, "save_strategy": "steps", "save_steps": 1}
    whole = trainer(tmp_path, callback(schedule), **evaluated)
    whole.train()
    assert widths(whole.model) == [10, 10]
    killed(tmp_path, 3, tmp_path / "again")
    run = trainer(tmp_path / "again", callback(schedule), **evaluated)
    run.train(resume_from_checkpoint=True)
    assert_same_weights(run.model, whole.model)


def test_the_trainer_may_restore_the_callback_itself(tmp_path):
    whole = finished(tmp_path)
    killed(tmp_path, 2, tmp_path / "again")
    options = {"save_strategy": "steps", "save_steps": 1, "restore_callback_states_from_checkpoint": True}
    run = trainer(tmp_path / "again", callback(), **options)
    run.train(resume_from_checkpoint=True)
    assert_same_weights(run.model, whole.model)
    with pytest.raises(HfGrowError, match="batches of its own"):
        own = [batch(whole.model) | {"labels": batch(whole.model)["input_ids"]}]
        first = trainer(tmp_path / "own", callback(batches=own), max_steps=4, save_strategy="steps", save_steps=1)
        first.train()
        trainer(tmp_path / "own", callback(batches=own), **options).train(resume_from_checkpoint=True)


def test_two_callbacks_each_find_their_own_state(tmp_path):
    def growers():
        first = callback(GrowthSchedule(at=(1, 5), sequences=8))
        return first, callback(GrowthSchedule(at=(2,), sequences=8), GrowthConfig(value_columns=1))

    def started(folder, pair):
        run = trainer(folder, pair[0], save_strategy="steps", save_steps=1)
        run.add_callback(pair[1])
        return run

    whole = started(tmp_path, growers())
    whole.train()
    killed(tmp_path, 3, tmp_path / "again")
    pair = growers()
    run = started(tmp_path / "again", pair)
    run.train(resume_from_checkpoint=True)
    assert [each.progress.events for each in pair] == [2, 1]
    assert_same_weights(run.model, whole.model)


def test_a_checkpoint_from_before_the_callback_was_used_goes_on(tmp_path):
    plain = Trainer(causal_model("gpt2"), arguments(tmp_path, max_steps=2, save_strategy="steps"), train_dataset=rows())
    plain.train()
    run = trainer(tmp_path, callback(), save_strategy="steps", save_steps=1)
    run.train(resume_from_checkpoint=True)
    assert widths(run.model) == [10, 10]
    state = json.loads((tmp_path / "run" / "checkpoint-6" / "trainer_state.json").read_text(encoding="utf-8"))
    assert state["stateful_callbacks"]["GrowthCallback"]["attributes"]["_saved"]["progress"]["events"] == 1


def test_weights_of_unknown_sizes_are_refused_in_one_sentence(tmp_path):
    finished(tmp_path)
    run = trainer(tmp_path / "elsewhere", callback())
    with pytest.raises(HfGrowError, match=r"hf_grow\.load_grown"):
        run.train(resume_from_checkpoint=str(tmp_path / "run" / "checkpoint-4"))
    assert widths(run.model) == [8, 8]
    named = trainer(tmp_path / "named", callback(), resume_from_checkpoint=str(tmp_path / "run" / "checkpoint-4"))
    named.train(resume_from_checkpoint=str(tmp_path / "run" / "checkpoint-4"))
    assert widths(named.model) == [10, 10]
    loaded = trainer(tmp_path / "loaded", callback(), hf_grow.load_grown(tmp_path / "run" / "checkpoint-4"))
    loaded.train(resume_from_checkpoint=str(tmp_path / "run" / "checkpoint-4"))
    # Weights read from a file lie elsewhere in memory, which may change the last bit of a product.
    for (name, one), other in zip(loaded.model.named_parameters(), named.model.parameters(), strict=True):
        assert torch.allclose(one, other, rtol=0, atol=1e-3), name


def test_the_best_model_may_be_of_another_size(tmp_path):
    """A learning rate that ruins the model makes the first checkpoint the best; afterwards training can start again."""
    best = {"load_best_model_at_end": True, "metric_for_best_model": "loss", "learning_rate": 0.5}
    every = {"eval_strategy": "steps", "eval_steps": 1, "save_strategy": "steps", "save_steps": 1}
    run = trainer(tmp_path, callback(GrowthSchedule(at=(2, 4), sequences=8)), **best, **every)
    run.train()
    step = run.state.best_global_step
    assert step == 1 and run.model.growth_history["events"] == []
    assert widths(run.model) == [8, 8] and run.model.config.hf_grow["layers"][0]["qk_head_dim"] == 8
    assert_same_weights(run.model, hf_grow.load_grown(tmp_path / "run" / f"checkpoint-{step}"))
    run.args.load_best_model_at_end = False
    before = copy.deepcopy(run.model)
    run.train()
    assert widths(run.model) == [12, 12]
    assert not torch.equal(before.transformer.h[0].attn.c_proj.weight, run.model.transformer.h[0].attn.c_proj.weight)


def test_only_new_weights_learn_and_a_killed_run_goes_on(tmp_path):
    base = causal_model("gpt2")
    schedule = GrowthSchedule(at=(0, 3), sequences=8)
    whole = finished(tmp_path, schedule=schedule, train="new")
    start = hf_grow.load_grown(tmp_path / "run" / "checkpoint-1")
    assert torch.equal(whole.model.transformer.wte.weight, base.transformer.wte.weight)
    for site, before, stock in zip(
        attention_sites(whole.model), attention_sites(start), base.transformer.h, strict=True
    ):
        assert torch.equal(site.attention.c_attn.weight, stock.attn.c_attn.weight)
        new, then = site.growth.query_columns.view(4, -1, 32), before.growth.query_columns.view(4, 2, 32)
        assert new.shape[1] == 4 and not torch.equal(new[:, :2], then)
    for step in (2, 4):
        killed(tmp_path, step, tmp_path / str(step))
        grower = callback(schedule, train="new")
        run = trainer(tmp_path / str(step), grower, save_strategy="steps", save_steps=1)
        run.train(resume_from_checkpoint=True)
        assert_same_weights(run.model, whole.model)
        assert len(hf_grow.merge_growth(run.model).growth_history["events"]) == 2


def test_new_weights_of_a_frozen_base_learn(tmp_path):
    model = causal_model("gpt2")
    base = model.transformer.h[0].attn.c_attn.weight.clone()
    model.requires_grad_(False)
    grower = callback(GrowthSchedule(at=(0,), sequences=8), train="new")
    run = trainer(tmp_path, grower, model, save_strategy="steps", save_steps=1)
    run.train()
    first = hf_grow.load_grown(tmp_path / "run" / "checkpoint-1")
    then, now = (each.transformer.h[0].attn for each in (first, run.model))
    assert not torch.equal(then.growth.query_columns, now.growth.query_columns)
    assert torch.equal(then.c_attn.weight, now.c_attn.weight) and torch.equal(now.c_attn.weight, base)


def test_first_growth_that_finds_nothing_leaves_nothing_to_train_alone(tmp_path, monkeypatch):
    """Or all of the base would learn, under the name of the new."""
    monkeypatch.setattr("hf_grow.training.callback.grow_on_schedule", lambda *_, **__: None)
    run = trainer(tmp_path, callback(GrowthSchedule(at=(0,), sequences=8), train="new"))
    with pytest.raises(HfGrowError, match="needs something new"):
        run.train()


def test_growth_stops_at_a_limit(tmp_path, caplog):
    grower = callback(GrowthSchedule(every=1, max_query_key_dim=12, sequences=8))
    run = trainer(tmp_path, grower)
    run.train()
    assert widths(run.model) == [12, 12] and grower.progress.full
    assert caplog.text.count("more than max_query_key_dim=12") == 1


def test_a_budget_stops_at_a_limit(tmp_path, caplog):
    model = causal_model("gpt2")
    most = model.num_parameters() + 900
    grower = callback(GrowthSchedule(every=1, max_parameters=most, sequences=8), GrowthConfig(budget=600))
    run = trainer(tmp_path, grower, model)
    run.train()
    assert len(grower.reports) >= 1 and model.num_parameters() <= most
    assert grower.progress.full and caplog.text.count("more than max_parameters") == 1


@pytest.mark.parametrize(
    ("growth", "limit", "message"),
    [
        (COLUMNS, {"max_query_key_dim": 9}, "10 query/key columns, more than max_query_key_dim=9"),
        (GrowthConfig(value_columns=1), {"max_value_dim": 8}, "9 value columns"),
        (GrowthConfig(heads=1), {"max_heads": 4}, "5 heads"),
        (COLUMNS, {"max_parameters": 1000}, "more than max_parameters=1,000"),
        (GrowthConfig(budget="1%"), {"max_parameters": 1000}, "more than max_parameters=1,000"),
        (GrowthConfig(budget=5), {}, "cheapest growth takes"),
        (GrowthConfig(columns=90), {}, "room for"),
    ],
)
def test_a_first_event_that_cannot_be_is_refused_before_any_step(tmp_path, growth, limit, message):
    run = trainer(tmp_path, callback(GrowthSchedule(at=(5,), **limit), growth))
    with pytest.raises(HfGrowError, match=message):
        run.train()
    assert run.state.global_step == 0


def test_given_batches_are_measured_on(tmp_path):
    model = causal_model("gpt2")
    given = [dict(batch(model), labels=batch(model)["input_ids"])] * 2
    grower = callback(batches=given, collect=CollectConfig(held_out=0.0))
    trainer(tmp_path, grower, model).train()
    assert grower.reports[0].collected["sequences"] == 4
    with pytest.raises(HfGrowError, match="not an iterator"):
        callback(batches=iter(given))


class Streamed(torch.utils.data.IterableDataset):
    """A training set without a length."""

    def __iter__(self):
        return iter(rows())


def test_a_streamed_training_set_needs_batches(tmp_path):
    run = Trainer(causal_model("gpt2"), arguments(tmp_path), callbacks=[callback()], train_dataset=Streamed())
    with pytest.raises(HfGrowError, match="batches="):
        run.train()
    given = [dict(each) for each in torch.utils.data.DataLoader(rows(), batch_size=4)]
    grower = callback(batches=given)
    Trainer(causal_model("gpt2"), arguments(tmp_path), callbacks=[grower], train_dataset=Streamed()).train()
    assert len(grower.reports) == 1


@pytest.mark.parametrize(
    ("changes", "message"),
    [
        ({"fsdp": "full_shard"}, "FSDP"),
        ({"deepspeed": "file.json"}, "DeepSpeed"),
        ({"parallelism_config": object()}, "parallelism_config"),
        ({"torch_compile": True}, "torch.compile"),
        ({"auto_find_batch_size": True}, "auto_find_batch_size"),
    ],
)
def test_trainers_that_would_not_train_the_growth_are_refused(tmp_path, changes, message):
    given = arguments(tmp_path)
    for name, value in changes.items():
        # Set afterwards: what these need is not installed or not to be had on a CPU.
        object.__setattr__(given, name, value)
    with pytest.raises(HfGrowError, match=message):
        callback().on_init_end(given, None, None, model=causal_model("gpt2"))


def test_compiled_and_adapted_models_are_refused(tmp_path):
    from peft import LoraConfig, get_peft_model

    compiled = causal_model("gpt2")
    compiled.compile()
    with pytest.raises(HfGrowError, match=r"torch\.compile"):
        trainer(tmp_path, callback(), compiled)
    with pytest.raises(HfGrowError, match=r"torch\.compile"):
        trainer(tmp_path, callback(), torch.compile(causal_model("gpt2")))
    adapted = get_peft_model(causal_model("llama"), LoraConfig(r=2, target_modules=["q_proj"], task_type="CAUSAL_LM"))
    with pytest.raises(HfGrowError, match="adapters"):
        trainer(tmp_path, callback(), adapted)


def test_what_cannot_work_is_refused_before_any_step(tmp_path):
    with pytest.raises(HfGrowError, match="eval_strategy"):
        trainer(tmp_path, callback(GrowthSchedule(plateau=1)))
    with pytest.raises(HfGrowError, match="put 0 into"):
        trainer(tmp_path, callback(train="new")).train()
    with pytest.raises(HfGrowError, match="LBFGS"):
        model = causal_model("gpt2")
        optimizer = torch.optim.LBFGS(model.parameters())
        trainer(tmp_path, callback(), model, (optimizer, torch.optim.lr_scheduler.ConstantLR(optimizer))).train()
    with pytest.raises(HfGrowError, match="not the model's"):
        optimizer = torch.optim.SGD(causal_model("gpt2").parameters(), lr=0.1)
        trainer(tmp_path, callback(), None, (optimizer, torch.optim.lr_scheduler.ConstantLR(optimizer))).train()
    with pytest.raises(HfGrowError, match="nothing left to train after growth at step 6 of 6"):
        trainer(tmp_path, callback(GrowthSchedule(at=(2, 6)))).train()
    with pytest.raises(HfGrowError, match="strategy='refactor'"):
        callback(train="new", growth=GrowthConfig(columns=-1, strategy="refactor"))
    with pytest.raises(HfGrowError, match="attach=False puts into it"):
        callback(train="new", growth=GrowthConfig(columns=1, attach=False))
    with pytest.raises(HfGrowError, match="train must be one of"):
        callback(train="old")
    with pytest.raises(HfGrowError, match="GrowthSchedule"):
        GrowthCallback(COLUMNS, None)


def test_a_model_made_by_model_init_grows(tmp_path):
    grower = callback()
    run = Trainer(
        args=arguments(tmp_path), model_init=lambda: causal_model("gpt2"), callbacks=[grower], train_dataset=rows()
    )
    run.train()
    assert widths(run.model) == [10, 10]


def test_a_watched_model_can_be_copied_and_pickled(tmp_path):
    run = trainer(tmp_path, callback())
    run.train()
    twin = copy.deepcopy(run.model)
    torch.save(run.model, tmp_path / "whole.pt")
    assert_same_weights(twin, torch.load(tmp_path / "whole.pt", weights_only=False))


def stock_weight():
    return causal_model("gpt2").transformer.h[0].attn.c_attn.weight


@pytest.mark.slow
@pytest.mark.parametrize("train", ["all", "new"])
def test_two_processes_grow_alike_inside_the_trainer_and_resume(tmp_path, train):
    launch(2, "trainer_on_rank.py", tmp_path, train)
    whole, again = ([torch.load(tmp_path / f"{name}-{rank}.pt") for rank in range(2)] for name in ("whole", "again"))
    for other in (whole[1], *again):
        for name, value in whole[0].items():
            assert torch.equal(value, other[name]), name
    if train == "all":
        assert whole[0]["transformer.h.0.attn.c_attn.weight"].shape[1] == 2 * 4 * 12 + 32
    else:
        assert whole[0]["transformer.h.0.attn.grown.default.query_columns"].shape == (4 * 4, 32)
        assert torch.equal(whole[0]["transformer.h.0.attn.c_attn.weight"], stock_weight())


def test_batches_without_a_loss_are_refused_before_any_step(tmp_path):
    """A Trainer may compute a loss of its own, which growth knows nothing of."""

    class OwnLoss(Trainer):
        def compute_loss(self, model, inputs, **_):
            return model(**inputs).logits.square().mean()

    unlabelled = [{"input_ids": row["input_ids"]} for row in rows()]
    grower = callback(GrowthSchedule(at=(4,)))
    own = OwnLoss(causal_model("gpt2"), arguments(tmp_path), callbacks=[grower], train_dataset=unlabelled)
    with pytest.raises(HfGrowError, match="returned no loss"):
        own.train()
    assert own.state.global_step == 0


class Interrupt(TrainerCallback):
    """As if the user had, in the middle of a step."""

    def __init__(self, step):
        self.step = step

    def on_step_begin(self, args, state, control, **kwargs):
        """In the step after this many."""
        if state.global_step == self.step:
            raise KeyboardInterrupt


def test_an_evaluation_after_an_interrupt_changes_nothing(tmp_path):
    grower = callback(GrowthSchedule(plateau=1, min_improvement=9.0, sequences=8))
    run = trainer(tmp_path, grower, eval_strategy="steps", eval_steps=2)
    run.add_callback(Interrupt(3))
    with pytest.raises(KeyboardInterrupt):
        run.train()
    before = widths(run.model)
    run.evaluate()
    assert widths(run.model) == before and grower.progress.evaluated == 2


def test_sequences_without_labels_do_not_stop_growth(tmp_path):
    silent = [
        {**row, "labels": torch.full_like(row["labels"], -100) if number % 4 == 0 else row["labels"]}
        for number, row in enumerate(rows(40))
    ]
    changes = {"per_device_train_batch_size": 1, "gradient_accumulation_steps": 4}
    grower = callback(GrowthSchedule(at=(3,), sequences=16))
    run = Trainer(causal_model("gpt2"), arguments(tmp_path, **changes), train_dataset=silent, callbacks=[grower])
    run.train()
    assert widths(run.model) == [10, 10]


def test_a_resumed_run_remembers_growth_that_changed_no_size(tmp_path):
    def make():
        grower = callback(GrowthSchedule(at=(1, 3), sequences=8), growth=GrowthConfig(strategy="step"))
        return trainer(tmp_path, grower, save_strategy="steps", save_steps=2)

    whole = make()
    whole.train()
    shutil.rmtree(tmp_path / "run" / "checkpoint-6")
    again = make()
    again.train(resume_from_checkpoint=True)
    assert_same_weights(again.model, whole.model)
    forms = [[event["form"] for event in run.model.growth_history["events"]] for run in (whole, again)]
    assert forms[0] == forms[1] and len(forms[0]) == 2
