"""The host of an elastic division begins the next epoch while one ends: same batches, bounded memory, nothing left."""

from __future__ import annotations

import threading
import time

import pytest
import torch

from tests.flow.division.preparers import order, sides
from weft.batches.division import executor
from weft.batches.division.executor import DividedPipeline
from weft.core.division import Division
from weft.core.errors import TrainingError

pytestmark = pytest.mark.timeout(60)
ELASTIC = Division(1, 1, workers=2, host_buffer=4, device_buffer=2, lead=2)


class Logged:
    """A host that takes its time, and tells which batches of which epochs it prepares."""

    def __init__(self, inner, seconds: float = 0.004, fails: int | None = None) -> None:
        self._inner, self._seconds, self._fails = inner, seconds, fails
        self.slots, self.prepared = inner.slots, list[tuple[int, int]]()

    def prepare(self, seeds):
        self.prepared.append((seeds.epoch, seeds.batch))
        time.sleep(self._seconds)
        if self._fails == seeds.epoch:
            raise ValueError("no more")
        return self._inner.prepare(seeds)

    def transfer(self, item):
        return self._inner.transfer(item)

    def discard(self, item):
        self._inner.discard(item)


def pipeline(division: Division = ELASTIC, **about) -> DividedPipeline:
    host, device = sides(division.pinned_batches)
    return DividedPipeline(division, Logged(host, **about), device)


def epoch(number: int) -> list:
    return list(order().epoch(number))


def trained(mine: DividedPipeline, number: int, then: int | None = None) -> list:
    """The batches of an epoch, each trained for a while."""
    found = []
    for batch in mine.run(epoch(number), () if then is None else epoch(then)):
        time.sleep(0.002)
        found.append(batch)
    return found


def two_epochs(mine: DividedPipeline) -> None:
    trained(mine, 0, 1)
    trained(mine, 1)


def threads() -> list[threading.Thread]:
    return [one for one in threading.enumerate() if one.name in ("weft-prepare", "weft-transfer")]


def test_batches_are_those_of_epochs_one_by_one_and_some_are_begun_before_their_epoch():
    mine = pipeline()
    epochs = [trained(mine, 0, 1)]
    begun = [one for one in mine.host.prepared if one[0] == 1]
    assert begun  # as the first epoch ended
    for number, then in ((1, 2), (2, None)):
        epochs.append(trained(mine, number, then))
    host, _ = sides()
    for number, found in enumerate(epochs):
        expected = [host.prepare(seeds).tensors() for seeds in epoch(number)]
        assert [batch.batch for batch in found] == list(range(len(expected)))
        for batch, theirs in zip(found, expected, strict=True):
            assert all(torch.equal(a, b) for a, b in zip(batch.tensors(), theirs, strict=True))
    assert len(set(mine.host.prepared)) == len(mine.host.prepared)  # none twice
    assert mine.prepared["host"] == len(mine.host.prepared)
    assert mine.prepared["host"] + mine.prepared["device"] == 3 * 14
    assert threads() == []
    assert mine.host.slots.used == 0


def test_between_two_epochs_the_buffer_fills_and_no_more():
    mine = pipeline()
    trained(mine, 0, 1)
    time.sleep(0.1)
    begun = [one for one in mine.host.prepared if one[0] == 1]
    assert len(begun) == ELASTIC.host_buffer == mine.host.slots.used
    trained(mine, 1)
    assert mine.host.slots.longest <= ELASTIC.pinned_batches


def test_closing_gives_back_what_was_begun():
    mine = pipeline()
    trained(mine, 0, 1)
    mine.close()
    assert threads() == []
    assert mine.host.slots.used == 0
    mine.close()  # again, with nothing to do
    assert len(trained(mine, 1)) == 14


@pytest.mark.parametrize("how", ["another epoch", "another division", "an epoch that was left"])
def test_what_nobody_asks_for_is_dropped(how):
    mine = pipeline()
    if how == "an epoch that was left":
        for _ in mine.run(epoch(0), epoch(1)):
            break
    else:
        trained(mine, 0, 1)
    if how == "another division":
        mine.division = Division(1, 0, workers=2, host_buffer=4)
    number = 2 if how == "another epoch" else 1
    assert [one.batch for one in trained(mine, number)] == list(range(14))
    assert mine.host.slots.used == 0
    assert threads() == []


def test_divisions_that_keep_to_a_ratio_begin_no_other_epoch():
    mine = pipeline(Division(1, 1, workers=2, host_buffer=4, strategy="fixed"))
    trained(mine, 0, 1)
    assert {one[0] for one in mine.host.prepared} == {0}
    assert threads() == []


def test_an_error_in_a_batch_of_the_next_epoch_is_raised():
    """As soon as the training thread looks: in this epoch or in that."""
    mine = pipeline(fails=1)
    with pytest.raises(TrainingError, match=r"phase 'batching_cpu' failed at batch .*ValueError: no more"):
        two_epochs(mine)
    assert threads() == []


def test_an_epoch_that_does_not_come_is_given_up(monkeypatch):
    monkeypatch.setattr(executor, "IDLE_SECONDS", 0.05)
    mine = pipeline()
    trained(mine, 0, 1)
    end = time.monotonic() + 5.0
    while (threads() or mine.host.slots.used) and time.monotonic() < end:
        time.sleep(0.01)
    assert threads() == []
    assert mine.host.slots.used == 0
    assert len(trained(mine, 1)) == 14


def test_it_is_quiet_between_two_epochs_when_told():
    """A step may be captured there, and no other thread may call CUDA then."""
    mine = pipeline(seconds=0.02)
    trained(mine, 0, 1)
    with mine.quiet():
        before = len(mine.host.prepared)
        time.sleep(0.05)
        assert len(mine.host.prepared) == before
    trained(mine, 1)


def test_leaving_while_a_batch_is_about_to_cross_the_bus_keeps_no_memory(monkeypatch):
    """A worker that ends after the run was left must not drop a batch that the bus has claimed."""
    claim = executor._Running._claim

    def slowly(self, key):
        found = claim(self, key)
        if found is not None and threading.current_thread().name == "weft-transfer":
            time.sleep(0.01)  # between the claim and the copy
        return found

    monkeypatch.setattr(executor._Running, "_claim", slowly)
    mine = pipeline(seconds=0.005)
    for _ in range(8):
        for place, _ in enumerate(mine.run(epoch(0), epoch(1))):
            time.sleep(0.002)
            if place == 5:
                break
        assert mine.host.slots.used == 0
    assert threads() == []


def test_a_run_that_is_closed_late_does_not_end_the_one_after_it():
    mine = pipeline()
    first = mine.run(epoch(0), epoch(1))
    for _ in range(14):
        next(first)
    second = mine.run(epoch(1))
    found = [next(second).batch]
    first.close()
    assert [*found, *(one.batch for one in second)] == list(range(14))
    assert threads() == []


def test_a_run_that_was_closed_from_outside_says_so():
    mine = pipeline()
    found = mine.run(epoch(0))
    next(found)
    mine.close()
    with pytest.raises(TrainingError, match="batches were closed before their epoch ended"):
        list(found)


def test_the_last_batch_of_an_epoch_is_not_given_up(monkeypatch):
    """Though nobody asks for the next epoch for long enough just as it is handed out."""
    monkeypatch.setattr(executor, "IDLE_SECONDS", 0.001)
    decide = executor._Running._decide

    def slowly(self):
        found = decide(self)
        if self.schedule.finished:
            time.sleep(0.02)
        return found

    monkeypatch.setattr(executor._Running, "_decide", slowly)
    mine = pipeline(seconds=0.001)
    for number in range(5):
        assert [one.batch for one in trained(mine, number, number + 1)] == list(range(14))
    mine.close()
