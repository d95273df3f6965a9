"""Models that fork: their slot is free as soon as their worker has ended, and what they started ends with it."""

from __future__ import annotations

import time

import pytest

import weft
from tests.serve.serving import FAULTY, Queue, ServeProcess, opened
from tests.serve.test_supervisor import own, submit_own
from weft.serve import worker_pool


def children(folder) -> list[int]:
    """The processes that a model of the tests has started and that still run."""
    started = [int(path.name.removeprefix("child-")) for path in folder.glob("child-*")]
    return [pid for pid in started if runs(pid)]


def runs(pid: int) -> bool:
    try:
        with open(f"/proc/{pid}/stat") as file:
            return file.read().rpartition(")")[2].split()[0] != "Z"
    except OSError:
        return False


def until(condition, seconds: float = 30.0) -> None:
    end = time.monotonic() + seconds
    while not condition():
        assert time.monotonic() < end
        time.sleep(0.02)


def test_a_model_that_forks_and_exits_frees_its_slot(tmp_path):
    with opened(tmp_path) as queue:
        [failed] = queue.wait(submit_own(queue, own("ForksAndExits"), max_attempts=1), 30.0)
        assert failed.state == "failed"
        assert "exit code 7" in failed.error
        assert [task.state for task in queue.wait(queue.submit({"seed": 1}), 30.0)] == ["done"]
        until(lambda: not children(tmp_path))


def test_a_model_that_forks_and_hangs_frees_its_slot_when_it_is_cancelled(tmp_path, monkeypatch):
    monkeypatch.setattr(worker_pool, "CANCELLED_SECONDS", 0.2)
    with opened(tmp_path, hang_seconds=3600.0) as queue:
        [bad] = submit_own(queue, own("ForksAndHangs"))
        queue.until(lambda: len(children(tmp_path)) == 2)
        queue.db.cancel(bad)
        queue.supervisor.wake()
        assert [task.state for task in queue.wait(queue.submit({"seed": 1}), 30.0)] == ["done"]
        assert queue.db.get(bad).state == "cancelled"
        until(lambda: not children(tmp_path))


def test_what_a_model_that_ends_well_leaves_behind_ends_with_its_worker(tmp_path):
    with opened(tmp_path) as queue:
        [done] = queue.wait(submit_own(queue, own("ForksAndReturns")), 30.0)
        assert done.state == "done"
        until(lambda: not children(tmp_path))


def test_a_model_that_goes_on_in_a_child_as_well_ends_once(tmp_path):
    with opened(tmp_path) as queue:
        names = submit_own(queue, own("GoesOnInAChild"), own("Plain"))
        done = queue.wait(names, 30.0)
        assert [(task.state, task.attempts) for task in done] == [("done", 1)] * 2
        assert queue.history(names[0])["train_loss"] == queue.history(names[1])["train_loss"]


def test_a_server_that_drains_leaves_no_child_of_a_model(tmp_path):
    queue = Queue(tmp_path)
    try:
        submit_own(queue, own("ForksAndHangs"))
        queue.until(lambda: len(children(tmp_path)) == 2)
    finally:
        queue.supervisor.stop(0.5)
        queue.db.close()
    assert not queue.supervisor.is_alive()
    assert children(tmp_path) == []


@pytest.mark.parametrize("how", ["kill", "stop"])
def test_no_child_of_a_model_outlives_the_server(tmp_path, how):
    server = ServeProcess(tmp_path, "--no-auth", "--allow-model", f"{FAULTY}:*", "--drain-seconds", "1").start()
    try:
        weft.Client(server.url).submit([weft.Task(**own("ForksAndHangs"))])
        until(lambda: len(children(tmp_path)) == 2, 60.0)
        of_models = children(tmp_path)
    finally:
        getattr(server, how)()
    until(lambda: not any(map(runs, of_models)))
