"""The sketch against the exact form."""

import pytest
from batches import labelled, sequences_of
from models import KINDS, every_case, growable, relative_difference

from hf_grow import CollectConfig, collect_statistics


@every_case
def test_a_sketch_as_wide_as_the_model_finds_what_the_exact_form_does(model_type, stock_class, changes):
    model = growable(model_type, stock_class, changes)
    batches = sequences_of(labelled(model, size=8, length=24))
    numbers = {"columns": 20, "value_columns": 20, "oversampling": 13, "kinds": KINDS}
    exact, sketch = (
        collect_statistics(model, batches, CollectConfig(collection=form, **numbers)) for form in ("exact", "sketch")
    )
    for one, other in zip(exact.layers, sketch.layers, strict=True):
        assert relative_difference(other.query_gram, one.query_gram) < 1e-9
        assert relative_difference(other.columns.gains.sum(), one.columns.gains.sum()) < 1e-4
        assert relative_difference(other.columns.held_out.sum(), one.columns.held_out.sum()) < 1e-3
        # Grams without full rank are cut off in other coordinates.
        assert relative_difference(other.values.gains[:, :20].sum(), one.values.gains[:, :20].sum()) < 0.03
        assert relative_difference(other.uniform.gains[:, :20].sum(), one.uniform.gains[:, :20].sum()) < 0.03
        assert float(other.bottleneck.sum()) == pytest.approx(float(one.bottleneck.sum()), rel=0.5)
