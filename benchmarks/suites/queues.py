"""CoGNN's five queues on one device under every policy and baseline: makespan, JCT, queuing time, memory.

    python -m benchmarks.suites.queues --out queues.json        also queues-QUEUE-cdf.svg and -gantt.svg beside it
    python -m benchmarks.suites.queues --quick --device cpu       tiny graphs and few tasks, to try it out
    python -m benchmarks.suites.queues --budget-seconds 280 --epochs 10 --warm-seconds 60 --pairs 2
                                                    what matters most first; --resume goes on with the rest

A queue has 20 trainings of one model (mix: of four), 4 to 10 layers of 64, on the 11 graphs of CoGNN's Table IV. Which
of the 77 combinations a queue has is not published; they are drawn by seed. The paper trains 200 epochs; ``--epochs``
scales that. All tasks arrive at once. The byte budget is CoGNN's on a V100: 26 GiB for tasks, 6 GiB reserved.

Modes. ``pyg``: PyG's models, one after another in one warm process (a process per task would pay
``pyg_start_seconds`` more each time). ``pyg_mps``: the same by several processes under MPS, first come first served,
memory unchecked. All others are Weft's own supervisor and workers: ``pipeswitch`` (one at a time, warm), ``mps`` (no
admission), CoGNN's ``base``, ``lmcf`` and ``bmc``, and ``backfill``, the default. On every side kernels are compiled
and graphs in host memory before; planning is not counted, and reported apart.

Every queue is also simulated: with each task's seconds as measured alone, and with interference fitted to pairs of
tasks that were measured side by side.
"""

from __future__ import annotations

import os
import tempfile
import time
from argparse import Namespace
from collections.abc import Mapping, Sequence
from contextlib import ExitStack
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import torch

from benchmarks.baselines import mps
from benchmarks.harness.graphs import make_graph
from benchmarks.harness.recorder import NotHere, Recorder, common_arguments, find, listed, print_table
from benchmarks.queue_runs.cdf_plot import cdf_svg
from benchmarks.queue_runs.device_sampler import DeviceSampler
from benchmarks.queue_runs.interference_fit import Fit, Pair, alone, calibrated, conditions, fit
from benchmarks.queue_runs.pyg_queue import PyGWorker, run_in_order
from benchmarks.queue_runs.queue_server import QueueRun, QueueServer, peak_bytes
from benchmarks.suites.prediction.queues import QUEUES, Entry, queue
from weft.core.models import BUILT_IN
from weft.graph.catalog.shapes import find as find_shape
from weft.sched.gantt import gantt_svg
from weft.sched.policies import find_policy
from weft.sched.queue_state import QueuedTask
from weft.sched.simulation import Simulation
from weft.sched.simulator import simulate

PYG = ("pyg", "pyg_mps")
WEFT = (("pipeswitch", "backfill", "lmcf", "bmc"), ("base", "mps"))  # of all queues the first, then of all the rest
MODES = ("pyg", *WEFT[0], *WEFT[1], "pyg_mps")
GIB = 1 << 30
Settings = dict[str, Any]


def settings_of(entry: Entry, graphs: Mapping[str, Path], args: Namespace) -> Settings:
    """A training as the settings of a task; those of PyG's model are the same."""
    heads = {"heads": 4, "out_heads": 4} if BUILT_IN[entry.model].has_heads else {}
    found = {"graph": str(graphs[entry.shape]), "model": entry.model, "layers": entry.layers, "hidden": args.hidden}
    return {**found, **heads, "epochs": args.epochs, "dropout": 0.0, "lr": 0.01}


def chosen_queue(name: str, args: Namespace) -> list[Entry]:
    """The entries of a queue; with ``--tasks`` only so many, spread over its graphs."""
    entries = queue(name)
    return entries[:: max(1, len(entries) // args.tasks)][: args.tasks] if args.tasks < len(entries) else entries


def tasks_of(name: str, graphs: Mapping[str, Path], args: Namespace) -> dict[str, Settings]:
    """The tasks of a queue by their labels."""
    return {
        f"{place:02}-{entry.name}-{entry.shape}": settings_of(entry, graphs, args)
        for place, entry in enumerate(chosen_queue(name, args))
    }


def warm_tasks(names: Sequence[str], graphs: Mapping[str, Path], args: Namespace) -> list[Settings]:
    """One short training of every model on every graph of the queues: they have all the kernels, whatever the depth."""
    kinds = dict.fromkeys((entry.model, entry.shape) for name in names for entry in chosen_queue(name, args))
    made = []
    for model, shape in kinds:
        whole = settings_of(Entry("queues", "warm", shape, model, 3), graphs, args)
        made.append({**whole, "epochs": 2})
    return made


def scale_of(shape: str, args: Namespace) -> float:
    """How much of a shape to make: all of it, or with ``--nodes`` about so many nodes."""
    return args.scale if args.nodes is None else min(1.0, max(args.nodes / find_shape(shape).num_nodes, 0.002))


def write_graphs(folder: Path, names: Sequence[str], device: torch.device, args: Namespace) -> dict[str, Path]:
    """The graphs of the queues, each a folder that processes map."""
    found = {}
    for shape in dict.fromkeys(entry.shape for name in names for entry in chosen_queue(name, args)):
        found[shape] = folder / "graphs" / shape
        make_graph(shape, device, scale_of(shape, args)).to("cpu").save(found[shape])
        if device.type == "cuda":
            torch.cuda.empty_cache()
    return found


# ---- one cell --------------------------------------------------------------------------------------------


def figures(outcome: Simulation, sampled: Mapping[str, Any], **more: Any) -> dict[str, Any]:
    """The figures of a run as plain data."""
    metrics = outcome.metrics().to_dict()
    kept = {
        key: metrics[key] for key in ("makespan", "mean_jct", "p95_jct", "mean_queuing", "p95_queuing", "peak_bytes")
    }
    tasks = {run.id: [round(run.start, 4), round(run.end, 4)] for run in outcome.tasks}
    return {**kept, "done": metrics["tasks"], **sampled, **more, "tasks": tasks}


def pyg_cell(
    name: str, tasks: Mapping[str, Settings], device: torch.device, args: Namespace, idle_bytes: int
) -> dict[str, Any]:
    """A queue in PyG, every task trained for an epoch before by every worker."""
    with ExitStack() as stack:
        environment: Mapping[str, str] = {}
        count = 1 if name == "pyg" else args.workers
        if count > 1 and device.type == "cuda":
            if not mps.available():
                raise NotHere(f"{mps.CONTROL} is not installed")
            environment = stack.enter_context(mps.service())
        workers = [PyGWorker(str(device), environment) for _ in range(count)]
        for worker in workers:
            stack.callback(worker.stop)
        warm = {f"{label}/{place}": {**one, "epochs": 1} for label, one in tasks.items() for place in range(count)}
        run_in_order(name, workers, warm)
        with DeviceSampler(device.index or 0 if device.type == "cuda" else None) as sampler:
            begin = time.time()
            outcome, trouble = run_in_order(name, workers, tasks)
            sampled = sampler.figures(begin, time.time(), idle_bytes)
        starts = [worker.start_seconds for worker in workers]
        peak = peak_bytes(outcome.groups)
        return figures(outcome, sampled, **trouble, peak_bytes=peak, start_seconds=sum(starts) / len(starts))


def weft_cell(
    name: str, tasks: Mapping[str, Settings], server: QueueServer, idle_bytes: int
) -> tuple[QueueRun, dict[str, Any]]:
    """A queue under one of Weft's policies."""
    place = int(server.device.partition(":")[2] or 0) if server.device.startswith("cuda") else None
    with DeviceSampler(place) as sampler:
        planned = time.time()
        run = server.run(name, tasks)
        sampled = sampler.figures(run.begin, run.end, idle_bytes)
    reserved = max((about["peak_bytes"] for about in run.details.values()), default=0.0)
    more = {
        "planning_seconds": run.begin - planned,
        "out_of_memory": run.out_of_memory,
        "failed": dict(run.failed),
        "largest_reserved_bytes": int(reserved),
        "budget_bytes": run.outcome.budget_bytes,
        "groups": len(run.outcome.groups),
    }
    return run, figures(run.outcome, sampled, **more)


# ---- the simulator against the measured ------------------------------------------------------------------


def measured_alone(run: QueueRun) -> list[QueuedTask]:
    """The tasks of a run one at a time, each with the seconds and the share of the device that it took."""
    gaps = run.outcome.makespan - sum(about["seconds"] for about in run.details.values())
    gap = max(gaps, 0.0) / max(len(run.details), 1)
    return [
        alone(task, run.details[task.id]["seconds"], run.details[task.id]["trained_seconds"], gap)
        for task in run.tasks
        if task.id in run.details
    ]


def measure_pairs(
    known: Sequence[QueuedTask], tasks: Mapping[str, Settings], server: QueueServer, count: int
) -> list[Pair]:
    """Some pairs side by side: tasks of about the same length, from the middle of the queue to its longest."""
    ordered = sorted(known, key=lambda task: task.seconds)
    places = [len(ordered) - 1 - step * max(1, len(ordered) // (2 * count)) for step in range(count)]
    pairs = []
    for place in (place for place in places if place >= 1):
        two = (ordered[place - 1], ordered[place])
        run = server.run("mps", {task.id: tasks[task.id] for task in two})
        if len(run.details) == 2:
            pairs.append(Pair(two, {one.id: one.end for one in run.outcome.tasks}))
    return pairs


def simulated(name: str, known: Sequence[QueuedTask], server: QueueServer, fitted: Fit) -> Simulation:
    """The queue by the simulator."""
    tasks, there = calibrated(known, fitted), [server.device_state()]
    return simulate(find_policy(name), tasks, there, conditions(fitted.contention), name)


# ---- everything ------------------------------------------------------------------------------------------


@dataclass
class Standing:
    """What is known of a queue so far: its tasks, runs by mode, seconds alone, and how its tasks interfere."""

    name: str
    tasks: Mapping[str, Settings]
    outcomes: dict[str, Simulation] = field(default_factory=dict)
    known: list[QueuedTask] = field(default_factory=list)
    fitted: Fit = field(default_factory=lambda: fit([]))


def run_queue(
    queue: Standing, modes: Sequence[str], recorder: Recorder, server: QueueServer, args: Namespace, idle: int
) -> None:
    """Some of Weft's modes on one queue; the run one at a time comes first, the simulator needs it."""
    for mode in modes if queue.known or not modes else dict.fromkeys(("pipeswitch", *modes)):

        def measure(mode: str = mode) -> dict[str, Any]:
            run, found = weft_cell(mode, queue.tasks, server, idle)
            queue.outcomes[mode] = run.outcome
            if mode == "pipeswitch":
                queue.known = measured_alone(run)
                found["alone"] = {one.id: [round(one.seconds, 4), round(one.utilisation, 3)] for one in queue.known}
            return found

        cell = recorder.cell({"queue": queue.name, "mode": mode}, measure, free=False)
        if mode == "pipeswitch" and queue.known and args.pairs:
            calibrate(queue, recorder, server, args)
        if queue.known and cell["status"] == "ok" and cell["done"] == len(queue.tasks):
            predicted = simulated(mode, queue.known, server, queue.fitted).metrics()
            cell["simulated_makespan"], cell["simulated_mean_jct"] = predicted.makespan, predicted.mean_jct
            cell["simulator_error"] = predicted.makespan / cell["makespan"] - 1
    if args.out is not None and queue.outcomes:
        plots(Path(args.out), queue.name, queue.outcomes)


def calibrate(queue: Standing, recorder: Recorder, server: QueueServer, args: Namespace) -> None:
    """Fit the simulator to pairs of the queue's tasks."""
    make = lambda: measure_pairs(queue.known, queue.tasks, server, args.pairs)  # noqa: E731
    queue.fitted = fit(recorder.prepare(f"pairs of {queue.name}", make) or [])
    recorder.about.setdefault("interference", {})[queue.name] = vars(queue.fitted)


def plots(out: Path, name: str, outcomes: Mapping[str, Simulation]) -> None:
    """The charts of a queue beside the results file."""
    completion = {mode: [run.completion_seconds for run in one.tasks] for mode, one in outcomes.items()}
    cdf = cdf_svg(f"{name} queue: job completion time", completion)
    out.parent.mkdir(parents=True, exist_ok=True)
    out.with_name(f"{out.stem}-{name}-cdf.svg").write_text(cdf, encoding="utf-8")
    gantt = gantt_svg(list(outcomes.values()))
    out.with_name(f"{out.stem}-{name}-gantt.svg").write_text(gantt, encoding="utf-8")


def run_pyg(name: str, mode: str, recorder: Recorder, graphs: Mapping[str, Path], args: Namespace, idle: int) -> None:
    """A queue in PyG."""
    tasks = tasks_of(name, graphs, args)
    recorder.cell({"queue": name, "mode": mode}, lambda: pyg_cell(mode, tasks, recorder.device, args, idle), free=False)


def summary(recorder: Recorder, names: Sequence[str]) -> None:
    """The table of all cells, and each mode against sequential PyG."""
    rows = []
    for cell in (cell for cell in recorder.cells if cell["status"] == "ok"):
        base = find(recorder.cells, queue=cell["queue"], mode="pyg")
        against = [
            base[key] / cell[key] if base and cell[key] else None for key in ("makespan", "mean_jct", "mean_queuing")
        ]
        busy, peak = cell.get("utilisation"), cell.get("device_peak_bytes")
        rows.append([
            cell["queue"], cell["mode"], cell["makespan"], cell["mean_jct"], cell["p95_jct"], cell["mean_queuing"],
            cell["p95_queuing"], *against, busy, cell["peak_bytes"] / GIB, None if peak is None else peak / GIB,
            cell["out_of_memory"], cell["done"], cell.get("simulator_error"),
        ])  # fmt: skip
    print_table(
        ["queue", "mode", "makespan s", "JCT s", "p95 JCT", "wait s", "p95 wait", "x makespan", "x JCT", "x wait",
         "busy", "admitted GiB", "device GiB", "OOM", "done", "simulator"],
        rows,
    )  # fmt: skip
    for cell in recorder.cells:
        if cell["status"] != "ok" or cell.get("failed"):
            print(f"{cell['queue']} {cell['mode']}: {cell.get('error') or cell.get('reason') or cell.get('failed')}")


def arguments() -> Namespace:
    """The command line."""
    parser = common_arguments(__doc__.splitlines()[0])
    parser.add_argument("--queues", default=",".join(QUEUES))
    parser.add_argument("--modes", default=",".join(MODES))
    parser.add_argument("--epochs", type=int, default=20)
    parser.add_argument("--hidden", type=int, default=64)
    parser.add_argument("--tasks", type=int, default=20, help="of each queue")
    parser.add_argument("--workers", type=int, default=3)
    parser.add_argument("--pairs", type=int, default=3, help="measured side by side for the simulator, per queue")
    parser.add_argument("--budget-gib", type=float, default=26.0)
    parser.add_argument("--reserved-gib", type=float, default=6.0)
    parser.add_argument("--warm-seconds", type=float, default=150.0)
    parser.add_argument("--scale", type=float, default=1.0, help="shrink the graphs, to try this out")
    parser.add_argument("--nodes", type=int, help="shrink every graph to about so many nodes")
    parser.add_argument("--quick", action="store_true", help="tiny graphs, few tasks and epochs")
    args = parser.parse_args()
    if args.quick:
        args.nodes, args.tasks, args.epochs, args.hidden, args.pairs = 2_000, 4, 3, 8, 1
    if args.out is None and os.environ.get("OUT"):
        args.out = Path(os.environ["OUT"]) / "queues.json"
    return args


def main() -> None:
    """Every queue in every mode."""
    args = arguments()
    names = listed(args.queues)
    recorder = Recorder("queues", args)
    device = torch.device("cuda", 0) if recorder.device.type == "cuda" else recorder.device
    recorder.device = device
    with tempfile.TemporaryDirectory(prefix="weft-queues-", ignore_cleanup_errors=True) as place, ExitStack() as stack:
        folder = Path(place)
        graphs = recorder.prepare("graphs", lambda: write_graphs(folder, names, device, args))
        idle = DeviceSampler(0 if device.type == "cuda" else None).bytes_before
        if graphs is None:
            return
        chosen = listed(args.modes)
        for name in names if "pyg" in chosen else ():
            run_pyg(name, "pyg", recorder, graphs, args, idle)
        if set(chosen) - set(PYG):
            sizes = int(args.budget_gib * GIB), int(args.reserved_gib * GIB)
            server = recorder.prepare(
                "server", lambda: stack.enter_context(QueueServer(folder, str(device), args.workers, *sizes))
            )
            if server is not None:
                recorder.about["mps"] = bool(server.supervisor.pool._mps and server.supervisor.pool._mps.running)
                recorder.prepare("warm", lambda: server.warm_up(warm_tasks(names, graphs, args), args.warm_seconds))
                queues = [Standing(name, tasks_of(name, graphs, args)) for name in names]
                for modes in WEFT:
                    for one in queues:
                        run_queue(one, [mode for mode in modes if mode in chosen], recorder, server, args, idle)
            stack.close()
        for name in names if "pyg_mps" in chosen else ():
            run_pyg(name, "pyg_mps", recorder, graphs, args, idle)
        recorder.save()
    summary(recorder, names)


if __name__ == "__main__":
    main()
