"""Which sequences choose and which judge."""

import pytest
import torch

from hf_grow.running.batches import split_sequences


def test_judges_follow_no_period_of_the_data():
    ids = torch.arange(400)[:, None]
    _, judging = split_sequences([{"input_ids": ids}], 0.25)
    judges = judging[0]["input_ids"][:, 0]
    assert len(judges) == pytest.approx(100, abs=3)
    for period in (2, 3, 4, 5, 8):
        counts = torch.bincount(judges % period, minlength=period)
        assert counts.min() > 0.6 * 100 / period


def test_which_sequences_judge_does_not_depend_on_batches():
    ids = torch.arange(13)[:, None].expand(-1, 4)
    for size in (1, 3, 5, 13):
        batches = [{"input_ids": part, "scale": torch.tensor(2.0)} for part in ids.split(size)]
        choosing, judging = split_sequences(batches, 0.25)
        seen = [torch.cat([batch["input_ids"][:, 0] for batch in part]).tolist() for part in (choosing, judging)]
        assert seen[1] == [1, 4, 9, 12] and sorted(seen[0] + seen[1]) == list(range(13))
        assert all(float(batch["scale"]) == 2.0 for batch in choosing)
