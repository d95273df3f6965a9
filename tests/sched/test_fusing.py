"""Fusing under every policy: alike tasks start as one group where asked, and what every policy keeps still holds."""

from __future__ import annotations

import pytest
from hypothesis import given, settings

from tests.sched.contract import work_off
from tests.sched.queues import GIB, device, machines, queues, task
from weft.sched.backfill import Backfill
from weft.sched.device_plan import GroupDraft
from weft.sched.interference import Interference
from weft.sched.policies import POLICIES, find_policy
from weft.sched.queue_state import MachineState
from weft.sched.simulator import simulate

ALIKE = [task(f"t{place}", 1, 10.0, join_key="k", shared_bytes=GIB // 2, utilisation=0.1) for place in range(4)]


def started(policy, tasks, size=26 * GIB, **more):
    return [set(start.members) for start in policy.schedule(tasks, [], MachineState((device(size, **more),))).start]


@pytest.mark.parametrize("name", POLICIES)
def test_alike_tasks_are_one_group_where_asked(name):
    assert started(find_policy(name, fuse=True), ALIKE, workers=1) == [{"t0", "t1", "t2", "t3"}]
    assert started(find_policy(name, fuse=False), ALIKE, workers=1) == [{"t0"}]


@pytest.mark.parametrize("name", POLICIES)
def test_by_default_backfill_alone_fuses(name):
    assert started(find_policy(name), ALIKE, workers=1) == started(
        find_policy(name, name == "backfill"), ALIKE, workers=1
    )


@pytest.mark.parametrize("name", [name for name in POLICIES if name != "mps"])
def test_a_fused_group_keeps_to_the_memory_that_is_free(name):
    # Three members take 0.5 + 3 * 0.5 GiB, with the margin 2.3 GiB.
    assert started(find_policy(name, fuse=True), ALIKE, int(2.4 * GIB), workers=1) == [{"t0", "t1", "t2"}]


@pytest.mark.parametrize("fuse", [True, False])
@pytest.mark.parametrize("name", POLICIES)
@given(tasks=queues(most=8), devices=machines)
@settings(max_examples=15, deadline=None)
def test_every_policy_keeps_its_contract(name, fuse, tasks, devices):
    work_off(find_policy(name, fuse), tasks, devices)


@pytest.mark.parametrize("name", ["lmcf", "bmc", "base"])
def test_fusing_shortens_a_queue_of_sweeps(name):
    fused, apart = (simulate(find_policy(name, fuse), ALIKE, [device(workers=1)]) for fuse in (True, False))
    assert fused.makespan < apart.makespan / 2


# ---- groups of several structures -------------------------------------------------------------------------------


def test_members_of_the_structure_of_the_first_join_before_others():
    tasks = [task(f"{kind}{place}", 1, 10.0 + place, join_key="k", structure=kind, utilisation=0.01)
             for place in range(3) for kind in "ba"]  # fmt: skip
    (group,) = Backfill(max_members=4).schedule(tasks, [], MachineState((device(workers=1),))).start
    assert set(group.members[:3]) == {"b0", "b1", "b2"}
    assert group.members[3].startswith("a")


def test_a_group_of_two_structures_sets_aside_what_both_need():
    draft = GroupDraft(1.0, Interference())
    shapes = {"a": (4, 3), "b": (6, 2)}
    for kind, (size, shared) in shapes.items():
        for place in range(2):
            draft.add(task(f"{kind}{place}", size, join_key="k", structure=kind, shared_bytes=shared * GIB,
                           common_bytes=GIB))  # fmt: skip
    # 3 + 2 * 1 and 2 + 2 * 4 GiB, of which one is there once.
    assert draft.footprint(0.0).bytes == 14 * GIB
