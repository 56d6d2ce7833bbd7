"""Which sequences training sees: each once an epoch, the same after a restart and however processes share them."""

import random

import numpy as np
import pytest
import torch
from runs import Stream
from torch.utils.data import IterableDataset

from hf_grow import HfGrowError
from hf_grow.training.feed import Feed, in_batches, random_numbers


def collect_numbers(rows):
    """A batch that says which rows it holds."""
    return {"input_ids": torch.tensor(rows)}


def feed(rows, batch_size=2, **options):
    return Feed(rows, collect_numbers, batch_size, **options)


def numbers(batches):
    return [number for batch in batches for number in batch["input_ids"].tolist()]


def test_an_epoch_shows_every_row_once_and_the_next_in_another_order():
    fed = feed(range(10), 5)
    epochs = [numbers(fed.batches(2 * epoch) + fed.batches(2 * epoch + 1)) for epoch in range(3)]
    assert all(sorted(epoch) == list(range(10)) for epoch in epochs)
    assert epochs[0] != epochs[1] != epochs[2] and epochs[0] != list(range(10))


def test_epochs_follow_without_a_gap():
    fed = feed(range(5), 2)
    seen = [number for step in range(5) for number in numbers(fed.batches(step))]
    assert sorted(seen[:5]) == sorted(seen[5:]) == list(range(5))


def test_fewer_rows_than_a_batch():
    (batch,) = feed(range(3), 8).batches(0)
    assert len(numbers([batch])) == 8 and set(numbers([batch])) == {0, 1, 2}


@pytest.mark.parametrize("rows", [range(23), Stream(list(range(23)))], ids=["numbered", "stream"])
def test_any_step_can_be_asked_for_at_any_time(rows):
    """As after a restart: forwards, again and backwards."""
    steps = {step: numbers(feed(rows, accumulation=3).batches(step)) for step in range(9)}
    fed = feed(rows, accumulation=3)
    for step in (0, 1, 1, 5, 2, 8, 0, 7):
        assert numbers(fed.batches(step)) == steps[step], step


@pytest.mark.parametrize("rows", [range(23), Stream(list(range(23)))], ids=["numbered", "stream"])
def test_processes_see_together_what_one_sees(rows):
    pair = [feed(rows, 2, accumulation=2, processes=2, process=process) for process in range(2)]
    alone, accumulating = feed(rows, 4, accumulation=2), feed(rows, 2, accumulation=4)
    for step in range(5):
        shares = [fed.batches(step) for fed in pair]
        joint = [numbers([first]) + numbers([second]) for first, second in zip(*shares, strict=True)]
        assert joint == [numbers([batch]) for batch in alone.batches(step)]
        assert numbers(accumulating.batches(step)) == numbers(alone.batches(step))


def test_a_stream_keeps_its_order_and_starts_again():
    fed = feed(Stream(list(range(5))), 3)
    assert [numbers(fed.batches(step)) for step in range(3)] == [[0, 1, 2], [3, 4, 0], [1, 2, 3]]


def test_the_seed_chooses_the_order():
    assert numbers(feed(range(50), 50, seed=1).batches(0)) != numbers(feed(range(50), 50, seed=2).batches(0))


@pytest.mark.parametrize("rows", [range(23), Stream(list(range(23)))], ids=["numbered", "stream"])
def test_shares_of_a_sample_are_disjoint_and_uneven(rows):
    shares = [numbers(feed(rows, processes=2, process=process).sample(7, 3)) for process in range(2)]
    assert [len(share) for share in shares] == [4, 3]
    assert sorted(shares[0] + shares[1]) == sorted(numbers(feed(rows).sample(7, 3)))
    assert len(set(shares[0] + shares[1])) == 7


def test_samples_differ_from_event_to_event():
    assert numbers(feed(range(50)).sample(7, 3)) == numbers(feed(range(50)).sample(7, 3))
    assert numbers(feed(range(50)).sample(7, 3)) != numbers(feed(range(50)).sample(7, 4))


@pytest.mark.parametrize("rows", [[5], Stream([5])], ids=["numbered", "stream"])
def test_every_process_gets_something_to_measure_on(rows):
    assert [numbers(feed(rows, processes=3, process=process).sample(7, 0)) for process in range(3)] == [[5]] * 3


def test_a_collator_draws_the_same_after_a_restart_and_leaves_random_numbers_alone():
    def noise(rows):
        return {"noise": torch.tensor([float(torch.rand(())), random.random(), np.random.rand()])}

    fed = Feed(range(4), noise, 2, accumulation=2)
    torch.manual_seed(0), random.seed(0), np.random.seed(0)
    expected = float(torch.rand(())), random.random(), np.random.rand()
    torch.manual_seed(0), random.seed(0), np.random.seed(0)
    first, second = fed.batches(0)
    assert (float(torch.rand(())), random.random(), np.random.rand()) == expected
    again = Feed(range(4), noise, 2, accumulation=2)
    assert torch.equal(again.batches(0)[1]["noise"], second["noise"])
    assert len({*first["noise"].tolist(), *second["noise"].tolist(), *fed.batches(1)[0]["noise"].tolist()}) == 9
    other = Feed(range(4), noise, 2, accumulation=2, processes=2, process=1)
    assert not torch.equal(other.batches(0)[0]["noise"], first["noise"])


def test_random_numbers_are_restored_after_an_error():
    torch.manual_seed(0), random.seed(0)
    expected = float(torch.rand(())), random.random()
    torch.manual_seed(0), random.seed(0)
    with pytest.raises(RuntimeError), random_numbers(1, 2):
        raise RuntimeError
    assert (float(torch.rand(())), random.random()) == expected


def test_a_torch_stream_with_a_length_is_a_stream():
    class Counted(IterableDataset):
        def __len__(self):
            return 4

        def __iter__(self):
            return iter(range(4))

    assert numbers(feed(Counted(), 3).batches(1)) == [3, 0, 1]


def test_the_last_batch_may_be_smaller():
    assert [numbers([batch]) for batch in in_batches(range(5), collect_numbers, 2)] == [[0, 1], [2, 3], [4]]


@pytest.mark.parametrize(
    ("rows", "words"),
    [
        ([], "is empty"),
        ("text", "not str"),
        ({"input_ids": [1]}, "not dict"),
        (3, "not int"),
        (iter([1]), "not an iterator"),
        ((number for number in range(3)), "not an iterator"),
    ],
)
def test_what_is_no_data_is_refused(rows, words):
    with pytest.raises(HfGrowError, match=words):
        feed(rows)


def test_an_empty_stream_is_refused_when_it_is_read():
    with pytest.raises(HfGrowError, match="is empty"):
        feed(Stream([])).batches(0)


@pytest.mark.parametrize("kind", [list, Stream])
def test_a_mark_tells_rows_from_others(kind):
    rows = [{"input_ids": torch.arange(number, number + 3), "labels": number} for number in range(4)]
    one, same = feed(kind(rows)), feed(kind(list(rows)), 3, seed=1)
    assert one.mark() == same.mark()
    other = [{**rows[0], "labels": 9}, *rows[1:]]
    assert feed(kind(other)).mark() != one.mark()
