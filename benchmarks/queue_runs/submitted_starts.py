"""How soon a submitted small task starts on a warm worker of a server.

    python -m benchmarks.queue_runs.submitted_starts --device cuda:0      about half a minute

Milliseconds from submission, through the queue, the planner, the scheduler and a worker process, to what a user sees of
the task: that a worker has it, that its run begins, its first epochs, its result. The tasks are on the small graph that
comes with Weft and are submitted one at a time: of a kind that was planned before, and of kinds that are new to the
server, whose kernels nobody has compiled yet (with an empty cache of Triton) or, on a second server, are on the disk.
"""

from __future__ import annotations

import argparse
import tempfile
import time
from pathlib import Path
from statistics import median
from typing import Any

import torch

from benchmarks.harness.recorder import print_table
from benchmarks.queue_runs.queue_server import QueueServer
from weft.sched.policies import find_policy
from weft.serve.queue_db import Submission
from weft.serve.queue_file import ENDED

GIB = 1 << 30
WANTED_MS = 100.0
PLANNED, COMPILES = "planned before", ", kernels to compile"
STEPS = {"running": "a worker has it", "start": "its run begins", "progress": "first epochs", "done": "done"}
TASK = {"graph": "demo", "model": "gcn", "hidden": 8, "epochs": 2}


def kinds(repeats: int) -> dict[str, list[dict[str, Any]]]:
    """Tasks by what is new about them."""
    return {
        PLANNED: [{**TASK, "seed": 1 + place} for place in range(repeats)],
        "another width": [{**TASK, "hidden": 9 + place} for place in range(repeats)],
        "another model": [{**TASK, "model": "sage", "hidden": 24 + place} for place in range(repeats)],
    }


def milliseconds(server: QueueServer, settings: dict[str, Any]) -> dict[str, float]:
    """From submission to every step of a task."""
    begin = time.time()
    (task,) = server.db.submit_many([Submission({"task": settings})])
    server.supervisor.wake()
    server._until(lambda: server.db.get(task.id).state in ENDED, 60.0, "for a small task")
    found = server.db.get(task.id)
    if found.state != "done":
        raise RuntimeError(f"{found.state}: {found.error}")
    first: dict[str, float] = {}
    for event in server.db.events(task=task.id, limit=10_000):
        first.setdefault(event.kind, 1e3 * (event.time - begin))
    return {step: first[step] for step in STEPS if step in first}


def measured(device: str, repeats: int, home: Path) -> dict[str, list[dict[str, float]]]:
    """All kinds on a new server with one worker, after one task of each model."""
    with (
        tempfile.TemporaryDirectory(prefix="weft-starts-", ignore_cleanup_errors=True) as place,
        QueueServer(Path(place), device, 1, 8 * GIB, 2 * GIB, home=home) as server,
    ):
        server.supervisor.use(find_policy("backfill"))
        for model in ("gcn", "sage"):
            milliseconds(server, {**TASK, "model": model})
        return {kind: [milliseconds(server, one) for one in tasks] for kind, tasks in kinds(repeats).items()}


def on_two_servers(device: str, repeats: int) -> dict[str, list[dict[str, float]]]:
    """Kinds that are new: first with kernels to compile, then with those on the disk, as after a restart."""
    with tempfile.TemporaryDirectory(prefix="weft-home-", ignore_cleanup_errors=True) as home:
        first, second = (measured(device, repeats, Path(home)) for _ in range(2))
    new = {f"{kind}{COMPILES}": many for kind, many in first.items() if kind != PLANNED}
    return {PLANNED: second[PLANNED], **{kind: many for kind, many in second.items() if kind != PLANNED}, **new}


def tables(found: dict[str, list[dict[str, float]]]) -> None:
    """Medians of every step; the goal last."""
    rows = [
        [kind, *(median(one[step] for one in many) if all(step in one for one in many) else None for step in STEPS)]
        for kind, many in found.items()
    ]
    print_table(["kind of task, median ms from submission until", *STEPS.values()], rows)
    print()
    begins = {kind: [one["start"] for one in many] for kind, many in found.items()}
    goals = [
        [f"a small task starts, {kind}, ms", f"< {WANTED_MS:g}", median(many), max(many), _verdict(median(many))]
        for kind, many in begins.items()
        if not kind.endswith(COMPILES)  # a worker pays for a kernel once, which takes what the compiler takes
    ]
    print_table(["goal", "wanted", "median", "most", "verdict"], goals)


def _verdict(figure: float) -> str:
    return "pass" if figure < WANTED_MS else "MISS"


def main() -> None:
    """Start a server, submit, print."""
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--device", default="cuda:0" if torch.cuda.is_available() else "cpu")
    parser.add_argument("--repeats", type=int, default=10)
    args = parser.parse_args()
    tables(on_two_servers(args.device, args.repeats))


if __name__ == "__main__":
    main()
