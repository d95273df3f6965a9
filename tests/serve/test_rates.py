"""How fast the queue is: a small task starts at once, long lists and decisions take milliseconds.

The best of several attempts counts: this process shares its processors with others.
"""

from __future__ import annotations

import json
import time

import pytest

from tests.serve.direct_queue import DirectQueue
from tests.serve.serving import Queue
from weft.core.run_options import RunOptions
from weft.core.task import Task
from weft.planner.machine_profiles import profile
from weft.sched.policies import find_policy
from weft.sched.queue_state import DeviceState, MachineState
from weft.sched.queues import random_queue
from weft.serve.estimates import estimate_of
from weft.serve.options import ServeOptions
from weft.serve.queue_db import Submission
from weft.serve.state import estimate_key

ATTEMPTS = 6


@pytest.fixture(scope="module")
def queue(tmp_path_factory):
    made = Queue(tmp_path_factory.mktemp("rates"))
    yield made
    made.close()


def seconds_to_start(queue: Queue, **settings) -> float:
    """From submission to the event that a worker writes when a run begins."""
    begin = time.time()
    (name,) = queue.submit({"epochs": 2, **settings})
    queue.wait([name])
    return min(event.time for event in queue.db.events(task=name) if event.kind == "start") - begin


@pytest.mark.parametrize("kind", ["planned before", "new"])
def test_a_small_task_starts_within_100_ms_on_a_warm_worker(queue, kind):
    queue.until(lambda: queue.supervisor.pool.any_idle() and queue.supervisor.pool.workers["planner"].ready)
    seconds_to_start(queue, seed=99)
    other = [{"seed": place} if kind == "planned before" else {"hidden": 9 + place} for place in range(ATTEMPTS)]
    found = []
    for one in other:
        found.append(seconds_to_start(queue, **one))
        if found[-1] < 0.1:
            return
        time.sleep(0.3)
    pytest.fail(f"{[round(1e3 * one) for one in found]} ms")


def test_10_000_tasks_are_listed_within_200_ms(tmp_path):
    pytest.importorskip("fastapi")
    from weft.serve.service import QueueService
    from weft.serve.supervisor import Supervisor

    options = ServeOptions(tmp_path / "q.db")
    with DirectQueue(options.db) as db:
        db.submit_many([Submission({"task": {"graph": "demo", "seed": seed}}) for seed in range(10_000)])
    service = QueueService(options, Supervisor(options))
    found = []
    for _ in range(ATTEMPTS):
        seconds, beyond, count = 0.0, 0, 0
        while beyond is not None:
            begin = time.perf_counter()
            text = service.reads.submit(service.page, None, None, 10_000, beyond).result()
            seconds += time.perf_counter() - begin
            beyond, count = json.loads(text)["next"], count + len(json.loads(text)["tasks"])
        found.append(seconds)
    service.close()
    assert count == 10_000
    assert min(found) < 0.2, found


@pytest.mark.parametrize("policy", ["backfill", "lmcf", "bmc", "base"])
def test_a_decision_about_1_000_tasks_takes_at_most_5_ms_per_task(policy):
    tasks = random_queue(1_000, 1, profile("h200"))
    machine = MachineState((DeviceState("cuda:0", 26 << 30, workers=3),))
    begin = time.perf_counter()
    assert find_policy(policy).schedule(tasks, [], machine).started
    assert time.perf_counter() - begin < 5.0


def test_a_small_task_has_a_bound_and_a_large_one_a_prediction():
    small = Task(graph="demo", hidden=8, epochs=2)
    quick, predicted = estimate_of(small, "cpu"), estimate_of(small, "cpu", RunOptions(budget="1GiB"))
    assert "rule of thumb" in quick["why"]
    assert "predicted" in predicted["why"]
    assert quick["bytes"] >= predicted["bytes"]
    assert 0 < quick["shared_bytes"] < quick["bytes"]
    assert "predicted" in estimate_of(small.with_values(epochs=5_000), "cpu")["why"]


def test_a_task_with_a_budget_has_an_estimate_of_its_own():
    assert estimate_key({"task": {}}) != estimate_key({"task": {}, "budget": 9})
