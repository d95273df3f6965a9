"""A team's queue on one device: 24 jobs of three users that arrive within 18 s, under several ways to run them.

    python -m benchmarks.suites.team_queue --out team_queue.json
    python -m benchmarks.suites.team_queue --quick --device cpu       tiny graphs and few epochs, to try it out
    python -m benchmarks.suites.team_queue --modes backfill,unfused --jobs stacked,solo --file mine.json

The jobs (``benchmarks/queue_runs/team_queue.json``, or ``--file``) are stacked and mixed sweeps, sampled sweeps,
modules of PyG, R-GCN, single tasks, and inference that is asked for every second with an answer wanted within 0.1 s.

Modes: ``backfill`` (the server as it is), ``unfused`` (the same policy; no task shares a group with another), ``lmcf``
(CoGNN's), ``sequential`` (one task at a time), and ``pyg-mps``: PyG's loops of the same tasks in as many warm processes
as Weft has workers, under NVIDIA's MPS, each taking the next task when it is free.

Tasks arrive as the file says, so planning is part of the first submission of a kind; it is done before the first mode
(``planning_seconds``), since a server keeps its plans. Graphs are on disk before, and kernels compiled by a warm-up for
each way of grouping that the modes use: for fused groups the queue itself with one epoch per task, so that its groups
are those of the queue; for single tasks one of each kind, without those that differ in seed or learning rate alone. A
cell says whether its warm-up came to its end (``warmed``). A job ends with its last task; makespan, completion (JCT)
and wait are those of trainings, from the first submission on. Inference requests come every second for 20 s, whatever
is running, so they have latencies of their own. The device is sampled 20 times per second.

Modes run in the order of ``--modes``, but Weft's one after another on one server. A mode that does not end within the
budget is recorded with the number of its tasks that did.
"""

from __future__ import annotations

import json
import tempfile
import time
from argparse import Namespace
from collections.abc import Mapping, Sequence
from contextlib import ExitStack
from dataclasses import asdict, replace
from pathlib import Path
from statistics import fmean, median
from typing import Any

import torch

from benchmarks.harness.graphs import make_graph
from benchmarks.harness.recorder import Recorder, common_arguments, listed
from benchmarks.queue_runs.pyg import PyGWorker, run_arriving
from benchmarks.queue_runs.server import DeviceSampler, QueueServer, peak_bytes
from benchmarks.queue_runs.team import QUEUE, Arrival, arrivals, read_jobs, shapes_of
from weft.graph.catalog.shapes import find as find_shape
from weft.sched.simulator import Simulation, TaskRun, percentile
from weft.serve.worker_pool import MPS

GIB = 1 << 30
PYG = "pyg-mps"
WEFT = {"backfill": ("backfill", True), "unfused": ("backfill", False), "lmcf": ("lmcf", False),
        "sequential": ("sequential", False)}  # fmt: skip
MODES = (*WEFT, PYG)
LONGEST, GRACE = 300.0, 30.0  # seconds of a mode; what one that has begun may take beyond the budget


def write_graphs(folder: Path, shapes: Sequence[str], device: torch.device, nodes: int | None) -> dict[str, Path]:
    """Every shape as a folder that processes map; ``nodes``: shrunk to about so many."""
    found = {}
    for shape in shapes:
        scale = 1.0 if nodes is None else min(1.0, max(nodes / find_shape(shape).num_nodes, 0.0005))
        found[shape] = folder / "graphs" / shape
        make_graph(shape, device, scale).to("cpu").save(found[shape])
        if device.type == "cuda":
            torch.cuda.empty_cache()
    return found


def kinds_of(tasks: Sequence[Arrival]) -> list[Arrival]:
    """The first of all tasks that run the same kernels, at second 0; seeds and learning rates make no other kernels."""
    kinds: dict[str, Arrival] = {}
    for task in tasks:
        settings = {name: value for name, value in task.settings.items() if name not in ("seed", "lr", "epochs")}
        kinds.setdefault(json.dumps(settings, sort_keys=True), replace(task, at=0.0))
    return list(kinds.values())


def by_job(runs: Sequence[TaskRun], queue: Sequence[Arrival]) -> list[TaskRun]:
    """Each training job whose tasks all ended, as one run from its first start to its last end."""
    jobs: dict[str, list[TaskRun]] = {}
    ended = {run.id: run for run in runs}
    for one in queue:
        if not one.of:
            jobs.setdefault(one.job, []).append(ended.get(one.label))  # type: ignore[arg-type]
    return [
        TaskRun(job, job, tasks[0].arrival, min(one.start for one in tasks), max(one.end for one in tasks))
        for job, tasks in jobs.items()
        if all(tasks)
    ]


def figures(outcome: Simulation, queue: Sequence[Arrival], sampled: Mapping[str, Any]) -> dict[str, Any]:
    """The figures of a mode as plain data."""
    inferring = {one.label for one in queue if one.of}
    trained = [run for run in outcome.tasks if run.id not in inferring]
    answers = [run.end - run.arrival for run in outcome.tasks if run.id in inferring]
    jobs = asdict(replace(outcome, tasks=by_job(outcome.tasks, queue)).metrics())
    tasks = asdict(replace(outcome, tasks=trained).metrics())
    targets = {one.label: one.infer["latency_target"] for one in queue if one.of}
    in_time = [run.end - run.arrival <= targets[run.id] for run in outcome.tasks if run.id in targets]
    sizes = [len(group.members) for group in outcome.groups if group.members[0] not in inferring]
    return {
        "makespan": tasks["makespan"],
        "mean_jct": jobs["mean_jct"],
        "p95_jct": jobs["p95_jct"],
        "mean_wait": tasks["mean_queuing"],
        "p95_wait": tasks["p95_queuing"],
        "jobs": jobs["tasks"],
        "tasks": len(trained),
        "groups": len(sizes),
        "largest_group": max(sizes, default=0),
        "answers": len(answers),
        "answer_median": median(answers) if answers else None,
        "answer_p95": percentile(answers, 0.95) if answers else None,
        "answers_in_time": fmean(in_time) if in_time else None,
        **sampled,
        "peak_bytes": peak_bytes(outcome.groups),
        "job_ends": {run.id: [round(run.start, 3), round(run.end, 3)] for run in by_job(outcome.tasks, queue)},
    }


def weft_cell(mode: str, queue: Sequence[Arrival], server: QueueServer, idle: int, seconds: float) -> dict[str, Any]:
    """The queue under one of Weft's modes."""
    policy, fuse = WEFT[mode]
    with DeviceSampler(_place(server.device)) as sampler:
        run = server.run_arriving(policy, queue, seconds, fuse)
        sampled = sampler.figures(run.begin, run.end, idle)
    more = {
        "out_of_memory": run.out_of_memory,
        "failed": dict(run.failed),
        "tried_again": dict(run.tried_again),
        "budget_bytes": run.outcome.budget_bytes,
        "reserved_bytes": server.options.reserved,
        "workers": server.options.workers,
    }
    return {**figures(run.outcome, queue, sampled), **more}


def pyg_cell(queue: Sequence[Arrival], device: str, count: int, idle: int, seconds: float) -> dict[str, Any]:
    """The queue in PyG: ``count`` processes that share the device, under MPS where there is a GPU."""
    workers: list[PyGWorker] = []
    service = MPS((device,), count)
    service.start()
    try:
        workers += [PyGWorker(device, environment=service.environment) for _ in range(count)]
        for worker in workers:
            worker.wait_ready()
        with DeviceSampler(_place(device)) as sampler:
            begin = time.time()
            outcome, trouble = run_arriving(PYG, workers, queue, seconds)
            sampled = sampler.figures(begin, time.time(), idle)
    finally:
        for worker in workers:
            worker.stop()
        service.stop()
    more = {"start_seconds": workers[0].start_seconds, "mps": bool(service.environment), "workers": count}
    return {**figures(outcome, queue, sampled), **trouble, **more}


def _place(device: str) -> int | None:
    return int(device.partition(":")[2] or 0) if device.startswith("cuda") else None


def run_weft(
    folder: Path, modes: Sequence[str], recorder: Recorder, queue: Sequence[Arrival], warm: Sequence[Arrival],
    args: Namespace, idle: int,
) -> None:  # fmt: skip
    """Some of Weft's modes on one server, after every task was planned and trained for an epoch."""
    sizes = int(args.budget_gib * GIB), int(args.reserved_gib * GIB)
    with ExitStack() as stack:
        start = lambda: stack.enter_context(QueueServer(folder, str(recorder.device), args.workers, *sizes))  # noqa: E731
        server = recorder.prepare("server", start)
        if server is None:
            return
        recorder.about["mps"] = bool(server.supervisor.pool._mps and server.supervisor.pool._mps.running)
        begin = time.monotonic()
        recorder.prepare("plans", lambda: server.plan([one.settings for one in queue if not one.of]))
        recorder.about["planning_seconds"] = round(time.monotonic() - begin, 2)
        warmed = {}
        for fuse in dict.fromkeys(WEFT[mode][1] for mode in modes):
            tasks, seconds = warm if fuse else kinds_of(warm), min(args.warm_seconds, max(recorder.left, 1.0))
            label = f"warm, {'fused' if fuse else 'unfused'}, {len(tasks)} tasks"
            make = lambda: server.run_arriving("backfill", tasks, seconds, fuse)  # noqa: B023, E731
            warmed[fuse] = recorder.prepare(label, make) is not None
        for mode in modes:
            seconds = min(LONGEST, recorder.left + GRACE)
            make = lambda: {**weft_cell(mode, queue, server, idle, seconds), "warmed": warmed[WEFT[mode][1]]}  # noqa: B023, E731
            recorder.cell({"mode": mode}, make, free=False)


def arguments() -> Namespace:
    """The command line."""
    parser = common_arguments(__doc__.splitlines()[0])
    parser.add_argument("--file", type=Path, default=QUEUE, help="the jobs")
    parser.add_argument("--jobs", default="", help="only jobs whose names begin so, such as stacked,infer")
    parser.add_argument("--modes", default=",".join(MODES))
    parser.add_argument("--workers", type=int, default=6)
    parser.add_argument("--budget-gib", type=float, default=96.0)
    parser.add_argument("--reserved-gib", type=float, default=30.0)
    parser.add_argument("--warm-seconds", type=float, default=90.0, help="at most, of each warm-up run")
    parser.add_argument("--arrival-scale", type=float, default=1.0, help="0: everything arrives at once")
    parser.add_argument("--nodes", type=int, help="shrink every graph to about so many nodes")
    parser.add_argument("--epochs", type=int, help="of every job, in place of the file's")
    parser.add_argument("--quick", action="store_true", help="tiny graphs and few epochs")
    args = parser.parse_args()
    if args.quick:
        args.nodes, args.epochs = 2_000, 2
    return args


def main() -> None:
    """The queue in every mode."""
    from benchmarks.report import runs

    args = arguments()
    recorder = Recorder("team_queue", args)
    device = torch.device("cuda", 0) if recorder.device.type == "cuda" else recorder.device
    recorder.device = device
    jobs, modes = read_jobs(args.file, listed(args.jobs)), listed(args.modes)
    recorder.about["arrival_scale"] = args.arrival_scale
    with tempfile.TemporaryDirectory(prefix="weft-team-", ignore_cleanup_errors=True) as place:
        folder = Path(place)
        graphs = recorder.prepare("graphs", lambda: write_graphs(folder, shapes_of(jobs), device, args.nodes))
        if graphs is None:
            return
        queue = [replace(one, at=one.at * args.arrival_scale) for one in arrivals(jobs, graphs, args.epochs)]
        warm = [replace(one, at=one.at * args.arrival_scale) for one in arrivals(jobs, graphs, 1) if not one.of]
        idle = DeviceSampler(_place(str(device))).bytes_before
        ours = [mode for mode in modes if mode in WEFT]
        for side in dict.fromkeys(mode if mode == PYG else "weft" for mode in modes):  # in the order of --modes
            if side == "weft":
                run_weft(folder, ours, recorder, queue, warm, args, idle)
                continue
            seconds = min(LONGEST, recorder.left + GRACE)
            recorder.cell({"mode": PYG}, lambda: pyg_cell(queue, str(device), args.workers, idle, seconds))  # noqa: B023
        recorder.save()
    recorder.print_tables(runs.team_queue, runs.team_goals)


if __name__ == "__main__":
    main()
