"""Event: one line of a run's journal. Displays, logs and reports read Events and nothing else."""

from __future__ import annotations

import json
import math
import time
from collections.abc import Mapping
from dataclasses import dataclass, field
from typing import Any

STEERED = ("paused", "resumed", "preempted")  # by a control, from outside
KINDS = (
    *("preparing", "start", "note", "group", "trial", "rows", "log", "progress", "end", "checkpoint", *STEERED),
    *("finish", "interrupted", "failed"),
)


@dataclass(frozen=True)
class Event:
    """Something that happened to a task or sweep: what (``kind``), to whom, when, and the numbers that go with it.

    ``preparing``: what is done before training (``message``), and how much of it (``done`` of ``total``).
    ``start``: plan, device, settings. ``note``: a ``message`` worth reading. ``progress``: epoch, loss and
    metrics so far (of a sweep: of all ``members`` that run); with a cache also ``rows_read`` and ``feature_hit_rate``
    (``lists_read`` and ``list_hit_rate`` of neighbour lists). ``rows``: every epoch of every member, once, several at a
    time: ``members`` lists ``task``, ``first`` (the epoch of the first row, counted from 1), ``columns`` and ``rows``,
    NaN where nothing was measured (null in JSON). ``log``: numbers by name (``values``) that callbacks of a member
    logged after an ``epoch``, with the member as ``task``. ``checkpoint``: path and epoch. ``paused``, ``resumed``:
    after which epoch. ``finish``, ``interrupted``, ``preempted``, ``failed``: how it ended. Of a sweep also ``group``:
    members that begin to train together, each with those of its ``settings`` that vary (``shared`` of ``start`` has the
    others), and ``end``: a member's status and metrics, with the member as ``task``. ``folder`` (of ``start``, in a
    sweep of ``end``) is that of its result and weights, if there is one.
    Of a tuned sweep also ``trial``: one begins, with its ``settings`` and the ``row`` that it trains in (``parent``,
    ``copied_at``: the trial that it continues, and since which epoch).

    ``run`` is the id of the run and ``seq`` counts its events from 1, on after a resume. ``worker`` is the process that
    sent it. ``group`` is the key of the group it is about (the folder of its checkpoint), empty for the whole.
    """

    kind: str
    task: str
    data: Mapping[str, Any] = field(default_factory=dict)
    time: float = field(default_factory=time.time)
    run: str = ""
    seq: int = 0
    worker: str = ""
    group: str = ""

    def to_dict(self) -> dict[str, Any]:
        """Plain data for JSON; ``group`` is called ``group_key``, since ``group`` is its position in some events."""
        about = {"run": self.run, "seq": self.seq, "worker": self.worker, "group_key": self.group}
        stamp = about if self.run else {}  # an event that no run has sent
        return {"event": self.kind, "task": self.task, "time": round(self.time, 3), **stamp, **self.data}

    @classmethod
    def from_dict(cls, data: Mapping[str, Any]) -> Event:
        """The inverse of :meth:`to_dict`; lines of journals without a stamp are read as well."""
        rest = dict(data)
        kind, task, when = rest.pop("event"), rest.pop("task"), rest.pop("time")
        run, seq = rest.pop("run", ""), rest.pop("seq", 0)
        worker, group = rest.pop("worker", ""), rest.pop("group_key", "")
        return cls(kind, task, rest, when, run, seq, worker, group)

    def to_json(self) -> str:
        """One line of JSON; NaN and infinity, which JSON does not know, become null."""
        data = self.to_dict()
        try:
            return json.dumps(data, allow_nan=False)
        except (ValueError, TypeError):  # replacing takes three times as long, and most events need none
            return json.dumps(finite(data), allow_nan=False)


def finite(value: Any) -> Any:
    """``value`` with every NaN and infinity replaced by None, at any depth."""
    if isinstance(value, float):
        return value if math.isfinite(value) else None
    if isinstance(value, Mapping):
        return {key: finite(item) for key, item in value.items()}
    if isinstance(value, (list, tuple)):
        return [finite(item) for item in value]
    return value
