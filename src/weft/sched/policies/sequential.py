"""The baseline without sharing: one task after another, each in a process of its own."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

from weft.sched.admission import SAFETY_THRESHOLD
from weft.sched.policies.one_at_a_time import start_one_each
from weft.sched.policies.policy import Tasks
from weft.sched.queue_state import Decision, MachineState, RunningGroup
from weft.sched.task_queue import TaskQueue


@dataclass(frozen=True)
class Sequential:
    """First in, first out, one task per device; every start is cold."""

    safety: float = SAFETY_THRESHOLD

    def schedule(self, tasks: Tasks, running: Sequence[RunningGroup], machine: MachineState) -> Decision:
        """Start the oldest task when nothing runs."""
        queue = TaskQueue.of(tasks, running)
        return start_one_each(queue, running, machine, queue.by_arrival, self.safety, warm=False)
