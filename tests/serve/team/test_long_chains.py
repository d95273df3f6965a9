"""A chain of 1,200 tasks, each after the one before it."""

from __future__ import annotations

import pytest

from tests.serve.direct_queue import DirectQueue, problems
from tests.serve.serving import Queue
from weft.serve.queue_db import Submission

LENGTH = 1_200


def chain(db, count=LENGTH):
    names = [f"t{place:04}" for place in range(count)]
    steps = [
        Submission({"task": {"graph": "demo", "model": "gcn", "hidden": 8, "epochs": 2}}, id=name, after=after)
        for name, after in zip(names, [(), *((name,) for name in names)], strict=False)
    ]
    db.submit_many(steps)
    return names


@pytest.mark.parametrize("end", ["cancel", "refuse"])
def test_a_chain_ends_with_its_first_task(tmp_path, end):
    with DirectQueue(tmp_path / "queue.db") as db:
        names = chain(db)
        if end == "cancel":
            db.cancel(names[0])
        else:
            db.refuse(names[0], "on purpose")
        ended = db.tasks(limit=LENGTH)
        assert {task.state for task in ended[1:]} == {"failed"}
        assert ended[1].error == f"depends on 't0000', which was {'cancelled' if end == 'cancel' else 'failed'}"
        assert ended[-1].error == "depends on 't1198', which was failed"
        assert problems(db) == []


def test_a_server_works_through_a_chain(tmp_path):
    queue = Queue(tmp_path)
    try:
        names = chain(queue.db)
        queue.supervisor.wake()
        queue.until(lambda: queue.db.get(names[4]).state == "done", 90.0)
        queue.until(lambda: queue.supervisor.state.why.get(names[-1]) == "waits for 't1198' to be done")
        queue.db.cancel(names[900])
        queue.supervisor.wake()
        queue.until(lambda: queue.db.get(names[6]).state == "done", 90.0)
        assert queue.db.get(names[-1]).state == "failed"
    finally:
        queue.db.cancel(names[100])
        queue.close()
    assert queue.supervisor.error == ""
