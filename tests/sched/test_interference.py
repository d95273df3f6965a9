"""How groups share a device: in proportion to what they ask, and by turns as long as their kernels."""

from __future__ import annotations

import pytest
from hypothesis import given
from hypothesis import strategies as st

from weft.sched.interference import DeviceLoad, Interference, mean_turn, shares

PLAIN = Interference(contention=0.0)
CONTENDED = Interference(contention=0.1)


def test_alone_nothing_is_lost():
    assert CONTENDED.slowdowns([DeviceLoad(0.5, 1e-4)]) == [1.0]
    assert CONTENDED.slowdowns([DeviceLoad(1.0)]) == [1.0]
    assert CONTENDED.slowdown(DeviceLoad(1.8), []) == pytest.approx(1.8), (
        "a fused group with more work than the device does"
    )
    assert CONTENDED.slowdowns([]) == []


@pytest.mark.parametrize("turn", [0.0, 1e-5, 3.0])
def test_groups_of_one_turn_share_in_proportion_to_what_they_ask(turn):
    assert CONTENDED.slowdown(DeviceLoad(0.5, turn), [DeviceLoad(0.4, turn)]) == pytest.approx(1.04)
    assert CONTENDED.slowdown(DeviceLoad(1.0, turn), [DeviceLoad(1.0, turn)]) == pytest.approx(2.2)
    crowd = [DeviceLoad(1.0, turn)] * 3
    assert CONTENDED.slowdown(DeviceLoad(0.5, turn), crowd) == pytest.approx(3.5 * 1.1), (
        "neighbours take one device at most"
    )


def test_short_kernels_wait_behind_long_ones():
    short, long = PLAIN.slowdowns([DeviceLoad(1.0, 1e-5), DeviceLoad(1.0, 9e-5)])
    assert (short, long) == (pytest.approx(10.0), pytest.approx(10 / 9))
    assert PLAIN.slowdown(DeviceLoad(1.0, 1e-5), [DeviceLoad(1.0, 9e-5)] * 2) == pytest.approx(19.0)


def test_nobody_gets_more_than_it_asks():
    found = shares([DeviceLoad(0.3, 9e-5), DeviceLoad(1.0, 1e-5), DeviceLoad(1.0, 1e-5)])
    assert found == pytest.approx([0.3, 0.35, 0.35])
    assert shares([DeviceLoad(0.3, 1e-6), DeviceLoad(0.6, 1e-3)]) == [0.3, 0.6], "there is room for both"


def test_a_turn_that_is_not_known_is_as_long_as_those_of_the_others():
    assert shares([DeviceLoad(1.0), DeviceLoad(1.0, 2e-5)]) == pytest.approx([0.5, 0.5])
    assert shares([DeviceLoad(1.0), DeviceLoad(1.0, 1e-5), DeviceLoad(1.0, 3e-5)]) == pytest.approx(
        [2 / 6, 1 / 6, 3 / 6]
    )
    assert (mean_turn([0.0, 2.0, 4.0]), mean_turn([])) == (3.0, 0.0)


def test_what_is_being_built_neither_loses_nor_takes():
    assert CONTENDED.slowdowns([DeviceLoad(0.0, 1e-3), DeviceLoad(1.0, 1e-5)]) == [1.0, 1.0]


def test_throughput():
    assert CONTENDED.throughput([DeviceLoad(0.5), DeviceLoad(0.4)]) > CONTENDED.throughput([DeviceLoad(0.5)])
    assert CONTENDED.throughput([DeviceLoad(1.0), DeviceLoad(1.0)]) < CONTENDED.throughput([DeviceLoad(1.0)])
    assert PLAIN.throughput([DeviceLoad(1.0, 1e-6), DeviceLoad(0.7, 1e-3)]) == pytest.approx(1.0)


@given(st.lists(st.builds(DeviceLoad, st.floats(0.0, 3.0), st.sampled_from([0.0, 1e-6, 1e-5, 1e-3])), max_size=8))
def test_the_device_is_given_out_once(loads):
    found = shares(loads)
    total = sum(load.demand for load in loads)
    assert sum(found) == pytest.approx(min(total, 1.0))
    assert all(0.0 <= share <= load.demand * (1 + 1e-9) for share, load in zip(found, loads, strict=True))
    assert all(one >= 1.0 - 1e-9 for one in PLAIN.slowdowns(loads))
