"""A disk that is full for a while: every task ends well."""

from __future__ import annotations

import subprocess
import time
from contextlib import suppress

import pytest

from tests.serve.direct_queue import problems
from tests.serve.serving import TASK, Queue
from weft.core.errors import WeftError
from weft.serve.queue_db import Submission


@pytest.fixture
def small_disk(tmp_path):
    """A file system of 24 MiB; skipped where it cannot be mounted."""
    folder = tmp_path / "disk"
    folder.mkdir()
    mounted = subprocess.run(["mount", "-t", "tmpfs", "-o", "size=24m", "tmpfs", str(folder)], capture_output=True)
    if mounted.returncode:
        pytest.skip("mounting a small file system is not allowed here")
    yield folder
    subprocess.run(["umount", "-l", str(folder)], capture_output=True, check=False)


def test_a_disk_that_is_full_for_a_while_loses_nothing(small_disk):
    queue = Queue(small_disk, checkpoint_seconds=0.05, lease_seconds=3.0)
    try:
        names = queue.submit(*({"seed": seed, "epochs": 150, "model": "sage"} for seed in range(2)))
        queue.until(lambda: queue.epoch(names[0]) > 0)
        filler = small_disk / "filler"
        fill(filler)
        refused = 0
        for seed in range(50, 250):  # the pages that are free inside the file take some; then they are refused
            try:
                names += [queue.db.submit(Submission({"task": {**TASK, "seed": seed}})).id]
            except WeftError as error:
                assert "could not be written" in str(error)  # noqa: PT017
                refused += 1
                break
        time.sleep(2.0)
        filler.unlink()
        queue.supervisor.wake()
        assert refused, "the disk was not full"
        done = queue.wait(names, 180.0)
        assert {task.state for task in done} == {"done"}, [(task.id, task.error) for task in done]
        assert problems(queue.db) == []
        assert len(queue.db.tasks()) == len(names)
    finally:
        queue.close()
    assert queue.supervisor.error == ""


def fill(path) -> None:
    """Write until nothing more can be written."""
    with suppress(OSError), open(path, "wb", buffering=0) as file:
        while True:
            file.write(b"x" * 65536)
    with suppress(OSError), open(path, "ab", buffering=0) as file:
        while True:
            file.write(b"x" * 512)
