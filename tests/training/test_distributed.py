"""A DistributedDataParallel goes on around a model that grew inside it."""

import pytest
import torch
from processes import launch


@pytest.mark.slow
def test_gradients_after_growth_are_those_of_one_process_on_the_joint_batch(tmp_path):
    launch(1, "grow_on_rank.py", tmp_path)
    launch(2, "grow_on_rank.py", tmp_path)
    alone, first, second = (torch.load(tmp_path / f"{name}.pt") for name in ("1-0", "2-0", "2-1"))
    assert alone["weights"]["transformer.h.0.attn.c_attn.weight"].shape == (32, 2 * 4 * 11 + 32)
    for part in ("gradients", "weights"):
        for name, value in alone[part].items():
            assert torch.equal(first[part][name], second[part][name]), name
            assert torch.allclose(first[part][name], value, rtol=1e-6, atol=1e-9), name
