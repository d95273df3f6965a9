"""CoGNN's three policies: pack the next task group in some order, and start it when the last one is done.

:class:`Base` takes tasks first in, first out, :class:`LMCF` the lowest memory consumption first, :class:`BMC` (its
Algorithm 1) small and large tasks in turn, for groups of balanced memory consumption.
"""

from __future__ import annotations

from collections.abc import Iterable, Iterator, Sequence
from dataclasses import dataclass

from weft.sched.admission import SAFETY_THRESHOLD, Tasks, needed_bytes, refusals
from weft.sched.device_plan import training_workers
from weft.sched.queue_state import DeviceState, GroupStart, MachineState, QueueDecision, QueuedTask, RunningGroup
from weft.sched.task_queue import SortedTasks, TaskQueue


class Pending:
    """Tasks in scheduling order, of which the next can be inspected before it is taken."""

    def __init__(self, tasks: Iterable[QueuedTask]) -> None:
        self._tasks: Iterator[QueuedTask] = iter(tasks)
        self.next: QueuedTask | None = next(self._tasks, None)

    def take(self) -> QueuedTask:
        """The next task, which is then removed."""
        assert self.next is not None
        taken, self.next = self.next, next(self._tasks, None)
        return taken


def next_group(pending: Pending, device: DeviceState, safety: float, strict: bool) -> list[QueuedTask]:
    """The longest run of pending tasks that the memory and the workers of ``device`` take at once.

    ``strict``: a second task may not fill the memory to the last byte (Algorithm 1 advances if the sum is >= MA).
    """
    group: list[QueuedTask] = []
    taken, trainings = 0, training_workers(device)
    while pending.next is not None and len(group) < device.workers:
        taken += needed_bytes(pending.next.bytes, safety)
        trainings -= pending.next.kind == "training"
        if taken > device.task_bytes or trainings < 0 or (strict and group and taken >= device.task_bytes):
            break
        group.append(pending.take())
    return group


def start_groups(
    queue: TaskQueue,
    running: Sequence[RunningGroup],
    machine: MachineState,
    order: Iterable[str],
    safety: float,
    strict: bool = False,
) -> QueueDecision:
    """Start the next group of ``order`` on each device on which nothing runs."""
    refuse = refusals(queue, machine, safety)
    pending = Pending(queue[name] for name in order if name not in refuse)
    busy = {group.device for group in running}
    starts: list[GroupStart] = []
    for device in machine.devices:
        if device.name not in busy:
            group = next_group(pending, device, safety, strict)
            why = "alone in its task group" if len(group) == 1 else f"one of {len(group)} tasks of the next task group"
            for task in group:
                needed = needed_bytes(task.bytes, safety)
                starts.append(GroupStart(device.name, (task.id,), needed, task.seconds, task.utilisation, why))
    waits = len(busy) == len(machine.devices)
    rest = "waits until every task of the running task group is done" if waits else "is in a later task group"
    return QueueDecision(tuple(starts), refuse=refuse, rest=rest)


@dataclass(frozen=True)
class Base:
    """Tasks in order of arrival, as many per group as memory and workers allow; one group after another."""

    safety: float = SAFETY_THRESHOLD

    def schedule(self, tasks: Tasks, running: Sequence[RunningGroup], machine: MachineState) -> QueueDecision:
        """Start the next task group when nothing runs."""
        queue = TaskQueue.of(tasks, running)
        return start_groups(queue, running, machine, queue.by_arrival, self.safety)


@dataclass(frozen=True)
class BMC:
    """Tasks from both ends of the queue in ascending order of memory, packed into groups.

    Algorithm 1 pops the ``i``-th task from the left (smallest) if ``i`` is even and from the right (largest) if odd,
    where ``i`` counts over all groups. The number of tasks started so far is that ``i``, so the groups of successive
    calls are those of one run of the algorithm.
    """

    safety: float = SAFETY_THRESHOLD

    def schedule(self, tasks: Tasks, running: Sequence[RunningGroup], machine: MachineState) -> QueueDecision:
        """Start the next task group when nothing runs."""
        queue = TaskQueue.of(tasks, running)
        order = from_both_ends(queue.by_bytes, machine.started)
        return start_groups(queue, running, machine, order, self.safety, strict=True)


def from_both_ends(ascending: SortedTasks, first: int) -> Iterator[str]:
    """The tasks alternately from the left and the right end; ``first`` is the number of the first pop."""
    left, right = 0, len(ascending) - 1
    for number in range(first, first + len(ascending)):
        yield ascending[right if number % 2 == 1 else left]
        left, right = left + (number % 2 == 0), right - (number % 2 == 1)


@dataclass(frozen=True)
class LMCF:
    """Tasks in ascending order of predicted memory, packed into groups that run one after another.

    Memory stands in for time: larger graphs take more of both, so small tasks do not wait for large ones.
    """

    safety: float = SAFETY_THRESHOLD

    def schedule(self, tasks: Tasks, running: Sequence[RunningGroup], machine: MachineState) -> QueueDecision:
        """Start the next task group when nothing runs."""
        queue = TaskQueue.of(tasks, running)
        return start_groups(queue, running, machine, queue.by_bytes, self.safety)
