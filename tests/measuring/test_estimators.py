"""Estimators of the wanted change of the scores."""

import pytest
import torch
from batches import labelled
from models import CASES, causal_model, growable, relative_difference

import hf_grow
from hf_grow import CollectConfig, GrowthConfig, HfGrowError, collect_statistics


@pytest.mark.parametrize("estimator", ["per_sequence", "mean_input", "exact"])
def test_every_estimator_lowers_the_loss(estimator):
    model = hf_grow.make_growable(causal_model("gpt2"))
    whole = labelled(model, size=16, length=40)
    whole |= {"attention_mask": torch.ones_like(whole["input_ids"]), "labels": whole["input_ids"]}
    collect = CollectConfig(collection="exact", estimator=estimator, cutoff=1e-4, held_out=0.0)
    _, report = hf_grow.grow(model, [whole], GrowthConfig(columns=4), collect=collect)
    assert report.loss_after < report.loss_before


def test_for_one_sequence_all_estimators_are_the_pooled_one():
    """With one sequence there is nothing to pool: the columns give the same change of the scores."""
    model = growable("gpt2", *CASES[0][1:])
    one = labelled(model, size=1, length=40)
    products = {}
    for estimator in ("pooled", "per_sequence", "mean_input", "exact"):
        config = CollectConfig(
            collection="exact", estimator=estimator, columns=20, held_out=0.0, target="gradient", cutoff=1e-9, ridge=0.0
        )
        found = collect_statistics(model, [one], config).layers[1]
        products[estimator] = found.columns.first @ found.columns.second.mT
        products[estimator] /= products[estimator].norm()
    for estimator in ("per_sequence", "mean_input", "exact"):
        assert relative_difference(products[estimator], products["pooled"]) < 1e-4, estimator


def test_mean_input_refuses_padding():
    model = hf_grow.make_growable(causal_model("gpt2"))
    with pytest.raises(HfGrowError, match="one length"):
        collect_statistics(model, [labelled(model)], CollectConfig(collection="exact", estimator="mean_input"))
