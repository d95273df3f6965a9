"""EventSource: emit what happens to a run as Events, for one task or summed up over a sweep, to loggers made here."""

from __future__ import annotations

import os
import platform
import time
import traceback
import warnings
from collections.abc import Callable, Mapping, Sequence
from dataclasses import replace
from importlib import import_module
from pathlib import Path
from types import MappingProxyType
from typing import Any

from weft.core.errors import SpecError
from weft.core.event import Event
from weft.core.member import Member
from weft.core.plan import Plan
from weft.core.plugins import blame_plugin, load_plugin
from weft.core.run_options import LOGGERS
from weft.core.sweep import Sweep, setting_of
from weft.core.task import Task, plain_value
from weft.core.wording import option
from weft.engine.machine import device_name
from weft.engine.result import Result
from weft.runtime.group import GroupRun

Listener = Callable[[Event], None]
Reads = Mapping[str, float]
Folders = Mapping[str, str]
SUM_UP_SECONDS = 0.5  # between two progress events of a sweep, which name every running member


class EventSource:
    """What a session and a job report to. This one reports nothing: ranks other than 0 have it."""

    _group: Mapping[str, Any] = {}  # the position of the group in training, of a sweep

    def __init__(self) -> None:
        # The last epoch of every member whose rows, and whose logged numbers, events have had; on after a resume.
        self.sent: dict[tuple[str, str], int] = {}

    def event(self, kind: str, **data: Any) -> None:
        """Emit an event about the task, or about the sweep as a whole."""

    def event_of(self, member: str, kind: str, **data: Any) -> None:
        """Emit an event about one member, which may be all there are."""
        self.event(kind, **data)

    def note(self, message: str) -> None:
        """Something worth reading."""
        self.event("note", message=message)

    def preparing(self, message: str, **numbers: int) -> None:
        """Something is done before training, ``done`` of ``total``."""
        self.event("preparing", message=message, **numbers)

    def group(self, group: GroupRun, plans: Sequence[Plan], position: int, key: str, why: str) -> None:
        """A group is about to train, for the scheduler's reason ``why``.

        ``key`` names it for good, ``position`` is its place among ``plans`` now.
        """

    def rows(self, members: Sequence[Member]) -> None:
        """Emit the rows of ``members`` that no event has had yet."""
        new = []
        for member in members:
            sent = self.sent.get(("rows", member.name), 0)
            if member.epoch > sent:
                rows = [list(row) for row in member.rows[sent:]]
                new.append({"task": member.name, "first": sent + 1, "columns": list(member.columns), "rows": rows})
                self.sent["rows", member.name] = member.epoch
        if new:
            self.event("rows", members=new)

    def logged(self, member: Member, values: Mapping[str, float]) -> None:
        """Emit what callbacks of ``member`` logged after its last epoch, unless an event has had that."""
        if member.epoch > self.sent.get(("log", member.name), 0):
            self.sent["log", member.name] = member.epoch
            self.event_of(member.name, "log", epoch=member.epoch, values=dict(values))

    def progress(self, members: Sequence[Member], epoch: int, trained: int, seconds: float, reads: Reads) -> None:
        """Members have advanced by ``trained`` epochs, all together, since the last time; ``reads``: of caches."""

    def ended(self, member: Member) -> None:
        """A member has ended; of one task the engine emits that once its files are written."""

    def never_begun(self, result: Result) -> None:
        """A member could not begin, or was cancelled before."""

    def checkpoint(self, path: Path, epoch: int) -> None:
        """A checkpoint was written."""
        self.event("checkpoint", path=str(path), epoch=epoch)

    def paused(self, paused: bool, epoch: int) -> None:
        """Training has paused, or continues."""
        self.event("paused" if paused else "resumed", epoch=epoch, **self._group)

    def left(self, reason: str, epoch: int) -> None:
        """The run ends here, with members that could continue: ``"interrupted"`` or ``"preempted"``."""
        self.event(reason, epoch=epoch, **self._group)


def about_graph(group: GroupRun) -> dict[str, Any]:
    """Name and size of the graph."""
    stats = group.graph.stats()  # a shard's are those of the whole graph
    return {"name": stats.name, "nodes": stats.num_nodes, "edges": stats.num_edges}


class TaskEvents(EventSource):
    """The events of one task; ``folders``: where the files of members will be, by name."""

    def __init__(self, label: str, emit: Listener, folders: Folders = MappingProxyType({})) -> None:
        super().__init__()
        self._label, self._emit, self._key = label, emit, ""
        self._folder = {"folder": folders[label]} if label in folders else {}

    def event(self, kind: str, **data: Any) -> None:
        self._emit(Event(kind, self._label, data, group=self._key))

    def group(self, group: GroupRun, plans: Sequence[Plan], position: int, key: str, why: str) -> None:
        self._key = key
        data: dict[str, Any] = {"epochs": group.epochs, "device": device_name(group.device)}
        data |= {"graph": about_graph(group), **group.describe(0), **self._folder}
        self.event("start", **data, scheduled=why, settings=group.tasks[0].to_dict(), plan=group.plan.to_dict())

    def progress(self, members: Sequence[Member], epoch: int, trained: int, seconds: float, reads: Reads) -> None:
        (member,) = members
        if member.rows:
            standing = member.standing()
            first = {key: standing.pop(key) for key in ("epoch", "epochs")}
            self.event("progress", **first, epochs_per_second=trained / max(seconds, 1e-9), **standing, **reads)


class SweepEvents(EventSource):
    """The events of a sweep: ``start``, ``group`` and ``progress`` of the whole, ``end`` of every member."""

    def __init__(self, sweep: Sweep, emit: Listener, folders: Folders = MappingProxyType({})) -> None:
        super().__init__()
        self._sweep, self._emit, self._folders = sweep, emit, folders
        self._total = sum(task.epochs for task in sweep)
        self._begun: dict[str, Member] = {}
        self._key = ""
        self._held: list[Event] = []  # ends of members that went wrong before anybody began
        self._last_progress = 0.0
        self._since: tuple[int, float] = (0, 0.0)  # epochs done and seconds passed since the last progress event

    def event(self, kind: str, **data: Any) -> None:
        held = self._held if kind in ("group", "finish", "failed") else []
        while held:
            self._emit(held.pop(0))
        of_a_group = kind not in ("preparing", "start", "finish", "failed")
        self._emit(Event(kind, self._sweep.label, data, group=self._key if of_a_group else ""))

    def event_of(self, member: str, kind: str, **data: Any) -> None:
        """Emit an event about a member, once the group is known."""
        event = Event(kind, member, data, group=self._key)
        if self._group:
            self._emit(event)
        else:
            self._held.append(event)

    def group(self, group: GroupRun, plans: Sequence[Plan], position: int, key: str, why: str) -> None:
        metric = group.describe(0)["metric"]
        if not self._group:
            self.event(
                "start",
                **self._whole(),
                device=device_name(group.device),
                graph=about_graph(group),
                graphs=list(self._sweep.graphs),
                metric=metric,
                shared=self._settings(group.tasks[0], shared=True),
                plan=[plan.to_dict() for plan in plans],
            )
        self._group, self._key = {"group": position, "groups": len(plans)}, key
        names = self._names(group)
        facts = {"graph": self._sweep.graph_of(group.tasks[0]), "metric": metric, "scheduled": why}
        facts |= {"settings": [self._settings(task, shared=False) for task in group.tasks if task.label in names]}
        facts |= {} if names else {"rows": len(group.tasks)}
        self.event("group", **self._group, **facts, epochs=group.epochs, members=names, plan=group.plan.to_dict())

    def _whole(self) -> dict[str, Any]:
        """What all groups are together."""
        sweep = self._sweep
        return {"tasks": len(sweep), "epochs": self._total, "varying": list(sweep.varying), "settings": sweep.to_dict()}

    def _names(self, group: GroupRun) -> list[str]:
        """The members that begin with ``group``."""
        return [task.label for task in group.tasks]

    def _settings(self, task: Task, shared: bool) -> dict[str, Any]:
        """Of a member: the settings that all have in common, or those that vary, as plain data."""
        varying = self._sweep.varying
        if shared:
            return {key: value for key, value in task.to_dict().items() if key not in ("name", *varying)}
        return {key: plain_value(setting_of(task, key)) for key in varying}

    def progress(self, members: Sequence[Member], epoch: int, trained: int, seconds: float, reads: Reads) -> None:
        self._begun |= {member.name: member for member in members}
        self._since = (self._since[0] + trained, self._since[1] + seconds)
        over = not any(member.running for member in members)
        if over or time.monotonic() - self._last_progress >= SUM_UP_SECONDS:
            rate = self._since[0] / max(self._since[1], 1e-9)
            done = sum(member.epoch for member in self._begun.values())
            # Epochs that members which ended early did not train are no longer part of the whole.
            spared = sum(m.epochs - m.epoch for m in self._begun.values() if not m.running)
            whole = {"done": done, "total": self._total - spared, "epochs_per_second": rate}
            rows = [{"task": member.name, "status": member.status, **member.standing()} for member in members]
            self.event("progress", **self._group, epoch=epoch, **whole, **reads, members=rows)
            self._last_progress, self._since = time.monotonic(), (0, 0.0)

    def ended(self, member: Member) -> None:
        self._begun[member.name] = member
        self._end(member.name, member.status, member.metrics(), member.message, last=member.standing())

    def never_begun(self, result: Result) -> None:
        self._total -= result.task.epochs
        self._end(result.name, result.status, result.metrics, result.message)

    def _end(self, name: str, status: str, metrics: dict[str, Any], message: str, **more: Any) -> None:
        data: dict[str, Any] = {"sweep": self._sweep.label, "status": status, "metrics": metrics, **more}
        data |= {"folder": self._folders[name]} if name in self._folders else {}
        self.event_of(name, "end", **data, **({"message": message} if message else {}))


class Broadcast:
    """Stamps events with run, number and worker, and hands them to the journal, the display, loggers and the listener.

    The journal comes first: after a crash it is the one that says which numbers were given. An error of a logger or of
    the user's listener is reported once, and training continues. ``loggers``: by what messages call them.
    """

    def __init__(
        self,
        own: Sequence[Listener],
        on_event: Listener | None,
        run: str,
        last_seq: int = 0,
        loggers: Mapping[str, Listener] = MappingProxyType({}),
    ) -> None:
        self._own, self._on_event, self._loggers = tuple(own), on_event, loggers
        self.run, self._seq, self._worker = run, last_seq, f"{platform.node()}-{os.getpid()}"
        self._reported: set[str] = set()

    def __call__(self, event: Event) -> None:
        self._seq += 1
        event = replace(event, run=self.run, seq=self._seq, worker=self._worker)
        for listener in self._own:
            listener(event)
        for name, logger in self._loggers.items():
            self._guarded(name, logger, event)
        if self._on_event is not None:
            self._guarded("on_event", self._on_event, event)

    def resume(self, former: Sequence[Event]) -> None:
        """Hand loggers what the journal has of the run that is continued."""
        self._call_loggers("resume", former)

    def close(self) -> None:
        """Close what loggers have open."""
        self._call_loggers("close")

    def _call_loggers(self, method: str, *arguments: Any) -> None:
        for name, logger in self._loggers.items():
            if hasattr(logger, method):
                self._guarded(name, getattr(logger, method), *arguments)

    def _guarded(self, name: str, call: Callable[..., Any], *arguments: Any) -> None:
        try:
            call(*arguments)
        except Exception as error:
            if name == "on_event" and isinstance(error, BrokenPipeError):  # stdout is closed: the command handles that
                raise
            if name in self._reported:
                return
            self._reported.add(name)
            last = traceback.extract_tb(error.__traceback__)[-1]
            event = next((argument for argument in arguments if isinstance(argument, Event)), Event("", ""))
            when = f"at a {event.kind!r} event" if event.kind else f"in its {call.__name__}()"
            message = (
                f"{name} raised {type(error).__name__}: {error} (line {last.lineno} of {last.filename}) "
                f"{when}; training goes on, further errors of it are not reported"
            )
            self(Event("note", event.task, {"message": message}, group=event.group))
            warnings.warn(message, RuntimeWarning, stacklevel=2)


def make_logger(spec: str) -> Callable[[Event], Any]:
    """The logger ``"KIND:WHERE"``; a :class:`SpecError` where its library is missing, or it cannot write there.

    It is called with every event. If it has ``resume(events)``, that is called before, with the journal of a run that
    is continued, and ``close()`` at the end. An entry point in ``weft.loggers`` makes one of the text behind the colon.
    """
    kind, _, where = spec.partition(":")
    if kind not in LOGGERS:
        make = load_plugin("loggers", kind)
        with blame_plugin("loggers", kind):
            made = make(where)
        if callable(made):
            return made  # type: ignore[no-any-return]
        raise SpecError(f"{option('log', spec)}: the entry point in weft.loggers made {made!r}, which is no function")
    module, _, name = LOGGERS[kind][1].partition(":")
    try:
        return getattr(import_module(f"weft.engine.loggers.{module}"), name)(where)  # type: ignore[no-any-return]
    except ModuleNotFoundError as error:
        missing = f"{error.name}, which is not installed: pip install 'weft-gnn[{kind}]'"
        raise SpecError(f"{option('log', spec)} needs {missing}") from None
    except Exception as error:  # a folder that cannot be made, a server that does not answer
        said = error if isinstance(error, SpecError) else f"{type(error).__name__}: {error}"
        raise SpecError(f"{option('log', spec)}: {said}") from error
