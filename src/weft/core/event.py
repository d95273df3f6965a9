"""Event: one line of a run's journal. Whoever shows a run reads Events and nothing else."""

from __future__ import annotations

import json
import math
import time
from collections.abc import Mapping
from dataclasses import dataclass, field
from typing import Any

KINDS = ("start", "note", "group", "progress", "end", "checkpoint", "finish", "interrupted", "failed")


@dataclass(frozen=True)
class Event:
    """Something that happened to a task or sweep: what (``kind``), to whom, when, and the numbers that go with it.

    ``start``: plan, device, settings. ``note``: a ``message`` worth reading. ``progress``: epoch, loss and
    metrics so far (of a sweep: of all ``members`` that run). ``checkpoint``: path and epoch. ``finish``,
    ``interrupted``, ``failed``: how it ended. Of a sweep also ``group``: members that begin to train together, and
    ``end``: a member's status and metrics, with the member as ``task``.
    """

    kind: str
    task: str
    data: Mapping[str, Any] = field(default_factory=dict)
    time: float = field(default_factory=time.time)

    def to_dict(self) -> dict[str, Any]:
        """Plain data for JSON."""
        return {"event": self.kind, "task": self.task, "time": round(self.time, 3), **self.data}

    def to_json(self) -> str:
        """One line of JSON; NaN and infinity, which JSON does not know, become null."""
        return json.dumps(finite(self.to_dict()), allow_nan=False)


def finite(value: Any) -> Any:
    """``value`` with every NaN and infinity replaced by None, at any depth."""
    if isinstance(value, float):
        return value if math.isfinite(value) else None
    if isinstance(value, Mapping):
        return {key: finite(item) for key, item in value.items()}
    if isinstance(value, (list, tuple)):
        return [finite(item) for item in value]
    return value
