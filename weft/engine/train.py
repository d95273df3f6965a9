"""``weft.run``: a task in, a :class:`Result` out."""

from __future__ import annotations

import os
from collections.abc import Callable, Iterator
from contextlib import ExitStack, contextmanager
from pathlib import Path
from typing import Any

import torch

from weft.core.errors import DivergedError, OutOfMemoryError, SpecError, TrainingError, WeftError
from weft.core.event import Event
from weft.core.task import Task
from weft.engine.device import choose_device, device_name, environment
from weft.engine.folder import REPORT, RunFolder
from weft.engine.progress import display_for
from weft.engine.resolve import resolve_graph
from weft.engine.result import Result
from weft.engine.session import CHECKPOINT_SECONDS, Session
from weft.plan.solo import choose
from weft.run.precision import matmul_precision
from weft.run.randomness import seeded
from weft.run.solo import SoloRun
from weft.run.threads import cpu_threads

Listener = Callable[[Event], None]


def run(
    task: Task,
    *,
    device: str | torch.device = "auto",
    out: str | os.PathLike[str] | None = None,
    resume: bool = False,
    progress: bool | str = "auto",
    on_event: Listener | None = None,
    checkpoint_every: float = CHECKPOINT_SECONDS,
) -> Result:
    """Train ``task`` and return what came of it.

    ``device``: ``"auto"`` (the GPU where there is one), ``"cpu"``, ``"cuda"``. ``out``: a folder for
    checkpoints, ``result.json``, the weights and a report; nothing is written without it. ``resume=True``
    continues from the checkpoint in ``out``. ``progress``: show a live line (``"auto"``: on a terminal).
    ``on_event`` is called with every :class:`Event`. ``checkpoint_every``: seconds between checkpoints.

    Raises :class:`InputError` for a task that cannot be trained, :class:`DivergedError` when the loss is no
    longer a number, :class:`OutOfMemoryError`, and ``KeyboardInterrupt`` (after a checkpoint) on Ctrl-C.
    """
    if not isinstance(task, Task):
        raise SpecError(f"weft.run takes a weft.Task, not {type(task).__name__}; weft.Task(graph=..., ...)")
    if resume and out is None:
        raise SpecError(f"task {task.label!r}: resume=True needs out=, the folder that has the checkpoint")
    target = choose_device(device)
    with ExitStack() as stack:
        listeners = [listener for listener in (on_event,) if listener is not None]
        display = display_for(progress)
        if display is not None:
            listeners.append(stack.enter_context(display))
        folder = RunFolder(Path(out)) if out is not None else None
        if target.type == "cuda":
            stack.enter_context(torch.cuda.device(target))
        stack.enter_context(seeded(task.seed, target))
        stack.enter_context(matmul_precision(task.precision))
        return _run(task, target, folder, resume, listeners, checkpoint_every)


def _run(
    task: Task,
    device: torch.device,
    folder: RunFolder | None,
    resume: bool,
    listeners: list[Listener],
    checkpoint_every: float,
) -> Result:
    checkpoint = folder.checkpoint_of(task) if folder and resume else None
    emit = _broadcast(listeners + ([folder.journal] if folder else []))
    try:
        with _clear_memory_errors(task, device):
            graph = resolve_graph(task, device)
            plan = choose(task, graph.stats(), device.type)
            with cpu_threads(plan.threads):
                solo = SoloRun(task, graph, plan, device)
                if folder is not None:
                    folder.open(afresh=checkpoint is None)
                emit(_start(solo))
                session = Session(solo, emit, folder, checkpoint_every)
                if checkpoint is not None:
                    session.resume(checkpoint.tensors, float(checkpoint.about.get("seconds", 0.0)))
                elif resume:
                    emit(Event("note", task.label, {"message": "no checkpoint to resume from; starting afresh"}))
                return _train(session, folder, emit)
    except DivergedError:
        raise  # told already, with the metrics so far
    except TrainingError as error:
        status = "out of memory" if isinstance(error, OutOfMemoryError) else "failed"
        emit(Event("failed", task.label, {"status": status, "message": str(error)}))
        raise


def _train(session: Session, folder: RunFolder | None, emit: Listener) -> Result:
    try:
        session.train()
    except DivergedError as error:
        result = _result(session, "diverged")
        _conclude(result, folder, emit, "failed", {"message": str(error)})
        raise
    result = _result(session, "stopped" if session.stopped_early else "finished")
    _conclude(result, folder, emit, "finish", {})
    return result


def _start(solo: SoloRun) -> Event:
    task, graph = solo.task, solo.graph
    data: dict[str, Any] = {
        "epochs": task.epochs,
        "device": device_name(solo.device),
        "graph": {"name": graph.name, "nodes": graph.num_nodes, "edges": graph.num_edges},
        **solo.describe(),
        "settings": task.to_dict(),
        "plan": solo.plan.to_dict(),
    }
    return Event("start", task.label, data)


def _result(session: Session, status: str) -> Result:
    run = session.run
    epochs = len(session.rows)
    metrics: dict[str, Any] = {"metric": run.metric, "objective": run.objective.name}
    if 0 <= session.best_epoch < epochs:
        metrics |= {key: value for key, value in session.row(session.best_epoch).items() if key != "loss"}
    metrics |= {
        "best_epoch": session.best_epoch + 1,
        "epochs_run": epochs,
        "seconds": session.seconds,
        "seconds_per_epoch": session.seconds_per_epoch,
    }
    history: dict[str, list[float]] = {"epoch": list(range(1, epochs + 1))}
    for index, column in enumerate(run.columns):
        history[column] = [row[index] for row in session.rows]
    env = environment(run.device)
    return Result(run.task, run.plan, metrics, history, run.best_model(), env, status)


def _conclude(result: Result, folder: RunFolder | None, emit: Listener, kind: str, data: dict) -> None:
    if folder is not None:
        folder.save_result(result)
        data = {"report": str(folder.path / REPORT), **data}
    emit(Event(kind, result.task.label, {"status": result.status, "metrics": result.metrics, **data}))


def _broadcast(listeners: list[Listener]) -> Listener:
    def emit(event: Event) -> None:
        for listener in listeners:
            listener(event)

    return emit


@contextmanager
def _clear_memory_errors(task: Task, device: torch.device) -> Iterator[None]:
    """Say in one sentence that the memory was not enough."""
    try:
        yield
    except WeftError:
        raise
    except (torch.OutOfMemoryError, MemoryError) as error:
        raise OutOfMemoryError(_memory_message(task, device)) from error
    except RuntimeError as error:
        if "can't allocate memory" not in str(error):
            raise
        raise OutOfMemoryError(_memory_message(task, device)) from error


def _memory_message(task: Task, device: torch.device) -> str:
    place = device_name(device)
    if device.type == "cuda":
        free, total = torch.cuda.mem_get_info(device)
        place += f", {total / 2**30:.1f} GiB of which {free / 2**30:.1f} GiB are free"
    return (
        f"task {task.label!r}: the memory of the device was not enough ({place}); "
        "try a smaller hidden or fewer layers, precision='bf16', or another device"
    )
