"""Growth beside quantised bases, which stay so: measured, grown, trained, saved, loaded; merged where that can be."""

import importlib.util

import pytest
import torch
from models import VOCABULARY, batch, causal_model, relative_difference, tensors
from transformers import (
    AutoModelForCausalLM,
    AutoTokenizer,
    BitsAndBytesConfig,
    QuantoConfig,
    TorchAoConfig,
    Trainer,
    TrainingArguments,
)

import hf_grow
from hf_grow import AdaptConfig, GrowthConfig, HfGrowError
from hf_grow.modeling.growable_attention import attention_sites
from hf_grow.surgery.base import base_hash, base_parameters

# Widths that are multiples of 32, as some kernels want them.
SIZE = {"gpt2": {"n_embd": 64}, "llama": {"hidden_size": 64, "intermediate_size": 64}}


def torchao(**options):
    from torchao.quantization import Int8WeightOnlyConfig, IntxWeightOnlyConfig
    from torchao.quantization.granularity import PerGroup

    if options["bits"] == 8:
        return TorchAoConfig(Int8WeightOnlyConfig())
    return TorchAoConfig(IntxWeightOnlyConfig(weight_dtype=torch.int4, granularity=PerGroup(32)))


BACKENDS = {
    "bitsandbytes 4-bit": ("bitsandbytes", lambda: BitsAndBytesConfig(load_in_4bit=True, bnb_4bit_quant_type="nf4")),
    "bitsandbytes 8-bit": ("bitsandbytes", lambda: BitsAndBytesConfig(load_in_8bit=True)),
    "torchao int8": ("torchao", lambda: torchao(bits=8)),
    "torchao int4": ("torchao", lambda: torchao(bits=4)),
    "quanto int8": ("optimum", lambda: QuantoConfig(weights="int8")),
    "quanto int4": ("optimum", lambda: QuantoConfig(weights="int4")),
}
# GPT-2 keeps its weights in Conv1D, which only bitsandbytes quantises.
CASES = [(backend, "llama") for backend in BACKENDS] + [(backend, "gpt2") for backend in list(BACKENDS)[:2]]


@pytest.fixture(params=CASES, ids=" ".join)
def load(request, tmp_path):
    """Loads the same quantised model each time."""
    backend, model_type = request.param
    package, config = BACKENDS[backend]
    if importlib.util.find_spec(package) is None:
        pytest.skip(f"needs {package} (extra: quantized)")
    causal_model(model_type, **SIZE[model_type]).save_pretrained(tmp_path / "base")
    return lambda: AutoModelForCausalLM.from_pretrained(tmp_path / "base", quantization_config=config()).eval()


def batches(count=8):
    ids = torch.randint(2, VOCABULARY, (count, 12), generator=torch.Generator().manual_seed(1))
    return [{"input_ids": part, "labels": part} for part in ids.split(2)]


def train(model, steps=3):
    optimizer = torch.optim.AdamW([p for p in model.parameters() if p.requires_grad], lr=1e-2, weight_decay=0.1)
    model.train()
    for part in batches()[:steps]:
        model(**part).loss.backward()
        optimizer.step()
        optimizer.zero_grad()
    return model.eval()


def logits(model):
    return tensors(model, batch(model, None))["logits"]


def test_a_quantised_base_is_adapted_saved_and_loaded_and_stays_to_the_bit(load, tmp_path):
    stock = load()
    before, mark = logits(hf_grow.make_growable(stock)), base_hash(stock)
    assert any(
        weight.dtype in (torch.uint8, torch.int8) or type(weight) is not torch.nn.Parameter
        for _, weight in base_parameters(stock)
    )
    model, report = hf_grow.adapt(stock, batches(), AdaptConfig(method="grow", columns=2, value_columns=2))
    assert model is stock and report.form == "preserving"
    assert relative_difference(logits(model), before) < 1e-4
    train(model)
    assert base_hash(model) == mark
    assert relative_difference(logits(model), before) > 1e-3
    with model.growth_disabled():
        assert torch.equal(logits(model), before)
    hf_grow.save_growth(model, tmp_path / "growth")
    loaded = hf_grow.load_growth(load(), tmp_path / "growth")
    assert torch.equal(logits(loaded), logits(model))


def test_growth_beside_a_quantised_base_lowers_the_loss_by_what_was_measured(load):
    model = load()
    growth = GrowthConfig(columns=2, value_columns=1, heads=1)
    _, report = hf_grow.grow(model, batches(16), growth, line_search_batches=batches(16))
    assert model.active_growth == "default" and report.loss_after < report.loss_before
    losses = [float(model(**part).loss) for part in batches(16)]
    assert sum(losses) / len(losses) == pytest.approx(report.loss_after, rel=1e-3)


def test_merging_asks_for_the_plain_base_or_dequantises(load, tmp_path):
    model = load()
    hf_grow.adapt(model, batches(), AdaptConfig(method="grow", columns=1, value_columns=1))
    train(model)
    hf_grow.save_growth(model, tmp_path / "growth")
    learned = logits(model)
    with pytest.raises(HfGrowError, match="are quantised and cannot take growth: put the growth onto the plain base"):
        hf_grow.merge_growth(model)
    assert torch.equal(logits(model), learned)
    plain = AutoModelForCausalLM.from_pretrained(tmp_path / "base").eval()
    with pytest.raises(HfGrowError, match="check_base=False"):
        hf_grow.load_growth(plain, tmp_path / "growth")
    merged = hf_grow.merge_growth(hf_grow.load_growth(plain, tmp_path / "growth", check_base=False))
    # As far as the base is from its quantised form.
    assert relative_difference(logits(merged), learned) < 0.6
    try:
        hf_grow.merge_growth(model, dequantize=True)
    except HfGrowError as error:
        assert "cannot dequantize" in str(error) and torch.equal(logits(model), learned)
        return
    assert all(
        type(projection) in (torch.nn.Linear,)
        for site in attention_sites(model)
        for projection, _ in site.projections()
    )
    assert relative_difference(logits(model), learned) < 0.1


def test_a_plain_trainer_trains_growth_beside_a_quantised_base(load, tmp_path):
    model = load()
    with pytest.raises(ValueError, match="purely quantized"):
        Trainer(model, TrainingArguments(tmp_path / "refused", report_to="none", use_cpu=True))
    mark = base_hash(model)
    hf_grow.adapt(model, batches(), AdaptConfig(method="grow", value_columns=2))
    start = [parameter.clone() for parameter in hf_grow.growth_parameters(model)]
    arguments = TrainingArguments(
        tmp_path / "run", max_steps=2, per_device_train_batch_size=4, save_strategy="no", report_to="none", use_cpu=True
    )
    rows = [{"input_ids": row, "labels": row} for part in batches() for row in part["input_ids"]]
    Trainer(model, arguments, train_dataset=rows).train()
    assert base_hash(model) == mark
    assert not any(
        torch.equal(*pair) for pair in zip(hf_grow.growth_parameters(model), start, strict=True) if pair[1].any()
    )


@pytest.mark.parametrize("load", [("bitsandbytes 4-bit", "llama"), ("torchao int8", "llama")], indirect=True, ids=str)
def test_a_quantised_model_with_growth_is_saved_and_loaded_whole(load, tmp_path):
    model = load()
    hf_grow.adapt(model, batches(), AdaptConfig(method="grow", columns=1, value_columns=1))
    train(model)
    model.save_pretrained(tmp_path / "whole")
    assert hf_grow.inspect_checkpoint(tmp_path / "whole")["events"] == model.growth_history["events"]
    loaded = hf_grow.load_grown(tmp_path / "whole").eval()
    for _ in range(2):
        # The first inference must not pack the base into another form.
        assert torch.equal(logits(loaded), logits(model))
    assert base_hash(loaded) == base_hash(model)
    hf_grow.save_growth(loaded, tmp_path / "growth")


@pytest.mark.parametrize("load", [(backend, "llama") for backend in BACKENDS], indirect=True, ids=" ".join)
def test_runs_beside_a_quantised_base_go_on(load, tmp_path):
    rows = [{"input_ids": row, "labels": row} for part in batches() for row in part["input_ids"]]
    growth, schedule = GrowthConfig(value_columns=1), hf_grow.GrowthSchedule(at=(0,), sequences=4)
    config = hf_grow.TrainConfig(steps=4, batch_size=2, save_every=2, train="new")

    def trainer():
        model = hf_grow.make_growable(load())
        return hf_grow.GrowthTrainer(
            model, rows, config=config, growth=growth, schedule=schedule, folder=tmp_path / "run", progress=False
        )

    first = trainer()
    first.train()
    (tmp_path / "run" / "checkpoint-4").rename(tmp_path / "last")
    again = trainer()
    again.train(resume=True)
    assert torch.equal(logits(again.model), logits(first.model))


@pytest.mark.parametrize("load", [("bitsandbytes 4-bit", "llama")], indirect=True, ids=str)
def test_finetuning_a_quantised_base_says_at_once_what_can_be_saved(load, tmp_path):
    tokenizer = AutoTokenizer.from_pretrained(hf_grow.SMALL_MODEL)
    with pytest.raises(HfGrowError, match="ask for growth_only"):
        hf_grow.finetune(
            load(), tokenizer, "no file", tmp_path / "out", recipe=AdaptConfig(method="grow"), progress=False
        )
