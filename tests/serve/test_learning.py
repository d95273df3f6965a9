"""What a server learns from groups that have ended: epoch times, if they had the device to themselves, and starts."""

from __future__ import annotations

import json

import pytest

from tests.serve.serving import Queue
from weft.serve.options import ServeOptions
from weft.serve.queue_db import Submission
from weft.serve.state import FIRST_SETUP_SECONDS, SupervisorState

LONG = {"graph": "demo", "model": "gcn", "hidden": 16, "epochs": 400}


@pytest.fixture
def queue(tmp_path):
    found = Queue(tmp_path, workers=2)
    yield found
    found.close()


def submit(queue, *settings) -> list[str]:
    """Tasks with a byte budget of their own, of which epochs are predicted however small they are; never fused."""
    tasks = [{**LONG, **one} for one in settings]
    found = queue.db.submit_many([Submission({"task": task, "budget": 4 << 30}) for task in tasks])
    queue.supervisor.wake()
    return [task.id for task in found]


def learned(folder) -> list[str]:
    """The labels of the runs that estimates are corrected by."""
    files = list(folder.rglob("calibration.json"))
    return [one["label"] for path in files for one in json.loads(path.read_text())["value"]["observations"]]


def test_a_group_that_had_the_device_to_itself_teaches_how_long_epochs_take(queue, tmp_path):
    [name] = submit(queue, {"epochs": 20})
    [done] = queue.wait([name])
    assert done.state == "done", done.error
    queue.until(lambda: len(learned(tmp_path)) == 1)
    assert name in learned(tmp_path)[0]


def test_groups_that_shared_the_device_do_not(queue, tmp_path):
    queue.until(lambda: sum(worker.idle for worker in queue.supervisor.pool.workers.values()) == 3)
    names = submit(queue, {"epochs": 400}, {"epochs": 400, "layers": 3})
    assert [task.state for task in queue.wait(names)] == ["done"] * 2
    queue.until(lambda: all(one.ended is not None for one in queue.db.groups(limit=10)))  # written after its tasks
    groups = queue.db.groups(limit=10)
    assert max(one.started for one in groups) < min(one.ended for one in groups), "they did not overlap"
    [alone] = queue.wait(submit(queue, {"epochs": 20, "layers": 4}))
    queue.until(lambda: len(learned(tmp_path)) >= 1)
    assert [alone.id in label for label in learned(tmp_path)] == [True]


def test_one_start_that_compiles_kernels_does_not_change_what_a_start_is_expected_to_take(tmp_path):
    state = SupervisorState(ServeOptions(tmp_path / "queue.db"))
    assert state.setup_of("cpu") == FIRST_SETUP_SECONDS
    for seconds in (0.2, 3.0, 0.21, 0.19, 0.2):
        state.learn_setup("cpu", seconds)
    assert state.setup_of("cpu") == 0.2
