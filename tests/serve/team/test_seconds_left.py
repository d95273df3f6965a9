"""What goes on from a checkpoint is predicted to take as long as the epochs that are left."""

from __future__ import annotations

import pytest

from tests.serve.scheduler_bench import PLAN, Bench
from weft.serve.groups import GroupEndings
from weft.serve.planner import TaskPlanner

EPOCHS, SETUP = 100, 0.1


@pytest.fixture
def bench(tmp_path):
    made = Bench(tmp_path)
    made.endings = GroupEndings(made.state, made.pool)
    made.planner = TaskPlanner(made.state, made.pool)
    yield made
    made.db.close()


def started(bench) -> float:
    """Start what waits; the seconds that its group is predicted to take."""
    bench.scheduler.schedule()
    [active] = bench.state.active.values()
    return active.group.seconds


def interrupt(bench, epoch: int | None, how: str) -> None:
    """End the group that runs after a checkpoint at ``epoch``, and plan its members again."""
    [active] = bench.state.active.values()
    bench.db.record([(name, "checkpoint", {"epoch": epoch}) for name in active.members if epoch is not None])
    if how == "killed":
        bench.endings.worker_gone(active.worker, "it did not answer")
        active.worker.group = ""
    else:
        outcome = {"status": how, "message": "", "metrics": {}, "folder": ""}
        bench.endings.done(active.worker, {"group": active.group.id, "members": dict.fromkeys(active.members, outcome)})
    bench.planner.plan_queued()


@pytest.mark.parametrize("count", [1, 3])
def test_a_group_that_goes_on_takes_as_long_as_the_epochs_that_are_left(bench, count):
    names = bench.planned(count, plan={**PLAN, "join_key": "alike", "epochs": EPOCHS})
    whole = started(bench)
    for left in (0.75, 0.25):  # of all epochs, however often it is interrupted
        interrupt(bench, EPOCHS - int(EPOCHS * left), "preempted")
        assert [bench.db.get(name).plan["seconds"] for name in names] == [PLAN["seconds"] * left] * count
        assert started(bench) == pytest.approx((whole - SETUP) * left + SETUP)


def test_members_that_go_on_alone_take_as_long_as_the_epochs_that_are_left(bench):
    names = bench.planned(2, plan={**PLAN, "join_key": "alike", "epochs": EPOCHS})
    started(bench)
    interrupt(bench, 60, "killed")
    assert [bench.db.get(name).plan["seconds"] for name in names] == [pytest.approx(40.0)] * 2
    assert started(bench) == pytest.approx(40.0 + SETUP)


@pytest.mark.parametrize(("epoch", "left"), [(None, 100.0), (0, 100.0), (EPOCHS, 1.0), (5 * EPOCHS, 1.0)])
def test_one_epoch_is_always_left_and_all_of_them_without_a_checkpoint(bench, epoch, left):
    [name] = bench.planned(plan={**PLAN, "epochs": EPOCHS})
    started(bench)
    interrupt(bench, epoch, "killed")
    assert bench.db.get(name).plan["seconds"] == left
