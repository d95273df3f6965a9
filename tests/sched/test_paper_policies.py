"""CoGNN's policies against hand-worked examples and a transcription of its Algorithm 1."""

from __future__ import annotations

import math
from collections import deque

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from tests.sched.queues import GIB, device, task
from weft.sched.policies import BMC, LMCF, Base, find_policy
from weft.sched.queue_state import MachineState, QueuedTask, RunningGroup
from weft.sched.simulator import simulate
from weft.sched.task_queue import TaskQueue


def groups_of(policy, sizes, memory, workers=2):
    """The task groups (as sizes) that ``policy`` starts one after another, with bytes as they are (no threshold)."""
    queue = TaskQueue.of([QueuedTask(f"t{i}", size, 1.0) for i, size in enumerate(sizes)])
    found, started = [], 0
    while len(queue):
        machine = MachineState((device(memory, workers, started=started),))
        decision = policy.schedule(queue, [], machine)
        members = [queue.take(name) for name in decision.started]
        started += len(members)
        found.append([one.bytes for one in members])
    return found


def algorithm_1(ascending, workers, memory):
    """The paper's Algorithm 1, line by line."""
    ends = deque(ascending)
    size = len(ends)
    total, count, elements = 0, -1, workers
    groups: list[list[int]] = []
    for i in range(size):
        one = ends.pop() if i % 2 == 1 else ends.popleft()
        total += one
        if total >= memory or elements == workers:
            groups.append([])
            total, elements = one, 0
            count += 1
        groups[count].append(one)
        elements += 1
    return groups


def test_base_keeps_the_order_and_packs_greedily():
    assert groups_of(Base(safety=1.0), [4, 5, 3, 9, 1, 1], 10) == [[4, 5], [3], [9, 1], [1]]


def test_base_does_not_look_past_a_task_that_does_not_fit():
    assert groups_of(Base(safety=1.0), [6, 6, 1], 10, workers=3) == [[6], [6, 1]]


def test_base_takes_as_many_as_there_are_workers():
    assert groups_of(Base(safety=1.0), [1] * 7, 100, workers=3) == [[1] * 3, [1] * 3, [1]]


def test_lmcf_is_base_in_ascending_order_of_memory():
    assert groups_of(LMCF(safety=1.0), [9, 1, 5, 3, 4, 1], 10) == [[1, 1], [3, 4], [5], [9]]


def test_bmc_pairs_the_smallest_with_the_largest():
    # i = 0 pops 1 from the left, i = 1 pops 6 from the right, and so on.
    assert groups_of(BMC(safety=1.0), [4, 1, 6, 2, 5, 3], 100) == [[1, 6], [2, 5], [3, 4]]


def test_bmc_keeps_the_parity_over_a_group_that_memory_ended():
    # 1 (left), then 9 (right): 1 + 9 >= 10 opens a group. i = 2 pops 2 from the left: 9 + 2 >= 10 opens the next one,
    # i = 3 pops 8 from the right: 2 + 8 >= 10 again; i = 4 pops 3 from the left: 8 + 3 >= 10 again.
    assert groups_of(BMC(safety=1.0), [1, 2, 3, 8, 9], 10) == [[1], [9], [2], [8], [3]]
    assert algorithm_1([1, 2, 3, 8, 9], 2, 10) == [[1], [9], [2], [8], [3]]


def test_bmc_with_three_workers():
    assert groups_of(BMC(safety=1.0), [1, 2, 3, 4, 5, 6, 7], 12, workers=3) == [[1, 7, 2], [6, 3], [5, 4]]
    assert algorithm_1([1, 2, 3, 4, 5, 6, 7], 3, 12) == [[1, 7, 2], [6, 3], [5, 4]]


@settings(max_examples=200, deadline=None)
@given(
    sizes=st.lists(st.integers(1, 50), min_size=1, max_size=24),
    workers=st.integers(1, 4),
    memory=st.integers(50, 120),
)
def test_bmc_is_algorithm_1(sizes, workers, memory):
    assert groups_of(BMC(safety=1.0), sizes, memory, workers) == algorithm_1(sorted(sizes), workers, memory)


def test_the_safety_threshold_is_that_of_the_paper():
    # 10 + 10 GiB fit in 23 GiB only without the threshold of 1.15.
    tasks = [task("a", 10), task("b", 10)]
    machine = MachineState((device(23 * GIB - 1),))
    for name in ("base", "lmcf", "bmc"):
        decision = find_policy(name).schedule(tasks, [], machine)
        assert decision.started == ("a",)
        assert decision.start[0].bytes == math.ceil(10 * GIB * 1.15)


def test_the_reserved_part_is_not_for_tasks():
    tasks = [task("a", 10), task("b", 10)]
    machine = MachineState((device(29 * GIB, reserved_bytes=6 * GIB + 1),))
    assert Base().schedule(tasks, [], machine).started == ("a",)


def test_a_group_starts_only_when_the_last_one_is_done():
    machine = MachineState((device(),))
    running = [RunningGroup("g", "cuda:0", ("x",), GIB)]
    for name in ("base", "lmcf", "bmc"):
        decision = find_policy(name).schedule([task("a")], running, machine)
        assert decision.start == ()
        assert "running task group" in decision.reason("a")


def test_the_barrier_in_time():
    # Base runs (a, b) and (c, d); the short b leaves its worker idle until a is done. Backfill starts c at once.
    tasks = [task(name, 1, seconds, utilisation=0.1) for name, seconds in (("a", 9), ("b", 1), ("c", 9), ("d", 1))]
    base, backfill = (simulate(find_policy(name), tasks, [device()]) for name in ("base", "backfill"))
    start = {run.id: run.start for run in base.tasks}
    assert start["a"] == start["b"] == 0.0
    assert start["c"] == start["d"] > 9.0
    assert backfill.makespan < 12.0 < base.makespan


@pytest.mark.parametrize(
    ("name", "first", "then"),
    [
        ("base", ("t0", "t1"), ("t2", "asked", "t3")),
        ("lmcf", ("t0", "t1"), ("t2", "t3", "asked")),
        ("bmc", ("t0", "asked", "t1"), ("t3", "t2")),
        ("mps", ("t0", "t1", "asked"), ("t2", "t3")),
        ("sequential", ("t0",), ("t1",)),
        ("pipeswitch", ("asked",), ("t0",)),
    ],
)
def test_trainings_leave_the_workers_that_are_kept_for_inference(name, first, then):
    """Two of three workers may train."""
    tasks = [task(f"t{place}", 1 + place, arrival=float(place)) for place in range(3)]
    tasks += [task("asked", 9, kind="inference", arrival=2.5), task("t3", 8, arrival=3.0)]
    found, started = [], 0
    for _ in range(2):
        machine = MachineState((device(60 * GIB, workers=3, inference_workers=1, started=started),), 9.0)
        found.append(find_policy(name).schedule(tasks, [], machine).started)
        started += len(found[-1])
        tasks = [one for one in tasks if one.id not in found[-1]]
    assert found == [first, then]


def test_a_running_training_has_its_worker():
    machine = MachineState((device(workers=2, inference_workers=1),))
    running = [RunningGroup("g", "cuda:0", ("x",), GIB)]
    tasks = [task("t"), task("asked", kind="inference", arrival=1.0)]
    assert find_policy("mps").schedule(tasks, running, machine).started == ("asked",)
    assert find_policy("mps").schedule(tasks[:1], running, machine).started == ()
    answers = [RunningGroup("g", "cuda:0", ("x",), GIB, kind="inference")]
    assert find_policy("mps").schedule(tasks, answers, machine).started == ("t",)
