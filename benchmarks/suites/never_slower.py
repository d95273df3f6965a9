"""A sweep of a user's module is not slower than the same tasks one after another: 12 modules on 3 graphs.

    python -m benchmarks.suites.never_slower --out never_slower_gpu.json
    OMP_NUM_THREADS=1 python -m benchmarks.suites.never_slower --device cpu --out never_slower.json

Sides: ``sweep`` are the groups that a run plans for all tasks, ``turn`` is as many epochs of the group of one task.
Both are trained as in a run (on a GPU captured and replayed), with their evaluation. Times are milliseconds of an epoch
of all tasks: CPU time of one thread on a CPU, which a busy machine changes little; wall time on a GPU. They are medians
of at least ``--runs`` rounds in alternation, and of more until the ratio of the sides is known to ``STEADY``;
``spread`` is how well it is known. ``made`` are the seconds to plan and build the groups and to train their first
epochs, compilation included; the sweep is made first, and compiles the kernels of one task as well.

The command fails unless every cell was measured, is steady and reaches ``BOUND``. A cell that was skipped for time is
missing: run it in a second call with ``--resume`` into the same file.
"""

from __future__ import annotations

import math
import sys
import time
from argparse import Namespace
from collections.abc import Callable, Mapping, Sequence
from statistics import median, quantiles
from typing import Any

import torch

import weft
from benchmarks.baselines.trainings import NAMES, OPAQUE, opaque_module, random_module, users_module
from benchmarks.harness.recorder import Recorder, common_arguments, listed
from benchmarks.harness.timing import synchronize
from weft.core.plan import Plan
from weft.engine.estimator import merger_for
from weft.engine.graphs import Graphs
from weft.engine.run_planner import RunPlanner
from weft.graph.graph import Graph
from weft.runtime.group import GroupRun

GRAPHS = {
    "cuda": ("shape:cora", "shape:pubmed", "shape:ogbn-arxiv"),
    "cpu": ("shape:cora", "shape:pubmed", "shape:proteins"),
}
MODULES = {
    **{name: (lambda name=name: opaque_module(name, layers=2, hidden=32)) for name in OPAQUE},
    **{name: (lambda name=name: users_module(name, hidden=32)) for name in NAMES},
    "random-1": lambda: random_module(1),
}
EPOCHS = 1_000  # of every task: fewer than compiling with Inductor would repay
ROUND_SECONDS, MOST_EPOCHS, WARM_EPOCHS = 0.05, 40, 3
STEADY, MOST_RUNS = 0.03, 4  # how well a ratio is to be known; times ``--runs`` that it may take
BOUND = 0.95  # of the speed in turn that a sweep must reach


def groups_of(tasks: Sequence[weft.Task], graph: Graph) -> list[tuple[Plan, GroupRun]]:
    """The groups that a run plans for ``tasks``, built and warm."""
    planner = RunPlanner(graph.device, Graphs(graph.device))
    by_name, made = {task.label: task for task in tasks}, []
    for plan in planner.groups(tasks):
        members = [by_name[name] for name in plan.members]
        planner.warm(members, plan, lambda done, total: None)  # on all cores, as a run does
        group = GroupRun(members, graph, plan, graph.device, merger_for(plan), measure=True)
        group.advance(WARM_EPOCHS)
        made.append((group.plan, group))
    synchronize(graph.device)
    return made


def advance_all(groups: Sequence[tuple[Plan, GroupRun]], epochs: int, times: int) -> None:
    """``epochs`` epochs of every group, ``times`` over."""
    for _ in range(times):
        for _, group in groups:
            group.advance(epochs)


def seconds_of(work: Callable[[], Any], device: torch.device) -> float:
    """Wall seconds until the device is done; CPU seconds of this process on a CPU."""
    clock = time.process_time if device.type == "cpu" else time.perf_counter
    synchronize(device)
    begin = clock()
    work()
    synchronize(device)
    return clock() - begin


def measure(module: str, graph: Graph, args: Namespace) -> dict[str, Any]:
    """Median milliseconds of an epoch of all tasks on both sides, and how the sweep was grouped."""
    model, device = MODULES[module](), graph.device
    tasks = [weft.Task(graph=graph, model=model, seed=i, epochs=EPOCHS, name=str(i)) for i in range(args.tasks)]
    found: dict[str, list[tuple[Plan, GroupRun]]] = {}
    made = {}
    for side, members in (("sweep", tasks), ("turn", tasks[:1])):
        made[side] = seconds_of(lambda s=side, m=members: found.update({s: groups_of(m, graph)}), device)
    times = {"sweep": 1, "turn": args.tasks}
    once = {side: seconds_of(lambda s=side: advance_all(found[s], 1, times[s]), device) for side in found}
    epochs = max(1, min(MOST_EPOCHS, int(ROUND_SECONDS / max(*once.values(), 1e-6))))
    taken: dict[str, list[float]] = {side: [] for side in found}
    for run in range(MOST_RUNS * args.runs):
        if run >= args.runs and spread(taken) <= STEADY:
            break
        for side, groups in found.items():
            taken[side].append(seconds_of(lambda g=groups, s=side: advance_all(g, epochs, times[s]), device) / epochs)
    ms = {side: 1e3 * median(values) for side, values in taken.items()}
    plans = [plan for plan, _ in found["sweep"]]
    return {
        **{f"{side}_ms": round(value, 4) for side, value in ms.items()},
        **{f"{side}_made_s": round(value, 2) for side, value in made.items()},
        "join": "+".join(plan.join for plan in plans),
        "stacks": sum(len(group.stacks) for _, group in found["sweep"]),
        "compiled": any(plan.compiled for plan in plans),
        "replayed": all(plan.replay for plan in plans),
        "turn_over_sweep": round(ms["turn"] / ms["sweep"], 3),
        "spread": round(spread(taken), 3),
        "rounds": len(taken["turn"]),
        "epochs": epochs * len(taken["turn"]),
        "why": [reason for plan in plans for reason in plan.why if "side by side" in reason],
    }


def spread(taken: Mapping[str, Sequence[float]]) -> float:
    """How well the ratio of the sides is known: the distance of the quartiles of its rounds over the root of those."""
    ratios = sorted(turn / sweep for turn, sweep in zip(taken["turn"], taken["sweep"], strict=True))
    if len(ratios) < 2:
        return math.inf
    first, middle, third = quantiles(ratios, n=4, method="inclusive")
    return (third - first) / (middle * math.sqrt(len(ratios)))


def summary(cells: list[dict[str, Any]]) -> dict[str, Any]:
    """The least ratio, how many are below the bound, unsteady or missing, what was made, and whether all went well."""
    found = [cell for cell in cells if "turn_over_sweep" in cell]
    below = sum(cell["turn_over_sweep"] < BOUND for cell in found)
    unsteady, missing = sum(cell["spread"] > STEADY for cell in found), len(cells) - len(found)
    return {
        "cells": len(found),
        "worst": min((cell["turn_over_sweep"] for cell in found), default=None),
        "below_bound": below,
        "unsteady": unsteady,
        "missing": missing,
        **{f"{side}_made_s": round(sum(cell[f"{side}_made_s"] for cell in found), 1) for side in ("sweep", "turn")},
        "passed": bool(found) and not below and not unsteady and not missing,
    }


def arguments() -> Namespace:
    """The command line."""
    parser = common_arguments(__doc__.splitlines()[0])
    parser.set_defaults(budget_seconds=420.0)
    parser.add_argument("--graphs", type=listed, default=[], help="other than the usual of the device")
    parser.add_argument("--modules", type=listed, default=list(MODULES))
    parser.add_argument("--tasks", type=int, default=4)
    parser.add_argument("--runs", type=int, default=5)
    return parser.parse_args()


def main() -> int:
    """Measure every module on every graph and print the ratios; 1 unless all of them went well."""
    args = arguments()
    recorder = Recorder("never_slower_gpu" if args.device.startswith("cuda") else "never_slower", args)
    if recorder.device.type == "cpu":
        torch.set_num_threads(1)
    for name in args.graphs or GRAPHS[recorder.device.type]:
        graph = recorder.prepare(name, lambda n=name: weft.load(n, device=recorder.device))
        for module in args.modules if graph is not None else []:
            recorder.cell({"graph": name, "module": module}, lambda m=module, g=graph: measure(m, g, args))
        for module in args.modules if graph is None else []:
            recorder.cells.append({"graph": name, "module": module, "status": "failed", "error": "no graph"})
    found = summary(recorder.cells)
    recorder.save(summary=found)
    print(found)
    return 0 if found["passed"] else 1


if __name__ == "__main__":
    sys.exit(main())
