"""What cannot be written when it happens is written later; nothing that one task does stops the server."""

from __future__ import annotations

import os
import signal
import time

import pytest

from tests.serve.serving import FAULTY, Queue
from weft.core.errors import WeftError
from weft.serve.groups import GroupEndings
from weft.serve.queue_db import QueueError, Submission
from weft.serve.submissions import BadRequestError, read_json

pytestmark = pytest.mark.timeout(180)
LONG = {"hidden": 12, "epochs": 200_000}


@pytest.fixture
def queue(tmp_path):
    found = Queue(tmp_path, lease_seconds=2.0, silent_seconds=5.0, hang_seconds=20.0)
    found.wait(found.submit({"epochs": 5}))
    yield found
    found.close()


def failing_once(queue: Queue, name: str) -> list:
    """Let a method of the supervisor's queue fail the first time, as on a full disk; its arguments then."""
    db, refused = queue.supervisor.state.db, []
    plain = getattr(db, name)

    def full(*given, **more):
        if not refused:
            refused.append(given)
            raise WeftError("the queue could not be written (database or disk is full); nothing was changed")
        return plain(*given, **more)

    setattr(db, name, full)
    return refused


def test_a_result_that_could_not_be_written_is_written_later_beside_another_task(queue):
    refused = failing_once(queue, "finish")
    [name] = queue.submit({"seed": 77, "epochs": 10})
    queue.until(lambda: bool(refused))
    [other] = queue.submit(LONG)
    queue.until(lambda: queue.db.get(name).state == "done")
    assert queue.db.get(name).attempts == 1
    queue.until(lambda: queue.epoch(other) > 0)
    queue.db.cancel(other)
    queue.supervisor.wake()


def test_a_worker_that_dies_while_nothing_can_be_written_is_replaced(queue):
    refused = failing_once(queue, "fail")
    [name] = queue.submit(LONG)
    queue.until(lambda: queue.epoch(name) > 0)
    pid = queue.worker_pid()
    os.kill(pid, signal.SIGKILL)
    queue.until(lambda: bool(refused))
    queue.until(lambda: queue.worker_pid() != pid)
    queue.until(lambda: queue.db.get(name).state == "running" and queue.db.get(name).attempts == 2)
    queue.db.cancel(name)
    queue.supervisor.wake()
    assert queue.wait(queue.submit({"epochs": 5, "hidden": 6}))[0].state == "done"


def test_a_long_message_to_a_worker_that_hangs_does_not_hold_up_the_supervisor(queue):
    [name] = queue.submit(LONG)
    queue.until(lambda: queue.epoch(name) > 0)
    pid = queue.worker_pid()
    os.kill(pid, signal.SIGSTOP)
    try:
        worker = next(one for one in queue.supervisor.pool.workers.values() if one.pid == pid)
        begin = time.monotonic()
        for _ in range(8):
            worker.send("fetch", text="x" * 100_000)  # more than a pipe holds
        assert time.monotonic() - begin < 1.0
        queue.until(lambda: queue.worker_pid() != pid)  # it sent no heartbeat
    finally:
        os.kill(pid, signal.SIGKILL) if queue.worker_pid() == pid else None
    queue.db.cancel(name)
    queue.supervisor.wake()


def test_a_message_that_is_no_unicode_fails_its_task_alone(queue):
    settings = {"graph": "demo", "model": f"{FAULTY}:NamesAFile", "epochs": 20}
    bad = queue.db.submit(Submission({"task": settings})).id
    queue.supervisor.wake()
    assert queue.wait([bad])[0].state == "failed"
    assert r"caf\udce9.txt" in queue.db.get(bad).error
    assert queue.supervisor.is_alive()
    assert queue.wait(queue.submit({"epochs": 5, "hidden": 6}))[0].state == "done"


@pytest.mark.parametrize("body", [b'"' + b'\\"' * 500_000, b'"' * 1_000_000, b'{"a":"' + b"\\" * 1_000_000])
def test_a_text_that_does_not_end_is_read_once(body):
    begin = time.monotonic()
    with pytest.raises(BadRequestError, match="not JSON"):
        read_json(body)
    assert time.monotonic() - begin < 5.0


def test_an_ending_of_a_task_that_was_deleted_meanwhile_is_not_tried_for_ever():
    tried = []

    def deleted() -> None:
        tried.append(1)
        raise QueueError("there is no such task")

    endings = GroupEndings(None, None)
    endings._unwritten.append(deleted)
    endings.write_left()
    endings.write_left()
    assert tried == [1]


def test_an_ending_that_cannot_be_written_is_kept():
    left = [WeftError("the disk is full"), None]

    def ending() -> None:
        if (error := left.pop(0)) is not None:
            raise error

    endings = GroupEndings(None, None)
    endings._unwritten.append(ending)
    with pytest.raises(WeftError, match="disk is full"):
        endings.write_left()
    endings.write_left()
    assert not endings._unwritten
