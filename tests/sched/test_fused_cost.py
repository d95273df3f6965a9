"""What a fused group takes: its seconds are stretched by its members' work, and that work is counted once."""

from __future__ import annotations

import pytest

from tests.sched.queues import GIB, device, task
from weft.sched.device_plan import DevicePlan, GroupDraft, fused_cost
from weft.sched.interference import Interference
from weft.sched.policies import Backfill
from weft.sched.queue_state import MachineState, QueueDecision, RunningGroup
from weft.sched.simulator import simulate
from weft.serve.queue_db import Group
from weft.serve.state import ActiveGroup

MODEL = Interference()
FULL = [task(f"t{place}", 0.1, 10.0, join_key="k") for place in range(8)]


def draft_of(tasks):
    draft = GroupDraft(1.15, MODEL)
    for one in tasks:
        draft.add(one)
    return draft


def group_of(tasks):
    (start,) = Backfill().schedule(tasks, [], MachineState((device(),))).start
    assert len(start.members) == len(tasks)
    return start


def test_a_group_has_the_work_of_its_members_once():
    start = group_of(FULL)
    assert (start.seconds, start.utilisation) == (pytest.approx(8 * 10.0 * 0.88), pytest.approx(1.0))
    thin = group_of([task(f"t{place}", 0.1, 10.0, join_key="k", utilisation=0.05) for place in range(8)])
    assert (thin.seconds, thin.utilisation) == (10.0, pytest.approx(8 * 0.05 * 0.88))
    assert fused_cost(0.0, 0.0, 0.0, MODEL) == (0.0, 0.0)


def test_users_are_charged_what_the_device_does_for_them():
    start = group_of(FULL)
    group = Group("g", "cuda:0", "w", start.members, "g", start.bytes, start.seconds, "", 0.0)
    users = dict.fromkeys(start.members, "ann")
    running = RunningGroup("g", "cuda:0", start.members, start.bytes, start.utilisation)
    active = ActiveGroup(group, None, dict.fromkeys(start.members, 1), users, running, 0.0)  # type: ignore[arg-type]
    charged = active.will_have * len(users)
    assert charged == pytest.approx(70.4)
    assert charged <= sum(one.work for one in FULL)


@pytest.mark.parametrize("start_seconds", [0.0, 4.0])
def test_a_group_ends_when_it_is_predicted_to(start_seconds):
    share = 1.0 - start_seconds / 10.0
    tasks = [
        task(f"t{place}", 0.1, 10.0, join_key="k", utilisation=share, start_seconds=start_seconds) for place in range(8)
    ]
    run = simulate(Backfill(), tasks, [device()])
    assert len(run.groups) == 1
    assert run.makespan == pytest.approx(group_of(tasks).seconds)


def test_the_end_that_others_are_planned_by():
    plan = DevicePlan.of(device(), [], 100.0, MODEL)
    group = draft_of(FULL).footprint(100.0)
    assert plan.end_of(group) == pytest.approx(170.4)
    plan.start(group)
    assert plan.busy_seconds == pytest.approx(70.4)
    assert plan.demand == pytest.approx(7.04), "a second group gets little of the device"
    second = draft_of([task("second", 0.1, 10.0)]).footprint(100.0)
    assert plan.end_of(second) == pytest.approx(100.0 + 10.0 * 8.04 * 1.1)


def test_a_large_task_keeps_its_reservation_beside_a_fused_group():
    """The group ends in time, and would not if its members' work counted twice."""
    tasks = [task("large", 20, 1.0), *(task(f"t{place}", 1, 10.0, join_key="k", utilisation=0.3) for place in "abcd")]
    held = [RunningGroup("held", "cuda:0", ("held",), 20 * GIB, 0.0, 0.0, 11.0)]
    decision = Backfill().schedule(tasks, held, MachineState((device(workers=4),)))
    assert [len(group.members) for group in decision.start] == [4]


class Seen:
    """The default policy, and what it was told of running groups."""

    def __init__(self):
        self.groups = []

    def schedule(self, tasks, running, machine) -> QueueDecision:
        self.groups += running
        return Backfill().schedule(tasks, running, machine)


def test_a_policy_sees_the_mean_of_a_running_group():
    seen = Seen()
    simulate(seen, [*FULL, task("later", 24, arrival=30.0)], [device()])
    (group,) = seen.groups
    assert (group.utilisation, group.ends) == (pytest.approx(1.0), pytest.approx(70.4))
