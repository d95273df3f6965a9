"""A model that hangs while it is planned fails alone: the planner is replaced, and others are planned on."""

from __future__ import annotations

import os
import time

import pytest

from tests.serve.serving import FAULTY, opened
from weft.serve.queue_db import Submission
from weft.serve.service import metrics_text


def submit(queue, model, user, **more):
    settings = {"graph": "demo", "model": model, "epochs": 3, **more}
    task = queue.db.submit(Submission({"task": settings}, user=user))
    queue.supervisor.wake()
    return task.id


def submit_hanging(queue, user="anna", model="HangsWhenPlanned", **more):
    return submit(queue, f"{FAULTY}:{model}", user, **more)


def is_planned(queue, name):
    planner = queue.supervisor.pool.workers.get("planner")
    return planner is not None and planner.group == name


def busy(queue):
    return 'weft_worker_busy{worker="planner"} 1' in metrics_text(queue.supervisor.view, {}, {})


@pytest.mark.parametrize("model", ["HangsWhenPlanned", "HangsInSecondCall"])
def test_a_model_that_hangs_while_it_is_planned_fails_and_others_go_on(tmp_path, model):
    with opened(tmp_path, hang_seconds=3.0) as queue:
        bad = submit_hanging(queue, model=model)
        queue.until(lambda: is_planned(queue, bad))
        good = submit(queue, "gcn", "ben")
        failed, done = queue.wait([bad, good], 60.0)
        assert (failed.state, failed.attempts) == ("failed", 0)
        assert failed.error == "planning it took longer than 3 s: its model made no progress"
        assert (done.state, done.attempts, done.error) == ("done", 1, None)
        assert queue.supervisor.state.counters["workers_lost"] == 1


def test_the_planner_is_busy_while_it_plans(tmp_path):
    with opened(tmp_path) as queue:
        queue.until(lambda: queue.supervisor.view["workers"])
        assert not busy(queue)
        bad = submit_hanging(queue)
        queue.until(lambda: busy(queue))
        queue.db.cancel(bad)
        queue.until(lambda: not busy(queue))


@pytest.mark.parametrize("withdraw", ["cancel", "pause"])
def test_a_task_that_is_no_longer_wanted_frees_the_planner(tmp_path, withdraw):
    with opened(tmp_path) as queue:
        bad = submit_hanging(queue)
        queue.until(lambda: is_planned(queue, bad))
        good = submit(queue, "gcn", "ben")
        getattr(queue.db, withdraw)(bad)
        queue.supervisor.wake()
        begin = time.monotonic()
        [done] = queue.wait([good], 60.0)
        assert done.state == "done"
        assert time.monotonic() - begin < queue.options.hang_seconds / 2
        assert queue.db.get(bad).state in ("cancelled", "paused")


def test_a_planner_that_is_ended_for_one_task_costs_others_nothing(tmp_path):
    """However often it is ended for tasks that were cancelled, what waits behind them is planned and runs."""
    with opened(tmp_path) as queue:
        for seed in range(3):
            bad = submit_hanging(queue, seed=seed)
            queue.until(lambda bad=bad: is_planned(queue, bad))
            queue.db.cancel(bad)
        names = [submit(queue, "gcn", "ben", hidden=hidden) for hidden in (4, 8)]
        done = queue.wait(names)
        assert [(task.state, task.attempts) for task in done] == [("done", 1)] * 2
        assert queue.supervisor._planner._tries == {}


def test_after_a_task_that_hung_those_of_other_users_are_planned_first(tmp_path):
    with opened(tmp_path, hang_seconds=2.0) as queue:
        first = submit_hanging(queue)
        queue.until(lambda: is_planned(queue, first))
        more = [submit_hanging(queue, seed=seed) for seed in (1, 2)]
        good = [submit(queue, "gcn", "ben", hidden=hidden) for hidden in (4, 8, 12)]
        queue.until(lambda: all(queue.db.get(name).state not in ("queued", "planned") for name in good))
        assert [queue.db.get(name).state for name in (first, *more)] == ["failed", "queued", "queued"]
        [done] = queue.wait([submit(queue, "sage", "anna")])
        assert done.state == "done"


@pytest.mark.parametrize("stall", ["graph", "model"])
def test_what_stalls_the_planner_keeps_no_other_user_waiting(tmp_path, stall):
    """A graph that never arrives (a FIFO here), or models that never return, of one user beside new kinds of others."""
    os.mkfifo(tmp_path / "stalled.npz")
    with opened(tmp_path, hang_seconds=3600.0) as queue:
        graph, model = (
            (str(tmp_path / "stalled.npz"), "gcn") if stall == "graph" else ("demo", f"{FAULTY}:HangsWhenBuilt")
        )
        bad = [submit(queue, model, "anna", graph=graph, seed=seed) for seed in range(3)]
        queue.until(lambda: is_planned(queue, bad[0]))
        names = [submit(queue, "gcn", "ben", hidden=hidden) for hidden in (4, 12)]
        assert [(task.state, task.attempts) for task in queue.wait(names)] == [("done", 1)] * 2
        assert [queue.db.get(name).state for name in bad] == ["queued"] * 3
        later = submit(queue, "sage", "carl")
        assert [task.state for task in queue.wait([later], 10.0)] == ["done"]
        for name in bad:
            queue.db.cancel(name)
        [again] = queue.wait([submit(queue, "gin", "anna")])
        assert (again.state, queue.supervisor.state.counters["tasks_requeued"]) == ("done", 0)
