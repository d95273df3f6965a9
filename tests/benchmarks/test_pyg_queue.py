"""PyG's side of the queues: a worker that ends, hangs or runs out of memory is recorded, and nothing waits for it."""

from __future__ import annotations

import time

import pytest

from benchmarks.queue_runs import pyg
from benchmarks.queue_runs.pyg import PyGWorker, WorkerLost, run_in_order, warm_up

# A worker without torch: it does what the task says.
SCRIPT = """
import json, sys, time
print(json.dumps({"ready": True}), flush=True)
for line in sys.stdin:
    task = json.loads(line)
    if task.get("do") == "die":
        sys.exit(3)
    time.sleep(task.get("sleep", 0.0))
    error = {"error": "OutOfMemoryError: CUDA out of memory"} if task.get("do") == "memory" else {}
    print(json.dumps({"seconds": 0.0, "peak_bytes": 5, **error}), flush=True)
"""


@pytest.fixture
def worker():
    made = PyGWorker("cpu", ("-c", SCRIPT))
    made.wait_ready()
    yield made
    made.stop()


def test_tasks_run_one_after_another(worker):
    outcome, trouble = run_in_order("pyg", worker, {name: {} for name in "abcd"})
    assert [run.id for run in outcome.tasks] == list("abcd")
    assert trouble == {"failed": {}, "out_of_memory": 0}
    assert worker.start_seconds > 0


def test_out_of_memory_is_counted(worker):
    outcome, trouble = run_in_order("pyg", worker, {"a": {"do": "memory"}, "b": {}})
    assert trouble["out_of_memory"] == 1
    assert [run.id for run in outcome.tasks] == ["b"]


def test_a_worker_that_ends_takes_its_own_and_later_tasks(worker):
    outcome, trouble = run_in_order("pyg", worker, {"a": {}, "b": {"do": "die"}, "c": {}})
    assert [run.id for run in outcome.tasks] == ["a"]
    assert trouble["failed"] == dict.fromkeys("bc", "a PyG worker ended with code 3")


def test_a_queue_that_takes_too_long_is_no_result(worker):
    begin = time.monotonic()
    with pytest.raises(TimeoutError, match="0 s were not enough for pyg"):
        run_in_order("pyg", worker, {"a": {"sleep": 60.0}, "b": {}}, seconds=0.3)
    assert time.monotonic() - begin < 20


def test_a_worker_that_does_not_answer_is_ended(worker):
    with pytest.raises(WorkerLost, match="did not answer within"):
        worker.train({"sleep": 60.0}, 0.2)
    with pytest.raises(WorkerLost):
        worker.train({})


def test_warming_up_ends_in_time(worker, monkeypatch):
    monkeypatch.setattr(pyg, "GRACE", 0.1)
    warm_up(worker, [{}, {"do": "memory"}], 5.0)
    with pytest.raises(WorkerLost):
        warm_up(worker, [{"sleep": 0.01}, {"sleep": 60.0}], 0.5)
