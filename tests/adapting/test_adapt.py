"""Adapting frozen models: what learns is within the budget, the base stays as it is, and what was added travels."""

import copy
import json
import re

import pytest
import torch
from hub_server import HubServer
from models import VOCABULARY, assert_same, causal_model, relative_difference, small_model
from peft import LoraConfig, PeftModel
from runs import interrupted_at
from transformers import BertForSequenceClassification

import hf_grow
from hf_grow import AdaptConfig, CollectConfig, GrowthTrainer, HfGrowError, TrainConfig, adapt
from hf_grow.adapting.adapt import trainable_parameters
from hf_grow.adapting.budget import choose_amounts
from hf_grow.adapting.config import METHODS
from hf_grow.adapting.saved import adapt_or_resume, load_adapted, save_adapted
from hf_grow.modeling.growable_attention import attention_sites
from hf_grow.surgery.base import base_hash, without_adapters

every_method = pytest.mark.parametrize("method", METHODS)
every_type = pytest.mark.parametrize("model_type", ["gpt2", "llama", "bert"])
BUDGET = 3000


def make(model_type):
    """A small stock model, for BERT a classifier."""
    return small_model(BertForSequenceClassification, "bert") if model_type == "bert" else causal_model(model_type)


def rows(model_type, count=16):
    generator = torch.Generator().manual_seed(0)
    ids = torch.randint(2, VOCABULARY, (count, 9), generator=generator)
    labels = ids[:, 0] % 2 if model_type == "bert" else ids
    return [{"input_ids": row, "labels": label} for row, label in zip(ids, labels, strict=True)]


def collate(some):
    return {name: torch.stack([row[name] for row in some]) for name in some[0]}


def batches(model_type):
    return [collate(rows(model_type)[start : start + 4]) for start in range(0, 16, 4)]


@torch.no_grad()
def logits(model, model_type):
    model.eval()
    return model(input_ids=batches(model_type)[0]["input_ids"]).logits


def train(model, model_type, config, steps=4):
    """A plain loop with weight decay, which would move old entries if nothing kept them."""
    optimizer = torch.optim.AdamW([p for p in model.parameters() if p.requires_grad], lr=1e-2, weight_decay=0.1)
    for _, batch in zip(range(steps), batches(model_type) * steps, strict=False):
        model(**batch).loss.backward()
        optimizer.step()
        optimizer.zero_grad()


def new_columns(model):
    """How many query/key and value columns every head got."""
    sites = [site.attention for site in attention_sites(without_adapters(model))]
    found = {(each.query_key_dim, each.value_dim) for each in sites}
    base = {(each.base_dims.qk_head_dim, each.base_dims.v_head_dim) for each in sites}
    ((query_key, value),), ((old_query_key, old_value),) = found, base
    return query_key - old_query_key, value - old_value


def moved_entries(before, after):
    """How many numbers differ, counted parameter by parameter; what `before` lacks counts whole."""
    old = dict(before.named_parameters())
    return sum(
        int((value != old[name]).sum()) if name in old and old[name].shape == value.shape else value.numel()
        for name, value in after.named_parameters()
        if value.requires_grad or name in old
    )


@every_type
@every_method
def test_what_learns_is_just_within_the_budget(model_type, method):
    config = AdaptConfig(method=method, budget=BUDGET)
    model, report = adapt(make(model_type), batches(model_type), config)
    assert trainable_parameters(model) <= BUDGET
    amounts = new_columns(model)
    assert amounts == (0, 0) if method == "lora" else 0 <= amounts[1] - amounts[0] <= 1
    assert (report is None) == (method == "lora")
    # One more rank, or where there is none one more column of the kind whose turn it is, would be too much.
    given = dict(zip(("columns", "value_columns"), amounts, strict=True)) if config.grows else {}
    if method == "grow":
        given["columns" if amounts[0] < amounts[1] else "value_columns"] += 1
    given = {kind: count for kind, count in given.items() if count}
    given |= {"rank": model.peft_config["default"].r + 1} if config.has_lora else {}
    larger, _ = adapt(make(model_type), batches(model_type), AdaptConfig(method=method, **given))
    assert trainable_parameters(larger) > BUDGET


@every_type
def test_kinds_of_columns_and_projections_for_lora_can_be_chosen(model_type):
    config = AdaptConfig(kinds="value_columns", lora_on=("output", "value"), budget=BUDGET)
    model, _ = adapt(make(model_type), batches(model_type), config)
    columns, value_columns = new_columns(model)
    assert columns == 0 and value_columns >= 1 and trainable_parameters(model) <= BUDGET
    adapted = {name.split(".")[-4] for name, _ in model.named_parameters() if "lora_A" in name}
    expected = {"gpt2": {"c_attn", "c_proj"}, "llama": {"v_proj", "o_proj"}, "bert": {"value", "dense"}}
    assert adapted == expected[model_type]
    per_rank = {"gpt2": 4 * 32 + 2 * 32, "llama": 32 + 2 * 8 + 2 * 32, "bert": 4 * 32}[model_type]
    lora = sum(parameter.numel() for name, parameter in model.named_parameters() if "lora_" in name)
    assert lora == 2 * model.peft_config["default"].r * per_rank


@every_type
@every_method
def test_only_what_is_counted_moves_and_the_base_stays_to_the_bit(model_type, method):
    config = AdaptConfig(method=method, budget=BUDGET, step_size=1.0 if method != "lora" else None)
    stock = make(model_type)
    mark = base_hash(hf_grow.make_growable(copy.deepcopy(stock)))
    model, _ = adapt(stock, batches(model_type), config)
    assert base_hash(model) == mark
    before = copy.deepcopy(model)
    train(model, model_type, config)
    assert base_hash(model) == mark
    moved = moved_entries(before, model)
    # Rows of tokens that never occur, or a gradient that is just zero, leave some numbers where they are.
    assert 0.9 * trainable_parameters(model) <= moved <= trainable_parameters(model)


def test_gpt2_counts_every_part_of_its_adapters():
    model, _ = adapt(make("gpt2"), batches("gpt2"), AdaptConfig(columns=2, rank=3))
    # Of 2 layers: 4 heads of 2 columns, for queries and keys, each of 32 inputs and a bias.
    grown = 2 * 4 * 2 * 2 * 33
    lora = 2 * 3 * (32 + 3 * 32)
    assert trainable_parameters(model) == grown + lora
    assert sum(p.numel() for n, p in model.named_parameters() if "lora_" in n) == lora


def test_a_head_of_a_classifier_learns_and_counts():
    model, _ = adapt(make("bert"), batches("bert"), AdaptConfig(method="grow", columns=1))
    head = 2 * 32 + 2
    assert trainable_parameters(model) == 2 * 4 * 2 * 33 + head
    frozen, _ = adapt(make("bert"), batches("bert"), AdaptConfig(method="grow", columns=1, also_train=()))
    assert trainable_parameters(frozen) == 2 * 4 * 2 * 33
    both, _ = adapt(make("bert"), batches("bert"), AdaptConfig(method="lora", rank=1, also_train="bert.pooler"))
    lora = 2 * 2 * (32 + 32)
    assert trainable_parameters(both) == lora + 33 * 32


def test_step_size_zero_changes_no_output():
    stock = make("llama")
    expected = logits(stock, "llama")
    model, report = adapt(stock, batches("llama"), AdaptConfig(budget=BUDGET, step_size=0))
    assert report.form == "preserving"
    assert relative_difference(logits(model, "llama"), expected) < 1e-5


def test_the_same_call_gives_the_same_start_and_another_seed_another():
    def start(seed):
        config = AdaptConfig(budget=BUDGET, collect=CollectConfig(seed=seed))
        model, _ = adapt(make("llama"), batches("llama"), config)
        return {name: value for name, value in model.named_parameters() if value.requires_grad}

    torch.manual_seed(1)
    first = start(0)
    torch.manual_seed(2)
    again, other = start(0), start(1)
    assert all(torch.equal(first[name], again[name]) for name in first)
    assert not all(torch.equal(first[name], other[name]) for name in first)


@every_type
@every_method
def test_what_was_added_is_saved_alone_and_put_onto_the_base_again(model_type, method, tmp_path):
    config = AdaptConfig(method=method, budget=BUDGET)
    model, _ = adapt(make(model_type), batches(model_type), config)
    train(model, model_type, config)
    expected = logits(model, model_type)
    save_adapted(model, tmp_path / "added")
    with pytest.raises(HfGrowError, match="not empty"):
        save_adapted(model, tmp_path / "added")
    save_adapted(model, tmp_path / "added", overwrite=True)
    # PEFT also keeps the head of a classifier.
    wanted = {"growth": config.grows, "lora": config.has_lora or model_type == "bert"}
    assert {place.name for place in (tmp_path / "added").iterdir()} == {part for part in wanted if wanted[part]}
    loaded = load_adapted(make(model_type), tmp_path / "added")
    assert torch.equal(logits(loaded, model_type), expected)
    assert trainable_parameters(loaded) == trainable_parameters(model)
    merged = model.merge_and_unload() if hasattr(model, "merge_and_unload") else model
    hf_grow.save_grown(merged, tmp_path / "whole")
    whole = hf_grow.load_grown(tmp_path / "whole")
    assert torch.allclose(logits(whole, model_type), expected, atol=1e-5)


def test_a_failed_save_leaves_the_old_one(tmp_path, monkeypatch):
    model, _ = adapt(make("llama"), batches("llama"), AdaptConfig(columns=1, rank=1))
    save_adapted(model, tmp_path / "added")
    before = {file: file.read_bytes() for file in tmp_path.rglob("*") if file.is_file()}

    def broken(*_, **__):
        raise OSError("disk full")

    monkeypatch.setattr(PeftModel, "save_pretrained", broken)
    with pytest.raises(HfGrowError, match="disk full"):
        save_adapted(model, tmp_path / "added", overwrite=True)
    assert {file: file.read_bytes() for file in tmp_path.rglob("*") if file.is_file()} == before


def test_another_base_is_refused(tmp_path):
    model, _ = adapt(make("llama"), batches("llama"), AdaptConfig(columns=1, rank=1))
    save_adapted(model, tmp_path / "added")
    other = make("llama")
    with torch.no_grad():
        other.lm_head.weight[0, 0] += 1
    with pytest.raises(HfGrowError, match="other weights"):
        load_adapted(other, tmp_path / "added")
    with pytest.raises(HfGrowError, match="neither growth nor lora"):
        load_adapted(make("llama"), tmp_path)


def test_a_start_is_taken_up_only_with_the_same_recipe(tmp_path):
    config = AdaptConfig(columns=1, rank=2)
    first = adapt_or_resume(make("llama"), batches("llama"), config, tmp_path / "start", resume=True)
    again = adapt_or_resume(make("llama"), [], config, tmp_path / "start", resume=True)
    assert torch.equal(logits(first, "llama"), logits(again, "llama"))
    with pytest.raises(HfGrowError, match="another recipe"):
        adapt_or_resume(make("llama"), [], AdaptConfig(columns=2, rank=2), tmp_path / "start", resume=True)


def test_a_start_that_was_kept_before_a_field_existed_is_of_the_default(tmp_path):
    config = AdaptConfig(columns=1, rank=2, collect=CollectConfig(seed=3))
    first = adapt_or_resume(make("llama"), batches("llama"), config, tmp_path / "start")
    file = tmp_path / "start" / "adapt.json"
    kept = json.loads(file.read_text(encoding="utf-8"))
    older = {name: value for name, value in kept.items() if name != "lora_dropout"}
    older["collect"] = {"seed": 3}
    file.write_text(json.dumps(older), encoding="utf-8")
    again = adapt_or_resume(make("llama"), [], config, tmp_path / "start", resume=True)
    assert torch.equal(logits(first, "llama"), logits(again, "llama"))
    for changed in (older | {"lora_dropout": 0.5}, kept | {"pruned": True}, kept | {"collect": {"seed": 4}}):
        file.write_text(json.dumps(changed), encoding="utf-8")
        with pytest.raises(HfGrowError, match="another recipe"):
            adapt_or_resume(make("llama"), [], config, tmp_path / "start", resume=True)


@every_method
def test_a_killed_run_goes_on_to_the_same_weights(method, tmp_path):
    recipe = AdaptConfig(method=method, budget=BUDGET)
    settings = TrainConfig(steps=4, batch_size=4, learning_rate=1e-2, save_every=2, train=recipe.train)

    def run(name, resume=False):
        model = adapt_or_resume(make("llama"), batches("llama"), recipe, tmp_path / name / "start", resume=resume)
        options = {"collate": collate, "config": settings, "folder": tmp_path / name, "progress": False}
        trainer = GrowthTrainer(model, rows("llama"), **options)
        trainer.train(resume=resume)
        return trainer.model

    whole = run("whole")
    with pytest.raises(KeyboardInterrupt), interrupted_at(3, "take_step"):
        run("killed")
    went_on = run("killed", resume=True)
    assert torch.equal(logits(went_on, "llama"), logits(whole, "llama"))
    assert not torch.equal(logits(whole, "llama"), logits(make("llama"), "llama"))


@pytest.mark.parametrize(
    ("options", "message"),
    [
        ({"method": "prune"}, "one of grow, lora, grow[+]lora, not 'prune'"),
        ({"budget": "lots"}, "budget must be a positive number"),
        ({"budget": 0}, "budget must be a positive number"),
        ({"share": 0}, "share must be a number between 0 and 1"),
        ({"share": 1.0}, "share must be a number between 0 and 1"),
        ({"lora_dropout": 1}, "lora_dropout must be a number between 0 and 1"),
        ({"lora_alpha": 0}, "lora_alpha must be a number"),
        ({"columns": 0}, "columns must be a whole number of at least 1"),
        ({"rank": 1.5}, "rank must be a whole number"),
        ({"method": "grow", "rank": 2}, "rank has no meaning with method='grow'"),
        ({"method": "lora", "columns": 2}, "columns has no meaning with method='lora'"),
        ({"step_size": -1}, "step_size must be a number"),
        ({"collect": {"seed": 1}}, "Give a CollectConfig"),
    ],
)
def test_bad_recipes_are_refused(options, message):
    with pytest.raises(HfGrowError, match=message):
        AdaptConfig(**options)


@every_method
def test_a_budget_that_is_too_small_names_what_is_needed(method):
    with pytest.raises(HfGrowError, match="too small") as raised:
        adapt(make("llama"), batches("llama"), AdaptConfig(method=method, budget=40))
    needed = int(str(raised.value).split("learn is ")[1].split()[0].replace(",", ""))
    model, _ = adapt(make("llama"), batches("llama"), AdaptConfig(method=method, budget=needed))
    assert trainable_parameters(model) == needed


def test_a_large_budget_stops_where_there_is_no_room():
    model, _ = adapt(make("gpt2"), batches("gpt2"), AdaptConfig(method="grow", budget="300%"))
    # A head reads 32 inputs and a bias, and has 8 columns.
    assert {site.attention.query_key_dim for site in attention_sites(model)} == {33}


def test_growth_beside_what_a_model_has_already():
    """LoRA, merged growth and attached growth are what the new columns come beside."""
    model, _ = adapt(make("llama"), batches("llama"), AdaptConfig(method="lora", rank=1))
    lora = trainable_parameters(model)
    both, _ = adapt(model, batches("llama"), AdaptConfig(method="grow", columns=1))
    assert both is model and trainable_parameters(both) > lora
    grown = hf_grow.make_growable(make("llama"))
    hf_grow.widen_query_key(grown, 0, 1)
    mark = base_hash(grown, growth=True)
    adapt(grown, batches("llama"), AdaptConfig(method="grow", columns=1))
    assert base_hash(grown) == mark
    first = trainable_parameters(grown)
    adapt(grown, batches("llama"), AdaptConfig(method="grow", columns=1))
    assert base_hash(grown) == mark and trainable_parameters(grown) == 2 * first


def test_lora_on_adapters_is_refused():
    model, _ = adapt(make("llama"), batches("llama"), AdaptConfig(method="lora", rank=1))
    with pytest.raises(HfGrowError, match="adapters already"):
        adapt(model, batches("llama"), AdaptConfig())
    with pytest.raises(HfGrowError, match="does not have; it has model, lm_head"):
        adapt(make("llama"), batches("llama"), AdaptConfig(method="lora", also_train="classifier"))


@pytest.mark.parametrize("share", [0.05, 0.5, 0.8, 0.95])
@every_type
def test_a_budget_is_refused_only_below_the_least_that_is_named(model_type, share):
    model = hf_grow.make_growable(make(model_type))
    with pytest.raises(HfGrowError, match="the least that can learn is") as refused:
        choose_amounts(model, AdaptConfig(share=share, budget=10))
    least = int(re.search(r"the least that can learn is ([\d,]+)", str(refused.value))[1].replace(",", ""))
    for budget in range(least, 3 * least, 97):
        amounts, rank = choose_amounts(model, AdaptConfig(share=share, budget=budget))
        assert sum(amounts.values()) >= 1 and rank >= 1
    with pytest.raises(HfGrowError, match="too small"):
        choose_amounts(model, AdaptConfig(share=share, budget=least - 1))


def test_only_what_was_saved_like_this_is_overwritten(tmp_path):
    model, _ = adapt(make("gpt2"), batches("gpt2"), AdaptConfig(method="lora", budget=BUDGET))
    (tmp_path / "project" / "lora").mkdir(parents=True)
    (tmp_path / "project" / "thesis.txt").write_text("years", encoding="utf-8")
    with pytest.raises(HfGrowError, match="holds no model, so it is not overwritten"):
        save_adapted(model, tmp_path / "project", overwrite=True)
    assert (tmp_path / "project" / "thesis.txt").exists()
    save_adapted(model, tmp_path / "saved")
    save_adapted(model, tmp_path / "saved", overwrite=True)


def test_adapters_that_would_be_left_out_are_refused(tmp_path):
    model, _ = hf_grow.grow(make("llama"), batches("llama"), hf_grow.GrowthConfig(columns=1))
    model.add_adapter(LoraConfig(r=2, target_modules=["q_proj"]))
    with pytest.raises(HfGrowError, match="not in a PeftModel"):
        save_adapted(model, tmp_path / "adapted")
    assert not (tmp_path / "adapted").exists()


def test_lora_on_a_grown_model_leaves_its_growth_alone(tmp_path):
    """The model as it is given is the frozen one, also after all of its weights have learned."""

    def grown_base():
        model, _ = hf_grow.grow(make("llama"), batches("llama"), hf_grow.GrowthConfig(columns=1))
        with torch.no_grad():
            model.model.norm.weight.add_(0.1)
        return model

    config = AdaptConfig(method="lora", rank=1)
    model, _ = adapt(grown_base(), batches("llama"), config)
    lora = sum(parameter.numel() for name, parameter in model.named_parameters() if "lora_" in name)
    assert trainable_parameters(model) == lora
    before = base_hash(model, growth=True)
    train(model, "llama", config)
    assert base_hash(model, growth=True) == before
    save_adapted(model, tmp_path / "added", config=config)
    assert {place.name for place in (tmp_path / "added").iterdir()} == {"lora", "adapt.json"}
    again = load_adapted(grown_base(), tmp_path / "added")
    assert torch.equal(logits(again, "llama"), logits(model, "llama")) and trainable_parameters(again) == lora


def test_an_adapter_without_its_weights_is_refused_and_changes_nothing(tmp_path):
    model, _ = adapt(make("llama"), batches("llama"), AdaptConfig(columns=1, rank=1))
    save_adapted(model, tmp_path / "added")
    (tmp_path / "added" / "lora" / "adapter_model.safetensors").unlink()
    base = make("llama")
    with pytest.raises(HfGrowError, match="is incomplete: there is no adapter_model"):
        load_adapted(base, tmp_path / "added")
    assert type(base) is type(make("llama"))
    with pytest.raises(HfGrowError, match="takes a transformers model, not str"):
        load_adapted("llama", tmp_path / "added")


def test_an_adapter_is_pushed_and_loaded_from_the_hub(tmp_path, monkeypatch):
    model, _ = adapt(make("llama"), batches("llama"), AdaptConfig(columns=1, rank=1, step_size=1.0))
    save_adapted(model, tmp_path / "added")
    with HubServer(token="hf_test", user="user") as server:
        server.redirect_client(monkeypatch, max_retries=0)
        monkeypatch.setattr("huggingface_hub.constants.HF_HUB_CACHE", str(tmp_path / "cache"))
        hf_grow.push_grown(tmp_path / "added", "user/added", token="hf_test")
        loaded = load_adapted(make("llama"), "user/added", token="hf_test")
        with pytest.raises(HfGrowError, match="user/nothing cannot be loaded"):
            load_adapted(make("llama"), "user/nothing", token="hf_test")
    assert torch.equal(logits(loaded, "llama"), logits(model, "llama"))


def test_lora_beside_attached_growth_learns_alone(tmp_path):
    def attached():
        growth = hf_grow.GrowthConfig(columns=1, attach=True)
        return hf_grow.grow(make("llama"), batches("llama"), growth)[0]

    config = AdaptConfig(method="lora", rank=1)
    model, _ = adapt(attached(), batches("llama"), config)
    lora = [name for name, parameter in model.named_parameters() if parameter.requires_grad]
    assert lora and all("lora_" in name for name in lora)
    train(model, "llama", config)
    save_adapted(model, tmp_path / "added", config=config)
    loaded = load_adapted(attached(), tmp_path / "added")
    assert trainable_parameters(loaded) == trainable_parameters(model)
    assert_same(loaded.state_dict(), model.state_dict())


def test_growth_that_learns_on_is_part_of_the_budget():
    growth = hf_grow.GrowthConfig(columns=1, attach=True)
    model, _ = hf_grow.grow(make("llama"), batches("llama"), growth)
    present = sum(parameter.numel() for parameter in hf_grow.growth_parameters(model))
    with pytest.raises(HfGrowError, match="too small"):
        adapt(model, batches("llama"), AdaptConfig(method="grow", budget=present))
    model, _ = adapt(model, batches("llama"), AdaptConfig(method="grow", budget=3 * present))
    assert present < trainable_parameters(model) <= 3 * present


def test_a_module_that_is_not_there_is_refused_before_the_model_grows():
    model = make("llama")
    with pytest.raises(HfGrowError, match="also_train names 'nope'"):
        adapt(model, batches("llama"), AdaptConfig(method="grow", columns=1, also_train=("nope",)))
    assert not any(".grown." in name for name in model.state_dict())


@pytest.mark.parametrize("change", [{"target_modules": ["nope"]}, {"r": 3}], ids=str)
def test_lora_that_does_not_fit_leaves_the_base_as_it_was(change, tmp_path):
    model, _ = adapt(make("llama"), batches("llama"), AdaptConfig(columns=1, rank=1))
    save_adapted(model, tmp_path / "added")
    file = tmp_path / "added" / "lora" / "adapter_config.json"
    file.write_text(json.dumps(json.loads(file.read_text(encoding="utf-8")) | change), encoding="utf-8")
    base = make("llama")
    before = copy.deepcopy(base.state_dict())
    with pytest.raises(HfGrowError, match="cannot be loaded"):
        load_adapted(base, tmp_path / "added")
    assert_same(base.state_dict(), before)
    assert all(parameter.requires_grad for parameter in base.parameters())
