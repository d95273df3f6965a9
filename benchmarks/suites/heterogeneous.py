"""Tasks of different structure woven into one step, against the same tasks alone: in sequence, and in processes.

    python -m benchmarks.suites.heterogeneous --out heterogeneous.json

``depths``: GCN of 2, 2, 3 and 4 layers on the pubmed shape. ``ten``: 4 GCN, 4 GIN and 2 GAT of 3 layers on the arxiv
shape. Sides: ``woven`` (one group, equal structures stacked, operators in shared kernels), ``concurrent`` (one group,
each stack on a stream of its own), ``stacks`` (each stack a step of its own, one after the other), ``sequence``
(Weft's solo runs one after another; the sum of their epochs), ``mps`` (a process each under NVIDIA's Multi-Process
Service, started together; the time until the last has trained its epochs) and, on request, ``processes`` (the same
without the service). Those are epochs once everything is prepared.

``runs``, ``run`` and ``run_woven`` are whole runs, wall seconds from the call to the results: ``weft.run(task)`` for
one task after another, ``weft.run([all tasks])``, and the same with ``weave="merged"``. Every run gets the graph as an
object on the host, moves it to the device and derives what it needs. All sides have run for a few epochs before, so
kernels are compiled; what Weft learns of a machine starts empty in every cell.

``matching_seconds`` is what a woven group takes before it trains that tasks alone do not: recording the operators of
its stacks and matching them. ``preparing_seconds`` also has compiling, if kernels are met for the first time on a
machine, and recording the CUDA graph.
"""

from __future__ import annotations

import gc
import os
import tempfile
import time
from argparse import Namespace
from collections.abc import Mapping, Sequence
from typing import Any
from unittest.mock import patch

import torch

import weft
from benchmarks.baselines.processes import train_together
from benchmarks.harness.graphs import fresh, make_graph
from benchmarks.harness.recorder import NotHere, Recorder, common_arguments, listed
from benchmarks.harness.timing import Memory, Timing, synchronize, time_until
from benchmarks.harness.weft_side import MOST_EPOCHS, eager_memory, group_epoch
from weft.core.models import BUILT_IN
from weft.core.plan import Plan
from weft.core.task import Task
from weft.engine.estimator import merger_for
from weft.engine.home import HOME_VARIABLE
from weft.engine.result import Result
from weft.graph.graph import Graph
from weft.planner.grouping.groups import plan_as_one_group
from weft.runtime.group import GroupRun
from weft.serve.worker_pool import MPS
from weft.weave.step import merged

SIDES = ("sequence", "stacks", "concurrent", "woven", "mps")  # alone before woven, so that kernels are compiled then
RUNS = ("runs", "run", "run_woven")
WARM_EPOCHS = 3  # of whole runs before they are timed
COMMON: dict[str, Any] = {"hidden": 64, "epochs": MOST_EPOCHS, "eval_every": MOST_EPOCHS}
HEADS = {"heads": 4, "out_heads": 4}  # of models that have some
CASES: dict[str, tuple[str, list[dict[str, Any]]]] = {
    "depths": ("pubmed", [{"model": "gcn", "layers": layers} for layers in (2, 2, 3, 4)]),
    "ten": (
        "arxiv",
        [{"model": model, "layers": 3} for model, count in (("gcn", 4), ("gin", 4), ("gat", 2)) for _ in range(count)],
    ),
}
EPOCHS = {"depths": 1000, "ten": 200}  # of every process: seconds, so that starting them does not count


def settings_of(case: str, hidden: int) -> list[dict[str, Any]]:
    """What every task of a case is made of, names and seeds included."""
    found = []
    for place, own in enumerate(CASES[case][1]):
        heads = HEADS if BUILT_IN[own["model"]].has_heads else {}
        name = f"{own['model']}-{own['layers']}-{place}"
        found.append({**COMMON, **heads, **own, "hidden": hidden, "seed": place, "name": name})
    return found


def tasks_of(case: str, graph: Graph, hidden: int) -> list[Task]:
    """The tasks of a case on ``graph``."""
    return [Task(graph=graph, **settings) for settings in settings_of(case, hidden)]


def measure(side: str, case: str, graph: Graph, args: Namespace) -> dict[str, Any]:
    """Milliseconds in which every task of the case advances by one epoch, on one side."""
    if side in ("woven", "concurrent"):
        return measure_groups(
            [tasks_of(case, graph, args.hidden)], graph, args.seconds, "merged" if side == "woven" else None
        )
    if side == "stacks":
        tasks = tasks_of(case, graph, args.hidden)
        plan = plan_as_one_group(tasks, graph.stats(), graph.device.type)
        return measure_groups([[tasks[i] for i in stack] for stack in plan.stack_members], graph, args.seconds)
    if side == "sequence":
        return measure_groups([[task] for task in tasks_of(case, graph, args.hidden)], graph, args.seconds)
    return measure_processes(side, case, graph, args)


def measure_groups(groups: list[list[Task]], graph: Graph, seconds: float, weave: str | None = None) -> dict[str, Any]:
    """Groups one after another: the sum of their epochs, each timed on its own."""
    total, planning, matching, preparing, peaks, notes = 0.0, 0.0, 0.0, 0.0, [], []
    timings: list[Timing] = []
    for tasks in groups:
        memory = Memory(graph.device)
        start = time.perf_counter()
        plan = plan_as_one_group(tasks, graph.stats(), graph.device.type, weave=weave)
        planning += time.perf_counter() - start
        matching += seconds_to_weave(tasks, graph, plan)
        start = time.perf_counter()
        weft = group_epoch(tasks, graph, plan=plan)
        weft.train()
        preparing += time.perf_counter() - start
        least = 10 if graph.device.type == "cuda" else 2
        timings.append(time_until(weft.train, graph.device, warmup=5, repeats=50, seconds=seconds, least=least))
        total += timings[-1].ms
        notes += weft.notes
        peaks.append(eager_memory(memory, weft)[0])
        del weft
    return {
        "ms": round(total, 4),
        "peak_gb": max(peaks) if None not in peaks else None,
        "planning_seconds": planning,
        "matching_seconds": matching,
        "preparing_seconds": preparing,
        "groups": len(groups),
        "notes": notes,
        "timing": [timing.to_dict() for timing in timings],
    }


def seconds_to_weave(tasks: list[Task], graph: Graph, plan: Plan) -> float:
    """Recording the operators of a group's stacks and matching them; nothing where there is one stack."""
    if plan.join != "woven":
        return 0.0
    run = GroupRun(tasks, graph, plan, graph.device, merger_for(plan))
    for stack in run.stacks:
        stack.train_step(stack.source.example())  # what is built once is built, and kernels are compiled
    synchronize(graph.device)
    start = time.perf_counter()
    merged(run.stacks)
    synchronize(graph.device)
    return time.perf_counter() - start


def measure_processes(side: str, case: str, graph: Graph, args: Namespace) -> dict[str, Any]:
    """A process a task, all at once; the time until the last one is done, per epoch."""
    warmup = 5 if graph.device.type == "cuda" else 1
    epochs = args.epochs or EPOCHS[case]
    requests = [
        {
            "shape": CASES[case][0],
            "scale": args.scale,
            "device": str(graph.device),
            "task": settings,
            "epochs": epochs,
            "warmup": warmup,
        }
        for settings in settings_of(case, args.hidden)
    ]
    service = MPS([graph.device.type], len(requests), wanted=side == "mps")
    if not service.start() and side == "mps":
        raise NotHere("NVIDIA's Multi-Process Service could not be started: it is not installed, or there is no GPU")
    try:
        found = train_together(requests, service.environment, args.process_seconds)
    finally:
        service.stop()
    own = [worker["seconds"] * 1e3 / epochs for worker in found["workers"]]
    return {
        "ms": round(found["makespan"] * 1e3 / epochs, 4),
        "epochs": epochs,
        "preparing_seconds": found["prepare_seconds"],
        "own_ms": [round(ms, 4) for ms in own],
        "recorded": all(worker["recorded"] for worker in found["workers"]),
    }


def measure_runs(
    side: str, case: str, graph: Graph, device: torch.device, epochs: int, args: Namespace
) -> dict[str, Any]:
    """Wall seconds of ``side``: the median of several passes; ``graph`` lies on the host."""

    def lasting(count: int) -> list[dict[str, Any]]:
        often = {"epochs": count, "eval_every": args.evaluate_every or count}
        return [{**one, **often} for one in settings_of(case, args.hidden)]

    passes = []
    with tempfile.TemporaryDirectory() as home, patch.dict(os.environ, {HOME_VARIABLE: home}):
        train(side, lasting(WARM_EPOCHS), graph, device)
        for _ in range(args.run_repeats):
            gc.collect()
            synchronize(device)
            begin = time.perf_counter()
            results = train(side, lasting(epochs), graph, device)
            synchronize(device)
            passes.append(round(time.perf_counter() - begin, 4))
    groups = {result.plan.members: result.plan.join for result in results}
    return {
        "seconds": sorted(passes)[len(passes) // 2],
        "passes": passes,
        "evaluate_every": args.evaluate_every,
        "groups": [f"{len(members)} {join}" for members, join in groups.items()],
        "losses": [result.history["loss"][-1] for result in results],
    }


def train(side: str, settings: Sequence[Mapping[str, Any]], graph: Graph, device: torch.device) -> list[Result]:
    """The results of all tasks, trained as ``side`` does it; a RuntimeError if one did not finish."""
    how: dict[str, Any] = {"device": str(device), "progress": False}
    if side == "runs":
        results = [weft.run(Task(graph=fresh(graph), **one), **how) for one in settings]
    else:
        shared = fresh(graph)
        tasks = [Task(graph=shared, **one) for one in settings]
        results = weft.run(tasks, options=weft.RunOptions(weave="merged" if side == "run_woven" else None), **how).tasks
    for result in results:
        if result.status != "finished":
            raise RuntimeError(f"task {result.name!r}: {result.status}: {result.message}")
    return results


def run_case(recorder: Recorder, case: str, args: Namespace) -> None:
    """All sides of one case."""
    shape, wanted = CASES[case][0], listed(args.sides)
    graph = recorder.prepare(f"graph {shape}", lambda: make_graph(shape, recorder.device, args.scale))
    if graph is None:
        return
    for side in (side for side in (*SIDES, "processes") if side in wanted):
        recorder.cell({"case": case, "side": side}, lambda s=side: measure(s, case, fresh(graph), args))
    host, graph = fresh(graph).to("cpu"), None  # whole runs have the device to themselves
    for epochs in map(int, listed(args.run_epochs)):
        for side in (side for side in RUNS if side in wanted):
            key = {"case": case, "side": side, "epochs": epochs}
            recorder.cell(key, lambda s=side, n=epochs: measure_runs(s, case, host, recorder.device, n, args))


def arguments() -> Namespace:
    """The command line."""
    parser = common_arguments(__doc__.splitlines()[0])
    parser.add_argument("--cases", default=",".join(CASES))
    parser.add_argument("--sides", default=",".join((*SIDES, *RUNS)), help="also: processes")
    parser.add_argument("--hidden", type=int, default=64)
    parser.add_argument("--epochs", type=int, help="that every process trains, instead of each case's own number")
    parser.add_argument("--seconds", type=float, default=2.0, help="timed seconds of one group")
    parser.add_argument("--process-seconds", type=float, default=90.0, help="for processes to prepare, and to train")
    parser.add_argument("--run-epochs", default="200,1000", help="lengths of whole runs")
    parser.add_argument("--run-repeats", type=int, default=3, help="passes of whole runs, of which the median counts")
    parser.add_argument("--evaluate-every", type=int, help="epochs, in whole runs; else after the last one")
    parser.add_argument("--scale", type=float, default=1.0, help="shrink the graphs, to try this out")
    return parser.parse_args()


def main() -> None:
    """Run the cells and print the tables."""
    from benchmarks.report import runs

    args = arguments()
    recorder = Recorder("heterogeneous", args)
    for case in listed(args.cases):
        run_case(recorder, case, args)
    recorder.print_tables(runs.different, runs.whole_runs)


if __name__ == "__main__":
    main()
