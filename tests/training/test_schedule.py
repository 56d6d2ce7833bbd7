"""When growth is due and how large a model may get."""

import json
import logging

import pytest
from batches import labelled, sequences_of
from models import causal_model

from hf_grow import GrowthConfig, GrowthSchedule, HfGrowError, make_growable
from hf_grow.modeling.growable_attention import attention_sites
from hf_grow.training.schedule import GrowthState, check_first_event, grow_on_schedule


@pytest.mark.parametrize(
    ("values", "message"),
    [
        ({}, "Say when to grow"),
        ({"max_events": 2}, "Say when to grow"),
        ({"at": (1, -1)}, "at must be a whole number"),
        ({"at": 1.5}, "at must be a whole number"),
        ({"at": "3"}, "at must be a whole number"),
        ({"every": 0}, "every must be a whole number of at least 1"),
        ({"every": True}, "every must be"),
        ({"plateau": 0}, "plateau must be"),
        ({"every": 2, "max_events": 0}, "max_events must be"),
        ({"every": 2, "max_heads": -1}, "max_heads must be"),
        ({"every": 2, "max_parameters": 1e6}, "max_parameters must be"),
        ({"every": 2, "sequences": 0}, "sequences must be"),
        ({"every": 2, "min_improvement": 0.1}, "give plateau"),
        ({"plateau": 2, "min_improvement": -0.1}, "min_improvement must be"),
        ({"plateau": 2, "min_improvement": float("nan")}, "min_improvement must be"),
    ],
)
def test_a_schedule_that_makes_no_sense_is_refused(values, message):
    with pytest.raises(HfGrowError, match=message):
        GrowthSchedule(**values)


def test_steps_may_be_given_in_any_order_and_form():
    assert GrowthSchedule(at=[5, 1, 5]).at == (1, 5)
    assert GrowthSchedule(at=4).at == (4,)


def due(state, steps):
    """The steps at which growth is due, when each event is carried out."""
    found = []
    for step in range(steps):
        if state.due_at_step(step):
            state.last_step, state.events = step, state.events + 1
            found.append(step)
    return found


@pytest.mark.parametrize(
    ("values", "expected"),
    [
        ({"at": (0, 3)}, [0, 3]),
        ({"every": 3}, [3, 6, 9]),
        ({"at": (3, 4), "every": 3}, [3, 4, 6, 9]),
        ({"every": 3, "max_events": 2}, [3, 6]),
        ({"plateau": 1}, []),
    ],
)
def test_growth_is_due_at_its_steps(values, expected):
    assert due(GrowthState(GrowthSchedule(**values)), 10) == expected


def test_nothing_is_due_twice_at_one_step():
    state = GrowthState(GrowthSchedule(at=(2,), plateau=1))
    assert state.due_at_step(2)
    state.last_step = 2
    assert not state.due_at_step(2) and not state.note_evaluation(1.0, 2) and not state.note_evaluation(1.0, 2)


def test_a_plateau_counts_evaluations_without_improvement():
    state = GrowthState(GrowthSchedule(plateau=2, min_improvement=0.1))
    losses = [3.0, 2.95, 2.8, 2.75, float("nan"), 1.0, 1.0, 1.0]
    assert [state.note_evaluation(loss, step) for step, loss in enumerate(losses)] == [
        *(False, False, False, False, True),
        *(False, False, True),
    ]
    assert state.best == 1.0


def test_a_state_goes_through_json():
    state = GrowthState(GrowthSchedule(plateau=3), events=2, last_step=7, best=1.5, waited=1, evaluated=8)
    assert GrowthState.from_dict(state.schedule, json.loads(json.dumps(state.to_dict()))) == state


@pytest.fixture
def model():
    return make_growable(causal_model("llama"))


@pytest.mark.parametrize(
    "growth", [GrowthConfig(columns=2), GrowthConfig(value_columns=3, heads=1), GrowthConfig(columns={1: 4})]
)
def test_a_limit_counts_what_growth_adds(model, growth):
    """As many parameters as growth will add fit; one less does not."""
    state = GrowthState(GrowthSchedule(every=1))
    before = model.num_parameters()
    batches = sequences_of(labelled(model, size=6))
    report = grow_on_schedule(model, batches, growth, state, 1)
    assert state.events == 1 and report.parameters_after == model.num_parameters() > before
    fresh = make_growable(causal_model("llama"))
    check_first_event(fresh, growth, GrowthSchedule(every=1, max_parameters=report.parameters_after))
    with pytest.raises(HfGrowError, match="max_parameters"):
        check_first_event(fresh, growth, GrowthSchedule(every=1, max_parameters=report.parameters_after - 1))


def test_heads_are_counted_as_query_heads(model):
    """A new key head of this Llama brings two query heads."""
    check_first_event(model, GrowthConfig(heads=1), GrowthSchedule(every=1, max_heads=6))
    with pytest.raises(HfGrowError, match="6 heads, more than max_heads=5"):
        check_first_event(model, GrowthConfig(heads=1), GrowthSchedule(every=1, max_heads=5))


def test_a_limit_concerns_only_what_grows(model):
    check_first_event(model, GrowthConfig(heads=1), GrowthSchedule(every=1, max_query_key_dim=1))


def test_the_cheapest_budget_is_enough_to_begin(model):
    """One query/key column in one layer: (4 + 2 heads) · 32 inputs."""
    check_first_event(model, GrowthConfig(budget=192), GrowthSchedule(every=1))
    with pytest.raises(HfGrowError, match="the cheapest growth takes 192"):
        check_first_event(model, GrowthConfig(budget=191), GrowthSchedule(every=1))
    with pytest.raises(HfGrowError, match="max_parameters"):
        most = model.num_parameters() + 191
        check_first_event(model, GrowthConfig(budget=500), GrowthSchedule(every=1, max_parameters=most))


def test_a_later_event_without_room_ends_growth_with_one_warning(model, caplog):
    state = GrowthState(GrowthSchedule(every=1, max_value_dim=9))
    batches = sequences_of(labelled(model, size=6))
    with caplog.at_level(logging.WARNING):
        for step in (1, 2, 3):
            if state.due_at_step(step):
                grow_on_schedule(model, batches, GrowthConfig(value_columns=1), state, step)
    assert state.full and state.events == 1 and caplog.text.count("No growth at step 2 and later") == 1
    assert [site.attention.value_dim for site in attention_sites(model)] == [9, 9]
