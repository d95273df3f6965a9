"""Calls in other threads: the first of each can be left out, and errors come out."""

from __future__ import annotations

import threading
import time

import pytest

from weft.batches.division.measuring import Call, Calls, all_at_once, background


def _wait_until(there) -> None:
    while not there():
        time.sleep(0.001)


def test_calls_are_chosen_by_their_beginning_and_by_their_number_in_their_thread():
    calls = Calls()
    for call in (Call(0.0, 9.0, 0), Call(1.0, 8.0, 0), Call(9.0, 2.0, 1), Call(11.0, 3.0, 2)):
        calls.add(call)
    assert calls.seconds() == [9.0, 8.0, 2.0, 3.0]
    assert calls.seconds(after=1) == [2.0, 3.0]
    assert calls.seconds(since=10.0) == [3.0]
    assert [calls.threads(after) for after in (0, 1, 2, 3)] == [2, 1, 1, 0]


def test_works_are_called_until_the_end():
    with background([lambda: time.sleep(0.001)] * 3) as calls:
        _wait_until(lambda: calls.threads(after=1) >= 3)
    assert len(calls) >= 6
    assert not calls.failed


def test_all_at_once_is_at_the_same_time():
    together = threading.Barrier(4, timeout=30)
    mine, others = all_at_once(together.wait, [together.wait] * 3)
    assert sorted([mine, *others]) == [0, 1, 2, 3]


def test_errors_come_out():
    def broken():
        raise ValueError("broken")

    with pytest.raises(ValueError, match="broken"):
        all_at_once(lambda: None, [broken])
    with pytest.raises(ValueError, match="broken"), background([broken]) as calls:
        _wait_until(lambda: calls.failed)
