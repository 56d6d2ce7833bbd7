"""Growth beside a frozen base trains with any trainer, and the base stays to the bit."""

import importlib.util

import pytest
import torch
from datasets import Dataset
from growth_beside_base import adapted, batches, named_weights, rows, same_base
from processes import launch
from transformers import AutoTokenizer, Trainer, TrainingArguments

import hf_grow

every_family = pytest.mark.parametrize("model_type", ["bert", "gpt2", "llama", "mistral", "qwen2"])


def arguments(folder, **options):
    return {
        "output_dir": str(folder),
        "max_steps": 3,
        "per_device_train_batch_size": 2,
        "learning_rate": 1e-2,
        "weight_decay": 0.1,
        "report_to": "none",
        "use_cpu": True,
        "disable_tqdm": True,
        "save_strategy": "no",
    } | options


def train(model, steps=3):
    """A plain loop with weight decay over all parameters, of which only some want a gradient."""
    optimizer = torch.optim.AdamW(model.parameters(), lr=1e-2, weight_decay=0.1)
    for _, batch in zip(range(steps), batches(), strict=False):
        model(**batch).loss.backward()
        optimizer.step()
        optimizer.zero_grad()


@every_family
def test_a_plain_loop(model_type):
    model, base = adapted(model_type)
    train(model)
    assert same_base(named_weights(model), base)


def test_a_plain_loop_in_bf16():
    model, base = adapted("llama", torch.bfloat16)
    train(model)
    assert same_base(named_weights(model), base)
    assert {parameter.dtype for parameter in hf_grow.growth_parameters(model)} == {torch.float32}


def test_a_compiled_model():
    model, base = adapted("llama")
    expected, _ = adapted("llama")
    # Without code generation, which takes a compiler and long: what could break is the graph.
    train(torch.compile(model, backend="aot_eager"))
    train(expected)
    assert same_base(named_weights(model), base)
    for name, value in named_weights(expected).items():
        assert torch.allclose(named_weights(model)[name], value, atol=1e-4), name


@pytest.mark.parametrize(
    "options",
    [
        {},
        {"bf16": True},
        {"gradient_checkpointing": True},
        {"gradient_checkpointing": True, "gradient_checkpointing_kwargs": {"use_reentrant": True}},
        {"optim": "adafactor", "gradient_accumulation_steps": 2},
    ],
    ids=str,
)
@pytest.mark.parametrize("model_type", ["gpt2", "llama"])
def test_transformers_trainer(model_type, options, tmp_path):
    model, base = adapted(model_type)
    Trainer(model, TrainingArguments(**arguments(tmp_path, **options)), train_dataset=rows()).train()
    assert same_base(named_weights(model), base)


def test_a_run_of_transformers_trainer_goes_on_from_its_checkpoint(tmp_path):
    model, base = adapted("llama")
    given = arguments(tmp_path / "run", max_steps=4, save_strategy="steps", save_steps=2)
    Trainer(model, TrainingArguments(**given), train_dataset=rows()).train()
    again, _ = adapted("llama")
    trainer = Trainer(again, TrainingArguments(**given), train_dataset=rows())
    trainer.train(resume_from_checkpoint=str(tmp_path / "run" / "checkpoint-2"))
    assert same_base(named_weights(again), base)
    for name, value in named_weights(model).items():
        assert torch.equal(named_weights(again)[name], value), name


def test_a_trainer_without_anything_that_learns_says_so(tmp_path):
    model, _ = adapted("llama")
    hf_grow.freeze_base(hf_grow.merge_growth(model))
    with pytest.raises(hf_grow.HfGrowError, match="No parameter of the model learns"):
        config = hf_grow.TrainConfig(steps=1, batch_size=2)
        hf_grow.GrowthTrainer(model, rows(), config=config, progress=False).train()


@pytest.mark.skipif(importlib.util.find_spec("trl") is None, reason="needs trl (extra: trl)")
def test_trl(tmp_path):
    from trl import SFTConfig, SFTTrainer

    model, base = adapted("llama")
    data = Dataset.from_dict({"input_ids": [row["input_ids"].tolist() for row in rows()]})
    tokenizer = AutoTokenizer.from_pretrained(hf_grow.SMALL_MODEL)
    tokenizer.pad_token = tokenizer.eos_token
    given = SFTConfig(**arguments(tmp_path), bf16=False)
    SFTTrainer(model, given, train_dataset=data, processing_class=tokenizer).train()
    assert same_base(named_weights(model), base)


@pytest.mark.slow
@pytest.mark.timeout(600)
@pytest.mark.parametrize("form", ["accelerate", "fsdp2", "trainer"])
def test_two_processes(form, tmp_path):
    for processes in (1, 2):
        launch(processes, "any_trainer_on_rank.py", form, tmp_path)
    alone, together = (torch.load(tmp_path / f"{processes}-{form}.pt") for processes in (1, 2))
    if form != "trainer":
        # AdamW makes whole steps of a gradient that is rounding alone, as that of a key's bias.
        near = {name: torch.allclose(alone[name], together[name], atol=1e-4) for name in alone if "key" not in name}
        assert all(near.values()), near
