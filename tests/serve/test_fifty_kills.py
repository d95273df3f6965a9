"""``kill -9`` of whatever process at 50 random moments, and a disk that is full for a while: every task ends well."""

from __future__ import annotations

import math
import os
import random
import signal
import subprocess
import time
from contextlib import suppress

import pytest

import weft
from tests.serve.direct_queue import problems
from tests.serve.serving import TASK, Queue, history_of
from tests.serve.warm_spawners import real_spawners
from weft.core.errors import WeftError
from weft.serve.queue_db import ENDED, Submission
from weft.serve.worker_pool import PLANNER

KILLS = 50
SPAWNER_AT = (20, 40)  # the process that all others are forked from: a new one imports everything
KINDS = ({"model": "gcn"}, {"model": "sage", "layers": 3}, {"model": "gin"})


def test_killed_at_fifty_moments(tmp_path):
    with real_spawners():
        kill_again_and_again(Queue(tmp_path, checkpoint_seconds=0.05, workers=2), random.Random(3))


def kill_again_and_again(queue: Queue, draw: random.Random) -> None:
    """Kill something ``KILLS`` times while the queue is kept busy, and look at every task."""
    names: list[str] = []
    try:
        for number in range(KILLS):
            keep_busy(queue, names, number)
            queue.until(lambda: queue.db.groups("running"))
            time.sleep(draw.uniform(0.0, 0.15))
            lost = queue.supervisor.state.counters["workers_lost"]
            while not kill_one(queue, draw, number):
                time.sleep(0.01)
            queue.until(lambda lost=lost: queue.supervisor.state.counters["workers_lost"] > lost)
        done = queue.wait(names, 240.0)
        assert {task.state for task in done} == {"done"}, [(task.id, task.error) for task in done]
        assert queue.supervisor.state.counters["workers_lost"] >= KILLS
        assert problems(queue.db) == []
        completed = [event.task for event in queue.db.events(limit=100_000) if event.kind == "done"]
        assert sorted(completed) == sorted(names)  # none lost, none completed twice
        for task in done:
            assert near(queue.history(task.id), one_by_itself(task.spec["task"])), task.id
    finally:
        queue.close()
    assert queue.supervisor.error == ""


def keep_busy(queue: Queue, names: list[str], number: int) -> None:
    """Queue more tasks once few are left; some can be joined, some cannot."""
    left = [name for name in names[-12:] if queue.db.get(name).state not in ENDED]
    if len(left) < 3:
        kind = KINDS[number % len(KINDS)]
        tasks = ({**kind, "seed": 100 * number + place, "epochs": 60} for place in range(3))
        names += queue.submit(*tasks, max_attempts=10_000)


def kill_one(queue: Queue, draw: random.Random, number: int) -> bool:
    """A worker most of the time, now and then the planner, twice the spawner; False if it had ended already."""
    if number in SPAWNER_AT:
        process = queue.supervisor.pool._spawner._process
        pid = None if process is None else process.pid
    else:
        workers = queue.supervisor.pool.workers
        names = [name for name in list(workers) if name != PLANNER]
        busy = [name for name in names if workers[name].group] or names
        name = PLANNER if draw.random() < 0.1 else draw.choice(busy)
        pid = workers[name].pid
    if pid is None or workers_end(queue, pid):
        return False
    try:
        os.kill(pid, signal.SIGKILL)
    except ProcessLookupError:
        return False
    return True


def workers_end(queue: Queue, pid: int) -> bool:
    """Whether that worker was ended before and is being replaced."""
    return any(worker.pid == pid and worker._ended.is_set() for worker in queue.supervisor.pool.workers.values())


def one_by_itself(settings: dict) -> dict:
    return next(iter(history_of(weft.Task(**settings)).values()))


def near(one: dict, two: dict) -> bool:
    """Equal up to the rounding of a task that trained in a group for a while and then alone."""
    for key, values in two.items():
        for mine, expected in zip(one[key], values, strict=True):
            unknown = mine is None or math.isnan(mine)
            if unknown != math.isnan(expected) or (not unknown and not math.isclose(mine, expected, abs_tol=2e-2)):
                return False
    return set(one) == set(two)


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
