"""kill -9 at random moments: nothing that was acknowledged is lost, nothing is completed twice."""

from __future__ import annotations

import os
import random
import subprocess
import sys
import time
from pathlib import Path

from tests.serve.direct_queue import DirectQueue, problems

KILLS = 30
PROCESSES = 2
HAMMER = Path(__file__).with_name("hammer.py")
ROOT = Path(__file__).parents[2]
ENVIRONMENT = {**os.environ, "PYTHONPATH": f"{ROOT / 'src'}{os.pathsep}{ROOT}"}


def start(path, number, out):
    command = [sys.executable, str(HAMMER), str(path), f"w{number}", str(number)]
    return subprocess.Popen(command, stdout=out, env=ENVIRONMENT)


def wait_until_ready(files, processes):
    until = time.monotonic() + 60
    while not all("ready" in file.read_text() for file in files):
        assert all(process.poll() is None for process in processes), "a process ended by itself"
        assert time.monotonic() < until, "the processes do not start"
        time.sleep(0.005)


def killed_at(path, folder, batch, seconds):
    """Start processes on the queue, kill each after ``seconds`` of its own, return what they wrote down."""
    files = [folder / f"{batch}-{place}.txt" for place in range(PROCESSES)]
    processes = []
    for place, file in enumerate(files):
        with file.open("w") as out:
            processes.append(start(path, batch * PROCESSES + place, out))
    wait_until_ready(files, processes)
    for process, wait in zip(processes, seconds, strict=True):
        time.sleep(wait)
        assert process.poll() is None, "a process ended by itself"
        process.kill()
        process.wait()
    return [line for file in files for line in file.read_text().splitlines()]


def test_kill_at_random_moments(tmp_path):
    path, draw = tmp_path / "queue.db", random.Random(7)
    DirectQueue(path).close()
    acknowledged: list[str] = []
    for batch in range(KILLS // PROCESSES):
        acknowledged += killed_at(path, tmp_path, batch, [draw.uniform(0.0, 0.2) for _ in range(PROCESSES)])
        with DirectQueue(path) as queue:
            queue.requeue_expired()
    with DirectQueue(path) as queue:
        check(queue, acknowledged)


def check(queue, acknowledged):
    assert problems(queue) == []
    states = {task.id: task.state for task in queue.tasks(limit=1_000_000)}
    told = [line.split() for line in acknowledged if len(line.split()) == 2]
    queued, done = ([name for kind, name in told if kind == wanted] for wanted in ("queued", "done"))
    assert len(queued) > KILLS, "the processes did too little to learn from"
    assert set(queued) <= set(states), "an acknowledged submission is lost"
    assert len(done) == len(set(done)), "a task was completed twice"
    assert all(states[name] == "done" for name in done), "an acknowledged result is lost"
    sequence = [event.seq for event in queue.events(limit=1_000_000)]
    assert sequence == sorted(set(sequence))
