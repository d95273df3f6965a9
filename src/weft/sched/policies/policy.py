"""The interface of a scheduling policy: one method from the state of the queue to a decision."""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from typing import Protocol

from weft.sched.queue_state import Decision, MachineState, QueuedTask, RunningGroup
from weft.sched.task_queue import TaskQueue

Tasks = TaskQueue | Iterable[QueuedTask]


class Policy(Protocol):
    """Decides what starts now. A policy keeps nothing between calls: equal input gives an equal decision.

    ``tasks`` may be any iterable of queued tasks; a :class:`TaskQueue` spares indexing them anew at each call.
    """

    def schedule(self, tasks: Tasks, running: Sequence[RunningGroup], machine: MachineState) -> Decision:
        """The groups to start now, and why the other tasks wait."""
        ...
