"""PyG's side of the queues: workers that end, hang or run out of memory cost their own task and no more."""

from __future__ import annotations

import time

import pytest

from benchmarks.queue_runs import pyg_queue
from benchmarks.queue_runs.pyg_queue import PyGWorker, PyGWorkers, WorkerLost, run_in_order, warm_up
from benchmarks.suites.queues import one_of_each_graph

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
PROGRAM = ("-c", SCRIPT)


@pytest.fixture
def pool(monkeypatch):
    monkeypatch.setattr(pyg_queue, "PyGWorker", lambda device, environment: PyGWorker(device, environment, PROGRAM))
    made = PyGWorkers(2, "cpu")
    yield made
    made.stop()


def test_tasks_go_to_the_next_free_worker(pool):
    outcome, trouble = run_in_order("pyg", pool.ready(), {name: {} for name in "abcd"})
    assert {run.id for run in outcome.tasks} == set("abcd")
    assert trouble == {"failed": {}, "out_of_memory": 0}
    assert all(worker.start_seconds > 0 for worker in pool.ready())


def test_out_of_memory_is_counted(pool):
    outcome, trouble = run_in_order("pyg", pool.ready(), {"a": {"do": "memory"}, "b": {}})
    assert trouble["out_of_memory"] == 1
    assert [run.id for run in outcome.tasks] == ["b"]


def test_a_worker_that_ends_takes_its_own_task_only(pool):
    tasks = {"a": {"do": "die"}, **{name: {"sleep": 0.05} for name in "bcd"}}
    outcome, trouble = run_in_order("pyg", pool.ready(), tasks)
    assert {run.id for run in outcome.tasks} == set("bcd")
    assert trouble["failed"] == {"a": "a PyG worker ended with code 3"}
    assert len(pool.ready()) == 2, "it is replaced for the next queue"
    assert run_in_order("pyg", pool.ready(), {"a": {}, "b": {}})[1]["failed"] == {}


def test_without_a_worker_the_rest_fails(pool):
    _, trouble = run_in_order("pyg", pool.ready(), {"a": {"do": "die"}, "b": {"do": "die"}, "c": {}})
    assert trouble["failed"]["c"] == "no PyG worker was left"


def test_a_queue_that_takes_too_long_is_no_result(pool):
    begin = time.monotonic()
    with pytest.raises(TimeoutError, match="0 s were not enough for pyg"):
        run_in_order("pyg", pool.ready(), {"a": {"sleep": 60.0}, "b": {}}, seconds=0.3)
    assert time.monotonic() - begin < 20
    assert len(pool.ready()) == 2


def test_a_worker_that_does_not_answer_is_ended():
    worker = PyGWorker("cpu", None, PROGRAM)
    worker.wait_ready()
    with pytest.raises(WorkerLost, match="did not answer within"):
        worker.train({"sleep": 60.0}, 0.2)
    assert not worker.alive
    with pytest.raises(WorkerLost):
        worker.train({})
    worker.stop()


def test_warming_up_ends_in_time_and_leaves_out_who_was_lost(pool, monkeypatch):
    monkeypatch.setattr(pyg_queue, "GRACE", 0.1)
    begin = time.monotonic()
    left = warm_up(pool.ready(), [{"sleep": 0.01}, {"sleep": 60.0}], 0.5)
    assert left == []
    assert time.monotonic() - begin < 20
    assert len(warm_up(pool.ready(), [{}, {"do": "memory"}], 5.0)) == 2


def test_several_workers_warm_up_with_one_task_of_every_graph():
    made = [("g1", "gcn", 7), ("g1", "gcn", 4), ("g2", "gcn", 5), ("g2", "gat", 9)]
    tasks = {f"t{i}": {"graph": graph, "model": model, "layers": n} for i, (graph, model, n) in enumerate(made)}
    assert [(one["graph"], one["model"], one["layers"]) for one in one_of_each_graph(tasks)] == [
        ("g1", "gcn", 4), ("g2", "gcn", 5), ("g2", "gat", 9),
    ]  # fmt: skip
