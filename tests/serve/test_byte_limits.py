"""What a worker is told that its group may take, whatever the policy sets aside."""

from __future__ import annotations

import pytest

from tests.serve.serving import Queue
from weft.sched.admission import needed_bytes
from weft.serve.workers.worker_process import WorkerProcess


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
