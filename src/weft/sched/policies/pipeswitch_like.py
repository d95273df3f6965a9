"""A baseline like PipeSwitch: one task after another out of one memory pool, with starts that cost nothing."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from itertools import chain

from weft.sched.admission import SAFETY_THRESHOLD
from weft.sched.policies.one_at_a_time import start_one_each
from weft.sched.policies.policy import Tasks
from weft.sched.queue_state import Decision, MachineState, RunningGroup
from weft.sched.task_queue import TaskQueue


@dataclass(frozen=True)
class PipeSwitchLike:
    """Temporal sharing: inference tasks first, then first in, first out, one task per device.

    A standby worker receives the next model while the active one computes, so every start is warm. Unlike PipeSwitch
    it does not interrupt a running training for an inference task.
    """

    safety: float = SAFETY_THRESHOLD

    def schedule(self, tasks: Tasks, running: Sequence[RunningGroup], machine: MachineState) -> Decision:
        """Start the next task when nothing runs."""
        queue = TaskQueue.of(tasks, running)
        return start_one_each(queue, running, machine, _inference_first(queue), self.safety, warm=True)


def _inference_first(queue: TaskQueue) -> chain[str]:
    urgent = list(queue.inference)
    names = set(urgent)
    return chain(urgent, (name for name in queue.by_arrival if name not in names))
