"""Where the seconds of a task beside its epochs went, by the events of the queue.

- ``ready_seconds``: from when the scheduler gave it to a worker until that worker began the run,
- ``built_seconds``: from there until the group was on the device: plan, graph, kernels, weights,
- ``first_seconds``: from there until the first progress, so the capture of the step and the first epochs,
- ``after_seconds``: from the last progress until the result was there.

Times are those at which the server wrote the events: a decision that it made meanwhile delays them.
"""

from __future__ import annotations

from collections.abc import Sequence

from weft.serve.queue_file import QueueEvent

PARTS = ("ready_seconds", "built_seconds", "first_seconds", "after_seconds")


def parts_of(events: Sequence[QueueEvent]) -> dict[str, float]:
    """The parts of a task's last attempt by name, of ``events`` in their order; what has no events is left out."""
    begin = max((place for place, event in enumerate(events) if event.kind == "running"), default=0)
    first: dict[str, float] = {}
    last: dict[str, float] = {}
    for event in events[begin:]:
        first.setdefault(event.kind, event.time)
        last[event.kind] = event.time
    between = (
        (first.get("running"), first.get("ready")),
        (first.get("ready"), first.get("start")),
        (first.get("start"), first.get("progress")),
        (last.get("progress"), last.get("done")),
    )
    found = zip(PARTS, between, strict=True)
    return {name: two[1] - two[0] for name, two in found if two[0] is not None and two[1] is not None}
