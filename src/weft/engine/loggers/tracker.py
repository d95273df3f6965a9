"""Tracker: read Events as members with settings, epochs and ends, for loggers with one run per member."""

from __future__ import annotations

import hashlib
import json
import math
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from weft.core.event import Event

SPLITS = ("train_", "val_", "test_")
ENDS = ("end", "finish", "failed")
Rows = Sequence[tuple[int, dict[str, float]]]  # epochs, counted from 1, with what was measured


@dataclass
class Tracked:
    """A member: ``settings`` of its task, and ``varying``, those that differ between the members of a sweep.

    ``run`` is the id of the run, ``group`` the name of the sweep, empty for a single task. ``epoch``: the last one
    that was logged; ``known``: the last one that a process before this had logged. ``handle``: of the logger.
    """

    run: str
    name: str
    group: str
    settings: Mapping[str, Any]
    varying: Mapping[str, Any]
    epoch: int = 0
    known: int = 0
    handle: Any = None

    @property
    def id(self) -> str:
        """An id that no other member of any run has, the same after a resume."""
        return f"{self.run}-{hashlib.sha256(self.name.encode()).hexdigest()[:8]}"


class Tracker:
    """A logger overrides ``begin``, ``log``, ``end``, ``finish`` and ``close``.

    ``rebuilds``: it writes a run that is resumed anew, from its journal. Other loggers continue members that had not
    ended.
    """

    rebuilds = False

    def __init__(self) -> None:
        self.members: dict[str, Tracked] = {}
        self.start = Event("start", "")  # the last one
        self.resumed = False
        self._settings: dict[str, Mapping[str, Any]] = {}  # by member; of a sweep those that vary
        self._ended: set[str] = set()

    def begin(self, member: Tracked) -> int:
        """A member is about to log, for the first time or after it had ended; the epochs that are logged already."""
        return 0

    def log(self, member: Tracked, rows: Rows, time: float) -> None:
        """Numbers that were measured at epochs."""

    def end(self, member: Tracked, final: Mapping[str, float], texts: Mapping[str, str], time: float) -> None:
        """A member has ended, with ``final`` numbers; ``texts``: ``status``, paths of ``weights`` and ``report``."""

    def finish(self, event: Event) -> None:
        """The run as a whole has finished."""

    def close(self) -> None:
        """The run is over, or left."""

    def resume(self, former: Sequence[Event]) -> None:
        """Take in the journal of the run that is continued. Members that had ended end again while it is resumed."""
        over = set() if self.rebuilds else {event.task for event in former if event.kind in ENDS}
        self.resumed = True
        for event in former:
            if event.kind == "rows":
                self._rows([part for part in event.data["members"] if part["task"] not in over], event)
            elif event.kind not in ENDS and (event.kind != "log" or event.task not in over):
                self(event)
        self._ended |= over

    def __call__(self, event: Event) -> None:
        """Take in one event."""
        data, kind = event.data, event.kind
        if kind == "start":
            self.start = event
            self._settings |= {} if "tasks" in data else {event.task: data["settings"]}
        elif kind == "group":
            self._settings |= dict(zip(data["members"], data["settings"], strict=True))
        elif kind == "trial":
            flat = {**data["settings"], **{f"model_args.{k}": v for k, v in data["settings"]["model_args"].items()}}
            self._settings[event.task] = {name: flat[name] for name in self.start.data["varying"] if name in flat}
        elif kind == "rows":
            self._rows(data["members"], event)
        elif kind == "log":
            member = self._member(event.task, event)
            if data["epoch"] > member.known:
                self.log(member, [(data["epoch"], measured(data["values"]))], event.time)
        elif kind == "end" or (kind in ENDS and "tasks" not in self.start.data and self.start.task):
            self._end(event)
        if kind == "finish":
            self.finish(event)

    def _rows(self, parts: Sequence[Mapping[str, Any]], event: Event) -> None:
        for part in parts:
            former = self.members.get(part["task"])
            last = part["first"] - 1 + len(part["rows"])
            if former is not None and last <= former.epoch:
                continue
            member = self._member(part["task"], event)
            logged, member.epoch = max(member.epoch, member.known), last
            if rows := [(epoch, values) for epoch, values in rows_of(part) if epoch > logged and values]:
                self.log(member, rows, event.time)

    def _member(self, name: str, event: Event) -> Tracked:
        """The member called ``name``, which begins, or goes on after it had ended."""
        if name not in self.members:
            start, settings = self.start, self._settings.get(name, {})
            group, varying = (start.task, settings) if "tasks" in start.data else ("", {})
            shared = start.data.get("shared", {})
            self.members[name] = Tracked(event.run, name, group, {**shared, **settings}, varying)
            self._ended.add(name)
        member = self.members[name]
        if name in self._ended:
            self._ended.discard(name)
            member.known = self.begin(member)
        return member

    def _end(self, event: Event) -> None:
        if event.task in self._ended:
            return
        member, data = self._member(event.task, event), event.data
        self._ended.add(event.task)
        numbers = measured(data.get("metrics", {}))
        final = {f"best_{name}" if name.startswith(SPLITS) else name: value for name, value in numbers.items()}
        folder = data.get("folder", self.start.data.get("folder"))
        weights = str(Path(folder) / "model.safetensors") if folder is not None and final.get("best_epoch") else ""
        texts = {"status": data["status"], "weights": weights, "report": data.get("report", "")}
        self.end(member, final, {name: text for name, text in texts.items() if text}, event.time)


def rows_of(part: Mapping[str, Any]) -> Iterator[tuple[int, dict[str, float]]]:
    """The epochs of one member in a ``rows`` event, with what was measured."""
    for epoch, row in enumerate(part["rows"], part["first"]):
        yield epoch, measured(dict(zip(part["columns"], row, strict=True)))


def in_cells(settings: Mapping[str, Any]) -> dict[str, bool | int | float | str]:
    """Settings that are given, lists and tables as JSON."""
    given = {name: value for name, value in settings.items() if value is not None}
    return {name: v if isinstance(v, (bool, int, float, str)) else json.dumps(v) for name, v in given.items()}


def measured(values: Mapping[str, Any]) -> dict[str, float]:
    """The finite numbers of ``values``."""
    return {name: x for name, x in values.items() if isinstance(x, (int, float)) and math.isfinite(x)}
