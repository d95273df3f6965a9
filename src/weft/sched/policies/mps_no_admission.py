"""A baseline like plain MPS: tasks go to free workers in order, whatever memory they take."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

from weft.sched.policies.policy import Tasks
from weft.sched.queue_state import Decision, GroupStart, MachineState, RunningGroup
from weft.sched.task_queue import TaskQueue


@dataclass(frozen=True)
class MPSNoAdmission:
    """First in, first out onto every free worker, without the safety condition.

    The only policy that may exceed the memory budget and that refuses nothing: the device then pages.
    """

    def schedule(self, tasks: Tasks, running: Sequence[RunningGroup], machine: MachineState) -> Decision:
        """Start the oldest tasks on all free workers."""
        queue = TaskQueue.of(tasks, running)
        starts = []
        for name, device in zip(queue.by_arrival, _free_workers(running, machine), strict=False):
            task = queue[name]
            why = "a worker is free; memory is not checked"
            starts.append(GroupStart(device, (name,), task.bytes, task.seconds, task.utilisation, why, warm=False))
        return Decision(tuple(starts), rest="waits for a free worker")


def _free_workers(running: Sequence[RunningGroup], machine: MachineState) -> list[str]:
    """A device name per free worker, devices in turn."""
    places = []
    for device in machine.devices:
        used = sum(group.device == device.name for group in running)
        places += [(place, device.name) for place in range(used, device.workers)]
    return [name for _, name in sorted(places, key=lambda place: place[0])]
