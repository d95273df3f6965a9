"""When members that have ended leave their group, and how a group shrinks."""

from __future__ import annotations

import pytest
from hypothesis import given
from hypothesis import strategies as st

from weft.planner.grouping.repacking import GAIN, Pace, pays_to_leave, periods


def test_half_of_a_long_training_leaves_and_the_end_of_a_short_one_does_not():
    pace = Pace().after(8, 0.008)
    assert pays_to_leave(4, 8, epochs_left=1000, pace=pace, prepare_seconds=1.0)
    assert not pays_to_leave(4, 8, epochs_left=100, pace=pace, prepare_seconds=1.0)
    assert not pays_to_leave(1, 8, epochs_left=1000, pace=pace, prepare_seconds=1.0)


def test_nobody_and_everybody_stay():
    pace = Pace().after(4, 1.0)
    assert not pays_to_leave(0, 4, 1000, pace, 0.0)
    assert not pays_to_leave(4, 4, 1000, pace, 0.0)
    assert not pays_to_leave(1, 4, 0, pace, 0.0)


def test_a_device_that_is_not_full_gains_nothing_by_it():
    """Once it has been seen that four members take as long as eight, the last leavers wait for the end."""
    even = Pace().after(8, 0.010)
    assert even.marginal(8) == pytest.approx(0.00125)
    flat = even.after(4, 0.010)
    assert flat.marginal(4) == pytest.approx(0.0)
    assert pays_to_leave(2, 4, 10_000, Pace().after(4, 0.010), 1.0)
    assert not pays_to_leave(2, 4, 10_000, flat, 1.0)


def test_the_slope_is_found_and_bounded():
    pace = Pace().after(8, 0.011).after(4, 0.007)  # 0.003 of its own and 0.001 a member
    assert pace.marginal(4) == pytest.approx(0.001)
    odd = Pace().after(8, 0.100).after(4, 0.001)
    assert odd.marginal(4) == pytest.approx(0.001 / 4), "more than everybody's share cannot be won"
    assert Pace().after(8, 0.001).after(4, 0.100).marginal(4) == 0.0
    assert Pace().marginal(4) == 0.0
    assert Pace().after(8, 1.0).after(8, 2.0).seen == ((8, 2.0),)


def test_periods_by_hand():
    found = periods([10, 10, 110], lambda members: 1.0 * members, prepare_seconds=20.0)
    assert [(p.members, p.running, p.epochs) for p in found] == [(3, 3, 10), (1, 1, 100)]
    assert [p.seconds for p in found] == [20.0 + 30.0, 20.0 + 100.0]
    kept = periods([10, 10, 20], lambda members: 1.0 * members, prepare_seconds=20.0)
    assert [(p.members, p.running, p.epochs, p.seconds) for p in kept] == [(3, 3, 10, 50.0), (3, 1, 10, 30.0)]


@given(
    st.lists(st.integers(1, 50), min_size=1, max_size=8),
    st.floats(0.0, 1.0),
    st.floats(0.0, 1.0),
    st.floats(0.0, 20.0),
)
def test_everybody_trains_to_the_end_and_leaving_never_costs(epochs, fixed, each, prepare):
    found = periods(epochs, lambda members: fixed + each * members, prepare)
    assert sum(p.epochs for p in found) == max(epochs)
    assert all(p.members >= p.running >= 1 for p in found)
    assert found[0].members == len(epochs)
    together = prepare + max(epochs) * (fixed + each * len(epochs))
    assert sum(p.seconds for p in found) <= together * (1 + 1e-9) + 1e-9
    assert GAIN >= 1.0
