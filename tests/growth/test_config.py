"""What a GrowthConfig refuses, and configs as plain values."""

import pytest
from models import KINDS

from hf_grow import CollectConfig, GrowthConfig, HfGrowError
from hf_grow.fields import from_dict, to_dict


@pytest.mark.parametrize(
    ("values", "message"),
    [
        ({}, "Say how much"),
        ({"columns": 1, "budget": "1%"}, "Say how much"),
        ({"columns": -1}, "at least 0"),
        ({"columns": 1.5}, "whole number"),
        ({"budget": "lots"}, "percentage like '1%'"),
        ({"budget": 0}, "positive number"),
        ({"columns": 1, "strategy": "magic"}, "append, refactor, step"),
        ({"columns": 1, "step_scope": "each"}, "shared, per_layer"),
        ({"columns": 1, "step_size": -1.0}, "not negative"),
        ({"heads": 1, "strategy": "refactor"}, "query/key columns only"),
        ({"columns": 1, "strategy": "step"}, "adds no columns"),
    ],
)
def test_bad_growth_configs_are_refused(values, message):
    with pytest.raises(HfGrowError, match=message):
        GrowthConfig(**values)


def test_configs_survive_json():
    for config in (GrowthConfig(columns={0: 2, "a.b": 3}), CollectConfig(kinds=KINDS, target="gradient")):
        assert from_dict(type(config), to_dict(config)) == config


def test_a_search_of_full_rank_needs_columns():
    with pytest.raises(HfGrowError, match="full_rank"):
        GrowthConfig(value_columns=2, line_search="full_rank")
    GrowthConfig(budget="1%", line_search="full_rank")
    GrowthConfig(columns={0: 1}, value_columns=2, line_search="full_rank")


def test_an_old_name_beside_the_new_one_is_refused():
    with pytest.raises(TypeError, match="give step_scope alone"):
        GrowthConfig(columns=1, steps="shared", step_scope="per_layer")
