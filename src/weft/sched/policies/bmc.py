"""CoGNN's BMC policy (its Algorithm 1): groups of balanced memory consumption, small and large tasks in turn."""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from dataclasses import dataclass

from weft.sched.admission import SAFETY_THRESHOLD
from weft.sched.policies.group_barrier import start_groups
from weft.sched.policies.policy import Tasks
from weft.sched.queue_state import Decision, MachineState, RunningGroup
from weft.sched.sorted_tasks import SortedTasks
from weft.sched.task_queue import TaskQueue


@dataclass(frozen=True)
class BMC:
    """Tasks from both ends of the queue in ascending order of memory, packed into groups.

    Algorithm 1 pops the ``i``-th task from the left (smallest) if ``i`` is even and from the right (largest) if odd,
    where ``i`` counts over all groups. The number of tasks started so far is that ``i``, so the groups of successive
    calls are those of one run of the algorithm.
    """

    safety: float = SAFETY_THRESHOLD

    def schedule(self, tasks: Tasks, running: Sequence[RunningGroup], machine: MachineState) -> Decision:
        """Start the next task group when nothing runs."""
        queue = TaskQueue.of(tasks, running)
        order = from_both_ends(queue.by_bytes, machine.started)
        return start_groups(queue, running, machine, order, self.safety, strict=True)


def from_both_ends(ascending: SortedTasks, first: int) -> Iterator[str]:
    """The tasks alternately from the left and the right end; ``first`` is the number of the first one popped."""
    left, right = 0, len(ascending) - 1
    for count in range(first, first + len(ascending)):
        if count % 2 == 1:
            yield ascending[right]
            right -= 1
        else:
            yield ascending[left]
            left += 1
