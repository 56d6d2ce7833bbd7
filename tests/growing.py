"""What the tests of measuring and growth ask for: sums, statistics of all kinds, growth of all kinds."""

from models import KINDS

from hf_grow import CollectConfig, GrowthConfig, collect_statistics

SMALL = {"columns": 3, "value_columns": 2, "oversampling": 3}
EVERYTHING = GrowthConfig(columns=3, value_columns=2, heads=2)


def exact_sums(model, batches, **changes):
    """The sums of every attention module over all sequences."""
    config = CollectConfig(collection="exact", **changes)
    return [layer.total() for layer in collect_statistics(model, batches, config).layers]


def statistics_of(model, batches, **changes):
    """Statistics of all kinds."""
    return collect_statistics(model, batches, CollectConfig(**{"kinds": KINDS, **SMALL, **changes}))
