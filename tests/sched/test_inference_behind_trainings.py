"""Inference starts on a worker that is free for it, however many trainings wait before it."""

from __future__ import annotations

import pytest

from tests.sched.queues import GIB, CountingQueue, device, task
from weft.sched.admission import decide
from weft.sched.policies import Backfill
from weft.sched.queue_state import MachineState, RunningGroup
from weft.sched.simulator import simulate

KEPT = device(workers=2, inference_workers=1)
BUSY = [RunningGroup("r", "cuda:0", ("r-0",), GIB, 0.5, ends=9000.0, priority=1)]


def trainings(count, size=1, **more):
    return [task(f"t{place}", size, 100.0, arrival=float(place), **more) for place in range(count)]


def asked(name="asked", size=1, **more):
    return task(name, size, 0.1, **{"arrival": 5000.0, "kind": "inference", "utilisation": 0.1, **more})


def decision(tasks, running=BUSY, on=KEPT):
    return decide(Backfill(), tasks, running, MachineState((on,), 6000.0))


@pytest.mark.parametrize("count", [1, 31, 32, 200])
def test_without_a_latency_target(count):
    assert decision([*trainings(count), asked()]).started == ("asked",)


@pytest.mark.parametrize("count", [1, 31, 32, 200])
def test_with_one_and_a_lower_priority(count):
    late = asked(latency_target=50_000.0)
    assert decision([*trainings(count, priority=1), late]).started == ("asked",)


def test_behind_trainings_that_wait_for_memory_or_for_the_device():
    filled = [RunningGroup("r", "cuda:0", ("r-0",), 10 * GIB, 1.0, ends=6050.0, priority=1)]
    for waiting in (trainings(40, size=20), trainings(40, utilisation=1.0)):
        found = decision([*waiting, asked()], filled, device(workers=4, inference_workers=1))
        assert found.started == ("asked",)


def test_the_most_urgent_goes_first():
    others = [asked(f"other{place}") for place in range(3)]
    found = decision([*trainings(40, priority=2), *others, asked(priority=1), asked("target", latency_target=1e5)])
    assert found.started == ("asked",)


def test_users_take_turns():
    flood = [asked(f"flood{place}", user="ann") for place in range(100)]
    workers = device(workers=3, inference_workers=2)
    found = decision([*trainings(40, priority=1), *flood, asked(user="bob")], on=workers)
    assert set(found.started) == {"flood0", "asked"}


def test_what_trainings_wait_for_is_kept():
    """The memory that is free is kept for the first training once the running group has ended."""
    filled = [RunningGroup("r", "cuda:0", ("r-0",), 10 * GIB, 0.5, ends=6050.0, priority=1)]
    long = task("long", 10, 1000.0, arrival=5000.0, kind="inference", utilisation=0.1)
    found = decision([*trainings(40, size=20), long], filled)
    assert not found.started
    assert "would delay a task that waits for memory" in found.wait["long"]


def test_answers_do_not_wait_for_the_trainings_to_end():
    answers = [asked(f"a{place}", arrival=100.0 + place) for place in range(5)]
    run = simulate(Backfill(), [*trainings(60, priority=1), *answers], [KEPT])
    waited = [one.end - one.arrival for one in run.tasks if one.id.startswith("a")]
    assert max(waited) < 1.0


@pytest.mark.parametrize("size", [1, 20])
def test_the_cost_does_not_grow_with_the_queue(size):
    reads = []
    for count in (500, 5000):
        queue = CountingQueue()
        for one in (*trainings(count), *(asked(f"a{place}", size) for place in range(count))):
            queue.add(one)
        filled = [RunningGroup("r", "cuda:0", ("r-0",), 10 * GIB, 0.5, ends=9000.0, priority=1)]
        Backfill().schedule(queue, filled, MachineState((KEPT,), 6000.0))
        reads.append(queue.reads)
    assert reads[1] <= reads[0] + 5
    assert reads[1] < 200
