"""A kernel that fails breaks a shared GPU for every process on it: all are tried again apart, the culprit fails."""

from __future__ import annotations

import pytest

import weft
from tests.serve.serving import FAULTY, TASK, Queue, history_of
from weft.serve.groups import GroupEndings
from weft.serve.queue_db import Submission
from weft.serve.worker_pool import WorkerPool

BAD = {"model": f"{FAULTY}:Raises", "graph": "demo", "epochs": 5}


@pytest.fixture
def faults(monkeypatch):
    """First runs, and all of tasks in the set that is returned, end with a device that no longer answers."""
    seen, culprits, done = set(), set(), GroupEndings.done

    def broken(self, worker, message):
        members = self._state.active[message["group"]].members
        if culprits.intersection(members) or not seen.issuperset(members):
            message = {**message, "leftover": None}
        seen.update(members)
        done(self, worker, message)

    monkeypatch.setattr(GroupEndings, "done", broken)
    return culprits


@pytest.fixture
def queue(tmp_path):
    opened = Queue(tmp_path, workers=2)
    opened.until(lambda: all(worker.ready for worker in opened.supervisor.pool.workers.values()))
    yield opened
    opened.close()
    assert opened.supervisor.error == ""


def submit_bad(queue) -> str:
    [task] = queue.db.submit_many([Submission({"task": BAD})])
    return task.id


def test_what_shared_a_broken_device_is_tried_with_the_device_to_itself(queue, faults, monkeypatch):
    monkeypatch.setattr(WorkerPool, "shares_faults", True)
    bad = submit_bad(queue)
    faults.add(bad)
    [good] = queue.submit({"seed": 4, "epochs": 20})
    failed, done = queue.wait([bad, good])
    assert (failed.state, failed.attempts, done.state, done.attempts) == ("failed", 2, "done", 2)
    assert "on purpose" in failed.error
    assert "\n" not in failed.error
    groups, most = (
        sorted(queue.db.groups(limit=100), key=lambda one: one.started),
        queue.supervisor.pool.task_bytes("cpu"),
    )
    latest = {one.members: one.bytes for one in groups}
    assert all(0.99 * most < latest[(name,)] <= most for name in (bad, good))  # nobody else had any
    expected = history_of(weft.Task(**{**TASK, "seed": 4, "epochs": 20}))["gcn"]
    assert queue.history(good)["loss"] == list(expected["loss"])


def test_a_fault_that_stays_in_its_process_costs_that_task_alone(queue, faults):
    bad = submit_bad(queue)
    faults.add(bad)
    [failed] = queue.wait([bad])
    assert (failed.state, failed.attempts) == ("failed", 1)
    [good] = queue.submit({"seed": 5})
    faults.clear()
    assert queue.wait([good])[0].state == "done"
