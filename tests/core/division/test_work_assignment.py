"""The host's share follows from measured phases: neither side waits for the other."""

from __future__ import annotations

import pytest

from weft.core.division import LARGEST, Division, DualBuffer, WorkAssignment

SECONDS = {"host": 120.0, "bus": 5.0, "given": 3.0, "own": 9.0}


def assignment(workers: int = 12, **changed: float) -> WorkAssignment:
    found = WorkAssignment(workers, gap=3.0, first=4.0)
    for phase, seconds in (SECONDS | changed).items():
        found.took(phase, seconds)
    return found


def test_while_the_host_makes_a_batch_the_device_is_as_busy():
    """120 s by 12 workers: one per 10 s, in which the device trains on it (3 s) and on 7/9 of one of its own."""
    found = assignment()
    assert found.gap == pytest.approx(1 + 7 / 9)
    assert found.lead == pytest.approx(125 / 10 * found.gap + 1)  # places that are trained until a batch has arrived
    assert found.first == pytest.approx(125 / 9 + 1)  # at first all of them are the device's


def test_a_host_that_is_fast_enough_prepares_every_batch():
    assert assignment(host=30.0, bus=2.0).gap == 1.0


def test_the_bus_bounds_the_host_by_its_fastest_copy():
    slow = assignment(bus=21.0)
    assert slow.gap == pytest.approx(1 + (21 - 3) / 9)
    slow.took("bus", 12.0)  # copies that share the bus with reads take longer
    assert slow.gap == pytest.approx(1 + (12 - 3) / 9)


def test_a_later_epoch_knows_the_fastest_copy_from_its_beginning():
    before = assignment(bus=21.0)
    before.took("bus", 12.0)
    assert WorkAssignment(12, gap=3.0, first=4.0, seconds=before.seconds).gap == pytest.approx(before.gap)


def test_a_hopeless_host_gets_few_batches_and_not_none():
    assert assignment(workers=1, host=1e9).gap == LARGEST


def test_until_all_phases_are_known_batches_are_as_planned():
    found = WorkAssignment(2, gap=2.5, first=4.0)
    for phase in ("host", "bus", "own"):
        found.took(phase, 1.0)
    places = []
    for _ in range(4):
        places.append(found.next(0))
        found.begun(places[-1], 0)
    assert places == [4, 7, 9, 12]
    assert found.next(30) == 34  # never behind what is trained


def test_later_seconds_count_more():
    found = assignment()
    before = found.gap
    for _ in range(40):
        found.took("host", 240.0)
    assert found.gap == pytest.approx(1 + (20 - 3) / 9, rel=0.01)
    assert found.gap > before


def test_the_device_prepares_what_the_host_has_not_begun():
    schedule = DualBuffer(Division(1, 1, workers=2, device_buffer=2, lead=2), batches=7)
    assert [schedule.begin_on_host(), schedule.begin_on_host(), schedule.begin_on_host()] == [2, 4, None]
    for batch in (0, 1):
        assert schedule.next_on_device() == ("prepare", batch)
        schedule.begin_on_device("prepare", batch)
        schedule.complete(batch)
        schedule.begin_on_device("train", batch)
    assert schedule.next_on_device() is None  # the host has begun it
    schedule.complete(2)
    assert schedule.begin_transfer() == 2
    schedule.complete(2)
    assert schedule.next_on_device() == ("train", 2)
    assert [schedule.prepared_by_device(batch) for batch in range(5)] == [True, True, False, True, False]


def test_seconds_of_earlier_epochs_are_known_at_once():
    division = Division(1, 1, workers=12, lead=2)
    assert DualBuffer(division, 50).begin_on_host() == 2
    assert DualBuffer(division, 50, SECONDS).begin_on_host() == 15


def test_only_two_sides_can_be_elastic():
    assert not Division(1, 0, lead=3).elastic
    assert not Division(1, 1, strategy="fixed").elastic
    assert "as many batches with 3 workers as are done in time" in Division(2, 1, 3).words()
