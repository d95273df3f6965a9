"""What a worker is told that its group may take, whatever the policy sets aside."""

from __future__ import annotations

import pytest

from tests.serve.serving import FAULTY, Queue
from weft.sched.admission import needed_bytes
from weft.serve.queue_db import Submission
from weft.serve.worker_pool import WorkerProcess


@pytest.mark.parametrize("policy", ["mps", "backfill"])
def test_a_task_may_take_its_prediction_and_the_margin(tmp_path, monkeypatch, policy):
    sent = []
    send = WorkerProcess.send
    monkeypatch.setattr(
        WorkerProcess, "send", lambda self, do, **data: (sent.append((do, data)), send(self, do, **data))
    )
    queue = Queue(tmp_path, policy=policy)
    try:
        [task] = queue.wait(queue.submit({"epochs": 2}))
    finally:
        queue.close()
    assert task.state == "done", task.error
    [budget] = [data["budget"] for do, data in sent if do == "run"]
    assert budget == needed_bytes(task.plan["bytes"]) > task.plan["bytes"]


def test_the_notes_of_a_task_say_nothing_of_a_budget_that_its_user_never_gave(tmp_path):
    queue = Queue(tmp_path)
    try:
        own = {"graph": "demo", "model": f"{FAULTY}:Plain", "epochs": 2}
        name = queue.db.submit(Submission({"task": own})).id
        queue.supervisor.wake()
        [task] = queue.wait([name])
        notes = [str(e.data.get("message")) for e in queue.db.events(task=name, limit=1000) if e.kind == "note"]
    finally:
        queue.close()
    assert task.state == "done", task.error
    assert notes
    assert not any("budget" in note for note in notes)  # and the system does stop a worker that takes more
