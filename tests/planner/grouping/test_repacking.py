"""When ended members are dropped from their group, and how a group shrinks."""

from __future__ import annotations

import pytest

from weft.planner.grouping.step_options import StepPace, pays_to_leave


def test_half_of_a_long_training_leaves_and_the_end_of_a_short_one_does_not():
    pace = StepPace().after(8, 0.008)
    assert pays_to_leave(4, 8, epochs_left=1000, pace=pace, prepare_seconds=1.0)
    assert not pays_to_leave(4, 8, epochs_left=100, pace=pace, prepare_seconds=1.0)
    assert not pays_to_leave(1, 8, epochs_left=1000, pace=pace, prepare_seconds=1.0)


def test_what_is_saved_must_exceed_what_it_costs_by_a_margin():
    pace = StepPace().after(4, 1.0)  # a quarter of a second per member and epoch
    assert not pays_to_leave(1, 4, 4, pace, 1.0 / 1.4)
    assert pays_to_leave(1, 4, 4, pace, 1.0 / 1.6)


def test_nobody_and_everybody_stay():
    pace = StepPace().after(4, 1.0)
    assert not pays_to_leave(0, 4, 1000, pace, 0.0)
    assert not pays_to_leave(4, 4, 1000, pace, 0.0)
    assert not pays_to_leave(1, 4, 0, pace, 0.0)


def test_a_device_that_is_not_full_gains_nothing_by_it():
    """Once it has been seen that four members take as long as eight, the last leavers wait for the end."""
    even = StepPace().after(8, 0.010)
    assert even.marginal(8) == pytest.approx(0.00125)
    flat = even.after(4, 0.010)
    assert flat.marginal(4) == pytest.approx(0.0)
    assert pays_to_leave(2, 4, 10_000, StepPace().after(4, 0.010), 1.0)
    assert not pays_to_leave(2, 4, 10_000, flat, 1.0)


def test_the_slope_is_found_and_bounded():
    pace = StepPace().after(8, 0.011).after(4, 0.007)  # 0.003 of its own and 0.001 per member
    assert pace.marginal(4) == pytest.approx(0.001)
    odd = StepPace().after(8, 0.100).after(4, 0.001)
    assert odd.marginal(4) == pytest.approx(0.001 / 4), "more than everybody's share cannot be won"
    assert StepPace().after(8, 0.001).after(4, 0.100).marginal(4) == 0.0
    assert StepPace().marginal(4) == 0.0
    assert StepPace().after(8, 1.0).after(8, 2.0).seen == ((8, 2.0),)
