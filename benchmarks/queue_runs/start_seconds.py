"""What making a start ready is worth: seconds of a run of one epoch with and without its weights or checkpoint ready.

    python -m benchmarks.queue_runs.start_seconds            about 20 s on a CPU

A wide model on a small graph, so that the start is most of the run. Both sides alternate; medians.
"""

from __future__ import annotations

import argparse
import shutil
import tempfile
import time
from contextlib import nullcontext, suppress
from pathlib import Path
from statistics import median

import torch

from benchmarks.harness.recorder import print_table
from weft.core.event import Event
from weft.core.task import Task
from weft.engine.control import Control
from weft.engine.graphs import GraphStore, sharing
from weft.engine.run import run
from weft.serve.worker_memory import PreparedStarts


def seconds_of(task: Task, out: Path, prepared: PreparedStarts | None, store: GraphStore, device: str) -> float:
    """Seconds of a run into ``out``; what ``prepared`` has is made ready before."""
    if prepared is not None:
        prepared.prepare([] if out.exists() else [task.to_dict()], [str(out)])
    begin = time.perf_counter()
    with sharing(store), nullcontext() if prepared is None else prepared.using():
        run(task, device=device, out=out, resume=True, progress=False)
    return time.perf_counter() - begin


def leave_off(task: Task, out: Path, device: str) -> None:
    """Train until the first epoch is reported, and leave a checkpoint in ``out``."""
    control = Control()

    def preempt(event: Event) -> None:
        if event.kind == "progress":
            control.preempt()

    with suppress(KeyboardInterrupt):
        run(task, device=device, out=out, progress=False, control=control, on_event=preempt, checkpoint_every=0.0)


def main() -> None:
    """Print a table."""
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--device", default="cuda:0" if torch.cuda.is_available() else "cpu")
    parser.add_argument("--hidden", type=int, default=1024)
    parser.add_argument("--repeats", type=int, default=5)
    args = parser.parse_args()
    device = torch.device(args.device)
    store = GraphStore(device, 1 << 30, 1 << 30)
    found: dict[tuple[str, bool], list[float]] = {}
    with tempfile.TemporaryDirectory(prefix="weft-starts-") as place:
        folder = Path(place)
        task = Task(graph="demo", model="gcn", hidden=args.hidden, layers=3, epochs=1, name="t")
        longer = task.with_values(epochs=3)
        seconds_of(task, folder / "warm", None, store, args.device)
        leave_off(longer, folder / "saved", args.device)
        for number in range(2 * args.repeats):
            ready = PreparedStarts(store) if number % 2 else None
            new, again = folder / f"new-{number}", folder / f"again-{number}"
            shutil.copytree(folder / "saved", again)
            found.setdefault(("new", bool(ready)), []).append(seconds_of(task, new, ready, store, args.device))
            found.setdefault(("resumed", bool(ready)), []).append(seconds_of(longer, again, ready, store, args.device))
    rows = [[kind, median(found[kind, False]), median(found[kind, True])] for kind in ("new", "resumed")]
    print_table(["run of one epoch", "seconds", "seconds, made ready"], rows)


if __name__ == "__main__":
    main()
