"""Passes tell a batch that does not fit the model from a fault of what watches it."""

from contextlib import closing

import pytest
import torch
from models import batch, causal_model

from hf_grow import CollectConfig, HfGrowError, collect_statistics, make_growable
from hf_grow.running.observe import Attachment, ExactObserver, Extra, Observer
from hf_grow.running.passes import Passes
from hf_grow.surgery.patch import growable_sites
from hf_grow.surgery.place import input_sizes


def labelled(model):
    """A batch with labels."""
    inputs = batch(model)
    return {**inputs, "labels": inputs["input_ids"]}


class FaultyInputs(Observer):
    """Raises where a projection is entered."""

    def __init__(self, site, error):
        super().__init__(site)
        self.error = error

    def _keep_inputs(self, roles, module, args):
        raise self.error


class FaultyKernel(FaultyInputs):
    """Raises in place of the kernel."""

    _keep_inputs = Observer._keep_inputs

    def __call__(self, kernel, query, key, value, *args, **kwargs):
        super().__call__(kernel, query, key, value, *args, **kwargs)
        raise self.error


class FaultyContribution(FaultyInputs):
    """Raises behind the output projection."""

    _keep_inputs = Observer._keep_inputs

    def _add_contribution(self, module, args, output):
        raise self.error


def run_gradients(passes, batches, observers):
    """Take all gradients."""
    with closing(passes.gradients(batches, observers)) as stream:
        return list(stream)


def run_watch(passes, batches, observers):
    """Watch all batches."""
    with closing(passes.watch(batches, observers)) as stream:
        return list(stream)


RUNS = {"gradients": run_gradients, "watch": run_watch, "loss": Passes.loss}
every_run = pytest.mark.parametrize("run", RUNS.values(), ids=RUNS)


@every_run
@pytest.mark.parametrize("error", [ValueError, TypeError, RuntimeError, KeyError, HfGrowError])
@pytest.mark.parametrize("faulty", [FaultyInputs, FaultyKernel, FaultyContribution])
def test_a_fault_of_an_observer_surfaces_as_itself(faulty, error, run):
    model = make_growable(causal_model("gpt2"))
    fault = error("of our own")
    sites = growable_sites(model)
    with pytest.raises(error) as raised:
        run(Passes(model), [labelled(model)], [Observer(sites[0]), faulty(sites[1], fault)])
    assert raised.value is fault
    assert not any(module._forward_hooks or module._forward_pre_hooks for module in model.modules())
    assert not any("observer" in site.attention.__dict__ for site in sites)
    assert all(parameter.requires_grad for parameter in model.parameters())


@every_run
def test_columns_of_a_wrong_size_surface_as_what_they_are(run):
    """The model takes the batch: the columns that are tried beside its own are wrong."""
    model = make_growable(causal_model("llama"))
    site = growable_sites(model)[0]
    columns = torch.zeros(site.attention.n_heads, input_sizes(site)["query"] + 1, 2, requires_grad=True)
    with pytest.raises(RuntimeError, match="mat1 and mat2"):
        run(Passes(model), [labelled(model)], [Attachment(site, Extra(query=columns))])


def unfit(model):
    """Batches that the model does not take, and what it says to them."""
    inputs = labelled(model)
    return {
        "wrong argument": ({**inputs, "past_key_values": 3}, "'int' object has no attribute"),
        "wrong labels": ({**inputs, "labels": inputs["labels"][:, :3]}, "batch_size"),
        "wrong mask": ({**inputs, "attention_mask": torch.zeros(2, 1, 11, 7)}, "size"),
        "token id": ({**inputs, "input_ids": inputs["input_ids"] + 10_000}, "index out of range"),
    }


every_unfit = pytest.mark.parametrize("name", ["wrong argument", "wrong labels", "wrong mask", "token id"])


@every_run
@pytest.mark.parametrize("watcher", [None, Observer, ExactObserver])
@every_unfit
def test_a_batch_that_does_not_fit_is_named_whoever_watches(name, watcher, run):
    model = make_growable(causal_model("gpt2"))
    bad, reason = unfit(model)[name]
    observers = [] if watcher is None else [watcher(site) for site in growable_sites(model)]
    with pytest.raises(HfGrowError, match=rf"Batch 1 does not fit .*: .*{reason}"):
        run(Passes(model), [labelled(model), bad], observers)


@every_unfit
def test_a_faulty_observer_does_not_hide_that_a_batch_does_not_fit(name):
    model = make_growable(causal_model("gpt2"))
    bad, _ = unfit(model)[name]
    observer = FaultyContribution(growable_sites(model)[0], ValueError("of our own"))
    with pytest.raises(HfGrowError, match="Batch 0 does not fit"):
        Passes(model).loss([bad], [observer])


@pytest.mark.parametrize("collection", ["exact", "sketch"])
def test_a_batch_without_labels_is_named(collection):
    model = make_growable(causal_model("gpt2"))
    with pytest.raises(HfGrowError, match="returned no loss: batches must hold labels"):
        collect_statistics(model, [batch(model)], CollectConfig(collection=collection, columns=1))
