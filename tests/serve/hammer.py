"""A process that changes a queue as fast as it can and writes down, on stdout, every change that was acknowledged.

Run as ``python hammer.py FILE NAME SEED``; it is killed from outside, at any moment.
"""

from __future__ import annotations

import random
import sys

from tests.serve.direct_queue import DirectQueue
from weft.serve.queue_db import LostClaimError, QueueDB, QueueError, Submission


def main(path: str, name: str, seed: int) -> None:
    draw = random.Random(seed)
    with DirectQueue(path) as queue:
        print("ready", flush=True)
        for number in range(1_000_000):
            _step(queue, name, number, draw)


def _step(queue: QueueDB, name: str, number: int, draw: random.Random) -> None:
    task = queue.submit(Submission({"n": number}, id=f"{name}-{number}", key=f"{name}-{number}", max_attempts=50))
    print("queued", task.id, flush=True)
    queue.requeue_expired()
    for waiting in queue.tasks(state="queued", limit=3):
        try:
            queue.plan(waiting.id, {})
        except QueueError:
            continue  # another process was faster
    for held in queue.claim(name, draw.choice((0.0, 5.0)), limit=2):
        _end(queue, name, held.id, held.attempts, draw)


def _end(queue: QueueDB, name: str, task: str, attempt: int, draw: random.Random) -> None:
    try:
        if draw.random() < 0.8:
            queue.finish(task, name, attempt, {"by": name})
            print("done", task, flush=True)
        else:
            queue.fail(task, name, attempt, "by chance", retry=True)
    except LostClaimError:
        pass  # the lease had run out


if __name__ == "__main__":
    main(sys.argv[1], sys.argv[2], int(sys.argv[3]))
