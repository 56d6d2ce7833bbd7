"""What a CollectConfig refuses."""

import pytest

from hf_grow import CollectConfig, HfGrowError


@pytest.mark.parametrize(
    ("values", "message"),
    [
        ({"collection": "guess"}, "sketch, exact"),
        ({"kinds": ("layers",)}, "columns, value_columns, heads"),
        ({"kinds": ()}, "at least one"),
        ({"kinds": 5}, "must be a tuple"),
        ({"passes": 1}, "at least 2"),
        ({"held_out": 1.0}, "below 1"),
        ({"estimator": "exact"}, "collection='exact'"),
        ({"metric": "none"}, "collection='exact'"),
        ({"inverse": "magic"}, "eigh, pinv"),
    ],
)
def test_bad_collect_configs_are_refused(values, message):
    with pytest.raises(HfGrowError, match=message):
        CollectConfig(**values)
