"""Preempted groups go on as the policy allows, and nothing that happens to their members stops the others."""

from __future__ import annotations

import os
import time
from contextlib import suppress
from pathlib import Path

import pytest

from tests.serve.faulty_models import Plain
from tests.serve.scheduler_bench import GIB, MIB, PLAN, Bench
from tests.serve.serving import opened
from weft.core.errors import WeftError
from weft.sched.backfill import Backfill
from weft.serve.queue_db import Submission
from weft.serve.supervisor import MOST_PLANNED


class Slow(Plain):
    """Says that it has begun, and trains once a file is there."""

    def go_wrong(self, y):
        folder = Path(os.environ["WEFT_TEST_FOLDER"])
        (folder / "begun").touch()
        while not (folder / "go on").exists():
            time.sleep(0.05)
        return y


@pytest.fixture
def bench(tmp_path):
    made = Bench(tmp_path)
    yield made
    made.db.close()


def test_a_preempted_group_goes_on_as_it_was(bench):
    group, names = bench.preempted(3)
    bench.db.cancel(names[1])
    bench.scheduler.schedule()
    assert bench.states(names) == ["running", "cancelled", "running"]
    assert bench.group_state(group) == "running"
    assert not bench.state.resumable
    [sent] = bench.pool.workers["cpu/0"].sent
    assert [task["name"] for task in sent["tasks"]] == names
    assert (sent["cancel"], sent["split"], sent["budget"]) == ([names[1]], [], 100 * MIB)


# Members that were deleted


def test_a_member_that_was_deleted_leaves_the_others_to_go_on_alone(bench):
    group, names = bench.preempted(3)
    bench.db.cancel(names[0])
    bench.forget(names[0])
    other = bench.planned(user="somebody else")
    for _ in range(2):
        bench.scheduler.schedule()
    assert bench.group_state(group) == "dissolved"
    assert sorted(bench.states(names[1:] + other)) == ["planned", "planned", "running"]
    assert [bench.db.get(name).plan["from"] for name in names[1:]] == [group.folder] * 2
    assert "another member was deleted" in bench.notes(names[1])


@pytest.mark.parametrize("deleted", [0, 1, 2])
def test_a_group_without_members_is_dissolved(bench, deleted):
    group, names = bench.preempted(2)
    for name in names:
        bench.db.cancel(name)
    for name in names[:deleted]:
        bench.forget(name)
    bench.scheduler.schedule()
    assert bench.group_state(group) == "dissolved"
    assert not bench.state.resumable


def test_what_is_likely_next_is_found_though_a_member_was_deleted(bench):
    _, names = bench.preempted(2, graph_path="g")
    bench.planned(priority=3)
    bench.scheduler.schedule()  # the worker is busy, and told of the group
    assert bench.pool.workers["cpu/0"].sent[-1] == {"do": "prefetch", "graph": "g"}
    bench.db.cancel(names[0])
    bench.forget(names[0])
    bench.scheduler.schedule()
    bench.scheduler.schedule()
    assert bench.db.get(names[1]).plan["alone"]


def test_a_running_member_that_was_deleted_leaves_its_group(bench):
    _, names = bench.preempted(2)
    bench.scheduler.schedule()
    bench.forget(names[0])
    bench.groups.heartbeat()
    [active] = bench.state.active.values()
    assert not active.leaving
    assert bench.pool.workers["cpu/0"].sent[-1] == {"do": "cancel", "group": active.group.id, "names": [names[0]]}


# What is more urgent


def test_a_task_that_depends_on_a_member_does_not_hold_the_group_back(bench):
    _, names = bench.preempted(2)
    later = bench.planned(priority=1, after=(names[0],))
    bench.scheduler.schedule()
    assert bench.states(names + later) == ["running", "running", "planned"]


def test_a_task_that_waits_to_be_tried_again_does_not_hold_the_group_back(bench):
    _, names = bench.preempted(2)
    [later] = bench.planned(priority=1)
    bench.state.not_before[later] = time.monotonic() + 60.0
    bench.scheduler.schedule()
    assert bench.states([*names, later]) == ["running", "running", "planned"]


def test_a_task_that_is_more_urgent_goes_first(bench):
    _, names = bench.preempted(2)
    urgent = bench.planned(priority=1)
    bench.scheduler.schedule()
    assert bench.states(names + urgent) == ["planned", "planned", "running"]
    assert len(bench.state.resumable) == 1
    assert all(bench.state.why[name] for name in names)


def test_tasks_that_were_queued_with_a_group_do_not_pass_it(bench):
    alike = bench.planned(2, plan={**PLAN, "seconds": 1.0})
    _, names = bench.preempted(2, plan={**PLAN, "seconds": 1.0})
    alike += bench.planned(2, plan={**PLAN, "seconds": 1.0})
    bench.scheduler.schedule()
    assert bench.states(names + alike) == ["running"] * 2 + ["planned"] * 4


def test_waiting_raises_a_group_as_it_does_tasks(bench):
    bench.scheduler.policy = Backfill(age_seconds=0.05)
    _, names = bench.preempted(2)
    time.sleep(0.2)  # four levels
    urgent = bench.planned(priority=2)
    bench.scheduler.schedule()
    assert bench.states(names + urgent) == ["running", "running", "planned"]


# Devices


def test_a_group_goes_on_elsewhere_if_its_device_is_gone(bench):
    group, names = bench.preempted(2, device="cpu@0123abcd")
    bench.scheduler.schedule()
    assert bench.states(names) == ["running"] * 2
    [active] = bench.state.active.values()
    assert (active.group.id, active.group.device) == (group.id, "cpu")


def test_members_begin_anew_on_devices_of_another_kind(bench):
    group, names = bench.preempted(2, device="cuda:1")
    bench.scheduler.schedule()
    assert bench.states(names) == ["queued"] * 2
    assert [bench.db.get(name).plan for name in names] == [None] * 2
    assert bench.group_state(group) == "dissolved"
    assert "the checkpoint of its group is of cuda, and this server has cpu" in bench.notes(names[1])


def test_a_group_waits_for_devices_that_have_not_started(tmp_path):
    bench = Bench(tmp_path, devices=("cpu", "cpu@other"))
    bench.pool.room = {"cpu": 50 * MIB}
    group, names = bench.preempted(2, device="cpu@other")
    bench.scheduler.schedule()
    assert bench.states(names) == ["planned"] * 2
    assert bench.group_state(group) == "preempted"
    bench.pool.room["cpu@other"] = GIB
    bench.scheduler.schedule()
    assert bench.states(names) == ["running"] * 2
    assert [active.group.device for active in bench.state.active.values()] == ["cpu@other"]


# Claims that fail


def test_a_group_stays_preempted_if_a_member_is_cancelled_while_it_starts(bench, monkeypatch):
    group, names = bench.preempted(3)
    claim_all = bench.db.claim_all

    def cancelled_first(*arguments):
        monkeypatch.setattr(bench.db, "claim_all", claim_all)
        bench.db.cancel(names[0])
        return claim_all(*arguments)

    monkeypatch.setattr(bench.db, "claim_all", cancelled_first)
    bench.scheduler.schedule()
    assert bench.state.dirty
    assert (bench.group_state(group), list(bench.state.resumable)) == ("preempted", [group.id])
    bench.scheduler.schedule()
    assert bench.states(names) == ["cancelled", "running", "running"]
    assert bench.group_state(group) == "running"


def test_a_group_stays_preempted_if_its_start_cannot_be_written(bench, monkeypatch):
    group, names = bench.preempted(2)

    def full(*_):
        raise WeftError("the queue could not be written (database or disk is full); nothing was changed")

    with monkeypatch.context() as patched:
        patched.setattr(bench.db, "claim_all", full)
        with suppress(WeftError):
            bench.scheduler.schedule()
    assert list(bench.state.resumable) == [group.id]
    bench.scheduler.schedule()
    assert bench.states(names) == ["running"] * 2
    assert [task["name"] for task in bench.pool.workers["cpu/0"].sent[0]["tasks"]] == names


# Members that are paused while the group waits


def test_a_member_that_is_paused_while_its_group_waits_goes_on_from_the_checkpoint(bench):
    group, names = bench.preempted(3)
    bench.db.pause(names[1])
    bench.scheduler.schedule()
    assert bench.states(names) == ["running", "paused", "running"]
    plan = bench.db.get(names[1]).plan
    assert (plan["from"], plan["alone"]) == (group.folder, True)
    runs = bench.state.options.runs
    [sent] = bench.pool.workers["cpu/0"].sent
    taken = {"from": str(runs / group.folder), "member": names[1], "into": str(runs / names[1])}
    assert sent["split"] == [taken]  # before the group saves a checkpoint without it


def test_a_member_that_is_resumed_before_its_group_starts_goes_on_with_it(bench):
    _, names = bench.preempted(2)
    bench.planned(priority=3)
    bench.db.pause(names[1])
    bench.scheduler.schedule()
    bench.db.resume(names[1])
    bench.scheduler.schedule()
    assert "from" not in bench.db.get(names[1]).plan
    assert len(bench.state.resumable) == 1


def test_members_that_are_all_paused_wait_and_go_on_as_their_group(bench):
    group, names = bench.preempted(2)
    for name in names:
        bench.db.pause(name)
    bench.scheduler.schedule()
    assert (bench.group_state(group), bench.states(names)) == ("preempted", ["paused"] * 2)
    for name in names:
        bench.db.plan(bench.db.resume(name).id, bench.db.get(name).plan)
    bench.scheduler.schedule()
    assert (bench.group_state(group), bench.states(names)) == ("running", ["running"] * 2)


# What the policy allows


def test_a_group_leaves_the_workers_alone_that_are_kept_for_inference(tmp_path):
    bench = Bench(tmp_path, workers=2, inference_workers=1)
    first = bench.planned()
    bench.scheduler.schedule()
    _, names = bench.preempted(2)
    bench.scheduler.schedule()
    assert bench.states(first + names) == ["running", "planned", "planned"]


@pytest.mark.parametrize("policy", ["sequential", "pipeswitch", "lmcf"])
def test_a_group_does_not_run_beside_others_if_the_policy_starts_none(tmp_path, policy):
    bench = Bench(tmp_path, workers=2, policy=policy)
    first = bench.planned()
    bench.scheduler.schedule()
    _, names = bench.preempted(2)
    bench.scheduler.schedule()
    assert bench.states(first + names) == ["running", "planned", "planned"]
    bench.state.active.clear()
    bench.scheduler.schedule()
    assert bench.states(names) == ["running"] * 2


def test_a_group_runs_beside_others_if_the_policy_has_it_so(tmp_path):
    bench = Bench(tmp_path, workers=2)
    bench.planned()
    bench.scheduler.schedule()
    _, names = bench.preempted(2)
    bench.scheduler.schedule()
    assert bench.states(names) == ["running"] * 2


def test_members_of_a_group_that_exceeds_the_budget_go_on_alone(bench):
    group, names = bench.preempted(2, size=GIB + 1)
    bench.scheduler.schedule()
    assert bench.group_state(group) == "dissolved"
    assert not bench.state.active
    assert "more than there is for tasks" in bench.notes(names[0])
    bench.scheduler.schedule()
    assert sorted(bench.states(names)) == ["planned", "running"]
    sent = bench.pool.workers["cpu/0"].sent[0]
    assert [one["from"] for one in sent["split"]] == [str(bench.state.options.runs / group.folder)]


def test_a_group_that_fills_the_budget_goes_on(bench):
    _, names = bench.preempted(2, size=GIB)
    bench.scheduler.schedule()
    assert bench.states(names) == ["running"] * 2


def test_a_group_waits_for_memory_that_others_have(tmp_path):
    bench = Bench(tmp_path, workers=2)
    bench.planned(plan={**PLAN, "bytes": 800 * MIB})
    bench.scheduler.schedule()
    _, names = bench.preempted(2, size=500 * MIB)
    bench.scheduler.schedule()
    assert bench.states(names) == ["planned"] * 2
    assert "and cpu has" in bench.state.why[names[0]]


# Runs that are still ending, and long queues


def test_a_task_whose_last_run_is_still_ending_waits_and_others_start(tmp_path):
    bench = Bench(tmp_path, workers=2)
    [name] = bench.planned()
    bench.scheduler.schedule()
    bench.db.pause(name)
    bench.db.resume(name)
    bench.groups.heartbeat()
    bench.db.plan_many([(name, PLAN)])
    [other] = bench.planned()
    bench.scheduler.schedule()
    assert bench.states([name, other]) == ["planned", "running"]
    assert bench.state.why[name] == "its last run is still ending"
    ended = next(active for active in bench.state.active.values() if name in active.members)
    assert ended.leaving
    del bench.state.active[ended.group.id]
    ended.worker.group = ""
    bench.scheduler.schedule()
    assert bench.states([name]) == ["running"]


def test_tasks_that_wait_for_one_do_not_hide_it(bench):
    [first] = bench.planned()
    [other] = bench.planned(user="somebody else")
    bench.planned(MOST_PLANNED, priority=1, after=(first,))
    seen = bench.scheduler._planned()
    assert len(seen) == MOST_PLANNED
    assert {first, other} <= {task.id for task in seen}


# With workers


def test_a_group_goes_on_though_something_urgent_depends_on_it(tmp_path):
    with opened(tmp_path) as queue:
        names = queue.submit(*({"seed": seed, "epochs": 150} for seed in range(2)))
        queue.until(lambda: queue.epoch(names[0]) > 0)
        later = queue.submit({"seed": 9, "epochs": 5, "hidden": 9}, priority=1, after=(names[0],))
        queue.until(lambda: queue.db.get(later[0]).state == "planned")
    with opened(tmp_path) as queue:
        assert [task.state for task in queue.wait(names + later)] == ["done"] * 3


def test_a_task_that_is_paused_and_resumed_at_once_does_not_stop_the_queue(tmp_path):
    with opened(tmp_path, workers=2, models=(f"{__name__}:*",)) as queue:
        name = queue.db.submit(Submission({"task": {"graph": "demo", "model": f"{__name__}:Slow", "epochs": 2}})).id
        queue.supervisor.wake()
        queue.until((tmp_path / "begun").exists)
        queue.db.pause(name)
        queue.db.resume(name)
        other = queue.submit({"epochs": 5})
        queue.wait(other, 40.0)  # before the other is taken for one that hangs
        assert any(name in active.members for active in queue.supervisor.state.active.values())
        (tmp_path / "go on").touch()
        assert [task.state for task in queue.wait([name, *other])] == ["done", "done"]
