"""A task to queue, and whether it is the one that was queued under its key before."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any

from weft.serve.queue.task_states import QueueError, QueueTask


@dataclass(frozen=True)
class Submission:
    """A task to queue. The same ``key`` queues it only once; without an ``id`` it gets one.

    ``said_key``: the key as the user gave it, for messages.
    """

    spec: Mapping[str, Any]
    id: str | None = None
    key: str | None = None
    user: str = ""
    priority: int = 0
    after: tuple[str, ...] = ()
    max_attempts: int = 3
    said_key: str | None = None


def check_same(known: QueueTask, new: Submission, spec: Mapping[str, Any]) -> None:
    """A :class:`QueueError` unless ``new``, with ``spec`` as it would be read back, asks for what ``known`` is."""
    other = ""
    if known.spec != spec:
        other = _other_limit(known.spec, spec) or "another spec"
    elif known.priority != new.priority:
        other = f"another priority ({known.priority}, not {new.priority})"
    elif set(known.after) != set(new.after):
        other = f"another after ({', '.join(known.after) or 'nothing'}, not {', '.join(new.after) or 'nothing'})"
    if other:
        key = new.key if new.said_key is None else new.said_key
        raise QueueError(f"key={key!r} was used for task {known.id!r} with {other}; choose another key")


def _other_limit(known: Mapping[str, Any], new: Mapping[str, Any]) -> str:
    """The name of what differs where the settings themselves do not."""
    names = [name for name in dict.fromkeys((*known, *new)) if known.get(name) != new.get(name)]
    return f"another {names[0]}" if len(names) == 1 and names[0] in ("budget", "deadline", "max_attempts") else ""


def check_needed(new: Submission, needed: str, state: str | None) -> None:
    """A :class:`QueueError` if a task that ``new`` comes after will never be done; ``state``: None if it is unknown."""
    if state is not None and state not in ("failed", "cancelled"):
        return
    infer = new.spec.get("infer")
    what = "infer.of" if isinstance(infer, Mapping) and infer.get("of") == needed else "after"
    who = f"task {new.id!r}: " if new.id is not None else ""
    raise QueueError(f"{who}{what}={needed!r} is {state or 'not in the queue'}; it will never be done")
