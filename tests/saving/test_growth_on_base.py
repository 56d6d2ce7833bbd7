"""Growth that is put onto its base or taken off leaves an optimizer of the model with what the model has."""

import pytest
import torch
from growth_beside_base import batches
from models import causal_model, fill_zeros, grow_everything

import hf_grow
from hf_grow import GrowthConfig, HfGrowError, growth_parameters, load_growth, make_growable, remove_growth, save_growth
from hf_grow.modeling.growable_attention import attention_sites


def grown(model_type):
    """A grown causal model whose new weights matter."""
    return fill_zeros(grow_everything(make_growable(causal_model(model_type))))


def scaled(**changes):
    """A model with a learnable scale."""
    return hf_grow.grow(causal_model("llama"), batches(), GrowthConfig(columns=1, scaling="learnable", **changes))[0]


def test_growth_goes_to_the_group_of_growth_in_an_optimizer(tmp_path):
    model = hf_grow.attach_growth(grown("gpt2"))
    growth = set(growth_parameters(model))
    base = [parameter for parameter in model.parameters() if parameter not in growth]
    optimizer = torch.optim.AdamW([{"params": base, "lr": 1e-5}, {"params": list(growth), "lr": 1e-3}])
    save_growth(model, tmp_path / "growth")
    for change in (
        lambda: hf_grow.widen_value(model, 1, 1, optimizer=optimizer),
        lambda: hf_grow.add_heads(model, 1, 1, optimizer=optimizer),
        lambda: load_growth(model, tmp_path / "growth", optimizer=optimizer),
    ):
        change()
        groups = [set(group["params"]) for group in optimizer.param_groups]
        assert groups == [set(base), set(growth_parameters(model))]


@pytest.mark.parametrize("load", [True, False])
def test_a_scale_that_goes_leaves_the_optimizer(load, tmp_path):
    model = scaled()
    optimizer = torch.optim.AdamW(model.parameters())
    if load:
        save_growth(model, tmp_path / "growth")
        load_growth(model, tmp_path / "growth", optimizer=optimizer)
    else:
        remove_growth(model, optimizer=optimizer)
    assert {one for group in optimizer.param_groups for one in group["params"]} == set(model.parameters())


def test_optimizers_that_cannot_go_on_are_refused_before_growth_is_loaded(tmp_path):
    save_growth(grown("llama"), tmp_path / "growth")
    model = causal_model("llama")
    with pytest.raises(HfGrowError, match="LBFGS cannot be carried"):
        load_growth(model, tmp_path / "growth", name="code", optimizer=torch.optim.LBFGS(model.parameters()))
    with pytest.raises(HfGrowError, match="belongs to another model"):
        load_growth(model, tmp_path / "growth", optimizer=torch.optim.AdamW(causal_model("llama").parameters()))
    assert not any(".grown." in name for name in model.state_dict())


def test_a_scale_that_is_not_finite_is_not_saved(tmp_path):
    model = scaled(attach=True)
    with torch.no_grad():
        attention_sites(model)[0].growth.scale.fill_(float("nan"))
    with pytest.raises(HfGrowError, match="so it is not saved"):
        save_growth(model, tmp_path / "growth")
    assert not (tmp_path / "growth").exists()
