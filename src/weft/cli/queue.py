"""``weft queue simulate``: compare scheduling policies on a queue of tasks, without a device."""

from __future__ import annotations

import json as jsonlib
from collections.abc import Mapping
from pathlib import Path
from typing import TYPE_CHECKING, Annotated, Any

import typer

from weft.cli.format import aligned, write_file
from weft.cli.options import FUSE, Json, ShellOption, takes
from weft.core.errors import SpecError
from weft.core.units import parse_bytes, show_bytes, show_seconds

if TYPE_CHECKING:
    from weft.sched.queues import RecordedQueue
    from weft.sched.simulator import Simulation

app = typer.Typer(
    help="Tasks that share a device: list those of a server, or simulate policies.",
    context_settings={"help_option_names": ["-h", "--help"]},
)
BUDGET, MACHINE, TASKS, SEED = "26GiB", "h200", 100, 0
COLUMNS = ("policy", "makespan", "mean JCT", "p95 JCT", "mean wait", "p95 wait", "busy", "peak", "refused", "late")


SIMULATED = (
    ShellOption(
        "policy",
        list[str],
        "sequential, mps, pipeswitch, base, lmcf, bmc or backfill; repeat to compare.",
        "NAME",
        "all",
    ),
    FUSE,
    ShellOption("queue", str, "A queue of CoGNN: gcn, sage, gat, gin or mix.", "NAME", "a random queue"),
    ShellOption(
        "epochs", int, "Of every task of a queue of CoGNN; its paper has 200.", "N", "those measured, 10 to 40"
    ),
    ShellOption("file", Path, "A recorded queue, with its device.", "QUEUE.json", "a random queue"),
    ShellOption("tasks", int, "Length of the random queue.", "N", str(TASKS)),
    ShellOption("seed", int, "Seed of the random queue.", "S", str(SEED)),
    ShellOption("gap", float, "Mean time between arrivals in the random queue; 0: all at once.", "SECONDS", "0"),
    ShellOption("budget", str, "Memory of the device for all tasks.", "BYTES", "26GiB, or the file's"),
    ShellOption("workers", int, "Groups that may run at once.", "K", "6, or the file's"),
    ShellOption("machine", str, "Machine that costs are estimated for: h200, v100-32g, ...", "NAME", MACHINE),
)


@app.command()
@takes(*SIMULATED)
def simulate(
    plot: Annotated[Path | None, typer.Option(metavar="FILE.svg", help="Gantt charts of the policies.")] = None,
    json: Json = False,
    **given: Any,
) -> None:
    """Run scheduling policies over a queue of trainings and print their figures.

    Needs no GPU: costs are estimates, by constants that were fitted to queues on an H200. JCT is the time from arrival
    to end, wait that from arrival to start; late counts tasks that end after their deadline or latency target.
    """
    from weft.sched.policies import POLICIES, find_policy
    from weft.sched.simulator import simulate as simulated

    if plot is not None and plot.suffix.lower() != ".svg":
        raise SpecError(f"--plot {plot}: the name must end in .svg")
    if given["gap"] is not None and not 0 <= given["gap"] < float("inf"):
        raise SpecError(f"--gap {given['gap']} must be a number of seconds, 0 or more")
    if given["epochs"] is not None and (given["queue"] is None or given["epochs"] < 1):
        raise SpecError(f"--epochs {given['epochs']} is of a queue of CoGNN (--queue gcn), at least 1")
    queue = _queue_of(given)
    queue = queue.on(None if given["budget"] is None else parse_bytes(given["budget"]), given["workers"])
    runs = []
    for name in dict.fromkeys(map(str.lower, given["policy"] or POLICIES)):
        policy = find_policy(name, given["fuse"])
        runs.append(simulated(policy, queue.tasks, [queue.device], queue.conditions, name=name, actual=queue.actual))
    if json:
        print(jsonlib.dumps({"simulations": [run.to_dict() for run in runs]}, allow_nan=False))
    else:
        print(_table(runs, len(queue.tasks)))
    if plot is not None:
        from weft.engine.charts import queue_svg

        write_file(plot, queue_svg(runs) + "\n", "--plot")


def _queue_of(given: Mapping[str, Any]) -> RecordedQueue:
    """The queue that the options select; refuses options that it would leave unused."""
    from weft.planner.machine_profiles import profile
    from weft.sched.queue_state import DeviceState
    from weft.sched.queues import FITTED, MEASURED_WORKERS, RecordedQueue, paper_queue, random_queue, read_recorded

    queue, file, machine = given["queue"], given["file"], given["machine"]
    if file is not None and queue is not None:
        raise SpecError(f"--file {file} and --queue {queue}: give one of them")
    drawn = [f"--{name} {given[name]}" for name in ("tasks", "seed", "gap") if given[name] is not None]
    if drawn and (queue is not None or file is not None):
        chosen = f"--queue {queue}" if queue is not None else f"--file {file}"
        raise SpecError(f"{drawn[0]} is for random queues, and {chosen} has its own tasks; leave one of the two out")
    if machine is not None and file is not None:
        raise SpecError(f"--machine {machine}: --file {file} has recorded costs; leave one of the two out")
    if file is not None:
        return read_recorded(file)
    costs = profile(machine or MACHINE)
    if queue is not None:
        tasks = paper_queue(queue, costs, given["epochs"])
    else:
        length = TASKS if given["tasks"] is None else given["tasks"]
        seed = SEED if given["seed"] is None else given["seed"]
        tasks = random_queue(length, seed, costs, given["gap"] or 0.0)
    return RecordedQueue(tuple(tasks), DeviceState("device", parse_bytes(BUDGET), workers=MEASURED_WORKERS), FITTED)


def _table(runs: list[Simulation], count: int) -> str:
    rows = [COLUMNS]
    for run in runs:
        figures = run.metrics()
        times = (figures.makespan, figures.mean_jct, figures.p95_jct, figures.mean_queuing, figures.p95_queuing)
        ends = (f"{figures.utilisation:.0%}", show_bytes(figures.peak_bytes), str(figures.refused), str(figures.late))
        rows.append((run.policy, *map(show_seconds, times), *ends))
    heading = f"{count} tasks, budget {show_bytes(runs[0].budget_bytes)}"
    return "\n".join([heading, *aligned(rows, right=range(1, len(COLUMNS)))])
