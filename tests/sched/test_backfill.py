"""The default policy: what starts first, what shares the device, what is fused, and what a decision costs."""

from __future__ import annotations

import pytest

from tests.sched.queues import GIB, CountingQueue, device, task
from weft.sched.policies import BMC, LMCF, Backfill
from weft.sched.queue_state import MachineState, RunningGroup, UserShare
from weft.sched.simulator import simulate


def decide(tasks, running=(), now=0.0, users=(), **more):
    return Backfill().schedule(tasks, list(running), MachineState((device(**more),), now, tuple(users)))


def first_of(tasks, **more):
    """The task that starts on a device with one worker."""
    return decide(tasks, workers=1, **more).started[0]


def running(name, size, *, utilisation=0.1, ends=100.0, **more):
    return RunningGroup(name, "cuda:0", (f"{name}-task",), int(size * GIB), utilisation, ends=ends, **more)


def test_the_shortest_goes_first():
    assert first_of([task("long", 1, 50), task("short", 1, 5)]) == "short"


def test_a_higher_priority_goes_before_a_shorter_task():
    assert first_of([task("short", 1, 5), task("urgent", 1, 50, priority=1)]) == "urgent"


def test_the_earliest_deadline_goes_first_within_a_priority():
    tasks = [task("short", 1, 1), task("late", 1, 5, deadline=90.0), task("soon", 1, 50, deadline=80.0)]
    assert first_of(tasks) == "soon"
    assert first_of([*tasks, task("urgent", 1, 50, priority=1)]) == "urgent"


def test_deadlines_put_no_user_before_another():
    tasks = [task("fair", 1, 5, user="ann"), *(task(f"due{i}", 1, 5, user="bob", deadline=1.0) for i in range(9))]
    assert first_of(tasks, users=[UserShare("ann", 10.0), UserShare("bob", 11.0)]) == "fair"
    assert first_of(tasks, users=[UserShare("ann", 11.0), UserShare("bob", 10.0)]) == "due0"


def test_waiting_raises_the_priority():
    old, new = task("old", arrival=0.0), task("new", arrival=1999.0, priority=2)
    assert first_of([old, new], now=1000.0) == "new"
    assert first_of([old, new], now=2000.0) == "old"


def test_a_lane_that_is_served_does_not_rise():
    old, new = task("old", user="ann", arrival=0.0), task("new", user="bob", arrival=1999.0, priority=2)
    served = UserShare("ann", 0.0, {"0": 1990.0})
    assert first_of([old, new], now=2000.0, users=[served]) == "new"


def test_a_long_task_is_passed_by_short_ones_for_a_bounded_time():
    long = task("long", 1, 100.0, arrival=0.0)
    assert first_of([long, task("short", 1, 1.0, arrival=900.0)], now=900.0) == "short"
    assert first_of([long, task("short", 1, 1.0, arrival=1001.0)], now=1001.0) == "long"


def test_the_user_who_had_less_goes_first():
    tasks = [task("a", 1, 5, user="ann"), task("b", 1, 50, user="bob")]
    assert first_of(tasks) == "a"
    assert first_of(tasks, users=[UserShare("ann", 100.0)]) == "b"


def test_users_take_turns_within_one_decision():
    tasks = [task(f"a{i}", 1, 5, user="ann", utilisation=0.1) for i in range(3)]
    tasks += [task(f"b{i}", 1, 50, user="bob", utilisation=0.1) for i in range(3)]
    assert set(decide(tasks, workers=2).started) == {"a0", "b0"}


def test_a_task_starts_beside_another_if_that_pays():
    beside = decide([task("a", utilisation=0.5)], [running("r", 1, utilisation=0.4)])
    assert beside.started == ("a",)
    assert "next to 1 running on cuda:0" in beside.start[0].why


def test_a_task_waits_if_sharing_only_slows_the_device_down():
    decision = decide([task("a", 1, 50, utilisation=1.0)], [running("r", 1, utilisation=1.0, ends=40.0)])
    assert decision.start == ()
    assert decision.wait == {"a": "would only slow down what runs on cuda:0"}


def test_a_short_task_does_not_wait_for_a_long_one_that_fills_the_device():
    full = running("r", 1, utilisation=1.0, ends=1000.0)
    assert decide([task("a", 1, 2, utilisation=1.0)], [full]).started == ("a",)


def test_memory_is_the_reason_in_one_sentence():
    decision = decide([task("a", 10)], [running("r", 20)])
    assert decision.wait == {"a": "needs 11.5 GiB, and cuda:0 has 6.00 GiB free"}


def test_small_tasks_do_not_starve_a_large_one():
    large, held = task("large", 20, 1.0), [running("r", 20, ends=100.0)]
    short, long = task("short", 4, 50.0, utilisation=0.1), task("long", 4, 500.0, utilisation=0.1)
    decision = decide([large, short, long], held, workers=4)
    assert decision.started == ("short",)  # ends before the memory for "large" is free
    assert "would delay a task that waits for memory" in decision.wait["long"]


def test_a_long_task_that_fits_beside_the_reservation_starts():
    large, held = task("large", 10, 1.0), [running("r", 20, ends=100.0)]
    decision = decide([large, task("thin", 2, 500.0, utilisation=0.1)], held, workers=4)
    assert decision.started == ("thin",)


def test_memory_is_kept_from_when_a_worker_is_free_as_well():
    """Memory is free at 10 and a worker for trainings at 100: the answer that ends at 60 is in nobody's way."""
    held = [running("i", 20, ends=10.0, kind="inference", priority=1), running("t", 1, ends=100.0, priority=1)]
    answer = task("answer", 4, 50.0, utilisation=0.1, kind="inference")
    decision = decide([task("large", 21, 1.0, priority=1), answer], held, workers=4, inference_workers=3)
    assert decision.started == ("answer",)


def test_tasks_with_one_join_key_become_one_group():
    tasks = [task(f"t{i}", 2, 10, join_key="k", shared_bytes=GIB, utilisation=0.1) for i in range(6)]
    decision = decide(tasks)
    assert [len(group.members) for group in decision.start] == [6]
    assert decision.start[0].bytes == pytest.approx(1.15 * 7 * GIB, abs=2)  # one shared GiB and six of their own
    assert "fused with 5 other tasks" in decision.start[0].why


def test_a_group_takes_what_fits():
    tasks = [task(f"t{i}", 6, 10, join_key="k", shared_bytes=GIB, utilisation=0.1) for i in range(6)]
    assert [len(group.members) for group in decide(tasks).start] == [4]


def test_beyond_eight_members_a_group_grows_only_while_the_device_has_room():
    busy = [task(f"t{i}", 0.1, 10, join_key="k", utilisation=0.9) for i in range(40)]
    idle = [task(f"t{i}", 0.1, 10, join_key="k", utilisation=0.05) for i in range(40)]
    assert len(decide(busy).start[0].members) == 8
    assert len(decide(idle).start[0].members) == 22  # 22 * 0.05 * 0.88 < 1


@pytest.mark.parametrize("change", [{"fusable": False}, {"attempts": 1}, {"join_key": ""}])
def test_what_may_not_be_fused_runs_alone(change):
    tasks = [task(f"t{i}", 1, 10, **{"join_key": "k", "utilisation": 0.1, **change}) for i in range(2)]
    assert [len(group.members) for group in decide(tasks).start] == [1, 1]


def test_an_inference_task_starts_beside_training():
    asked = task("asked", 1, 0.5, kind="inference", latency_target=5.0)
    decision = decide([asked], [running("r", 1, utilisation=1.0, ends=0.1)])
    assert decision.started == ("asked",)


def test_training_does_not_make_inference_miss_its_target():
    answer = running("i", 1, utilisation=0.9, kind="inference", slowdown_limit=1.2)
    decision = decide([task("a", 1, 50, utilisation=0.9)], [answer])
    assert decision.start == ()
    assert "miss its latency target" in decision.wait["a"]


def test_workers_kept_for_inference():
    tasks = [task("t", utilisation=0.1), task("i", 1, 0.1, kind="inference", latency_target=9.0, utilisation=0.1)]
    held = [running("r", 1)]
    assert decide(tasks, held, workers=2, inference_workers=1).started == ("i",)
    assert decide(tasks[:1], held, workers=2, inference_workers=1).start == ()


def test_the_longest_task_starts_in_time():
    # Alone, "long" leaves 90 % of the device idle for 100 s; the other tasks are about as much work.
    tasks = [task("long", 1, 100.0, utilisation=0.1), *(task(f"s{i}", 1, 10.0, utilisation=1.0) for i in range(8))]
    run = simulate(Backfill(), tasks, [device()])
    assert {one.id: one.start for one in run.tasks}["long"] == 0.0
    assert run.makespan < 120.0


def test_without_a_second_worker_the_shortest_goes_first():
    tasks = [task("long", 1, 100.0, utilisation=0.1), task("short", 1, 10.0, utilisation=0.1)]
    assert first_of(tasks) == "short"
    assert decide(tasks, workers=2, inference_workers=1).started == ("short",), "the other one is not for trainings"


def test_large_tasks_begin_while_there_is_something_to_run_beside_them():
    # Two of the large ones never fit together, and each leaves half of the device idle: 40 s one after another.
    large = [task(name, 15, 10.0, utilisation=0.5) for name in "abcd"]
    small = [task(f"s{place}", 1, 5.0, utilisation=0.1) for place in range(12)]
    ours, lmcf, bmc = (
        simulate(policy, [*large, *small], [device(workers=3)]) for policy in (Backfill(), LMCF(), BMC())
    )
    assert ours.makespan < 42.0 < 50.0 < bmc.makespan
    assert ours.metrics().mean_jct < lmcf.metrics().mean_jct


def test_a_large_task_passes_only_tasks_of_its_own_lane():
    large = [task(name, 15, 10.0, utilisation=0.1) for name in "abc"]
    assert decide([*large, task("s", 1, 1.0, utilisation=0.1)], workers=2).started[0] == "a"
    other = task("s", 1, 1.0, utilisation=0.1, user="other")
    assert decide([*large, other], workers=2).started == ("s", "a")
    assert decide([*large, task("s", 1, 1.0, priority=1)], workers=2).started[0] == "s"


def test_what_waits_for_memory_is_passed_by_none_that_would_delay_it():
    tasks = [task("first", 16, 1.0, utilisation=0.1), task("long", 8, 100.0, utilisation=0.1)]
    assert decide(tasks, [running("r", 10, ends=5.0)], workers=3).started == ()


def test_two_devices_share_the_load():
    devices = tuple(device(name=f"cuda:{i}", workers=1) for i in range(2))
    decision = Backfill().schedule([task("a"), task("b")], [], MachineState(devices))
    assert {group.device for group in decision.start} == {"cuda:0", "cuda:1"}


def test_a_device_that_holds_the_graph_is_preferred():
    devices = tuple(device(name=f"cuda:{i}") for i in range(2))
    held = [RunningGroup("r", "cuda:1", ("x",), GIB, 0.1, ends=9.0, graph="cora")]
    start = Backfill().schedule([task("a", graph="cora", utilisation=0.1)], held, MachineState(devices)).start
    assert start[0].device == "cuda:1"


def reads_of_one_decision(count):
    queue = CountingQueue()
    for number in range(count):
        queue.add(task(f"t{number}", 1 + number % 7, 1.0 + number % 97, user=f"u{number % 5}"))
    held = [running("r", 1, utilisation=1.0, ends=0.5)]
    Backfill().schedule(queue, held, MachineState((device(workers=4),)))
    return queue.reads


def test_the_cost_of_a_decision_does_not_grow_with_the_queue():
    few, many = reads_of_one_decision(500), reads_of_one_decision(5000)
    assert many <= few + 5
    assert many < 200


def test_a_group_has_at_most_the_members_that_the_policy_allows():
    tasks = [task(f"t{i}", 0.1, 10, join_key="k", utilisation=0.05) for i in range(8)]
    decision = Backfill(max_members=3).schedule(tasks, [], MachineState((device(workers=1),), 0.0))
    assert [len(start.members) for start in decision.start] == [3]
