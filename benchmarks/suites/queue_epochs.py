"""CoGNN's queues at the paper's 200 epochs with several numbers of workers, and Weft's overhead as the paper counts it.

    python -m benchmarks.suites.queue_epochs --out queue_epochs.json
    python -m benchmarks.suites.queue_epochs --quick --device cpu       tiny graphs and few tasks, to try it out

The paper divides its overheads (estimating memory; scheduling) by the time in which the queue executes one epoch of
every task. Here each queue is run with ``--epochs`` and with ``--short`` epochs under one policy, and

    makespan = overhead + epochs x epoch

is solved for both unknowns: ``epoch`` is that time under this policy, and ``overhead`` what starts and scheduling take
in all. Planning (estimates of memory and time of tasks that the server has not seen) ends before the clock starts and
is counted apart. Queues, graphs, budget and warm-up are those of ``benchmarks.suites.queues``.
"""

from __future__ import annotations

import tempfile
from argparse import Namespace
from collections.abc import Mapping
from contextlib import ExitStack
from pathlib import Path
from typing import Any

import torch

from benchmarks.harness.recorder import Recorder, common_arguments, listed
from benchmarks.queue_runs.server import DeviceSampler, QueueServer
from benchmarks.suites.queues import GIB, seconds_for, tasks_of, weft_cell, write_graphs


def run_server(workers: int, folder: Path, graphs: Mapping[str, Path], recorder: Recorder, args: Namespace) -> None:
    """All queues under all policies on a server with so many workers."""
    idle = DeviceSampler(0 if recorder.device.type == "cuda" else None).bytes_before
    sizes = int(args.budget_gib * GIB), int(args.reserved_gib * GIB)
    place = folder / f"workers-{workers}"
    place.mkdir()
    with ExitStack() as stack:
        start = lambda: stack.enter_context(  # noqa: E731
            QueueServer(place, str(recorder.device), workers, *sizes, home=folder / "home")
        )
        server = recorder.prepare(f"server, {workers} workers", start)
        if server is None:
            return
        for name in listed(args.queues):
            every = {count: _tasks(name, graphs, args, count) for count in (args.short, args.epochs)}
            warm = [{**one, "epochs": 1} for one in every[args.epochs].values()]
            seconds = min(args.warm_seconds, max(recorder.left, 0.0))
            make = lambda warm=warm, seconds=seconds: server.warm_up(warm, seconds)  # noqa: E731
            recorder.prepare(f"warm {name}, {workers} workers", make)
            for mode in listed(args.modes):
                for count, tasks in every.items():
                    key = {"queue": name, "workers": workers, "mode": mode, "epochs": count}
                    work = lambda mode=mode, tasks=tasks: weft_cell(  # noqa: E731
                        mode, tasks, server, idle, seconds_for(recorder)
                    )
                    recorder.cell(key, work, free=False)


def _tasks(name: str, graphs: Mapping[str, Path], args: Namespace, epochs: int) -> dict[str, dict[str, Any]]:
    return tasks_of(name, graphs, Namespace(**{**vars(args), "epochs": str(epochs)}))


def arguments() -> Namespace:
    """The command line."""
    parser = common_arguments(__doc__.splitlines()[0])
    parser.add_argument("--queues", default="gcn,mix")
    parser.add_argument("--modes", default="backfill")
    parser.add_argument("--workers", default="6,2")
    parser.add_argument("--epochs", type=int, default=200)
    parser.add_argument("--short", type=int, default=20, help="epochs of the second run of each queue")
    parser.add_argument("--hidden", type=int, default=64)
    parser.add_argument("--tasks", type=int, default=20, help="of each queue")
    parser.add_argument("--budget-gib", type=float, default=26.0)
    parser.add_argument("--reserved-gib", type=float, default=6.0)
    parser.add_argument("--warm-seconds", type=float, default=40.0, help="at most, per queue and server")
    parser.add_argument("--scale", type=float, default=1.0, help="shrink the graphs, to try this out")
    parser.add_argument("--nodes", type=int, help="shrink every graph to about so many nodes")
    parser.add_argument("--quick", action="store_true", help="tiny graphs, few tasks and epochs")
    args = parser.parse_args()
    if args.quick:
        args.nodes, args.tasks, args.epochs, args.short, args.hidden = 1_500, 3, 6, 2, 8
    return args


def main() -> None:
    """Every queue with every number of workers."""
    from benchmarks.report import runs

    args = arguments()
    recorder = Recorder("queue_epochs", args)
    device = torch.device("cuda", 0) if recorder.device.type == "cuda" else recorder.device
    recorder.device = device
    with tempfile.TemporaryDirectory(prefix="weft-queues-", ignore_cleanup_errors=True) as place:
        folder = Path(place)
        graphs = recorder.prepare("graphs", lambda: write_graphs(folder, listed(args.queues), device, args))
        if graphs is None:
            return
        for workers in map(int, listed(args.workers)):
            run_server(workers, folder, graphs, recorder, args)
    recorder.print_tables(runs.queue_epochs)


if __name__ == "__main__":
    main()
