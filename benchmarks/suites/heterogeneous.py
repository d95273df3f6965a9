"""Tasks of different structure woven into one step, against the same tasks alone: in sequence, and in processes.

    python -m benchmarks.suites.heterogeneous --out heterogeneous.json

``depths``: GCN of 2, 2, 3 and 4 layers on the pubmed shape. ``ten``: 4 GCN, 4 GIN and 2 GAT of 3 layers on the arxiv
shape. Sides: ``woven`` (one group, equal structures stacked, operators in shared kernels), ``beside`` (one group, each
stack on a stream of its own), ``stacks`` (each stack a step of its own, one after the other), ``sequence`` (Weft's solo
runs one after another; the sum of their epochs), ``mps`` (a process each under NVIDIA's Multi-Process Service, started
together; the time until the last has trained its epochs) and, where asked for, ``processes`` (the same without the
service). Those are epochs once everything is prepared; ``runs``, ``run``, ``run_woven`` and, where asked for,
``shells``, ``shell``, ``shell_woven`` are whole runs: see ``whole_runs.py``.

*Analysis* of epochs is what a woven group takes before it trains that tasks alone would not: planning the group,
recording the operators of its stacks and matching them. Compiling the kernels that the match asks for comes on top when
they are met for the first time on a machine; ``preparing_seconds`` has that, and the recording of the CUDA graph.
Analysis of a whole run is all of its planning, estimates included, which a task alone has as well, and the matching.
"""

from __future__ import annotations

import time
from argparse import Namespace
from contextlib import nullcontext
from typing import Any

import torch

from benchmarks.baselines import mps
from benchmarks.harness.graphs import fresh, make_graph
from benchmarks.harness.recorder import NotHere, Recorder, common_arguments, find, listed, print_table
from benchmarks.harness.timing import Memory, Timing, synchronize, time_until
from benchmarks.harness.weft_side import MOST_EPOCHS, eager_memory, group_epoch
from benchmarks.harness.workers import Workers
from benchmarks.suites.whole_runs import PARTS, RUNS, SHELLS, measure_runs, measure_shells
from weft.core.models import BUILT_IN
from weft.core.plan import Plan
from weft.core.task import Task
from weft.engine.merger import merger_for
from weft.graph.graph import Graph
from weft.planner.grouping.groups import plan_as_one_group
from weft.runtime.group import GroupRun
from weft.weave.step import merged

SIDES = ("woven", "concurrent", "stacks", "sequence", "mps")
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
ANALYSIS_SHARE = 0.005


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
        return measure_groups([tasks_of(case, graph, args.hidden)], graph, args.seconds, weave=side == "woven")
    if side == "stacks":
        tasks = tasks_of(case, graph, args.hidden)
        plan = plan_as_one_group(tasks, graph.stats(), graph.device.type)
        return measure_groups([[tasks[i] for i in stack] for stack in plan.stack_members], graph, args.seconds)
    if side == "sequence":
        return measure_groups([[task] for task in tasks_of(case, graph, args.hidden)], graph, args.seconds)
    return measure_processes(side, case, graph, args)


def measure_groups(groups: list[list[Task]], graph: Graph, seconds: float, weave: bool = True) -> dict[str, Any]:
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
    if side == "mps" and not (mps.available() and graph.device.type == "cuda"):
        raise NotHere(f"{mps.CONTROL} is not installed, or there is no GPU")
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
    with mps.service() if side == "mps" else nullcontext() as env, Workers(requests, env) as workers:
        found = workers.run(args.process_seconds, args.process_seconds)
    own = [worker["seconds"] * 1e3 / epochs for worker in found["workers"]]
    return {
        "ms": round(found["makespan"] * 1e3 / epochs, 4),
        "epochs": epochs,
        "preparing_seconds": found["prepare_seconds"],
        "own_ms": [round(ms, 4) for ms in own],
        "recorded": all(worker["recorded"] for worker in found["workers"]),
    }


# ---- report ------------------------------------------------------------------------------------------


def analysis(cells: list[dict[str, Any]], case: str, epochs: int) -> dict[str, Any] | None:
    """Seconds that weaving takes before training, its share of ``epochs`` epochs, and when that is 0.5 %."""
    woven, alone = find(cells, case=case, side="woven"), find(cells, case=case, side="sequence")
    if woven is None or alone is None:
        return None
    extra = woven["planning_seconds"] + woven["matching_seconds"]
    training = woven["ms"] * epochs / 1e3
    return {
        "seconds": extra,
        "share": extra / (extra + training),
        "epochs": epochs,
        "epochs_until_half_a_percent": int(extra * (1 / ANALYSIS_SHARE - 1) / (woven["ms"] / 1e3)),
        "preparing_seconds": woven["preparing_seconds"],
        "preparing_alone_seconds": alone["preparing_seconds"],
    }


def print_report(recorder: Recorder, args: Namespace) -> None:
    """A row a case: milliseconds of all sides, and theirs over woven."""
    cells, shown = recorder.cells, [side for side in (*SIDES, "processes") if side in listed(args.sides)]
    rows, found = [], {}
    if not shown:
        return
    for case in listed(args.cases):
        ms = {side: (find(cells, case=case, side=side) or {}).get("ms") for side in shown}
        over = [ms[side] / ms["woven"] if ms.get("woven") and ms[side] else None for side in shown if side != "woven"]
        found[case] = analysis(cells, case, args.analysis_epochs)
        share = found[case]["share"] * 100 if found[case] else None
        rows.append([case, *ms.values(), *over, share])
    names = [f"{side}/woven" for side in shown if side != "woven"]
    print_table(["case", *(f"{s} ms" for s in shown), *names, f"analysis % of {args.analysis_epochs} epochs"], rows)
    for case, one in found.items():
        if one:
            enough = one["epochs_until_half_a_percent"]
            print(f"{case}: analysis {one['seconds']:.3f} s; below 0.5 % from {enough:,} epochs on")
    recorder.save(analysis=found)


def print_runs(recorder: Recorder, args: Namespace) -> None:
    """A row a case and length: seconds of whole runs, those one after another over the others, shares of analysis."""
    shown = [side for side in (*RUNS, *SHELLS) if side in listed(args.sides)]
    if not shown:
        return
    pairs = [(apart, side) for apart, *joined in (RUNS, SHELLS) for side in joined if {apart, side} <= set(shown)]
    rows, parts = [], []
    for case in listed(args.cases):
        for epochs in map(int, listed(args.run_epochs)):
            cells = {side: find(recorder.cells, case=case, side=side, epochs=epochs) or {} for side in shown}
            seconds = {side: cell.get("seconds") for side, cell in cells.items()}
            over = [seconds[a] / seconds[b] if seconds[a] and seconds[b] else None for a, b in pairs]
            shares = [100 * cells[side]["analysis_share"] if cells[side] else None for side in shown if side in RUNS]
            rows.append([case, epochs, *seconds.values(), *over, *shares])
            parts += [_parts(case, epochs, side, cells[side]) for side in shown if side in RUNS and cells[side]]
    names = [*(f"{side} s" for side in shown), *(f"{a}/{b}" for a, b in pairs)]
    print_table(["case", "epochs", *names, *(f"analysis % of {side}" for side in shown if side in RUNS)], rows)
    if parts:
        print_table(["case", "epochs", "side", "groups", *(f"{part} s" for part in PARTS), "other s"], parts)


def _parts(case: str, epochs: int, side: str, cell: dict[str, Any]) -> list[Any]:
    groups = ", ".join(cell["groups"][:3]) + ", ..." * (len(cell["groups"]) > 3)
    return [case, epochs, side, groups, *(cell[f"{part}_seconds"] for part in (*PARTS, "other"))]


def run_case(recorder: Recorder, case: str, args: Namespace) -> None:
    """All sides of one case; alone before woven, so that kernels are compiled before preparation is timed."""
    shape = CASES[case][0]
    graph = recorder.prepare(f"graph {shape}", lambda: make_graph(shape, recorder.device, args.scale))
    if graph is None:
        return
    for side in ("sequence", "stacks", "concurrent", "woven", "mps", "processes"):
        if side in listed(args.sides):
            recorder.cell({"case": case, "side": side}, lambda s=side: measure(s, case, fresh(graph), args))
    sides = [side for side in (*RUNS, *SHELLS) if side in listed(args.sides)]
    host, graph = (fresh(graph).to("cpu") if sides else None), None  # whole runs have the device to themselves
    for epochs in map(int, listed(args.run_epochs)):
        for side in sides:
            key = {"case": case, "side": side, "epochs": epochs}
            recorder.cell(key, lambda s=side, n=epochs: measure_whole(s, case, host, recorder.device, n, args))


def measure_whole(
    side: str, case: str, graph: Graph, device: torch.device, epochs: int, args: Namespace
) -> dict[str, Any]:
    """Seconds of whole runs of ``epochs`` epochs; ``graph`` lies on the host."""
    settings = settings_of(case, args.hidden)
    if side in SHELLS:
        return measure_shells(side, settings, graph, device, epochs, evaluate_every=args.evaluate_every)
    more = {"evaluate_every": args.evaluate_every, "repeats": args.run_repeats}
    return measure_runs(side, settings, graph, device, epochs, **more)


def arguments() -> Namespace:
    """The command line."""
    parser = common_arguments(__doc__.splitlines()[0])
    parser.add_argument("--cases", default=",".join(CASES))
    parser.add_argument("--sides", default=",".join((*SIDES, *RUNS)), help=f"also: processes, {', '.join(SHELLS)}")
    parser.add_argument("--hidden", type=int, default=64)
    parser.add_argument("--epochs", type=int, help="that every process trains, instead of each case's own number")
    parser.add_argument("--analysis-epochs", type=int, default=1000, help="training that analysis is a share of")
    parser.add_argument("--seconds", type=float, default=2.0, help="timed seconds of one group")
    parser.add_argument("--process-seconds", type=float, default=90.0, help="for processes to prepare, and to train")
    parser.add_argument("--run-epochs", default="200,1000", help="lengths of whole runs")
    parser.add_argument("--run-repeats", type=int, default=3, help="passes of whole runs, of which the median counts")
    parser.add_argument("--evaluate-every", type=int, help="epochs, in whole runs; else after the last one")
    parser.add_argument("--scale", type=float, default=1.0, help="shrink the graphs, to try this out")
    return parser.parse_args()


def main() -> None:
    """Run the cells and print the table."""
    args = arguments()
    recorder = Recorder("heterogeneous", args)
    for case in listed(args.cases):
        run_case(recorder, case, args)
    print_report(recorder, args)
    print_runs(recorder, args)


if __name__ == "__main__":
    main()
