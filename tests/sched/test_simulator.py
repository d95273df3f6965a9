"""The simulator against schedules worked out by hand, its figures, and queues of ten thousand tasks."""

from __future__ import annotations

from dataclasses import replace

import pytest

from tests.sched.queues import GIB, device, task
from weft.core.errors import SpecError, WeftError
from weft.planner.machine_profiles import profile
from weft.sched.interference import Interference
from weft.sched.policies import POLICIES, find_policy
from weft.sched.queue_state import GroupStart, MachineState, QueueDecision
from weft.sched.queues import PAPER_QUEUES, paper_queue, random_queue
from weft.sched.simulator import MOST_RESTLESS, Conditions, percentile, simulate

NO_CONTENTION = Conditions(Interference(contention=0.0))
V100 = profile("v100-32g")


def ends(run):
    return {one.id: pytest.approx(one.end) for one in run.tasks}


def test_one_after_another():
    tasks = [task("a", 1, 4.0), task("b", 1, 2.0, arrival=1.0), task("c", 1, 1.0, arrival=20.0)]
    run = simulate(find_policy("sequential"), tasks, [device()])
    assert ends(run) == {"a": 4.0, "b": 6.0, "c": 21.0}
    figures = run.metrics()
    assert figures.makespan == pytest.approx(21.0)
    assert figures.mean_jct == pytest.approx((4 + 5 + 1) / 3)
    assert figures.mean_queuing == pytest.approx((0 + 3 + 0) / 3)
    assert figures.utilisation == pytest.approx(7 / 21)
    assert figures.p95_jct == pytest.approx(5.0)


def test_two_that_fill_the_device_share_it():
    # Both at half speed until b has done its 2 s at t = 4; a then has 2 of 4 s left.
    tasks = [task("a", 1, 4.0), task("b", 1, 2.0)]
    assert ends(simulate(find_policy("base"), tasks, [device()], NO_CONTENTION)) == {"b": 4.0, "a": 6.0}


def test_kernels_take_turns():
    # b, with kernels of a third, gets a quarter of the device until a has done its 3 s at t = 4.
    tasks = [task("a", 1, 3.0, turn_seconds=3e-5), task("b", 1, 2.0, turn_seconds=1e-5)]
    assert ends(simulate(find_policy("base"), tasks, [device()], NO_CONTENTION)) == {"a": 4.0, "b": 5.0}


def test_two_that_leave_room_do_not_slow_each_other_down():
    tasks = [task("a", 1, 4.0, utilisation=0.5), task("b", 1, 2.0, utilisation=0.5)]
    assert ends(simulate(find_policy("base"), tasks, [device()], NO_CONTENTION)) == {"b": 2.0, "a": 4.0}


def test_a_start_asks_nothing_of_the_device():
    # a trains alone from 1 to 2, b starts meanwhile; then both at half speed until a has done its 3 s at t = 6.
    tasks = [
        task("a", 1, 4.0, utilisation=0.75, start_seconds=1.0),
        task("b", 1, 6.0, utilisation=2 / 3, start_seconds=2.0),
    ]
    run = simulate(find_policy("base"), tasks, [device()], NO_CONTENTION)
    assert ends(run) == {"a": 6.0, "b": 8.0}
    assert run.busy_seconds == pytest.approx(7.0)
    assert run.decisions == 1  # a policy has nothing to decide when a task has started
    contended = Conditions(Interference(contention=1.0))
    tasks = [task("a", 1, 4.0), task("b", 1, 3.0, utilisation=0.0, start_seconds=3.0)]
    assert ends(simulate(find_policy("base"), tasks, [device()], contended)) == {"b": 3.0, "a": 4.0}


def test_others_slow_the_queue_down():
    # One that takes half of the device beside others that want all of it: 1.5 times as much as there is.
    conditions = Conditions(Interference(contention=0.0), background=1.0)
    run = simulate(find_policy("base"), [task("a", 1, 4.0, utilisation=0.5)], [device()], conditions)
    assert ends(run) == {"a": 6.0}


def test_a_policy_decides_by_what_is_predicted_and_tasks_take_what_is_actual():
    tasks = [task("short", 1, 1.0, utilisation=0.9), task("long", 1, 5.0, utilisation=0.9)]
    actual = [task("short", 1, 7.0), task("long", 1, 2.0)]
    run = simulate(find_policy("backfill"), tasks, [device(workers=1)], NO_CONTENTION, actual=actual)
    assert ends(run) == {"short": 7.0, "long": 9.0}  # it believes that this is shortest first
    assert [group.members for group in run.groups] == [("short",), ("long",)]
    only = simulate(find_policy("backfill"), tasks, [device(workers=1)], NO_CONTENTION, actual=actual[1:])
    assert ends(only) == {"short": 1.0, "long": 3.0}
    with pytest.raises(SpecError, match="actual task 'other' is not in the queue"):
        simulate(find_policy("base"), tasks, [device()], actual=[task("other")])


def test_a_task_that_was_preempted_has_the_rest_of_its_actual_seconds_left():
    tasks = [task("long", 4, 20.0), task("urgent", 4, 1.0, arrival=2.0, priority=5)]
    one = [device(workers=1)]
    run = simulate(find_policy("backfill"), tasks, one, NO_CONTENTION, actual=[task("long", 4, 30.0)])
    assert ends(run) == {"urgent": 3.0, "long": 31.0}


def test_a_task_that_was_preempted_starts_again():
    long = task("long", 4, 20.0, utilisation=0.9, start_seconds=2.0)
    tasks = [long, task("urgent", 4, 1.0, arrival=5.0, priority=5)]
    run = simulate(find_policy("backfill"), tasks, [device(workers=1)], NO_CONTENTION)
    assert ends(run) == {"urgent": 6.0, "long": 23.0}  # 3 of its 18 s of training were done
    assert run.busy_seconds == pytest.approx(18.0 + 1.0)
    early = [long, task("urgent", 4, 1.0, arrival=1.0, priority=5)]
    run = simulate(find_policy("backfill"), early, [device(workers=1)], NO_CONTENTION)
    assert ends(run) == {"urgent": 2.0, "long": 22.0}


def test_too_much_memory_makes_the_device_page():
    tasks = [task("a", 20, 4.0, utilisation=0.5), task("b", 20, 4.0, utilisation=0.5)]
    conditions = Conditions(Interference(contention=0.0, paging=10.0))
    run = simulate(find_policy("mps"), tasks, [device()], conditions)
    assert ends(run) == {"a": 40.0, "b": 40.0}
    assert run.peak_bytes == 40 * GIB


def test_members_of_a_fused_group_end_one_by_one_and_the_group_with_the_last():
    tasks = [task(f"t{i}", 1, 1.0 + i, join_key="k", utilisation=0.1) for i in range(3)]
    run = simulate(find_policy("backfill"), tasks, [device()])
    assert ends(run) == {"t0": 1.0, "t1": 2.0, "t2": 3.0}
    assert [(sorted(group.members), group.end) for group in run.groups] == [(["t0", "t1", "t2"], pytest.approx(3.0))]


def test_a_dependency_may_arrive_later():
    tasks = [task("child", 1, 1.0, after=("parent",)), task("parent", 1, 2.0, arrival=5.0)]
    assert ends(simulate(find_policy("backfill"), tasks, [device()])) == {"parent": 7.0, "child": 8.0}


def test_what_depends_on_a_refused_task_is_refused_whenever_it_arrives():
    tasks = [task("huge", 99), task("child", 1, 1.0, after=("huge",), arrival=9.0), task("a", 1, 50.0)]
    run = simulate(find_policy("backfill"), tasks, [device()])
    assert set(run.refused) == {"huge", "child"}
    assert set(ends(run)) == {"a"}


def test_an_unknown_dependency_is_an_error():
    with pytest.raises(SpecError, match="task 'a': after='zz' is not in the queue"):
        simulate(find_policy("base"), [task("a", after=("zz",))], [device()])


def test_a_policy_that_starts_nothing_is_reported():
    class Never:
        def schedule(self, tasks, running, machine):
            return QueueDecision(rest="never")

    with pytest.raises(WeftError, match="Never starts nothing"):
        simulate(Never(), [task("a")], [device()])


def test_a_policy_that_does_not_come_to_rest_is_reported():
    class PingPong:
        def schedule(self, tasks, running, machine):
            if running:
                return QueueDecision(preempt=(running[0].id,))
            start = GroupStart("cuda:0", (next(iter(tasks)).id,), GIB, 1.0, 1.0, "")
            return QueueDecision((start,), again=machine.now)

    class Restless:
        def schedule(self, tasks, running, machine):
            return QueueDecision(rest="later", again=machine.now)

    tasks = [task("a", 1, 4.0), task("b", 1, 4.0)]
    with pytest.raises(WeftError, match=r"PingPong has decided .* times at 0 s without coming to rest"):
        simulate(PingPong(), tasks, [device()])
    with pytest.raises(WeftError, match=r"Restless has decided .* times at 0 s without coming to rest"):
        simulate(Restless(), tasks, [device()])


def test_a_policy_decides_often_at_one_time_if_something_ends():
    tasks = [task(f"t{place}", 1, 0.0) for place in range(MOST_RESTLESS + 10)]
    assert simulate(find_policy("sequential"), tasks, [device()]).makespan == 0.0


def test_time_goes_on_once_nothing_is_queued():
    """``third`` does not pay beside ``first`` yet, which has its graph, and starts on the other device."""
    tasks = [task("first", 1, 100.0, graph="a"), task("third", 1, 50.0, graph="a", start_seconds=1.0)]
    devices = [device(name="cuda:0"), device(name="cuda:1")]
    machine = MachineState(tuple(devices))
    assert find_policy("backfill").schedule(tasks, [], machine).again is None
    assert simulate(find_policy("backfill"), tasks, devices).makespan == pytest.approx(100.0)

    class Again:
        def schedule(self, tasks, running, machine):
            return replace(find_policy("base").schedule(tasks, running, machine), again=machine.now + 1.0)

    assert simulate(Again(), tasks, devices[:1]).makespan > 100.0


def test_a_user_is_charged_once_for_a_task_that_was_preempted():
    shares = []

    class Seen:
        def schedule(self, tasks, running, machine):
            shares.append({share.user: share.device_seconds for share in machine.users})
            return find_policy("backfill").schedule(tasks, running, machine)

    tasks = [task("long", 4, 20.0, user="ann"), task("urgent", 4, 1.0, arrival=5.0, priority=5, user="bob")]
    simulate(Seen(), [*tasks, task("last", 4, 1.0, arrival=50.0)], [device(workers=1)])
    assert shares[-1] == {"ann": pytest.approx(20.0), "bob": pytest.approx(1.0)}


@pytest.mark.parametrize("name", PAPER_QUEUES)
def test_the_default_policy_on_the_queues_of_the_paper(name):
    tasks = paper_queue(name, V100)
    figures = {p: simulate(find_policy(p), tasks, [device()]).metrics() for p in POLICIES}
    mine = figures["backfill"]
    assert all(figures[p].peak_bytes <= 26 * GIB for p in POLICIES if p != "mps")
    assert mine.mean_jct < figures["lmcf"].mean_jct < figures["base"].mean_jct
    assert mine.makespan < figures["bmc"].makespan
    assert mine.refused == 0


@pytest.mark.rest
def test_ten_thousand_tasks_of_all_kinds():
    tasks = random_queue(10_000, seed=1, machine=V100, gap_seconds=4.0)
    run = simulate(find_policy("backfill"), tasks, [device(workers=4)])
    assert len(run.tasks) + len(run.refused) == 10_000
    assert run.peak_bytes <= 26 * GIB
    assert len(run.groups) < 10_000  # some were fused


def test_percentile():
    assert percentile([], 0.95) == 0.0
    assert percentile([3.0], 0.95) == 3.0
    assert percentile(list(range(1, 101)), 0.95) == 95
