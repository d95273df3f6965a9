"""The three phases of an overlap, one decision after another."""

from __future__ import annotations

import random

import pytest

from weft.core.division import Division, DualBuffer
from weft.core.errors import SpecError


def test_one_overlap_fills_then_flushes():
    schedule = DualBuffer(Division(2, 2, strategy="fixed"), batches=4)
    assert schedule.next_on_device() == ("prepare", 0)
    schedule.begin_on_device("prepare", 0)
    assert [schedule.begin_on_host(), schedule.begin_on_host(), schedule.begin_on_host()] == [2, 3, None]
    assert schedule.begin_transfer() is None  # nothing is finished yet
    schedule.complete(0)
    assert schedule.next_on_device() == ("prepare", 1)  # filling goes on though batch 0 could be trained
    schedule.begin_on_device("prepare", 1)
    schedule.complete(1)
    schedule.complete(2)
    assert schedule.begin_transfer() is None  # the device buffer is full
    schedule.begin_on_device(*schedule.next_on_device())
    assert schedule.begin_transfer() == 2
    assert schedule.next_on_device() == ("train", 1)
    schedule.begin_on_device("train", 1)
    assert schedule.next_on_device() is None  # blocked on the bus
    schedule.complete(2)
    assert schedule.next_on_device() == ("train", 2)


def test_while_blocked_the_device_prepares_ahead_or_takes_over():
    ahead = DualBuffer(Division(1, 1, device_buffer=3, strategy="fixed"), batches=4)
    for action in (("prepare", 0), ("train", 0)):
        if action[0] == "prepare":
            ahead.begin_on_device(*action)
            ahead.complete(0)
    assert ahead.begin_on_host() == 1
    assert ahead.next_on_device() == ("prepare", 2)
    late = DualBuffer(Division(3, 1, host_buffer=3, device_buffer=4, strategy="fixed"), batches=4)
    late.begin_on_device("prepare", 0)
    late.complete(0)
    assert late.begin_on_host() == 1
    late.begin_on_device("train", 0)
    assert late.next_on_device() == ("prepare", 2)
    late.begin_on_device("prepare", 2)
    assert late.prepared_by_device(2)
    assert late.taken_over == 1
    assert late.begin_on_host() == 3  # what was taken over is not begun twice


def test_events_out_of_place_are_refused():
    schedule = DualBuffer(Division(1, 1), batches=2)
    with pytest.raises(SpecError, match="batch 0 is waiting, not on_host or on_bus or on_device"):
        schedule.complete(0)


@pytest.mark.parametrize("seed", range(80))
def test_whatever_the_timing_every_batch_is_trained_once_and_in_order(seed):
    """Random events: no deadlock, and never more in a buffer than it holds."""
    chance = random.Random(seed)
    host, device = chance.randint(0, 4), chance.randint(0, 4)
    how = {"lead": chance.randint(0, 5)} if seed >= 40 else {"strategy": "fixed"}
    division = Division(
        host, device or int(not host), chance.randint(1, 3), chance.randint(0, 5), chance.randint(0, 5), **how
    )
    schedule, order, busy = DualBuffer(division, 23), [], {"host": [], "bus": [], "device": []}
    for _ in range(5000):
        if schedule.finished:
            break
        what = chance.choice(["host", "bus", "device", "end"])
        if what == "host" and len(busy["host"]) < division.workers and (batch := schedule.begin_on_host()) is not None:
            busy["host"].append(batch)
        if what == "bus" and not busy["bus"] and (batch := schedule.begin_transfer()) is not None:
            busy["bus"].append(batch)
        if what == "device" and not busy["device"] and (action := schedule.next_on_device()) is not None:
            schedule.begin_on_device(*action)
            if action[0] == "train":
                order.append(action[1])
            else:
                busy["device"].append(action[1])
        if what == "end" and (side := chance.choice([name for name, some in busy.items() if some] or [""])):
            batch = busy[side].pop(chance.randrange(len(busy[side])))
            schedule.complete(batch)
            schedule.took(chance.choice(["host", "bus", "given", "own"]), chance.random())
    assert order == list(range(23))


def elastic(batches: int, upcoming: int) -> DualBuffer:
    division = Division(1, 1, workers=2, host_buffer=3, device_buffer=2, lead=2)
    return DualBuffer(division, batches, upcoming=upcoming)


def train_next(schedule: DualBuffer) -> None:
    action = schedule.next_on_device()
    assert action is not None
    schedule.begin_on_device(*action)
    if action[0] == "prepare":
        schedule.complete(action[1])
        schedule.begin_on_device(*schedule.next_on_device())


def test_as_an_epoch_ends_the_host_goes_on_with_the_next_one():
    schedule = elastic(batches=4, upcoming=4)
    assert [schedule.begin_on_host() for _ in range(3)] == [2, 4, 6]  # the first and third of the next epoch
    assert schedule.begin_on_host() is None  # its buffer is full
    for place in (2, 4):
        schedule.complete(place)
    assert schedule.begin_transfer() == 2
    assert schedule.begin_transfer() is None  # those of the next epoch wait in host memory
    schedule.complete(2)
    while not schedule.finished:
        train_next(schedule)
    after = schedule.following(upcoming=4)
    assert after.batches == 4
    assert [after.prepared_by_device(place) for place in range(4)] == [False, True, False, True]
    assert after.begin_transfer() == 0
    after.complete(2)  # which was begun in the epoch before
    assert after.begin_on_host() == 4  # a batch of the one after: two places behind the last that was begun


def test_without_a_next_epoch_the_host_ends_with_this_one():
    schedule = elastic(batches=4, upcoming=0)
    assert [schedule.begin_on_host() for _ in range(3)] == [2, None, None]
    fixed = DualBuffer(Division(1, 1, host_buffer=9, strategy="fixed"), batches=4, upcoming=4)
    assert [fixed.begin_on_host() for _ in range(3)] == [1, 3, None]
