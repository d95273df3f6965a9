"""The place that preempted groups make is kept for the task that they make it for, until it has started."""

from __future__ import annotations

from dataclasses import replace

import pytest

from tests.sched.queues import GIB, device, task
from weft.sched.admission import decide
from weft.sched.policies import Backfill
from weft.sched.queue_state import MachineState, RunningGroup, UserShare
from weft.sched.simulator import simulate

URGENT = task("urgent", 7, 100.0, priority=2, arrival=1.0)
LONG = task("long", 0.1, 10_000.0, utilisation=0.4)
ANSWER = task("answer", 4, 100.0, utilisation=0.5, kind="inference", arrival=1.0)
KEPT = device(10 * GIB, workers=2, inference_workers=1)


def running(name, size=1.0, place="cuda:0", ends=1000.0, **more):
    return RunningGroup(name, place, (f"{name}-0",), int(size * GIB), 0.4, 0.0, ends, **more)


def test_what_is_less_urgent_does_not_take_the_place():
    """``answer`` has a worker of its own, and takes the memory that ``urgent`` needs once ``long`` has left."""
    decision = decide(Backfill(), [URGENT, ANSWER], [running("long", 0.1)], MachineState((KEPT,), 1.0))
    assert (decision.preempt, decision.started) == (("long",), ())
    assert "being freed" in decision.wait["answer"]
    small = replace(ANSWER, bytes=GIB)
    beside = decide(Backfill(), [URGENT, small], [running("long", 0.1)], MachineState((KEPT,), 1.0))
    assert (beside.preempt, beside.started) == (("long",), ("answer",)), "there is room for both"


def test_preempting_for_an_urgent_task_comes_to_an_end():
    run = simulate(Backfill(), [URGENT, LONG, ANSWER], [KEPT])
    assert {one.id: one.start for one in run.tasks} == {"long": 0.0, "urgent": 1.0, "answer": pytest.approx(101.0)}
    assert len(run.groups) == 4, "only 'long' is preempted, and once"


def test_the_place_is_kept_while_the_groups_still_leave():
    leaves = [running("long", 0.1, leaving=True)]
    decision = decide(Backfill(), [URGENT, ANSWER], leaves, MachineState((KEPT,), 1.0))
    assert (decision.preempt, decision.started) == ((), ())
    assert "save a checkpoint" in decision.wait["urgent"]
    as_urgent = [replace(leaves[0], priority=2)]
    decision = decide(Backfill(), [URGENT, ANSWER], as_urgent, MachineState((KEPT,), 1.0))
    assert decision.started == ("answer",), "it leaves for another reason"


def test_another_device_may_be_used_meanwhile():
    two = (KEPT, device(10 * GIB, workers=2, name="cuda:1", inference_workers=1))
    held = [running("long", 0.1), running("other", 0.1, "cuda:1", priority=2)]
    decision = decide(Backfill(), [URGENT, ANSWER], held, MachineState(two, 1.0))
    assert decision.preempt == ("long",)
    assert [start.device for start in decision.start] == ["cuda:1"]


@pytest.mark.parametrize(("workers", "kept"), [(1, 0), (2, 1), (3, 2)])
def test_a_training_preempts_whether_or_not_workers_are_kept_for_inference(workers, kept):
    machine = MachineState((device(workers=workers, inference_workers=kept),), 1.0)
    high = task("high", 1, 100.0, priority=5)
    assert decide(Backfill(), [high], [running("low")], machine).preempt == ("low",)
    never = task("never", 99, priority=9)
    assert decide(Backfill(), [never, high], [running("low")], machine).preempt == ("low",)


def test_nobody_is_preempted_for_a_task_that_has_just_started():
    two = (device(name="cuda:0"), device(10 * GIB, workers=2, name="cuda:1", inference_workers=1))
    held = [running("a", priority=1), running("b", 12, priority=1)]
    decision = decide(Backfill(), [task("urgent", 7, 20.0, priority=5)], held, MachineState(two, 1.0))
    assert (decision.started, decision.preempt) == (("urgent",), ())


def test_somebody_starts_and_another_makes_way_in_one_decision():
    two = (device(workers=1), device(workers=1, name="cuda:1"))
    first, second = task("first", 1, 50.0, priority=5), task("second", 1, 60.0, priority=5)
    decision = decide(Backfill(), [first, second], [running("low")], MachineState(two, 1.0))
    assert (decision.started, decision.preempt) == (("first",), ("low",))


def test_an_answer_goes_before_a_training_that_would_be_preempted_for_it():
    """The training is due first, and would run for longer than the answer can wait."""
    training = task("training", 1, 5000.0, deadline=30.0)
    answer = task("answer", 1, 1.0, kind="inference", latency_target=500.0, user="other")
    run = simulate(Backfill(), [training, answer], [device(workers=1)])
    assert [group.members for group in run.groups] == [("answer",), ("training",)]
    held = [running("low", ends=5000.0)]
    decision = decide(Backfill(), [training, answer], held, MachineState((device(workers=1),), 1.0))
    assert decision.preempt == ("low",)
    assert "save a checkpoint" in decision.wait["answer"]


def test_answers_take_no_more_of_a_device_than_another_users_training():
    """Of Ann's 20 device-seconds her training is yet to take 12 x 0.4 when Bob asks for an answer."""
    held = [running("ann's", users=("ann",), ends=13.0)]
    answer = task("answer", 1, 1.0, kind="inference", latency_target=5.0, user="bob")
    for had, preempted in ((15.0, ("ann's",)), (16.0, ())):
        machine = MachineState((device(workers=1),), 1.0, (UserShare("ann", 20.0), UserShare("bob", had)))
        assert decide(Backfill(), [answer], held, machine).preempt == preempted


def test_a_stream_of_answers_leaves_another_user_half_of_the_device():
    training = task("training", 1, 100.0, user="ann")
    answers = [
        task(f"answer{i}", 1, 1.0, kind="inference", latency_target=5.0, user="bob", arrival=float(i))
        for i in range(1000)
    ]
    run = simulate(Backfill(), [training, *answers], [device(workers=1)])
    assert {one.id: one.end for one in run.tasks}["training"] < 300.0


def test_what_was_preempted_has_not_waited_while_it_ran():
    """Its lane would have risen by three levels since it was started, and be before the urgent task."""
    tasks = [task("long", 1, 10_000.0), task("urgent", 1, 10.0, priority=2, arrival=2000.0)]
    run = simulate(Backfill(), tasks, [device(workers=1)])
    assert {one.id: one.start for one in run.tasks}["urgent"] == 2000.0
