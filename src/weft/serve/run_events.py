"""Events of a run as events of its tasks in the queue: what dashboards and ``weft watch`` read."""

from __future__ import annotations

from collections.abc import Iterator, Mapping, Sequence
from typing import Any

Record = tuple[str, str, Mapping[str, Any]]  # task, kind, data
LEFT_OUT = ("event", "task", "time", "run", "seq", "worker", "group_key", "plan", "settings", "path", "report")
MOST_NOTED = 8  # members of a group that a note is written for


def records_of(event: Mapping[str, Any], members: Sequence[str], group: str) -> Iterator[Record]:
    """The queue's events for one event of a run; none for those that only concern the run as a whole."""
    kind, data = event["event"], {key: value for key, value in event.items() if key not in LEFT_OUT}
    if kind == "progress" and "members" in data:
        for one in (one for one in data["members"] if one["task"] in members):
            yield one["task"], "progress", {**{k: v for k, v in one.items() if k != "task"}, "group": group}
    elif kind == "progress":
        yield members[0], "progress", {**data, "group": group}
    elif kind == "note":
        for name in members[:MOST_NOTED]:
            yield name, "note", {"message": data.get("message", ""), "group": group}
    elif kind == "checkpoint":
        for name in members:
            yield name, "checkpoint", {"epoch": data.get("epoch"), "group": group}
    elif kind == "ready":
        for name in members[:MOST_NOTED]:
            yield name, "ready", {**data, "group": group}
    elif kind == "start":
        for name in members:
            yield name, "start", {"device": data.get("device"), "group": group, "members": len(members)}
