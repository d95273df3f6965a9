"""EventSource: emit what happens to a run as Events, for one task or summed up over a sweep."""

from __future__ import annotations

import math
import os
import platform
import time
import traceback
import warnings
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field, replace
from pathlib import Path
from typing import TYPE_CHECKING, Any, Protocol

import numpy as np

from weft.core.compatibility import function_name
from weft.core.decision import RUNNING, Update
from weft.core.event import Event
from weft.core.plan import Plan
from weft.core.sweep import Sweep
from weft.core.task import Task
from weft.engine.machine import device_name
from weft.engine.result import Result
from weft.runtime.group import GroupRun

if TYPE_CHECKING:
    from weft.runtime.group import GroupRun, MemberUpdate


# ---- MemberProgress: the host's record of one member: history, status, and how it ended.
#
# Columns of a history: the training loss, losses of the splits, metrics of the splits.


@dataclass
class MemberProgress:
    """A member in training. ``rows``: one row of ``columns`` an epoch; ``seconds``: its share of the group's time.

    ``steps``: of an epoch; ``status`` is ``"running"`` or one of :data:`weft.engine.result.STATUSES`;
    ``best_epoch`` counts from 0, -1: none.
    """

    task: Task
    columns: list[str]
    metric: str
    objective: str
    steps: int = 1
    rows: list[list[float]] = field(default_factory=list)
    end: int = 0
    best_epoch: int = -1
    best_score: float = -math.inf
    status: str = RUNNING
    message: str = ""
    seconds: float = 0.0
    steady_seconds: float = 0.0
    steady_epochs: int = 0

    @classmethod
    def of(cls, group: GroupRun, index: int) -> MemberProgress:
        """The track of a member that has not begun."""
        stack = group.members[index].stack
        steps = stack.source.steps_per_epoch
        return cls(group.tasks[index], stack.columns, stack.metric, stack.objective.name, steps)

    @property
    def name(self) -> str:
        """What the task is called."""
        return self.task.label

    @property
    def running(self) -> bool:
        """Whether there is something left to train."""
        return self.status == RUNNING

    @property
    def epoch(self) -> int:
        """Epochs trained that count."""
        return len(self.rows)

    # ---- learning ------------------------------------------------------------------------------------

    def take(self, progress: MemberUpdate) -> None:
        """Take over what the device has recorded, and notice the end."""
        if not self.running:
            return
        del self.rows[progress.first :]
        self.rows += progress.rows
        self.end, self.best_epoch, self.best_score = progress.end, progress.best_epoch, progress.best_score
        if not self._notice_divergence(progress) and self.epoch >= self.end:
            self.status = "finished" if self.end >= self.task.epochs else "stopped"

    def charge(self, seconds: float, epochs: int, steady: bool) -> None:
        """Count ``seconds`` for ``epochs``; set-up and the first poll are not ``steady``."""
        self.seconds += seconds
        if steady:
            self.steady_seconds += seconds
            self.steady_epochs += epochs

    def stop(self, status: str, message: str) -> None:
        """End here, by a decision."""
        self.status, self.message, self.end = status, message, self.epoch

    def _notice_divergence(self, progress: MemberUpdate) -> bool:
        losses = [i for i, name in enumerate(self.columns) if name.endswith("loss")]
        for offset, row in enumerate(progress.rows):
            epoch = progress.first + offset
            evaluated = not math.isnan(row[-1]) or self.end == epoch + 1
            bad = [i for i in (losses if evaluated else losses[:1]) if not math.isfinite(row[i])]
            if bad:
                del self.rows[epoch + 1 :]
                self.stop("diverged", self._what_diverged(epoch, self.columns[bad[0]], row[bad[0]]))
                return True
        return False

    def _what_diverged(self, epoch: int, column: str, value: float) -> str:
        kept = "no epoch was usable"
        if self.best_epoch >= 0:
            kept = f"the best weights so far (epoch {self.best_epoch + 1}) are kept"
        return (
            f"task {self.name!r}: {column} became {value} at epoch {epoch + 1} of {self.task.epochs}; "
            f"{kept}; {self._advice(epoch == 0 and column == 'loss' and self.steps == 1)}"
        )

    def _advice(self, with_first_weights: bool) -> str:
        """What to look at; a loss ``with_first_weights`` is from before any update, so no rate is to blame."""
        task = self.task
        own = [f"objective {function_name(task.objective)}"] if task.has_own("objective") else []
        own += [f"what model {task.model_name} computes"] if task.traits is None else []
        look = f"look at {' and '.join(own)}" if own else ""
        if with_first_weights:
            return f"{look or 'look at the features'}: no weight had been updated yet"
        lower = f"try a lower lr than {task.lr:g}"
        return f"{look}, or {lower}" if own else lower

    # ---- reporting -----------------------------------------------------------------------------------

    def update(self, first: int, **of_the_group: Any) -> Update:
        """The update for a driver: the rows from epoch ``first`` (counted from 0) on, and how it stands."""
        return Update(
            self.name,
            first,
            tuple(map(tuple, self.rows[first:])),
            self.end,
            self.best_epoch,
            self.best_score,
            self.status == "diverged",
            status=self.status,
            **of_the_group,
        )

    @property
    def watched(self) -> str:
        """The column that members are compared by."""
        return f"val_{self.metric}"

    def row(self, epoch: int) -> dict[str, float]:
        """What was measured at ``epoch`` (counted from 0), by column."""
        return dict(zip(self.columns, self.rows[epoch], strict=True))

    def standing(self) -> dict[str, Any]:
        """Where it is: the epoch, what was measured last, the best so far."""
        data: dict[str, Any] = {"epoch": self.epoch, "epochs": self.task.epochs}
        if self.rows:
            row = self.row(self.epoch - 1)
            data |= {key: short(value) for key, value in row.items() if not math.isnan(value)}
        if 0 <= self.best_epoch < self.epoch:
            best = self.row(self.best_epoch)
            data["best_epoch"] = self.best_epoch + 1
            if self.watched in best:
                data[f"best_{self.watched}"] = short(best[self.watched])
        return data

    def metrics(self) -> dict[str, Any]:
        """What a :class:`Result` says: every split at the best epoch, epochs and seconds."""
        metrics: dict[str, Any] = {"metric": self.metric, "objective": self.objective}
        if 0 <= self.best_epoch < self.epoch:
            metrics |= {key: short(value) for key, value in self.row(self.best_epoch).items() if key != "loss"}
        return metrics | {
            "best_epoch": self.best_epoch + 1,
            "epochs_run": self.epoch,
            "seconds": self.seconds,
            "seconds_per_epoch": self.seconds_per_epoch,
        }

    @property
    def seconds_per_epoch(self) -> float:
        """Mean seconds of an epoch, without set-up and the first poll if there were others."""
        if self.steady_epochs:
            return self.steady_seconds / self.steady_epochs
        return self.seconds / max(self.epoch, 1)

    def history(self) -> dict[str, list[float]]:
        """A list a column."""
        columns: dict[str, list[Any]] = {"epoch": list(range(1, self.epoch + 1))}
        return columns | {name: [row[index] for row in self.rows] for index, name in enumerate(self.columns)}

    # ---- saving --------------------------------------------------------------------------------------

    def about(self) -> dict[str, Any]:
        """What a checkpoint holds of this member besides its tensors."""
        return {"status": self.status, "message": self.message, "seconds": self.seconds, "epoch": self.epoch}

    def resume(self, about: dict[str, Any], progress: MemberUpdate) -> None:
        """Go on from a checkpoint."""
        self.seconds = float(about.get("seconds", 0.0))
        self.take(progress)
        if about.get("status", RUNNING) != RUNNING:
            del self.rows[int(about["epoch"]) :]
            self.status, self.message = about["status"], about.get("message", "")


def short(value: float) -> float:
    """The shortest number that is ``value`` in float32, as it was measured: 0.856, not 0.8560000061988831."""
    return float(str(np.float32(value)))


Listener = Callable[[Event], None]
Reads = Mapping[str, float]
NO_READS: Reads = {}
SUM_UP_SECONDS = 0.5  # between two progress events of a sweep, which name every running member


class EventSource(Protocol):
    """What a session and a job report to."""

    def note(self, message: str) -> None:
        """Something worth reading."""

    def preparing(self, message: str, **numbers: int) -> None:
        """Something is done before training, ``done`` of ``total``."""

    def group(self, group: GroupRun, plans: Sequence[Plan], position: int, key: str = "", why: str = "") -> None:
        """A group is about to train, for the scheduler's reason ``why``.

        ``key`` names it for good, ``position`` is its place among ``plans`` now.
        """

    def progress(
        self, tracks: Sequence[MemberProgress], epoch: int, trained: int, seconds: float, reads: Reads = NO_READS
    ) -> None:
        """Members have advanced by ``trained`` epochs, all together, since the last time; ``reads``: of caches."""

    def ended(self, track: MemberProgress) -> None:
        """A member has ended."""

    def never_begun(self, result: Result) -> None:
        """A member could not begin, or was cancelled before."""

    def checkpoint(self, path: Path, epoch: int) -> None:
        """A checkpoint was written."""

    def paused(self, paused: bool, epoch: int) -> None:
        """Training has paused, or goes on."""

    def left(self, reason: str, epoch: int) -> None:
        """The run ends here, with members that could go on: ``"interrupted"`` or ``"preempted"``."""


def about_graph(group: GroupRun) -> dict[str, Any]:
    """Name and size of the graph."""
    stats = group.graph.stats()  # a shard's are those of the whole graph
    return {"name": stats.name, "nodes": stats.num_nodes, "edges": stats.num_edges}


class TaskEvents:
    """The events of one task."""

    def __init__(self, label: str, emit: Listener) -> None:
        self._label, self._emit, self._key = label, emit, ""

    def event(self, kind: str, **data: Any) -> None:
        """Emit an event about the task."""
        self._emit(Event(kind, self._label, data, group=self._key))

    def note(self, message: str) -> None:
        self.event("note", message=message)

    def preparing(self, message: str, **numbers: int) -> None:
        self.event("preparing", message=message, **numbers)

    def group(self, group: GroupRun, plans: Sequence[Plan], position: int, key: str = "", why: str = "") -> None:
        self._key = key
        data: dict[str, Any] = {"epochs": group.epochs, "device": device_name(group.device)}
        data |= {"graph": about_graph(group), **group.describe(0)}
        self.event("start", **data, scheduled=why, settings=group.tasks[0].to_dict(), plan=group.plan.to_dict())

    def progress(
        self, tracks: Sequence[MemberProgress], epoch: int, trained: int, seconds: float, reads: Reads = NO_READS
    ) -> None:
        (track,) = tracks
        if track.rows:
            rate = trained / max(seconds, 1e-9)
            standing = track.standing()
            first = {key: standing.pop(key) for key in ("epoch", "epochs")}
            self.event("progress", **first, epochs_per_second=rate, **standing, **reads)

    def ended(self, track: MemberProgress) -> None:
        """The engine emits the end of a task once its files are written."""

    def never_begun(self, result: Result) -> None:
        """The engine emits this as well."""

    def checkpoint(self, path: Path, epoch: int) -> None:
        self.event("checkpoint", path=str(path), epoch=epoch)

    def paused(self, paused: bool, epoch: int) -> None:
        self.event("paused" if paused else "resumed", epoch=epoch)

    def left(self, reason: str, epoch: int) -> None:
        self.event(reason, epoch=epoch)


class SweepEvents:
    """The events of a sweep: ``start``, ``group`` and ``progress`` of the whole, ``end`` of every member."""

    def __init__(self, sweep: Sweep, emit: Listener) -> None:
        self._sweep, self._emit = sweep, emit
        self._total = sum(task.epochs for task in sweep)
        self._begun: dict[str, MemberProgress] = {}
        self._group: dict[str, Any] = {}
        self._key = ""
        self._held: list[Event] = []  # ends of members that went wrong before anybody began
        self._told = 0.0
        self._since: tuple[int, float] = (0, 0.0)  # epochs done and seconds passed since the last progress event

    def event(self, kind: str, **data: Any) -> None:
        """Emit an event about the whole."""
        held = self._held if kind in ("group", "finish", "failed") else []
        while held:
            self._emit(held.pop(0))
        of_a_group = kind not in ("preparing", "start", "finish", "failed")
        self._emit(Event(kind, self._sweep.label, data, group=self._key if of_a_group else ""))

    def note(self, message: str) -> None:
        self.event("note", message=message)

    def preparing(self, message: str, **numbers: int) -> None:
        self.event("preparing", message=message, **numbers)

    def group(self, group: GroupRun, plans: Sequence[Plan], position: int, key: str = "", why: str = "") -> None:
        described = group.describe(0)
        if not self._group:
            self.event(
                "start",
                tasks=len(self._sweep),
                epochs=self._total,
                device=device_name(group.device),
                graph=about_graph(group),
                graphs=list(self._sweep.graphs),
                metric=described["metric"],
                varying=list(self._sweep.varying),
                settings=self._sweep.to_dict(),
                plan=[plan.to_dict() for plan in plans],
            )
        self._group, self._key = {"group": position, "groups": len(plans)}, key
        names = [task.label for task in group.tasks]
        about = {"graph": self._sweep.graph_of(group.tasks[0]), "metric": described["metric"], "scheduled": why}
        self.event("group", **self._group, **about, epochs=group.epochs, members=names, plan=group.plan.to_dict())

    def progress(
        self, tracks: Sequence[MemberProgress], epoch: int, trained: int, seconds: float, reads: Reads = NO_READS
    ) -> None:
        self._begun |= {track.name: track for track in tracks}
        self._since = (self._since[0] + trained, self._since[1] + seconds)
        over = not any(track.running for track in tracks)
        if over or time.monotonic() - self._told >= SUM_UP_SECONDS:
            rate = self._since[0] / max(self._since[1], 1e-9)
            members = [{"task": t.name, "status": t.status, **t.standing()} for t in tracks]
            whole = {"done": self._done(), "total": self._left(), "epochs_per_second": rate}
            self.event("progress", **self._group, epoch=epoch, **whole, **reads, members=members)
            self._told, self._since = time.monotonic(), (0, 0.0)

    def _done(self) -> int:
        return sum(track.epoch for track in self._begun.values())

    def _left(self) -> int:
        """Epochs of the whole sweep as far as is known: those of members that ended early are not among them."""
        spared = sum(t.task.epochs - t.epoch for t in self._begun.values() if not t.running)
        return self._total - spared

    def ended(self, track: MemberProgress) -> None:
        self._begun[track.name] = track
        self._end(track.name, track.status, track.metrics(), track.message, last=track.standing())

    def never_begun(self, result: Result) -> None:
        self._total -= result.task.epochs
        self._end(result.name, result.status, result.metrics, result.message)

    def _end(self, name: str, status: str, metrics: dict[str, Any], message: str, **more: Any) -> None:
        data: dict[str, Any] = {"sweep": self._sweep.label, "status": status, "metrics": metrics, **more}
        event = Event("end", name, {**data, **({"message": message} if message else {})}, group=self._key)
        if self._group:
            self._emit(event)
        else:
            self._held.append(event)

    def checkpoint(self, path: Path, epoch: int) -> None:
        self.event("checkpoint", path=str(path), epoch=epoch)

    def paused(self, paused: bool, epoch: int) -> None:
        self.event("paused" if paused else "resumed", epoch=epoch, **self._group)

    def left(self, reason: str, epoch: int) -> None:
        self.event(reason, epoch=epoch, **self._group)


class Broadcast:
    """Stamps events with run, number and worker, and hands them to the journal, the display and the user's listener.

    The journal comes first: after a crash it is the one that says which numbers were given. An error of the user's
    listener is reported once, and training goes on.
    """

    def __init__(self, own: Sequence[Listener], on_event: Listener | None, run: str, last_seq: int = 0) -> None:
        self._own, self._on_event = tuple(own), on_event
        self._run, self._seq, self._worker = run, last_seq, f"{platform.node()}-{os.getpid()}"
        self._reported = False

    def __call__(self, event: Event) -> None:
        self._seq += 1
        event = replace(event, run=self._run, seq=self._seq, worker=self._worker)
        for listener in self._own:
            listener(event)
        if self._on_event is None:
            return
        try:
            self._on_event(event)
        except BrokenPipeError:  # stdout is closed: the command handles that
            raise
        except Exception as error:
            self._report(error, event)

    def _report(self, error: Exception, event: Event) -> None:
        if self._reported:
            return
        self._reported = True
        last = traceback.extract_tb(error.__traceback__)[-1]
        message = (
            f"on_event raised {type(error).__name__}: {error} (line {last.lineno} of {last.filename}) "
            f"at a {event.kind!r} event; training goes on, further errors of it are not reported"
        )
        self(Event("note", event.task, {"message": message}, group=event.group))
        warnings.warn(message, RuntimeWarning, stacklevel=2)
