"""CoGNN's five queues on one device under every policy and baseline: makespan, JCT, queuing time, memory.

    python -m benchmarks.suites.queues --out queues.json
    python -m benchmarks.suites.queues --quick --device cpu       tiny graphs and few tasks, to try it out
    python -m benchmarks.suites.queues --budget-seconds 560 --pairs 2
                                                    what matters most first; --resume goes on with the rest of --out
    python -m benchmarks.queue_runs.tables queues.json            the tables again, from the results

A queue has 20 trainings of one model (mix: of four), 4 to 10 layers of 64, on the 11 graphs of CoGNN's Table IV. Which
of the 77 combinations a queue has is not published; they are drawn by seed. The paper trains 200 epochs; ``--epochs``
scales that: by default so far that PyG takes some 45 s per queue on an H200. The fewer, the more starts weigh, of
which PyG's tasks in one warm process have hardly any. All tasks arrive at once. The byte budget is CoGNN's on a V100:
26 GiB for tasks, 6 GiB reserved.

Modes. ``pyg``: PyG's models, one after another in one warm process (a process per task would pay ``start_seconds``
more each time). All others are Weft's own supervisor and workers: ``pipeswitch`` (one at a time, warm), ``mps`` (no
admission), CoGNN's ``base``, ``lmcf`` and ``bmc``, and ``backfill``, the default. On every side kernels are compiled
and graphs in host memory before; planning is not counted, and reported apart.

Every queue is also simulated: with each task's seconds of training as measured alone, its start as in the other runs,
and interference fitted to pairs of tasks that were measured side by side. The results file is written after every cell;
whatever ended a run, ``--resume`` goes on after its last cell, and simulations are made of the cells of both.
"""

from __future__ import annotations

import tempfile
import time
from argparse import Namespace
from collections.abc import Mapping, Sequence
from contextlib import ExitStack
from dataclasses import asdict
from pathlib import Path
from typing import Any

import torch

from benchmarks.baselines.trainings import QUEUES, Entry, queue
from benchmarks.harness.graphs import make_graph
from benchmarks.harness.recorder import Recorder, common_arguments, find, listed
from benchmarks.queue_runs.pyg import PyGWorker, run_in_order
from benchmarks.queue_runs.pyg import warm_up as warm_up_pyg
from benchmarks.queue_runs.server import DeviceSampler, QueueServer, peak_bytes
from benchmarks.queue_runs.simulations import ONE, PAIRS, add_simulations, measured_alone
from weft.core.models import BUILT_IN
from weft.graph.catalog.shapes import find as find_shape
from weft.sched.simulator import Simulation

PYG = "pyg"
WEFT = (("pipeswitch", "backfill", "lmcf", "bmc"), ("base", "mps"))  # of all queues the first, then of all the rest
MODES = (PYG, *WEFT[0], *WEFT[1])
EPOCHS = "gcn=40,sage=40,gat=10,gin=40,mix=20"
GIB = 1 << 30
LONGEST, GRACE = 300.0, 30.0  # seconds of a cell; what one that has begun may take beyond the budget
Settings = dict[str, Any]


def epochs_of(text: str) -> dict[str, int]:
    """Epochs by queue, of ``"gcn=40,gat=10"``, or of one number for all."""
    parts = [part.partition("=") for part in listed(text)]
    if [mark for _, mark, _ in parts] == [""]:
        return dict.fromkeys(QUEUES, int(text))
    return {name: int(count) for name, _, count in parts}


def settings_of(entry: Entry, graphs: Mapping[str, Path], args: Namespace) -> Settings:
    """A training as the settings of a task; those of PyG's model are the same."""
    heads = {"heads": 4, "out_heads": 4} if BUILT_IN[entry.model].has_heads else {}
    found = {"graph": str(graphs[entry.shape]), "model": entry.model, "layers": entry.layers, "hidden": args.hidden}
    return {**found, **heads, "epochs": epochs_of(args.epochs)[entry.queue], "dropout": 0.0, "lr": 0.01}


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


def write_graphs(folder: Path, names: Sequence[str], device: torch.device, args: Namespace) -> dict[str, Path]:
    """The graphs of the queues, each a folder that processes map."""
    found = {}
    for shape in dict.fromkeys(entry.shape for name in names for entry in chosen_queue(name, args)):
        found[shape] = folder / "graphs" / shape
        scale = args.scale
        if args.nodes is not None:  # about so many
            scale = min(1.0, max(args.nodes / find_shape(shape).num_nodes, 0.002))
        make_graph(shape, device, scale).to("cpu").save(found[shape])
        if device.type == "cuda":
            torch.cuda.empty_cache()
    return found


def figures(outcome: Simulation, sampled: Mapping[str, Any], **more: Any) -> dict[str, Any]:
    """The figures of a run as plain data."""
    metrics = asdict(outcome.metrics())
    kept = {
        key: metrics[key] for key in ("makespan", "mean_jct", "p95_jct", "mean_queuing", "p95_queuing", "peak_bytes")
    }
    tasks = {run.id: [round(run.start, 4), round(run.end, 4)] for run in outcome.tasks}
    return {
        **kept,
        "done": metrics["tasks"],
        **sampled,
        **more,
        "tasks": tasks,
    }


def weft_cell(
    name: str, tasks: Mapping[str, Settings], server: QueueServer, idle_bytes: int, seconds: float = LONGEST
) -> dict[str, Any]:
    """A queue under one of Weft's policies."""
    place = int(server.device.partition(":")[2] or 0) if server.device.startswith("cuda") else None
    with DeviceSampler(place) as sampler:
        planned = time.time()
        run = server.run(name, tasks, seconds=seconds)
        sampled = sampler.figures(run.begin, run.end, idle_bytes)
    reserved = max((about["peak_bytes"] for about in run.details.values()), default=0.0)
    more = {
        "planning_seconds": run.begin - planned,
        "out_of_memory": run.out_of_memory,
        "failed": dict(run.failed),
        "tried_again": dict(run.tried_again),
        "largest_reserved_bytes": int(reserved),
        "budget_bytes": run.outcome.budget_bytes,
        "reserved_bytes": server.options.reserved,
        "groups": len(run.outcome.groups),
        "took": {
            task: {key: round(value, 4) for key, value in about.items() if key.endswith("seconds")}
            for task, about in run.details.items()
        },
    }
    if name == ONE:
        more |= {"predicted": server.predicted(run), "device": server.device_state().to_dict()}
    return figures(run.outcome, sampled, **more)


def measured_pairs(base: Mapping[str, Any], tasks: Mapping[str, Settings], server: QueueServer, count: int) -> Settings:
    """Some pairs side by side: in turn two that train for about as long, and a long one beside a short one.

    The former say how much is lost to each other, the latter whether kernels take turns.
    """
    ordered = sorted(measured_alone(dict(base)), key=lambda task: task.work)
    places = [len(ordered) - 1 - step * max(1, len(ordered) // (2 * count)) for step in range(count)]
    pairs = []
    for step, place in enumerate(place for place in places if place >= 1):
        two = ordered[place // 4 if step % 2 else place - 1].id, ordered[place].id
        run = server.run("mps", {name: tasks[name] for name in two})
        if len(run.details) == 2 and not run.out_of_memory:
            ends = {one.id: one.end for one in run.outcome.tasks}
            trained = {one: about["trained_seconds"] for one, about in run.details.items()}
            pairs.append({"tasks": list(two), "ends": ends, "trained": trained})
    return {"pairs": pairs}


def run_queue(
    name: str, modes: Sequence[str], recorder: Recorder, server: QueueServer, tasks: Mapping[str, Settings],
    args: Namespace, idle: int,
) -> None:  # fmt: skip
    """Some of Weft's modes on one queue; the run one at a time and pairs come first, the simulator needs them."""

    def cell(mode: str) -> dict[str, Any]:
        return weft_cell(mode, tasks, server, idle, seconds_for(recorder))

    base = recorder.cell({"queue": name, "mode": ONE}, lambda: cell(ONE), free=False)
    if base["status"] == "ok" and not base["failed"] and args.pairs:
        make = lambda: measured_pairs(base, tasks, server, args.pairs)  # noqa: E731
        recorder.cell({"queue": name, "mode": PAIRS}, make, free=False)
    for mode in (mode for mode in modes if mode != ONE):
        recorder.cell({"queue": name, "mode": mode}, lambda mode=mode: cell(mode), free=False)
    add_simulations(recorder.cells, [name])
    recorder.save()


def seconds_for(recorder: Recorder) -> float:
    """What a cell may take: one that takes too long must not take the others' time."""
    return min(LONGEST, recorder.left + GRACE)


def run_pyg(names: Sequence[str], recorder: Recorder, graphs: Mapping[str, Path], args: Namespace, idle: int) -> None:
    """All queues in PyG, by one worker, which trains every task of a queue for an epoch before."""
    place = recorder.device.index or 0 if recorder.device.type == "cuda" else None

    def measure(tasks: Mapping[str, Settings]) -> dict[str, Any]:
        worker = PyGWorker(str(recorder.device))
        try:
            worker.wait_ready()
            warm = [{**one, "epochs": 1} for one in tasks.values()]
            warm_up_pyg(worker, warm, min(args.warm_seconds, seconds_for(recorder)))
            with DeviceSampler(place) as sampler:
                begin = time.time()
                outcome, trouble = run_in_order(PYG, worker, tasks, seconds_for(recorder))
                sampled = sampler.figures(begin, time.time(), idle)
        finally:
            worker.stop()
        peak = peak_bytes(outcome.groups)
        return figures(outcome, sampled, **trouble, peak_bytes=peak, start_seconds=worker.start_seconds)

    for name in names:
        tasks = tasks_of(name, graphs, args)
        recorder.cell({"queue": name, "mode": PYG}, lambda tasks=tasks: measure(tasks), free=False)


def left_to_run(recorder: Recorder, names: Sequence[str], modes: Sequence[str]) -> bool:
    """Whether some cell of Weft's was not run before."""
    return any(find(recorder.cells, queue=name, mode=mode) is None for name in names for mode in modes)


def run_weft(
    folder: Path, names: Sequence[str], chosen: Sequence[str], recorder: Recorder, graphs: Mapping[str, Path],
    args: Namespace, idle: int,
) -> None:  # fmt: skip
    """All queues in Weft's modes, on one server: the modes that matter most of all queues first."""
    sizes = int(args.budget_gib * GIB), int(args.reserved_gib * GIB)
    with ExitStack() as stack:
        start = lambda: stack.enter_context(QueueServer(folder, str(recorder.device), args.workers, *sizes))  # noqa: E731
        server = recorder.prepare("server", start)
        if server is None:
            return
        recorder.about["mps"] = bool(server.supervisor.pool._mps and server.supervisor.pool._mps.running)
        warmed: dict[str, int] = {}  # by queue: workers that had been lost until then
        for modes in WEFT:
            for name in names:
                wanted = [mode for mode in modes if mode in chosen]
                if left_to_run(recorder, [name], wanted):
                    tasks = tasks_of(name, graphs, args)
                    if warmed.get(name) != server.supervisor.state.counters["workers_lost"]:
                        seconds = min(args.warm_seconds, max(recorder.left, 0.0))
                        warm = [{**one, "epochs": 1} for one in tasks.values()]  # so that no mode measures first starts
                        make = lambda warm=warm, seconds=seconds: server.warm_up(warm, seconds)  # noqa: E731
                        recorder.prepare(f"warm {name}", make)
                        warmed[name] = server.supervisor.state.counters["workers_lost"]
                    run_queue(name, wanted, recorder, server, tasks, args, idle)


def arguments() -> Namespace:
    """The command line."""
    parser = common_arguments(__doc__.splitlines()[0])
    parser.add_argument("--queues", default=",".join(QUEUES))
    parser.add_argument("--modes", default=",".join(MODES))
    parser.add_argument("--epochs", default=EPOCHS, help="by queue, or one number")
    parser.add_argument("--hidden", type=int, default=64)
    parser.add_argument("--tasks", type=int, default=20, help="of each queue")
    parser.add_argument("--workers", type=int, default=6)
    parser.add_argument("--pairs", type=int, default=3, help="measured side by side for the simulator, per queue")
    parser.add_argument("--budget-gib", type=float, default=26.0)
    parser.add_argument("--reserved-gib", type=float, default=6.0)
    parser.add_argument("--warm-seconds", type=float, default=60.0, help="at most, per queue")
    parser.add_argument("--scale", type=float, default=1.0, help="shrink the graphs, to try this out")
    parser.add_argument("--nodes", type=int, help="shrink every graph to about so many nodes")
    parser.add_argument("--quick", action="store_true", help="tiny graphs, few tasks and epochs")
    args = parser.parse_args()
    if args.quick:
        args.nodes, args.tasks, args.epochs, args.hidden, args.pairs = 2_000, 4, "3", 8, 1
    return args


def main() -> None:
    """Every queue in every mode."""
    from benchmarks.report import runs

    args = arguments()
    names = listed(args.queues)
    recorder = Recorder("queues", args)
    device = torch.device("cuda", 0) if recorder.device.type == "cuda" else recorder.device
    recorder.device = device
    with tempfile.TemporaryDirectory(prefix="weft-queues-", ignore_cleanup_errors=True) as place:
        folder = Path(place)
        graphs = recorder.prepare("graphs", lambda: write_graphs(folder, names, device, args))
        idle = DeviceSampler(0 if device.type == "cuda" else None).bytes_before
        if graphs is None:
            return
        chosen = listed(args.modes)
        if PYG in chosen:
            run_pyg(names, recorder, graphs, args, idle)
        if left_to_run(recorder, names, [mode for mode in chosen if mode != PYG]):
            run_weft(folder, names, chosen, recorder, graphs, args, idle)
        add_simulations(recorder.cells, names)
        recorder.save()
    recorder.print_tables(runs.queues, runs.queue_use, runs.queue_goals)


if __name__ == "__main__":
    main()
