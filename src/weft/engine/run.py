"""``weft.run``: a task in, a :class:`Result` out; a sweep in, a :class:`SweepResult` out."""

from __future__ import annotations

import os
import time
from collections.abc import Sequence
from contextlib import ExitStack
from pathlib import Path
from typing import Any, overload

import torch

from weft.core.errors import DivergedError, OutOfMemoryError, TrainingError
from weft.core.event import Event
from weft.core.graph_stats import GraphStats
from weft.core.plan import PlanOptions
from weft.core.sweep import Sweep
from weft.core.task import Task
from weft.core.units import parse_bytes
from weft.engine.base.cancel import Cancel
from weft.engine.base.device import choose_device, environment
from weft.engine.base.options import check_choices, check_options, not_work
from weft.engine.display.progress_bar import display_for
from weft.engine.results.result import Result
from weft.engine.results.sweep_result import SweepResult
from weft.engine.training.early_stops import EarlyStops
from weft.engine.training.event_source import Listener, SweepEvents, TaskEvents
from weft.engine.training.job import Job, JobOptions
from weft.engine.training.run_folder import REPORT, RunFolder, SweepFolder
from weft.engine.training.session import CHECKPOINT_SECONDS
from weft.planner.pruning import Policy, policy_for


@overload
def run(work: Task, **options: Any) -> Result: ...
@overload
def run(work: Sweep | Sequence[Task], **options: Any) -> SweepResult: ...
def run(
    work: Task | Sweep | Sequence[Task],
    *,
    device: str | torch.device = "auto",
    out: str | os.PathLike[str] | None = None,
    resume: bool = False,
    progress: bool | str = "auto",
    on_event: Listener | None = None,
    checkpoint_every: float = CHECKPOINT_SECONDS,
    prune: str | Policy | None = None,
    cancel: Cancel | None = None,
    budget: str | float | None = None,
    weave: bool | None = None,
    compile: bool | None = None,
) -> Result | SweepResult:
    """Train a task, or all tasks of a sweep (or of a list) together, and return what came of it.

    ``device``: ``"auto"`` (the GPU where there is one), ``"cpu"``, ``"cuda"``. ``out``: a folder for
    checkpoints, ``result.json``, the weights and a report; nothing is written without it. ``resume=True``
    continues from the checkpoints in ``out``. ``progress``: show a live line or table (``"auto"``: on a terminal).
    ``on_event`` is called with every :class:`Event`. ``checkpoint_every``: seconds between checkpoints.
    ``prune``: end members of a sweep that are not worth training on: ``"median"``, or a policy such as
    :class:`MedianPruner`. ``cancel``: a :class:`Cancel` that ends members from outside. ``budget``: bytes that it may
    take on the device (``"24GiB"``; None: what is free there); what cannot keep within is refused before it begins.
    ``weave``: whether tasks of different structure are merged into one step with shared kernels, which takes up to half
    a minute to compile; None: on a GPU that they do not fill they train beside each other, False: in turn.
    ``compile``: whether Inductor fuses what lies between Weft's operators, in modules of one's own above all; None: on
    a GPU, where the plan expects it to repay.

    Raises :class:`InputError` for a task that cannot be trained, :class:`DivergedError` when the loss is no
    longer a number, :class:`OutOfMemoryError`, and ``KeyboardInterrupt`` (after a checkpoint) on Ctrl-C. A member of
    a sweep that diverges or fails is a Result with that status instead, beside the others.
    """
    work = _checked(work)
    check_options(out=out, resume=resume, on_event=on_event, checkpoint_every=checkpoint_every, cancel=cancel)
    check_choices(weave=weave, compile=compile)
    limit = None if budget is None else parse_bytes(budget)
    options = JobOptions(checkpoint_every, EarlyStops(policy_for(prune), cancel), limit, PlanOptions(weave, compile))
    if cancel is not None:
        cancel.expect(task.label for task in ([work] if isinstance(work, Task) else work))
    target = choose_device(device)
    with ExitStack() as stack:
        listeners = [listener for listener in (on_event,) if listener is not None]
        display = display_for(progress, several=isinstance(work, Sweep))
        if display is not None:
            listeners.append(stack.enter_context(display))
        if target.type == "cuda":
            stack.enter_context(torch.cuda.device(target))
        folder = None if out is None else _folder(Path(out), work)
        if folder is not None:
            stack.callback(folder.close)
        if isinstance(work, Task):
            return _run_task(work, target, folder, resume, listeners, options)
        return _run_sweep(work, target, folder, resume, listeners, options)


def _folder(path: Path, work: Task | Sweep) -> RunFolder:
    return RunFolder(path) if isinstance(work, Task) else SweepFolder(path, work)


def _checked(work: Any) -> Task | Sweep:
    if isinstance(work, (Task, Sweep)):
        return work
    if isinstance(work, (list, tuple)) and all(isinstance(task, Task) for task in work):
        return Sweep.from_tasks(work)
    raise not_work(work, "weft.run")


# ---- one task ----------------------------------------------------------------------------------------


def _run_task(
    task: Task,
    device: torch.device,
    folder: RunFolder | None,
    resume: bool,
    listeners: list[Listener],
    options: JobOptions,
) -> Result:
    events = TaskEvents(task.label, _broadcast(listeners, folder))
    job = Job([task], device, events, folder, options)
    try:
        (result,) = job.train(resume)
    except TrainingError as error:
        status = "out of memory" if isinstance(error, OutOfMemoryError) else "failed"
        events.event("failed", status=status, message=str(error))
        raise
    report = _report(folder)
    if result.status == "diverged":
        events.event("failed", status=result.status, metrics=result.metrics, **report, message=result.message)
        raise DivergedError(result.message)
    events.event("finish", status=result.status, metrics=result.metrics, **report)
    return result


# ---- a sweep -----------------------------------------------------------------------------------------


def _run_sweep(
    sweep: Sweep,
    device: torch.device,
    folder: RunFolder | None,
    resume: bool,
    listeners: list[Listener],
    options: JobOptions,
) -> SweepResult:
    events = SweepEvents(sweep, _broadcast(listeners, folder))
    job = Job(sweep.tasks(), device, events, folder, options)
    begin = time.perf_counter()
    try:
        found = job.train(resume)
        plans = tuple(plan for _, plan in job.groups)
        seconds = time.perf_counter() - begin
        result = SweepResult(sweep, found, plans, environment(device), seconds, _about_graphs(job, sweep))
        if isinstance(folder, SweepFolder) and folder.opened:
            folder.save_sweep(result)
    except TrainingError as error:
        events.event("failed", status="failed", message=str(error))
        raise
    events.event("finish", **_summary(result), **_report(folder))
    return result


def _report(folder: RunFolder | None) -> dict[str, str]:
    return {"report": str(folder.path / REPORT)} if folder is not None and folder.opened else {}


def _summary(result: SweepResult) -> dict[str, Any]:
    whole = result.summary()
    several = ("graphs",) if len(whole["graphs"]) > 1 else ()
    summary = {key: whole[key] for key in ("best", "metric", "statuses", "seconds", *several)}
    best = result[summary["best"]].metrics if summary["best"] is not None else {}
    return {"status": "finished", **summary, "metrics": best}


def _about_graphs(job: Job, sweep: Sweep) -> dict[str, dict[str, Any]]:
    first = {sweep.graph_of(task): task for task in reversed(sweep.tasks())}
    return {name: _about_graph(job.graph_of(first[name])) for name in sweep.graphs}


def _about_graph(stats: GraphStats) -> dict[str, Any]:
    sizes = {"nodes": stats.num_nodes, "edges": stats.num_edges, "features": stats.num_features}
    sizes |= {"classes": stats.num_classes, "train": stats.num_train, "val": stats.num_val, "test": stats.num_test}
    return {"name": stats.name, **sizes}


def _broadcast(listeners: list[Listener], folder: RunFolder | None) -> Listener:
    everybody = listeners + ([folder.journal] if folder is not None else [])

    def emit(event: Event) -> None:
        for listener in everybody:
            listener(event)

    return emit
