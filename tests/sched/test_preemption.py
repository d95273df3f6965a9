"""Preemption: something urgent makes groups of lower priority save a checkpoint and return to the queue."""

from __future__ import annotations

import pytest

from weft.core.errors import WeftError
from weft.sched.admission import decide
from weft.sched.backfill import Backfill
from weft.sched.queue_state import DeviceState, GroupStart, MachineState, QueueDecision, QueuedTask, RunningGroup
from weft.sched.simulator import simulate

GIB = 1 << 30
DEVICE = DeviceState("d", 20 * GIB, workers=2)
MACHINE = MachineState((DEVICE,), now=100.0)


def running(name: str, gib: int, ends: float = 1000.0, **more) -> RunningGroup:
    return RunningGroup(name, "d", (f"{name}-0",), gib * GIB, started=0.0, ends=ends, **more)


def urgent(gib: int = 8, **more) -> QueuedTask:
    return QueuedTask("urgent", gib * GIB, 10.0, **{"priority": 5, **more})


def test_without_a_free_worker_the_lowest_priority_makes_way():
    groups = [running("a", 2, priority=1), running("b", 2)]
    decision = decide(Backfill(), [urgent()], groups, MACHINE)
    assert (decision.preempt, decision.start) == (("b",), ())
    assert "save a checkpoint" in decision.reason("urgent")


def test_without_memory_as_many_make_way_as_are_needed():
    three = MachineState((DeviceState("d", 20 * GIB, workers=3),), now=100.0)
    groups = [running("a", 9), running("b", 9)]
    assert decide(Backfill(), [urgent(10)], groups, three).preempt == ("a", "b")
    assert decide(Backfill(), [urgent(5)], groups, three).preempt == ("a",)


@pytest.mark.parametrize(
    "group",
    [running("a", 9, priority=5), running("a", 9, ends=102.0), running("a", 9, leaving=True)],
    ids=["as urgent", "ends soon", "leaving already"],
)
def test_who_does_not_make_way(group):
    one = MachineState((DeviceState("d", 20 * GIB, workers=1),), now=100.0)
    assert decide(Backfill(), [urgent()], [group], one).preempt == ()


def test_nobody_is_preempted_for_what_never_fits():
    decision = decide(Backfill(), [urgent(30)], [running("a", 9), running("b", 9)], MACHINE)
    assert decision.preempt == ()
    assert "urgent" in decision.refuse


def test_a_preempted_task_goes_on_where_it_was():
    tasks = [QueuedTask("long", GIB, 100.0), QueuedTask("urgent", GIB, 10.0, priority=3, arrival=40.0)]
    run = simulate(Backfill(), tasks, [DeviceState("d", 4 * GIB, workers=1)])
    ends = {one.id: (one.start, one.end) for one in run.tasks}
    assert ends["urgent"] == pytest.approx((40.0, 50.0))
    assert ends["long"] == pytest.approx((0.0, 110.0))
    assert [(group.members, group.start, group.end) for group in run.groups] == [
        (("long",), 0.0, 40.0), (("urgent",), 40.0, 50.0), (("long",), 50.0, 110.0)
    ]  # fmt: skip


def test_nobody_is_preempted_for_what_would_wait_all_the_same():
    """Beside ``first``, which fills the device, ``urgent`` only slows down: ``light`` would start again instead."""
    devices = [DeviceState("small", 12 * GIB, workers=2), DeviceState("large", 26 * GIB, workers=2)]
    tasks = [
        QueuedTask("asked", GIB, 640.0, utilisation=0.92, kind="inference", latency_target=10.0, start_seconds=190.0),
        QueuedTask("light", GIB, 635.0, utilisation=0.2, arrival=5.0, turn_seconds=0.001),
        QueuedTask("first", 5 * GIB, 344.0, utilisation=0.8, priority=2, start_seconds=103.0),
        QueuedTask("short", GIB, 68.0, utilisation=1e-6, priority=2, turn_seconds=1e-6),
        QueuedTask("urgent", GIB, 955.0, utilisation=0.64, arrival=5.0, priority=2, turn_seconds=1e-6),
        QueuedTask("other", GIB, 450.0, utilisation=0.86, priority=2, start_seconds=135.0),
    ]
    run = simulate(Backfill(), tasks, devices)  # went on preempting without end
    assert {one.id for one in run.tasks} == {one.id for one in tasks}
    assert len(run.groups) <= 2 * len(tasks)


class Wrong:
    def __init__(self, decision: QueueDecision) -> None:
        self._decision = decision

    def schedule(self, tasks, running, machine) -> QueueDecision:
        return self._decision


def start(*names: str) -> GroupStart:
    return GroupStart("d", names, 1, 1.0, 1.0, "")


@pytest.mark.parametrize(
    ("decision", "told"),
    [
        (QueueDecision((start("ghost"),)), "does not wait"),
        (QueueDecision((start("urgent"), start("urgent"))), "started twice"),
        (QueueDecision((start("urgent"),), refuse={"urgent": "no"}), "is refused"),
        (QueueDecision((start("urgent"),)), "3 groups on d, which has 2 workers"),
        (QueueDecision(preempt=("ghost",)), "does not run"),
    ],
)
def test_a_decision_that_cannot_be_carried_out_is_an_error(decision, told):
    groups = [running("a", 1), running("b", 1)] if "workers" in told else []
    with pytest.raises(WeftError, match=told):
        decide(Wrong(decision), [urgent()], groups, MACHINE)
