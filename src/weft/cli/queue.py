"""``weft queue simulate``: compare scheduling policies on a queue of tasks, without a device."""

from __future__ import annotations

import json as jsonlib
from collections.abc import Mapping
from pathlib import Path
from typing import TYPE_CHECKING, Annotated

import typer

from weft.core.errors import SpecError
from weft.core.units import parse_bytes, show_bytes, show_seconds

if TYPE_CHECKING:
    from weft.sched.queue_state import QueuedTask
    from weft.sched.queues import RecordedQueue
    from weft.sched.simulator import Simulation

app = typer.Typer(
    help="Tasks that share a device: list those of a server, or simulate policies.",
    context_settings={"help_option_names": ["-h", "--help"]},
)
BUDGET, MACHINE, TASKS, SEED = "26GiB", "v100-32g", 100, 0
COLUMNS = ("policy", "makespan", "mean JCT", "p95 JCT", "mean wait", "p95 wait", "busy", "peak", "refused", "late")


@app.callback()
def _queue() -> None:
    pass


@app.command()
def simulate(
    policy: Annotated[
        list[str] | None,
        typer.Option(
            metavar="NAME",
            help="sequential, mps, pipeswitch, base, lmcf, bmc or backfill; repeat to compare.",
            show_default="all",
        ),
    ] = None,
    queue: Annotated[
        str | None,
        typer.Option(
            metavar="NAME", help="A queue of CoGNN: gcn, sage, gat, gin or mix.", show_default="a random queue"
        ),
    ] = None,
    file: Annotated[
        Path | None,
        typer.Option(metavar="QUEUE.json", help="A recorded queue, with its device.", show_default="a random queue"),
    ] = None,
    tasks: Annotated[
        int | None, typer.Option(metavar="N", help="Length of the random queue.", show_default=str(TASKS))
    ] = None,
    seed: Annotated[
        int | None, typer.Option(metavar="S", help="Seed of the random queue.", show_default=str(SEED))
    ] = None,
    gap: Annotated[
        float | None,
        typer.Option(
            metavar="SECONDS",
            help="Mean time between arrivals in the random queue; 0: all arrive at once.",
            show_default="0",
        ),
    ] = None,
    budget: Annotated[
        str | None,
        typer.Option(metavar="BYTES", help="Memory of the device for all tasks.", show_default="26GiB, or the file's"),
    ] = None,
    workers: Annotated[
        int | None, typer.Option(metavar="K", help="Groups that may run at once.", show_default="2, or the file's")
    ] = None,
    machine: Annotated[
        str | None,
        typer.Option(
            metavar="NAME", help="Machine that costs are estimated for: v100-32g, h200, ...", show_default=MACHINE
        ),
    ] = None,
    plot: Annotated[Path | None, typer.Option(metavar="FILE.svg", help="Gantt charts of the policies.")] = None,
    json: Annotated[bool, typer.Option("--json", help="Figures and groups as JSON on stdout.")] = False,
) -> None:
    """Run scheduling policies over a queue of trainings and print their figures.

    Needs no GPU: costs are estimates by rule of thumb. JCT is the time from arrival to end, wait that from arrival to
    start; late counts tasks that end after their deadline or latency target.
    """
    _check(plot, gap)
    _check_queue(queue, file, {"--tasks": tasks, "--seed": seed, "--gap": gap}, machine)
    recorded = _recorded(file) if file is not None else _made(_tasks(queue, tasks, seed, gap, machine or MACHINE))
    recorded = recorded.on(None if budget is None else parse_bytes(budget), workers)
    runs = _simulate(policy or [], recorded)
    print(_json(runs) if json else _table(runs, len(recorded.tasks)))
    if plot is not None:
        _write(runs, plot)


def _check(plot: Path | None, gap: float | None) -> None:
    if plot is not None and plot.suffix.lower() != ".svg":
        raise SpecError(f"--plot {plot}: the name must end in .svg")
    if gap is not None and not 0 <= gap < float("inf"):
        raise SpecError(f"--gap {gap} must be a number of seconds, 0 or more")


def _check_queue(queue: str | None, file: Path | None, drawn: Mapping[str, float | None], machine: str | None) -> None:
    """Refuse options that the chosen queue would leave unused; ``drawn``: those of random queues."""
    if file is not None and queue is not None:
        raise SpecError(f"--file {file} and --queue {queue}: give one of them")
    given = [f"{name} {value}" for name, value in drawn.items() if value is not None]
    if given and (queue is not None or file is not None):
        chosen = f"--queue {queue}" if queue is not None else f"--file {file}"
        raise SpecError(f"{given[0]} is for random queues, and {chosen} has its own tasks; leave one of the two out")
    if machine is not None and file is not None:
        raise SpecError(f"--machine {machine}: --file {file} has recorded costs; leave one of the two out")


def _tasks(queue: str | None, count: int | None, seed: int | None, gap: float | None, machine: str) -> list[QueuedTask]:
    from weft.planner.machine_profiles import profile
    from weft.sched.queues import Mixture, paper_queue, random_queue

    if queue is not None:
        return paper_queue(queue, profile(machine))
    length, start = TASKS if count is None else count, SEED if seed is None else seed
    return random_queue(length, start, profile(machine), Mixture(gap_seconds=gap or 0.0))


def _recorded(file: Path) -> RecordedQueue:
    from weft.sched.queues import read_recorded

    return read_recorded(file)


def _made(tasks: list[QueuedTask]) -> RecordedQueue:
    from weft.sched.queue_state import DeviceState
    from weft.sched.queues import RecordedQueue

    return RecordedQueue(tuple(tasks), DeviceState("device", parse_bytes(BUDGET), workers=2))


def _simulate(names: list[str], queue: RecordedQueue) -> list[Simulation]:
    from weft.sched.policies import POLICIES, find_policy
    from weft.sched.simulator import simulate

    chosen = {name.lower(): find_policy(name) for name in names or POLICIES}
    about = queue.tasks, [queue.device], queue.conditions
    return [simulate(policy, *about, name=name, actual=queue.actual) for name, policy in chosen.items()]


def _json(runs: list[Simulation]) -> str:
    return jsonlib.dumps({"simulations": [run.to_dict() for run in runs]}, allow_nan=False)


def _table(runs: list[Simulation], count: int) -> str:
    rows = [COLUMNS, *(_row(run) for run in runs)]
    widths = [max(len(row[place]) for row in rows) for place in range(len(COLUMNS))]
    lines = ["  ".join(_aligned(cell, widths[i], i) for i, cell in enumerate(row)).rstrip() for row in rows]
    return "\n".join([f"{count} tasks, budget {show_bytes(runs[0].budget_bytes)}", *lines])


def _aligned(cell: str, width: int, place: int) -> str:
    return cell.rjust(width) if place else cell.ljust(width)


def _row(run: Simulation) -> tuple[str, ...]:
    figures = run.metrics()
    times = (figures.makespan, figures.mean_jct, figures.p95_jct, figures.mean_queuing, figures.p95_queuing)
    ends = (f"{figures.utilisation:.0%}", show_bytes(figures.peak_bytes), str(figures.refused), str(figures.late))
    return (run.policy, *map(show_seconds, times), *ends)


def _write(runs: list[Simulation], path: Path) -> None:
    from weft.engine.charts import queue_svg

    try:
        path.absolute().parent.mkdir(parents=True, exist_ok=True)
        path.write_text(queue_svg(runs) + "\n", encoding="utf-8")
    except OSError as error:
        raise SpecError(f"--plot {path}: cannot be written ({error.strerror}); choose another place") from None
