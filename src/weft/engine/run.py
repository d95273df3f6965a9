"""``weft.run``: train a task, a sweep or a plan; returns a :class:`Result` or a :class:`SweepResult`."""

from __future__ import annotations

import os
import time
import uuid
from collections.abc import Callable, Iterator, Sequence
from contextlib import AbstractContextManager, ExitStack, contextmanager
from functools import partial
from pathlib import Path
from typing import TYPE_CHECKING, Any, overload

import torch

from weft.core.errors import DivergedError, OutOfMemoryError, SpecError, TrainingError
from weft.core.graph_stats import GraphStats
from weft.core.plan import PlanOptions
from weft.core.sweep import Sweep
from weft.core.task import Task
from weft.core.units import parse_bytes
from weft.core.wording import switch
from weft.dist.peer_memory import RankLostError
from weft.engine.choosing import placement_options
from weft.engine.control import Cancel, Control
from weft.engine.display import display_for
from weft.engine.driver import CHECKPOINT_SECONDS, DriverOptions
from weft.engine.events import Broadcast, Listener, SweepEvents, TaskEvents
from weft.engine.folder import REPORT, RunFolder, RunningReport, SweepFolder
from weft.engine.graphs import with_all_splits
from weft.engine.job import Job
from weft.engine.job_options import JobOptions
from weft.engine.machine import choose_device, environment
from weft.engine.options import (
    check_batches,
    check_choices,
    check_extend,
    check_handles,
    check_hardware,
    check_options,
    check_places_over_ranks,
    check_ranks,
    check_relations,
    check_splits,
    not_work,
)
from weft.engine.process_state import Needs, process_state
from weft.engine.result import Result
from weft.engine.run_planner import check_runnable, device_of
from weft.engine.sweep_result import SweepResult
from weft.planner.pruning import Policy, policy_for
from weft.planner.report.plan_report import PlanReport
from weft.runtime.checkpoint import FILE

if TYPE_CHECKING:
    from weft.dist.ranks import Ranks

MakeJob = Callable[[Sequence[Task], torch.device, Any, RunFolder | None, JobOptions], Job]


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
    checkpoint_every: float = CHECKPOINT_SECONDS,
    prune: str | Policy | None = None,
    cancel: Cancel | None = None,
    control: Control | None = None,
    budget: str | float | None = None,
    weave: bool | None = None,
    compile: bool | None = None,
    ranks: int = 1,
    batches: Any = None,
    hardware: Any = None,
    features: str | None = None,
    topology: str | None = None,
    cache: str | float | None = None,
    cache_policy: Any = None,
    division: str | float | None = None,
    order: str = "given",
    peers: str = "auto",
) -> Result | SweepResult:
    """Train a task, or all tasks of a sweep (or of a list) together, and return the outcome.

    The answer of :func:`weft.plan`, or one read from a file with :func:`weft.read_plan`, is trained exactly as planned:
    its groups, stacks, joins, row orders and choices of compiling and replaying. It is refused, before anything is
    trained, on another graph or kind of device, with other weights, or where its groups do not fit.

    ``device``: ``"auto"`` (the GPU if there is one), ``"cpu"``, ``"cuda"``. ``out``: a folder for
    checkpoints, ``result.json``, the weights and a report; nothing is written without it. A folder that holds a run is
    refused, unless ``resume=True`` continues from its checkpoints, ``extend=True`` adds members or epochs to it without
    repeating what is there, or ``overwrite=True`` deletes it.
    ``progress``: show a live line or table (``"auto"``: on a terminal or in a notebook), or lines of text
    (``"plain"``). ``on_event`` is called with every
    :class:`Event`; an error of it is reported once. ``checkpoint_every``: seconds of training between checkpoints.
    ``prune``: end members of a sweep that are not worth training on: ``"median"``, or a policy such as
    :class:`MedianPruner`. ``control``: a :class:`Control` that pauses, resumes, preempts the run or ends members from
    outside; ``cancel``: a :class:`Cancel`, which ends members. ``budget``: bytes that it may
    take on the device (``"24GiB"``; None: what is free there); what cannot keep within is refused before it begins.
    ``weave``: whether tasks of different structure are merged into one step with shared kernels, which takes up to half
    a minute to compile; None: on a GPU that they do not fill they train beside each other, False: in turn.
    ``compile``: whether Inductor fuses what lies between Weft's operators, in users' modules above all; None: on
    a GPU, where the plan expects it to repay.
    ``ranks``: how many processes share the graph, each with about as many edges: GPUs of this host (``device="cuda"``),
    one GPU (``"cuda:0"``) or the CPU. This process is one of them. A checkpoint of some ranks is resumed by any number.
    ``hardware``: what prepares batches of sampled training with the host's threads: it has ``name``, ``registry()`` and
    ``preparers(parts)`` (docs/division.md); None: the GPU, where features or edges lie in host memory.
    ``batches``: a loader that makes the batches of a task with ``mode="sampled"``, such as PyG's ``NeighborLoader``.
    Of sampled training: ``features`` and ``topology`` (the edges) lie on the ``"gpu"``, in pinned ``"host"`` memory,
    there with the most used of them ``"cached"`` on the GPU, or on ``"disk"``, in the files of a saved graph; None: the
    first of these that fits into the budget. ``cache``: bytes of the device for the cache (``"2GiB"``; None: what is
    left of the budget); ``cache_policy``: what it holds, by ``"degree"``, ``"presampling"`` or ``"benefit"``, or an
    object with a ``choose`` method (:class:`weft.batches.CachePolicy`). ``division``: how batches are divided between
    the host and the GPU: ``"elastic"`` (the default: the host prepares as many as arrive in time), ``"fixed"``
    (MorphGL's algorithms at the ratio of Equation 6), or a number from 0 to 1, the fixed share of the GPU.
    ``order``: renumber the nodes before they are spread over ranks, so that fewer edges cross between them:
    ``"degree"``, ``"bfs"``, ``"rcm"`` or ``"metis"``; the numbers are those of the renumbered graph on one rank.
    ``peers``: the memory that ranks on GPUs read each other's rows from: ``"ipc"`` (CUDA IPC), ``"symmetric"`` (torch's
    symmetric memory) or ``"nvshmem"`` (the same on NVSHMEM's heap), the last two with a GPU per rank.

    Raises :class:`InputError` for a task that cannot be trained, :class:`DivergedError` when the loss is no
    longer a number, :class:`OutOfMemoryError`, and ``KeyboardInterrupt`` (after a checkpoint) on Ctrl-C. A member of
    a sweep that diverges or fails is a Result with that status instead, beside the others.
    """
    report = work if isinstance(work, PlanReport) else None
    work = with_all_splits(_checked(work))
    check_options(out=out, resume=resume, overwrite=overwrite, on_event=on_event, checkpoint_every=checkpoint_every)
    check_extend(extend, out=out, overwrite=overwrite, planned=report is not None, ranks=ranks)
    resume = resume or extend
    check_choices(weave=weave, compile=compile)
    handle = check_handles(control, cancel) or Control()
    limit = None if budget is None else parse_bytes(budget)
    placed = placement_options(features, topology, cache, cache_policy, division)
    if report is not None:
        # A plan has the name of a policy of the user's own, not the object.
        decided = {name: choice for name, choice in placed.items() if not hasattr(choice, "choose")}
        limit = _planned_limit(report, limit, weave=weave, compile=compile, **decided)
    driver = DriverOptions(checkpoint_every, policy_for(prune))
    tasks = [work] if isinstance(work, Task) else work.tasks()
    check_batches(batches, tasks, resume, ranks)
    check_hardware(hardware, tasks, batches, ranks)
    options = JobOptions(driver, handle, limit, PlanOptions(weave, compile, **placed), report, batches, hardware)
    handle.expect(task.label for task in tasks)
    target = choose_device(device) if report is None else device_of(report, device)
    count = check_ranks(ranks, weave, compile, report is not None, order, peers)
    check_places_over_ranks(placed, count)
    check_relations(tasks, count)
    check_splits(tasks, count)
    if count > 1 and not is_first_rank():
        out, resume, on_event, progress = None, False, None, False
    with ExitStack() as stack:
        folder = None if out is None else _folder(Path(out), work, resume or overwrite, extend)
        if folder is not None:
            stack.callback(folder.close)
        display = display_for(progress, several=isinstance(work, Sweep))
        shown = [] if display is None else [stack.enter_context(display)]
        if target.type == "cuda":
            stack.enter_context(torch.cuda.device(target))
        stack.enter_context(process_state(Needs.of(tasks, target, limit), target))
        emit = _broadcast(shown, folder, resume, on_event)
        make_job: MakeJob = Job
        if count > 1:
            stack.enter_context(_lost_ranks_told(folder))
            spread = torch.device(target.type) if str(device) in ("auto", "cuda") else target
            here = stack.enter_context(_ranks(count, spread, tasks, order, peers))
            make_job, target = partial(_sharded, here, order), here.device
        if isinstance(work, Task):
            return _run_task(work, target, folder, resume, emit, options, make_job)
        return _run_sweep(work, target, folder, resume, emit, options, make_job)


def is_first_rank() -> bool:
    """Whether this process tells and saves; see :func:`weft.dist.launch.is_first_rank`."""
    from weft.dist.launch import is_first_rank as asked

    return asked()


def _sharded(ranks: Ranks, order: str, tasks: Sequence[Task], _: torch.device, *others: Any) -> Job:
    from weft.engine.sharded_job import ShardedJob

    return ShardedJob(tasks, ranks, *others, order=order)


def _ranks(
    count: int, device: torch.device, tasks: Sequence[Task], order: str, peers: str
) -> AbstractContextManager[Ranks]:
    from weft.dist.launch import start_ranks
    from weft.engine.sharded_job import train_as_rank

    return start_ranks(count, device, train_as_rank, (tuple(tasks), order), peers=peers)


@contextmanager
def _lost_ranks_told(folder: RunFolder | None) -> Iterator[None]:
    """Say how to go on after a rank was lost."""
    try:
        yield
    except RankLostError as error:
        kept = folder is not None and folder.opened and any(folder.path.rglob(FILE))
        how = f"continue from the checkpoint in {folder.path} with {switch('resume')}" if kept and folder else ""
        raise RankLostError(f"{error}; {how or 'there is no checkpoint yet'}", error.rank) from None


def _folder(path: Path, work: Task | Sweep, may_hold_run: bool, extends: bool) -> RunFolder:
    folder = RunFolder(path, extends) if isinstance(work, Task) else SweepFolder(path, work, extends)
    if not may_hold_run:
        folder.check_free()
    return folder


def _planned_limit(report: PlanReport, limit: int | None, **choices: Any) -> int | None:
    """The bytes to keep to: the plan's, or fewer; a plan's own choices cannot be given again."""
    for name, choice in choices.items():
        if choice is not None:
            raise SpecError(f"{name}={choice!r}: plan {report.name!r} has decided that already; give it to weft.plan")
    limits = [one for one in (limit, report.plans[0].budget) if one is not None]
    return min(limits, default=None)


def _checked(work: Any) -> Task | Sweep:
    if isinstance(work, PlanReport):
        check_runnable(work)
        assert work.work is not None
        return work.work
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
    emit: Listener,
    options: JobOptions,
    make_job: MakeJob,
) -> Result:
    events = TaskEvents(task.label, emit)
    job = make_job([task], device, events, folder, options)
    if folder is not None:
        job.running_report = RunningReport(lambda members: folder.save_report(members[0]))
    try:
        (result,) = job.train(resume)
        _check_written(job, result)
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
    emit: Listener,
    options: JobOptions,
    make_job: MakeJob,
) -> SweepResult:
    events = SweepEvents(sweep, emit)
    job = make_job(sweep.tasks(), device, events, folder, options)
    begin = time.perf_counter()

    def as_a_whole(found: list[Result]) -> SweepResult:
        plans, seconds = tuple(plan for _, plan in job.groups), time.perf_counter() - begin
        return SweepResult(sweep, found, plans, environment(device), seconds, _about_graphs(job, sweep))

    if isinstance(folder, SweepFolder):
        job.running_report = RunningReport(lambda members: folder.save_report(as_a_whole(members)))
    try:
        found = job.train(resume)
        result = as_a_whole(found)
        if isinstance(folder, SweepFolder) and folder.opened and job.not_written is None:
            _write_sweep(job, folder, result)
        _check_written(job, result)
    except TrainingError as error:
        events.event("failed", status="failed", message=str(error))
        raise
    events.event("finish", **_summary(result), **_report(folder))
    return result


def _write_sweep(job: Job, folder: SweepFolder, result: SweepResult) -> None:
    try:
        folder.save_sweep(result)
    except TrainingError as error:
        job.not_written = error


def _check_written(job: Job, result: Result | SweepResult) -> None:
    """Raise the error that kept results from being written; it carries them."""
    if job.not_written is not None:
        job.not_written.result = result
        raise job.not_written


def _report(folder: RunFolder | None) -> dict[str, str]:
    return {"report": str(folder.path / REPORT)} if folder is not None and folder.opened else {}


def _summary(result: SweepResult) -> dict[str, Any]:
    whole = result.summary()
    several = ("graphs",) if len(whole["graphs"]) > 1 else ()
    summary = {key: whole[key] for key in ("best", "metric", "statuses", "seconds", *several)}
    best = result[summary["best"]].metrics if summary["best"] is not None else {}
    status = "preempted" if "preempted" in summary["statuses"] else "finished"
    return {"status": status, **summary, "metrics": best}


def _about_graphs(job: Job, sweep: Sweep) -> dict[str, dict[str, Any]]:
    first = {sweep.graph_of(task): task for task in reversed(sweep.tasks())}
    return {name: about_graph(job.graph_of(first[name])) for name in sweep.graphs}


def about_graph(stats: GraphStats) -> dict[str, Any]:
    sizes = {"nodes": stats.num_nodes, "edges": stats.num_edges, "features": stats.num_features}
    sizes |= {"classes": stats.num_classes, "train": stats.num_train, "val": stats.num_val, "test": stats.num_test}
    return {"name": stats.name, **sizes}


def _broadcast(shown: list[Listener], folder: RunFolder | None, resume: bool, on_event: Listener | None) -> Broadcast:
    """Where events go; a run that is resumed keeps its id and counts on."""
    former, last = folder.last_stamp() if folder is not None and resume else ("", 0)
    journal = [] if folder is None else [folder.journal]
    return Broadcast([*journal, *shown], on_event, former or uuid.uuid4().hex[:12], last)
