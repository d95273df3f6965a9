"""What was preempted has not waited while it ran: it does not start again in place of what it made way for."""

from __future__ import annotations

import time

import pytest

from tests.serve.scheduler_bench import PLAN, Bench
from weft.sched.backfill import Backfill
from weft.sched.task_queue import UserShares
from weft.serve.groups import GroupEndings
from weft.serve.supervisor import Supervisor

AGE_SECONDS, RAN_SECONDS = 0.05, 0.4  # eight levels


@pytest.fixture
def bench(tmp_path):
    made = Bench(tmp_path)
    made.scheduler.policy = Backfill(age_seconds=AGE_SECONDS)
    made.endings = GroupEndings(made.state, made.pool)
    yield made
    made.db.close()


def started(bench, count=1) -> list[str]:
    """Tasks of one group that have run for long."""
    names = bench.planned(count, plan={**PLAN, "join_key": "alike"}, user="ann")
    bench.scheduler.schedule()
    assert bench.states(names) == ["running"] * count
    time.sleep(RAN_SECONDS)
    return names


def end(bench, how: str) -> None:
    """End the group that runs, and plan again what is queued again."""
    [active] = bench.state.active.values()
    outcome = {"status": how, "message": "", "metrics": {}, "folder": ""}
    members = dict.fromkeys(active.members, outcome)
    if how == "killed":
        bench.endings.worker_gone(active.worker, "it did not answer")
        active.worker.group = ""
    elif how == "interrupted":
        bench.endings.done(active.worker, {"group": active.group.id, "error": how, "kind": "preempted"})
    else:
        bench.endings.done(active.worker, {"group": active.group.id, "members": members})
    bench.db.plan_many([(name, bench.db.get(name).plan) for name in members])


@pytest.mark.parametrize("count", [1, 3])
@pytest.mark.parametrize("how", ["preempted", "interrupted", "killed"])
def test_the_task_that_others_made_way_for_starts_in_their_place(bench, count, how):
    names = started(bench, count)
    urgent = bench.planned(user="bob", priority=1)
    bench.scheduler.schedule()
    assert [active.leaving for active in bench.state.active.values()] == [True]
    end(bench, how)
    bench.scheduler.schedule()
    assert bench.states(urgent + names) == ["running"] + ["planned"] * count


def test_a_paused_task_has_not_waited_while_it_ran(bench):
    [name] = started(bench)
    bench.db.pause(name)
    bench.groups.heartbeat()
    bench.db.resume(name)
    other = bench.planned(user="bob", priority=1)
    end(bench, "preempted")
    bench.scheduler.schedule()
    assert bench.states([name, *other]) == ["planned", "running"]


def restart(bench) -> None:
    """End the server as ``kill -9`` does, after a heartbeat, and let the next one take over."""
    bench.groups.heartbeat()
    supervisor = Supervisor(bench.state.options)
    for worker in bench.pool.workers.values():
        worker.group = ""
    bench.state.active.clear()
    bench.state.shares = UserShares(bench.db.shares())
    supervisor.state = bench.state
    supervisor._recover()
    bench.db.plan_many([(task.id, task.plan) for task in bench.db.tasks(state="queued")])


@pytest.mark.parametrize("count", [1, 3])
def test_what_a_former_server_ran_has_not_waited_while_it_ran(bench, count):
    names = started(bench, count)
    urgent = bench.planned(user="bob", priority=1)
    restart(bench)
    bench.scheduler.schedule()
    assert bench.states(urgent + names) == ["running"] + ["planned"] * count


def test_when_a_lane_was_last_served_before_a_restart_is_in_the_file(bench):
    started(bench)
    before = time.time()
    restart(bench)
    assert before <= bench.db.shares()[0].last_start["0"] <= time.time()


def test_when_a_lane_was_last_served_is_in_the_file(bench):
    started(bench)
    before = time.time()
    end(bench, "preempted")
    [share] = bench.db.shares()
    assert share.last_start["0"] >= before
    assert share.device_seconds > 0.0


def test_what_has_ended_leaves_its_lane_as_it_was(bench):
    started(bench)
    before = time.time()
    end(bench, "finished")
    assert bench.db.shares()[0].last_start["0"] < before
