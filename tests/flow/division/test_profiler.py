"""Five phases with their variance, how they slow each other down, and bounded time."""

from __future__ import annotations

import threading
import time
from dataclasses import replace

import pytest

from examples.thread_accelerator import PacedDevice, PacedHost, ThreadAccelerator
from tests.flow.division.preparers import order, sides
from weft.batches.division import profiler
from weft.batches.division.profiler import Call, Calls, Profiled, TimeLimit, all_at_once, background, profile
from weft.core.division import typical
from weft.planner.division.partitioner import Limits, partition

pytestmark = pytest.mark.timeout(60)
DELAYS = {"batching_cpu": 0.02, "transfer_pcie": 0.004, "batching_npu": 0.006, "transfer_npu": 0.008}
DELAYS["training_npu"] = 0.003


def profiled(delays=None, **options):
    """A profile of a fake accelerator."""
    fake = ThreadAccelerator("npu", delays)
    host, device = sides()
    what = Profiled(PacedHost(fake, host), PacedDevice(fake, device), lambda item: fake.train(lambda: item), "npu")
    try:
        return profile(what, list(order().epoch(0)), **options), fake, host
    finally:
        fake.stop()


def test_the_five_phases_are_measured_with_their_variance():
    found, _, host = profiled(DELAYS, workers=2, steps=5)
    assert set(found.phases) == set(DELAYS)
    for key, seconds in DELAYS.items():
        assert found.of(key).mean >= seconds
        assert found.of(key).count >= 3
    assert any(one.std > 0 for one in found.phases.values())
    assert found.bytes > 0
    assert host.slots.used == 0


def test_interference_is_measured_between_what_runs_at_once():
    found, _, _ = profiled(DELAYS, workers=2, steps=4)
    assert set(found.interference["training_npu"]) == {"batching_cpu", "transfer_pcie"}
    assert set(found.interference["batching_cpu"]) == {"batching_npu", "transfer_npu", "training_npu", "transfer_pcie"}
    assert "batching_cpu" in found.interference["transfer_pcie"]
    assert all(factor >= 1 for others in found.interference.values() for factor in others.values())


def test_a_step_that_does_everything_is_measured_as_a_whole():
    """Its phases add up to it: training and reading as alone, and sampling is what is left."""
    fake = ThreadAccelerator("gpu", {"transfer_gpu": 0.004, "training_gpu": 0.003, "batching_gpu": 0.02})
    device, train = PacedDevice(fake, sides()[1]), lambda item: fake.train(lambda: item)
    what = Profiled(None, device, train, alone=lambda: time.sleep(0.03))
    try:
        found = profile(what, list(order().epoch(0)), steps=3)
        other = profile(replace(what, alone=None), list(order().epoch(0)), steps=3)
    finally:
        fake.stop()
    assert set(found.captured) == {"batching_gpu", "transfer_gpu", "training_gpu"}
    assert sum(one.mean for one in found.captured.values()) >= 0.03
    assert found.captured["training_gpu"].mean == found.of("training_gpu").mean
    assert not other.captured


def test_a_whole_step_beside_copies_says_how_they_share_the_bus():
    """Steps hold the bus for most of their time, so copies take longer beside them than the little that steps do."""
    fake = ThreadAccelerator("gpu", {"transfer_gpu": 0.008, "training_gpu": 0.002, "transfer_pcie": 0.004})
    host, device = sides()

    def whole():
        fake.run("transfer_gpu", lambda: None, bus=True)
        fake.run("training_gpu", lambda: None)

    train = lambda item: fake.train(lambda: item)  # noqa: E731
    what = Profiled(PacedHost(fake, host), PacedDevice(fake, device), train, alone=whole)
    try:
        found = profile(what, list(order().epoch(0)), steps=6)
        other = profile(replace(what, alone=None), list(order().epoch(0)), steps=3)
    finally:
        fake.stop()
    assert set(found.inside) == {"transfer_gpu", "transfer_pcie"}
    assert found.inside["transfer_pcie"]["transfer_gpu"] > 1.2
    assert found.inside["transfer_gpu"]["transfer_pcie"] >= 1.0
    assert not other.inside


@pytest.mark.parametrize("there", ["both", "host", "device"])
@pytest.mark.parametrize("whole", [False, True])
def test_the_parts_of_a_profile_use_up_its_limit(there, whole, monkeypatch):
    limits = []

    class Counted(TimeLimit):
        def __init__(self, seconds, weight):
            super().__init__(seconds, weight)
            limits.append(self)

    monkeypatch.setattr(profiler, "TimeLimit", Counted)
    host, device = sides()
    host, device = host if there != "device" else None, device if there != "host" else None
    alone = (lambda: None) if whole and device is not None else None
    profile(Profiled(host, device, lambda item: item, alone=alone), list(order().epoch(0)), steps=3)
    assert limits[0].remaining == pytest.approx(0.0, abs=1e-9)


def test_a_stall_of_the_host_is_not_taken_for_its_pace():
    """Of few batches; three times as long as the others is too little for a stall of many."""
    calls = iter([0.02, 0.02, 0.06] + [0.02] * 10_000)
    found, _, _ = profiled(lambda key: next(calls) if key == "batching_cpu" else 0.0, workers=1, steps=3)
    assert found.of("batching_cpu").mean < 0.032


class PinningHost:
    """A host whose buffers are pinned when they are first needed, one at a time, which takes as long as ten batches."""

    def __init__(self, inner, batch: float = 0.02, pinning: float = 0.2) -> None:
        self._inner, self._batch, self._pinning = inner, batch, pinning
        self._idle, self._lock, self._driver = 0, threading.Lock(), threading.Lock()
        self.pinned = 0

    def prepare(self, seeds):
        with self._lock:
            fresh = not self._idle
            self._idle -= not fresh
            self.pinned += fresh
        if fresh:
            with self._driver:
                time.sleep(self._pinning)
        time.sleep(self._batch)
        return self._inner.prepare(seeds)

    def transfer(self, item):
        return self._inner.transfer(item)

    def discard(self, item):
        with self._lock:
            self._idle += 1
        self._inner.discard(item)


@pytest.mark.parametrize("limit", [0.1, 3.0])
def test_batches_for_which_memory_is_pinned_are_not_counted(limit):
    """Four workers take as long as one here; a first batch of each would take 200 to 800 ms more."""
    slower = []
    for _ in range(3):  # another process may hold a core for a moment, but not in each of three profiles
        inner, device = sides()
        host = PinningHost(inner)
        found = profile(Profiled(host, device, lambda item: item), list(order().epoch(0)), workers=4, limit=limit)
        assert host.pinned == 5  # of each worker, and the one that is copied
        assert found.of("batching_cpu", 4).mean < 0.1
        slower.append(found.interference["batching_cpu"]["transfer_pcie"])
        if slower[-1] < 2.0:
            break
    assert min(slower) < 2.0


def test_pairs_that_there_is_no_time_for_are_as_is_typical():
    host, device = sides()
    what = Profiled(host, device, lambda item: item)
    found = profile(what, list(order().epoch(0)), workers=2, limit=0.0).interference
    for pair in (("batching_cpu", "transfer_pcie"), ("transfer_pcie", "batching_cpu")):
        assert found[pair[0]][pair[1]] == typical(*pair)
    assert set(found["training_gpu"]) == {"batching_cpu", "transfer_pcie"}


def test_a_side_that_fails_meanwhile_does_not_let_others_wait_for_ever():
    host, device = sides()
    plain, calls = host.prepare, []

    def prepare(seeds):
        calls.append(seeds)
        if len(calls) > 6:  # one of each worker and the one that is copied, three alone
            raise ValueError("broken")
        return plain(seeds)

    host.prepare = prepare
    with pytest.raises(ValueError, match="broken"):
        profile(Profiled(host, device, lambda item: item), list(order().epoch(0)), workers=2, steps=3)


def test_workers_are_started_once_for_all_that_runs_beside_them(monkeypatch):
    """Starting them and waiting for their last batches would take longer than what is measured."""
    started = []
    plain = profiler.background
    monkeypatch.setattr(profiler, "background", lambda works: started.append(len(works)) or plain(works))
    profiled(DELAYS, workers=3, steps=3)
    assert started.count(3) == 1


def test_a_shared_resource_shows_as_interference():
    """Training that also needs the bus is slowed down by copies; on a busy machine perhaps not at the first attempt."""
    assert any(_slowed_by_copies() > 2 for _ in range(8))


def _slowed_by_copies() -> float:
    fake = ThreadAccelerator("npu", {"transfer_pcie": 0.06, "training_npu": 0.005})
    host, device = sides()
    train = lambda item: fake.run("training_npu", lambda: item, bus=True)  # noqa: E731
    try:
        found = profile(
            Profiled(PacedHost(fake, host), PacedDevice(fake, device), train, "npu"), list(order().epoch(0)), steps=5
        )
    finally:
        fake.stop()
    return found.interference["training_npu"]["transfer_pcie"]


class _Lagging:
    """A trainer whose steps of 20 ms are submitted in 10: it has one more to do than the thread that submits."""

    lags = True

    def __init__(self) -> None:
        self._now = self._done = 0.0

    def step(self, _item) -> None:
        self._now += 0.010
        self._done = max(self._done, self._now) + 0.020

    def mark(self) -> float:
        return max(self._done, self._now)

    def seconds(self, begin: float, end: float) -> float:
        self._now = max(self._now, end)
        return end - begin


def test_what_submitting_takes_is_not_taken_for_the_step():
    """It is hidden behind the step before, as in a run; beside busy threads it may take longer than the step."""
    clock = _Lagging()
    found = profile(Profiled(None, None, clock.step, clock=clock), list(order().epoch(0)), steps=6)
    assert found.of("training_gpu").mean == pytest.approx(0.020)


def test_slow_phases_are_measured_fewer_times():
    begin = time.perf_counter()
    found, _, _ = profiled({"batching_cpu": 0.1, "training_npu": 0.1}, workers=1, steps=20, limit=2.0)
    assert found.of("batching_cpu").count < 20
    assert time.perf_counter() - begin < 8


def test_a_device_that_only_trains_and_a_host_that_only_watches():
    host, device = sides()
    items = list(order().epoch(0))
    no_device = profile(Profiled(host, None, lambda item: item), items, steps=3)
    assert set(no_device.phases) == {"batching_cpu", "transfer_pcie", "training_gpu"}
    no_host = profile(Profiled(None, device, lambda item: item), items, steps=3)
    assert set(no_host.phases) == {"batching_gpu", "transfer_gpu", "training_gpu"}
    assert no_host.interference == {}


def test_a_failure_of_a_side_is_raised():
    class Broken:
        def prepare(self, seeds):
            raise ValueError("broken")

    with pytest.raises(ValueError, match="broken"):
        profile(Profiled(Broken(), None, lambda item: item), list(order().epoch(0)), steps=3)


def test_a_measured_machine_is_divided_by_its_profile():
    found, fake, _ = profiled(DELAYS | {"batching_cpu": 0.03}, workers=2, steps=4)
    chosen = partition(found, fake.registry(), 100, Limits(16, 6, 2), trainer="npu")
    sides_alone = [seconds for division, seconds in chosen.tried if not division.divided]
    assert chosen.simulation.seconds_per_batch <= min(sides_alone)


def test_what_a_part_does_not_use_is_left_to_the_others():
    now = [100.0]
    limit = TimeLimit(10.0, 5.0, lambda: now[0])
    assert limit.part(2.0) == 4.0
    now[0] += 1.0
    assert limit.part() == 3.0
    now[0] += 8.5
    assert limit.part() == 0.25
    now[0] += 2.0
    assert limit.part() == 0.0


def test_more_parts_than_were_announced_get_what_is_left():
    limit = TimeLimit(6.0, 1.0, lambda: 0.0)
    assert limit.part() == 6.0
    assert limit.part() == 6.0


def _wait_until(there) -> None:
    while not there():
        time.sleep(0.001)


def test_calls_are_chosen_by_their_beginning_and_by_their_number_in_their_thread():
    calls = Calls()
    calls.done += [Call(0.0, 9.0, 0), Call(1.0, 8.0, 0), Call(9.0, 2.0, 1), Call(11.0, 3.0, 2)]
    assert calls.seconds() == [9.0, 8.0, 2.0, 3.0]
    assert calls.seconds(after=1) == [2.0, 3.0]
    assert calls.seconds(since=10.0) == [3.0]
    assert [calls.threads(after) for after in (0, 1, 2, 3)] == [2, 1, 1, 0]


def test_works_are_called_until_the_end():
    with background([lambda: time.sleep(0.001)] * 3) as calls:
        _wait_until(lambda: calls.threads(after=1) >= 3)
    assert len(calls.done) >= 6
    assert not calls.failed


def test_all_at_once_is_at_the_same_time():
    together = threading.Barrier(4, timeout=30)
    assert sorted(all_at_once([together.wait] * 4)) == [0, 1, 2, 3]


def test_errors_come_out():
    def broken():
        raise ValueError("broken")

    with pytest.raises(ValueError, match="broken"):
        all_at_once([lambda: None, broken])
    with pytest.raises(ValueError, match="broken"), background([broken]) as calls:
        _wait_until(lambda: calls.failed)
