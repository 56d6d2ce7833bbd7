"""Statistics as files."""

import pytest
import torch
from batches import labelled
from models import KINDS, causal_model

from hf_grow import CollectConfig, HfGrowError, Statistics, collect_statistics, make_growable


def test_statistics_are_saved_and_read_back(tmp_path):
    model = make_growable(causal_model("llama"))
    config = CollectConfig(collection="exact", kinds=KINDS, columns=2, value_columns=2)
    statistics = collect_statistics(model, [labelled(model, size=8)], config)
    statistics.save(tmp_path / "statistics.safetensors")
    again = Statistics.load(tmp_path / "statistics.safetensors")
    assert (
        again.config == config and again.step_sizes == statistics.step_sizes and again.summary() == statistics.summary()
    )
    for one, other in zip(statistics.layers, again.layers, strict=True):
        assert torch.equal(one.columns.first, other.columns.first) and one.place == other.place
        assert torch.equal(one.total().gradient, other.total().gradient)
    assert [file.name for file in tmp_path.iterdir()] == ["statistics.safetensors"]
    (tmp_path / "half").write_bytes((tmp_path / "statistics.safetensors").read_bytes()[:1000])
    for name in ("half", "absent"):
        with pytest.raises(HfGrowError, match="cannot be read as statistics"):
            Statistics.load(tmp_path / name)
