"""Memory and time as Weft estimates them before a run, against what the run takes.

    python -m benchmarks.suites.estimates --out estimates.json
    python -m benchmarks.suites.estimates --against estimates.json --out again.json  # runs nothing

The trainings are those of ``benchmarks/baselines/trainings.py``: CoGNN's five queues, 20 random modules over
``weft.nn``, and PyG's modules, alone and (the first two) stacked T = 4 and 16; and five users' modules with torch's
norms, dropout and attention, stacked at every T (``--sets users --tasks 1,4,6,16`` are 20 stacks). The estimate sees
sizes only and allocates nothing; the run is what ``weft.run`` would do: every tensor of the graph on the device, the
step recorded, then a few epochs with their evaluation. Memory is torch's own account, ``max_memory_allocated`` and
``max_memory_reserved``, from an empty cache.

Time is compared before calibration and after it: the factors are fitted to one half of the trainings and used on the
other, both ways, so that no training corrects its own estimate.

``--against`` takes the measurements of a results file and estimates its trainings anew, on the host, where no GPU is
needed: what a changed model would have said of them.
"""

from __future__ import annotations

import gc
import time
from argparse import Namespace
from collections.abc import Sequence
from pathlib import Path
from statistics import median
from typing import Any

import torch

from benchmarks.baselines.trainings import SETS, Entry, entries
from benchmarks.harness.graphs import fresh, make_graph
from benchmarks.harness.recorder import Recorder, common_arguments, listed
from benchmarks.harness.results import Results
from benchmarks.harness.timing import synchronize
from weft.core.machine import Machine
from weft.core.plan import Plan
from weft.core.task import Task
from weft.engine.estimator import Estimator, merger_for
from weft.engine.learning import with_runs
from weft.engine.probe import probe
from weft.graph.graph import Graph
from weft.planner.cost.calibration import Calibration, Observation
from weft.planner.cost.memory import upper_bound
from weft.planner.grouping.groups import plan_as_one_group
from weft.planner.machine_profiles import profile
from weft.runtime.device.process import cpu_threads
from weft.runtime.group import GroupRun

Cell = dict[str, Any]


def error(cell: Cell, name: str) -> float | None:
    """``estimate / measured - 1``; None where nothing was measured."""
    measured = cell.get(name)
    return cell[f"estimated_{name}"] / measured - 1.0 if measured else None


def usable(cells: Sequence[Cell]) -> list[Cell]:
    """Cells that were run."""
    return [cell for cell in cells if cell["status"] == "ok" and cell.get("fits")]


def timed(cells: Sequence[Cell]) -> list[Cell]:
    """Cells whose time counts: not those that were run while others used the device as well."""
    return [cell for cell in usable(cells) if cell.get("seconds") and cell.get("measured") != "memory"]


def weighed(cells: Sequence[Cell]) -> list[Cell]:
    """Cells whose memory counts; a results file may have it and the time from different runs (``measured``)."""
    return [cell for cell in usable(cells) if cell.get("measured") != "time"]


def calibrated(cells: Sequence[Cell]) -> list[float | None]:
    """Seconds of every cell with factors fitted to the other half of the cells."""
    run = timed(cells)
    seen = [Observation(cell["families"], cell["seconds"], cell["name"]) for cell in run]
    halves = [with_runs(Calibration(), seen[1 - half :: 2]) for half in (0, 1)]
    found = {
        id(cell): sum(halves[place % 2].factor(name) * seconds for name, seconds in cell["families"].items())
        for place, cell in enumerate(run)
    }
    return [found.get(id(cell)) for cell in cells]


def spearman(one: Sequence[float], other: Sequence[float]) -> float | None:
    """The correlation of ranks; None for fewer than two points, or equal ones."""
    from scipy.stats import spearmanr

    if min(len(set(one)), len(set(other))) < 2:
        return None
    return float(spearmanr(one, other).statistic)


def groups(cells: Sequence[Cell]) -> dict[str, dict[str, Any]]:
    """Errors by set and T, of all but the modules that somebody else wrote (``library``), and of all."""
    run, after = usable(cells), dict(zip(map(id, cells), calibrated(cells), strict=True))
    found: dict[str, list[Cell]] = {}
    for cell in run:
        found.setdefault(f"{cell['set']} T={cell['tasks']}", []).append(cell)
    found |= {"library": library(run), "all": run}
    return {name: _group(chosen, after) for name, chosen in found.items()}


def library(cells: Sequence[Cell]) -> list[Cell]:
    """Those of Weft's own models and layers."""
    return [cell for cell in cells if cell["set"] not in ("opaque", "users")]


def _group(cells: list[Cell], after: dict[int, float | None]) -> dict[str, Any]:
    held = weighed(cells)
    found: dict[str, Any] = {"cells": len(held)}
    for name in ("allocated", "reserved"):
        errors = [e for e in (error(cell, name) for cell in held) if e is not None]
        if errors:
            below = sum((cell[name] or 0) > upper_bound(cell[f"estimated_{name}"]) for cell in held)
            found[name] = {"worst": max(map(abs, errors)), "median": median(map(abs, errors)),
                           "lowest": min(errors), "below_with_margin": below}  # fmt: skip
    clocked = timed(cells)
    measured = [cell["seconds"] for cell in clocked]
    plain = [cell["estimated_seconds"] for cell in clocked]
    fitted = [after[id(cell)] or 0.0 for cell in clocked]
    found["timed_cells"] = len(clocked)
    if clocked:
        found["time"] = {"before": _time(plain, measured), "after": _time(fitted, measured)}
    return found


def _time(estimated: list[float], measured: list[float]) -> dict[str, float | None]:
    errors = [abs(e / m - 1.0) for e, m in zip(estimated, measured, strict=True)]
    return {"median": median(errors), "worst": max(errors), "spearman": spearman(estimated, measured)}


MEASURED = ("allocated", "reserved", "seconds", "before", "before_reserved", "fits", "notes")
HOST = torch.device("cpu")


def entry_of(cell: dict[str, Any]) -> Entry:
    """The training of a cell."""
    alike = (cell["set"], cell["queue"], cell["shape"], cell["name"])
    return next(one for one in entries(list(SETS)) if (one.kind, one.queue, one.shape, one.name) == alike)


ROUNDS, ROUND_SECONDS = 3, 0.1
LEFT_OVER = 2**26  # bytes reserved and not used from which on the graph's arrays are made anew
MOST_EPOCHS = 100  # of a round; the tasks have 400


def estimate(tasks: list[Task], plan: Plan, machine: Machine) -> dict[str, Any]:
    """What the planner says, and how long it took to say it."""
    start = time.perf_counter()
    found = Estimator(machine).together(tasks, plan)
    seconds = time.perf_counter() - start
    return {
        "estimated_allocated": found.memory.peak,
        "estimated_reserved": found.cost.reserved_bytes,
        "estimated_seconds": found.cost.epoch_seconds,
        "families": dict(found.cost.families),
        "kinds": dict(found.memory.kinds),
        "unknown": list(found.program.unknown),
        "note": found.program.note,
        "estimate_seconds": round(seconds, 4),
    }


def measure(tasks: list[Task], graph: Graph, plan: Plan) -> dict[str, Any]:
    """What a run of the same group takes: bytes at the peak, and seconds of an epoch with its evaluation.

    ``before_reserved``: what the graph's making has left reserved, which is more than its arrays where they are apart.
    """
    device = graph.device
    before = {"before": empty(device), "before_reserved": reserved(device)}
    with cpu_threads(plan.threads):
        return {**before, **_run(GroupRun(tasks, graph, plan, device, merger_for(plan)), device)}


def reserved(device: torch.device) -> int:
    """Bytes that the allocator holds."""
    return torch.cuda.memory_reserved(device) if device.type == "cuda" else 0


def _run(run: GroupRun, device: torch.device) -> dict[str, Any]:
    run.advance(3)
    synchronize(device)
    memory = {"allocated": None, "reserved": None}
    if device.type == "cuda":
        memory = {
            "allocated": torch.cuda.max_memory_allocated(device),
            "reserved": torch.cuda.max_memory_reserved(device),
        }
    return {**memory, "seconds": epoch_seconds(run, device), "notes": run.notes}


def empty(device: torch.device) -> int:
    """Give back everything that earlier cells left, cuBLAS's workspaces included; bytes that are still taken."""
    gc.collect()
    if device.type != "cuda":
        return 0
    torch.cuda.synchronize(device)
    torch._C._cuda_clearCublasWorkspaces()
    torch.cuda.empty_cache()
    torch.cuda.reset_peak_memory_stats(device)
    return torch.cuda.memory_allocated(device)


def epoch_seconds(run: GroupRun, device: torch.device) -> float:
    """Median seconds of an epoch, looks at the device spread over as many epochs as they are in a training."""
    once = _timed(run, device, 1)
    epochs = max(1, min(MOST_EPOCHS, int(ROUND_SECONDS / once)))
    return median(_timed(run, device, epochs) for _ in range(ROUNDS))


def _timed(run: GroupRun, device: torch.device, epochs: int) -> float:
    start = time.perf_counter()
    run.advance(epochs)
    synchronize(device)
    return (time.perf_counter() - start) / epochs


def cell(entry: Entry, tasks: int, graph: Graph, machine: Machine, hidden: int) -> dict[str, Any]:
    """One training, estimated and, where the estimate says that it fits, run."""
    members = entry.tasks(graph, tasks, hidden)
    plan = plan_as_one_group(members, graph.stats(), graph.device.type)
    found = estimate(members, plan, machine)
    about = {"set": entry.kind, "queue": entry.queue, "layers": entry.layers, **found}
    if graph.device.type == "cuda" and found["estimated_reserved"] > machine.available_bytes:
        return {**about, "fits": False}
    return {**about, "fits": True, **measure(members, graph, plan)}


def chosen(args: Namespace) -> list[tuple[Entry, int]]:
    """Trainings and their T: all alone, every ``--stacked-every``-th of the queues and modules stacked as well."""
    found: list[tuple[Entry, int]] = []
    every = entries(listed(args.sets))[:: args.every]
    for tasks in (int(text) for text in listed(args.tasks)):
        for place, entry in enumerate(every):
            stacked = entry.kind == "users" or (entry.kind != "opaque" and place % args.stacked_every == 0)
            if tasks == 1 or stacked:
                found.append((entry, tasks))
    return found


def settled(graph: Graph) -> Graph:
    """The graph as if it had been read and moved to the device; one made there lies among the holes of its making.

    Segments that hold one array and much else that is free would count as reserved by whatever trains on it.
    """
    if graph.device.type != "cuda":
        return graph
    device, graph = graph.device, graph.to("cpu")
    empty(device)
    return graph.to(device)


def scattered(device: torch.device) -> bool:
    """Whether an array of the graph has come to lie in a large segment of an earlier training, which then stays."""
    used = empty(device)
    return reserved(device) - used > LEFT_OVER


def run_all(recorder: Recorder, machine: Machine, args: Namespace) -> None:
    """Shape by shape, so that a graph is made once for all that train on it."""
    wanted = [(entry, tasks) for entry, tasks in chosen(args) if not args.shapes or entry.shape in listed(args.shapes)]
    shapes = listed(args.shapes) or dict.fromkeys(entry.shape for entry, _ in wanted)
    for shape in shapes:
        graph = recorder.prepare(f"graph {shape}", lambda s=shape: settled(make_graph(s, recorder.device, args.scale)))
        if graph is None:
            continue
        for entry, tasks in (pair for pair in wanted if pair[0].shape == shape):
            key = {"name": entry.name, "shape": shape, "tasks": tasks}
            if scattered(recorder.device):
                graph = graph.to("cpu")  # nobody else holds it: its arrays are let go
                empty(recorder.device)
                graph = graph.to(recorder.device)
            recorder.cell(key, lambda e=entry, t=tasks, g=graph: cell(e, t, fresh(g), machine, args.hidden))
        del graph


def run_again(recorder: Recorder, cells: list[Cell], machine: Machine, args: Namespace) -> None:
    """Every training of ``--against``, estimated anew for the machine that it was run on."""

    def estimated(cell: Cell, graph: Graph) -> Cell:
        entry = entry_of(cell)
        about = {"set": entry.kind, "queue": entry.queue, "layers": entry.layers}
        kept = {name: cell[name] for name in MEASURED if name in cell}
        members = entry.tasks(graph, cell["tasks"], args.hidden)
        return {
            **about,
            **estimate(members, plan_as_one_group(members, graph.stats(), machine.device), machine),
            **kept,
        }

    cells = [cell for cell in usable(cells) if cell.get("measured") != "time"]
    for shape in listed(args.shapes) or dict.fromkeys(cell["shape"] for cell in cells):
        graph = make_graph(shape, HOST)
        for cell in (one for one in cells if one["shape"] == shape):
            key = {"name": cell["name"], "shape": shape, "tasks": cell["tasks"]}
            recorder.cell(key, lambda c=cell, g=graph: estimated(c, g))


def seconds_for_many(machine: Machine, count: int = 100) -> dict[str, Any]:
    """How long the estimates of ``count`` tasks of one structure take; the graph is a shape that is never made."""
    tasks = [
        Task(graph="shape:ogbn-arxiv", name=f"t{i}", layers=3, seed=i, lr=0.01 / (1 + i), dropout=0.1 + i / 200)
        for i in range(count)
    ]
    start = time.perf_counter()
    estimator = Estimator(machine)
    for task in tasks:
        estimator.alone(task)
    return {"tasks": count, "seconds": round(time.perf_counter() - start, 3)}


def arguments() -> Namespace:
    """The command line."""
    parser = common_arguments(__doc__.splitlines()[0])
    parser.add_argument("--sets", default=",".join(SETS))
    parser.add_argument("--shapes", default="", help="only these, in this order")
    parser.add_argument("--tasks", default="1,4,16")
    parser.add_argument("--every", type=int, default=1, help="take every n-th training only")
    parser.add_argument("--stacked-every", type=int, default=4, help="stack every n-th training")
    parser.add_argument("--hidden", type=int, default=64)
    parser.add_argument("--machine", default="probe", help="probe, or the name of a profile")
    parser.add_argument("--scale", type=float, default=1.0, help="shrink the graphs, to try this out")
    parser.add_argument("--against", type=Path, help="estimate the trainings of this results file anew, run nothing")
    return parser.parse_args()


def main() -> None:
    """Estimate and run everything, then say how far apart they are."""
    from benchmarks.report import runs

    args = arguments()
    recorder = Recorder("estimates", args)
    if args.against is not None:
        measured = Results.read(args.against)
        machine = Machine.from_dict(measured.runs[-1]["machine"])  # of several runs that of the newest
    else:  # measured now, or a named profile
        find = lambda: probe(recorder.device) if args.machine == "probe" else profile(args.machine)  # noqa: E731
        machine = recorder.prepare("machine", find)
    if machine is None:
        return
    recorder.about["machine"] = machine.to_dict()
    recorder.about["many"] = seconds_for_many(machine)
    if args.against is None:
        run_all(recorder, machine, args)
    else:
        run_again(recorder, measured.cells, machine, args)
    recorder.print_tables(runs.estimates, runs.estimate_takes)


if __name__ == "__main__":
    main()
