"""CoGNN's LMCF policy: the lowest memory consumption first."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

from weft.sched.admission import SAFETY_THRESHOLD
from weft.sched.policies.group_barrier import start_groups
from weft.sched.policies.policy import Tasks
from weft.sched.queue_state import Decision, MachineState, RunningGroup
from weft.sched.task_queue import TaskQueue


@dataclass(frozen=True)
class LMCF:
    """Tasks in ascending order of predicted memory, packed into groups that run one after another.

    Memory stands in for time: larger graphs take more of both, so small tasks do not wait for large ones.
    """

    safety: float = SAFETY_THRESHOLD

    def schedule(self, tasks: Tasks, running: Sequence[RunningGroup], machine: MachineState) -> Decision:
        """Start the next task group when nothing runs."""
        queue = TaskQueue.of(tasks, running)
        return start_groups(queue, running, machine, queue.by_bytes, self.safety)
