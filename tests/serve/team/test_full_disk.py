"""A disk under the runs that is full: no attempt is lost, and tasks end well once there is room."""

from __future__ import annotations

import subprocess

import pytest

from tests.serve.serving import Queue
from tests.serve.test_full_disk import fill
from weft.serve import groups as group_endings
from weft.serve.groups import is_full_disk


@pytest.fixture
def small_runs(tmp_path):
    """The folder of the runs on a file system of 4 MiB of its own; skipped where it cannot be mounted."""
    folder = tmp_path / "queue.db.runs"
    folder.mkdir()
    mounted = subprocess.run(["mount", "-t", "tmpfs", "-o", "size=4m", "tmpfs", str(folder)], capture_output=True)
    if mounted.returncode:
        pytest.skip("mounting a small file system is not allowed here")
    yield folder
    subprocess.run(["umount", "-l", str(folder)], capture_output=True, check=False)


def test_tasks_wait_for_room_and_cost_no_attempt(tmp_path, small_runs, monkeypatch):
    monkeypatch.setattr(group_endings, "DISK_WAIT", 0.1)
    queue = Queue(tmp_path, checkpoint_seconds=0.05)
    try:
        running = queue.submit({"seed": 1, "epochs": 400, "hidden": 32})
        queue.until(lambda: queue.epoch(running[0]) > 0)
        filler = small_runs / "filler"
        fill(filler)
        names = running + queue.submit({"seed": 2}, {"seed": 3, "model": "sage"})
        tries = 5  # more than a task has attempts
        queue.until(lambda: max(requeued(queue, name) for name in names) >= tries, 120.0)
        waiting = [queue.db.get(name) for name in names]
        assert not any(task.state == "failed" for task in waiting), [task.error for task in waiting]
        assert any("space left" in (task.error or "") for task in waiting)
        filler.unlink()
        done = queue.wait(names, 120.0)
        assert [task.state for task in done] == ["done"] * 3, [task.error for task in done]
        assert [task.error for task in done] == [None] * 3, "what was wrong before is not wrong now"
    finally:
        queue.close()
    assert queue.supervisor.error == ""


def requeued(queue, name):
    """How often a task returned to the queue."""
    return sum(event.kind == "queued" for event in queue.db.events(task=name, limit=10_000)) - 1


@pytest.mark.parametrize(
    ("error", "full"),
    [
        ("cannot write to /runs/a: No space left on device; every file there is whole", True),
        ("OSError: [Errno 28] No space left on device: '/runs/a'", True),
        ("OSError: [Errno 122] Disk quota exceeded", True),
        ("cannot write to /runs/a: Permission denied; every file there is whole", False),
        ("ValueError: on purpose", False),
    ],
)
def test_what_a_full_disk_is(error, full):
    assert is_full_disk(error) == full
