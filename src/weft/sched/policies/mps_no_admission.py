"""A baseline like plain MPS: tasks go to free workers in order, whatever memory they take."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

from weft.sched.policies.device_plan import training_workers
from weft.sched.policies.policy import Tasks
from weft.sched.queue_state import Decision, GroupStart, MachineState, RunningGroup
from weft.sched.task_queue import TaskQueue


@dataclass(frozen=True)
class MPSNoAdmission:
    """First in, first out onto every free worker, without the safety condition.

    The only policy that may exceed the memory budget and that refuses nothing: the device then pages. Workers that are
    kept for inference take the oldest inference tasks, also past trainings that wait.
    """

    def schedule(self, tasks: Tasks, running: Sequence[RunningGroup], machine: MachineState) -> Decision:
        """Start the oldest tasks on all free workers."""
        queue = TaskQueue.of(tasks, running)
        free = _FreeWorkers(running, machine)
        starts = []
        for name in queue.by_arrival:
            task = queue[name]
            if not free.any(inference=bool(queue.inference)):
                break
            device = free.take(task.kind == "inference")
            if device is not None:
                why = "a worker is free; memory is not checked"
                starts.append(GroupStart(device, (name,), task.bytes, task.seconds, task.utilisation, why, warm=False))
        return Decision(tuple(starts), rest="waits for a free worker")


class _FreeWorkers:
    """The free workers, devices in turn, and how many trainings each device can still take."""

    def __init__(self, running: Sequence[RunningGroup], machine: MachineState) -> None:
        places = []
        self._trainings: dict[str, int] = {}
        for device in machine.devices:
            here = [group for group in running if group.device == device.name]
            places += [(place, device.name) for place in range(len(here), device.workers)]
            trainings = sum(group.kind == "training" for group in here)
            self._trainings[device.name] = training_workers(device) - trainings
        self._places = [name for _, name in sorted(places, key=lambda place: place[0])]

    def any(self, inference: bool) -> bool:
        """Whether a worker is left for a training, or for either kind if there is ``inference``."""
        return bool(self._places) if inference else self._next(inference=False) is not None

    def take(self, inference: bool) -> str | None:
        """The device of the next worker for a task of that kind, which is then taken; None if there is none."""
        name = self._next(inference)
        if name is not None:
            self._places.remove(name)
            self._trainings[name] -= not inference
        return name

    def _next(self, inference: bool) -> str | None:
        return next((name for name in self._places if inference or self._trainings[name] > 0), None)
