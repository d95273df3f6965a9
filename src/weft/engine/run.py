"""``weft.run``: train a task, a sweep or a plan; returns a :class:`Result` or a :class:`SweepResult`."""

from __future__ import annotations

import os
import time
import uuid
from collections.abc import Callable, Iterator, Sequence
from contextlib import ExitStack, contextmanager
from dataclasses import replace
from pathlib import Path
from typing import Any, overload

import torch

from weft.core.errors import DivergedError, OutOfMemoryError, SpecError, TrainingError
from weft.core.graph_stats import GraphStats
from weft.core.run_options import Placement, RunOptions, refuse_misplaced
from weft.core.sweep import Sweep, as_work
from weft.core.task import Task
from weft.core.wording import option, switch
from weft.dist.peer_memory import RankLostError
from weft.engine.control import Control
from weft.engine.display import display_for
from weft.engine.events import Broadcast, EventSource, Listener, SweepEvents, TaskEvents, make_logger
from weft.engine.folder import REPORT, RunFolder, SweepFolder
from weft.engine.graphs import with_all_splits
from weft.engine.job import Job
from weft.engine.machine import choose_device
from weft.engine.process_state import Needs, process_state
from weft.engine.result import Result
from weft.engine.run_planner import check_runnable, device_of
from weft.engine.sweep_result import SweepResult
from weft.engine.tuned import TunedEvents, TunedFolder, TunedJob
from weft.engine.tuned_plan import check_tuner
from weft.planner.grouping.trials import one_of_each
from weft.planner.report.plan_report import PlanReport
from weft.planner.tuning import trial_name
from weft.runtime.checkpoint import FILE

MOST_COPIES = 10  # names that a control takes, per trial: copies of population-based training are trials, too


@overload
def run(work: Task, **options: Any) -> Result: ...
@overload
def run(work: Sweep | Sequence[Task], **options: Any) -> SweepResult: ...
@overload
def run(work: PlanReport, **options: Any) -> Result | SweepResult: ...
def run(
    work: Task | Sweep | Sequence[Task] | PlanReport,
    *,
    device: str | torch.device = "auto",
    out: str | os.PathLike[str] | None = None,
    resume: bool = False,
    overwrite: bool = False,
    extend: bool = False,
    progress: bool | str = "auto",
    on_event: Listener | None = None,
    control: Control | None = None,
    budget: str | float | None = None,
    ranks: int = 1,
    placement: Placement = Placement(),  # noqa: B008
    options: RunOptions = RunOptions(),  # noqa: B008
    **misplaced: Any,
) -> Result | SweepResult:
    """Train a task, or all tasks of a sweep (or of a list) together, and return the outcome.

    The answer of :func:`weft.plan`, or one read from a file with :func:`weft.read`, is trained exactly as planned:
    its groups, stacks, joins, row orders and choices of compiling and replaying. It is refused, before anything is
    trained, on another graph or kind of device, with other weights, or if its groups do not fit.

    ``device``: ``"auto"`` (the GPU if there is one), ``"cpu"``, ``"cuda"``. ``out``: a folder for checkpoints,
    ``result.json``, the weights and a report; nothing is written without it. A folder that holds a run is refused,
    unless ``resume=True`` continues from its checkpoints, ``extend=True`` adds members or epochs to it without
    repeating what is there, or ``overwrite=True`` deletes it. ``progress``: show a live line or table on a terminal or
    in a notebook, elsewhere notes and the outcome on stderr (``"auto"``), lines of text (``"plain"``), or nothing
    (False). ``on_event`` is called with every :class:`Event`; an error of it is reported once. ``control``: a
    :class:`Control` that pauses, resumes, preempts the run or ends members from outside. ``budget``: bytes that it may
    take on the device (``"24GiB"``; None: what is free there). ``ranks``: how many processes share the graph.
    ``placement``: where the data of sampled training lies. ``options``: everything else about how it is done, such as
    pruning and weaving: see :class:`RunOptions`.

    Raises :class:`InputError` for a task that cannot be trained, :class:`DivergedError` when the loss is no
    longer a number, :class:`OutOfMemoryError`, and ``KeyboardInterrupt`` (after a checkpoint) on Ctrl-C. A member of
    a sweep that diverges or fails is a Result with that status instead, in its place among the others.
    """
    if not isinstance(options, RunOptions):
        raise SpecError(f"options={options!r} must be a weft.RunOptions(...)")
    refuse_misplaced(misplaced, "weft.run")
    options = options.with_keywords(device=device, budget=budget, ranks=ranks, placement=placement)
    report, limit = None, options.budget
    if isinstance(work, PlanReport):
        report = work
        check_runnable(report)
        # The bytes to keep to: the plan's, or fewer; what a plan has decided cannot be given again.
        for name, value in options.for_plan.items():
            # A plan has the name of a policy of the user's own, not the object.
            if name != "budget" and not hasattr(value, "choose"):
                raise SpecError(
                    f"{name}={value!r}: plan {report.name!r} has decided that already; give it to weft.plan"
                )
        other = next((plan.places.sampler for plan in report.plans if plan.places.sampler != "default"), None)
        if options.ranks > 1 and other is not None:
            raise SpecError(f"plan {report.name!r} samples with sampler={other!r}, which ranks={options.ranks} do not")
        limits = [limit for limit in (options.budget, report.plans[0].budget) if limit is not None]
        limit = min(limits, default=None)
        work = as_work(report.work, "weft.run")
    kinds: list[Task] = []  # of trials
    if options.tuner is not None:
        kinds = check_tuner(options, work)
        for name, refused in {"extend": extend, "a saved plan": report is not None}.items():
            if refused:
                raise SpecError(f"{name} does not go with {option('tuner')}: trials are chosen while it runs")
    else:
        work = with_all_splits(as_work(work, "weft.run"))
    _check_folder_options(out, resume, overwrite, extend, options, report is not None)
    if on_event is not None and not callable(on_event):
        raise SpecError(f"on_event={on_event!r} must be a function that takes a weft.Event")
    if control is not None and not isinstance(control, Control):
        raise SpecError(f"control={control!r} must be a weft.Control()")
    resume, control = resume or extend, control or Control()
    tasks = one_of_each(kinds) if kinds else [work] if isinstance(work, Task) else work.tasks()
    options.check_tasks(tasks)
    options.check_joins(tasks)
    trials = map(trial_name, range(MOST_COPIES * (options.trials or 0)))
    control.expect(trials if kinds else (task.label for task in tasks))
    target = choose_device(options.device) if report is None else device_of(report, options.device)
    options.check_device(target.type)
    if options.ranks > 1:
        from weft.dist.launch import is_first_rank, leave_if_imported_by_a_rank, start_ranks  # not for one rank

        leave_if_imported_by_a_rank()
        if not is_first_rank():
            out, resume, on_event, progress, options = None, False, None, False, replace(options, log=())
    options = replace(options, budget=limit)
    loggers = {option("log", spec): make_logger(spec) for spec in options.log}
    with ExitStack() as stack:
        folder = None
        if out is not None:
            path = Path(out)
            folder = RunFolder(path, extend) if isinstance(work, Task) else None
            if isinstance(work, Sweep):
                folder = TunedFolder(path, work, kinds, options) if kinds else SweepFolder(path, work, extend)
            if not resume and not overwrite:
                folder.check_free()
            stack.callback(folder.close)
        display = display_for(progress, several=isinstance(work, Sweep))
        shown = [] if display is None else [stack.enter_context(display)]
        if target.type == "cuda":
            stack.enter_context(torch.cuda.device(target))
        stack.enter_context(process_state(Needs.of(tasks, target, limit), target))
        # A run that is resumed keeps its id and counts on.
        former, last = folder.last_stamp() if folder is not None and resume else ("", 0)
        journal = [] if folder is None else [folder.journal]
        emit = Broadcast([*journal, *shown], on_event, former or uuid.uuid4().hex[:12], last, loggers)
        stack.callback(emit.close)
        if folder is not None and former and loggers:
            emit.resume(folder.former_events())
        folders = {task.label: str(folder.of_member(task.label)) for task in tasks} if folder is not None else {}
        events = TaskEvents(work.label, emit, folders) if isinstance(work, Task) else None
        if isinstance(work, Sweep):
            tuned = TunedEvents(work, kinds, emit, options.trials or 1) if kinds else None
            events = tuned or SweepEvents(work, emit, folders)
        if kinds:
            job = TunedJob(work, kinds, target, events, folder, options, control)
        elif options.ranks == 1:
            job = Job(tasks, target, events, folder, options, control, report)
        else:
            from weft.engine.sharded_job import ShardedJob, train_as_rank

            stack.enter_context(_lost_ranks_explained(folder))
            spread = torch.device(target.type) if options.device in ("auto", "cuda") else target
            # The other ranks decide nothing: rank 0 sends them what it decided. Each keeps to the budget on its device.
            as_rank = RunOptions(ranks=options.ranks, order=options.order, sharded=options.sharded, budget=limit)
            arguments = (tuple(tasks), as_rank)
            here = stack.enter_context(
                start_ranks(options.ranks, spread, train_as_rank, arguments, peers=options.peers)
            )
            job = ShardedJob(tasks, here, events, folder, options, control, report)
        return _train(work, job, events, folder, resume)


def _check_folder_options(
    out: Any, resume: bool, overwrite: bool, extend: Any, options: RunOptions, planned: bool
) -> None:
    """A :class:`SpecError` for options about the folder that contradict each other, or need a folder."""
    folder, continued, extended, deleted = option("out"), switch("resume"), switch("extend"), switch("overwrite")
    wrong = {
        f"out={out!r} must be a folder, such as out='runs/first'": not isinstance(out, (str, os.PathLike, type(None))),
        f"extend={extend!r} must be True or False": not isinstance(extend, bool),
        f"{continued} needs {folder}, the folder that has the checkpoint": resume and out is None,
        f"{extended} needs {folder}, the folder of the run to extend": extend and out is None,
        f"{continued} continues the run in {folder}, {deleted} deletes it; choose one of the two": resume and overwrite,
        f"{extended} and {deleted}: give one of the two": extend and overwrite,
        f"{extended}: a plan is run as it is; give the task or sweep itself": extend and planned,
        f"{extended} trains on one rank, not on ranks={options.ranks}": extend and options.ranks != 1,
        f"{option('checkpoint_every', options.checkpoint_every)} would have no effect without {folder}": (
            out is None and "checkpoint_every" in options.given
        ),
        "resume=True: batches= comes from a loader, whose batches cannot be made again; start afresh": (
            resume and options.batches is not None
        ),
    }
    for message, refused in wrong.items():
        if refused:
            raise SpecError(message)


@contextmanager
def _lost_ranks_explained(folder: RunFolder | None) -> Iterator[None]:
    """Say how to continue after a rank was lost."""
    try:
        yield
    except RankLostError as error:
        continues = folder is not None and folder.opened and any(folder.path.rglob(FILE))
        how = f"continue from the checkpoint in {folder.path} with {switch('resume')}" if continues and folder else ""
        raise RankLostError(f"{error}; {how or 'there is no checkpoint yet'}", error.rank) from None


def _train(
    work: Task | Sweep, job: Job, events: EventSource, folder: RunFolder | None, resume: bool
) -> Result | SweepResult:
    """Train ``work``, write what came of it as a whole, and emit how it ended."""
    begin = time.perf_counter()

    def as_a_whole(members: list[Result]) -> Result | SweepResult:
        if isinstance(work, Task):
            return members[0]
        sweep = Sweep.of_trials([m.task for m in members], work.name) if isinstance(job, TunedJob) else work
        seconds, graphs = time.perf_counter() - begin, about_graphs(job.graph_of, sweep)
        importance = job.importance if isinstance(job, TunedJob) else {}
        return SweepResult(sweep, members, job.records, members[0].environment, seconds, graphs, importance)

    if folder is not None:
        job.write_report = lambda members: folder.save_report(as_a_whole(members))
    try:
        result = as_a_whole(job.train(resume))
        if isinstance(folder, SweepFolder) and folder.opened and job.not_written is None:
            try:
                folder.save_sweep(result)
            except TrainingError as error:
                job.not_written = error
        if job.not_written is not None:  # the error that kept results from being written carries them
            job.not_written.result = result
            raise job.not_written
    except TrainingError as error:
        no_memory = isinstance(work, Task) and isinstance(error, OutOfMemoryError)
        events.event("failed", status="out of memory" if no_memory else "failed", message=str(error))
        raise
    report = {"report": str(folder.path / REPORT)} if folder is not None and folder.opened else {}
    if isinstance(result, SweepResult):
        whole = result.summary()
        several = ("graphs",) if len(whole["graphs"]) > 1 else ()
        summary = {key: whole[key] for key in ("best", "best_settings", "metric", "statuses", "seconds", *several)}
        status = "preempted" if "preempted" in whole["statuses"] else "finished"
        best = {} if whole["best"] is None else result[whole["best"]].metrics
        events.event("finish", status=status, **summary, metrics=best, **report)
    elif result.status == "diverged":
        events.event("failed", status=result.status, metrics=result.metrics, **report, message=result.message)
        raise DivergedError(result.message)
    else:
        events.event("finish", status=result.status, metrics=result.metrics, **report)
    return result


def about_graphs(graph_of: Callable[[Task], GraphStats], sweep: Sweep) -> dict[str, dict[str, Any]]:
    """Name and size of every graph of ``sweep``."""
    described = {}
    first = {sweep.graph_of(task): task for task in reversed(sweep.tasks())}
    for name in sweep.graphs:
        stats = graph_of(first[name])
        sizes = {"nodes": stats.num_nodes, "edges": stats.num_edges, "features": stats.num_features}
        sizes |= {"classes": stats.num_classes, "train": stats.num_train, "val": stats.num_val, "test": stats.num_test}
        described[name] = {"name": stats.name, **sizes}
    return described
