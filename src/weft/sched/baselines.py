"""Start one task per device at a time: common to the sequential and the temporal baseline."""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from dataclasses import dataclass, replace
from itertools import chain

from weft.sched.admission import SAFETY_THRESHOLD, Tasks, needed_bytes, refusals
from weft.sched.cognn import Pending, next_group
from weft.sched.device_plan import training_workers
from weft.sched.queue_state import Decision, GroupStart, MachineState, RunningGroup
from weft.sched.task_queue import TaskQueue


def start_one_each(
    queue: TaskQueue,
    running: Sequence[RunningGroup],
    machine: MachineState,
    order: Iterable[str],
    safety: float,
    warm: bool,
) -> Decision:
    """Start the next task of ``order`` on each device that is idle and large enough.

    A device has at least one worker that is not kept for inference, so one task of either kind can always run.
    """
    refuse = refusals(queue, machine, safety)
    pending = Pending(queue[name] for name in order if name not in refuse)
    busy = {group.device for group in running}
    starts = []
    for device in machine.devices:
        if device.name not in busy:
            for task in next_group(pending, replace(device, workers=1, inference_workers=0), safety, strict=False):
                needed, why = needed_bytes(task.bytes, safety), "is next, and has the device to itself"
                starts.append(GroupStart(device.name, (task.id,), needed, task.seconds, task.utilisation, why, warm))
    return Decision(tuple(starts), refuse=refuse, rest="waits for the tasks before it; one task runs at a time")


# ---- The baseline without sharing: one task after another, each in a process of its own.


@dataclass(frozen=True)
class Sequential:
    """First in, first out, one task per device; every start is cold."""

    safety: float = SAFETY_THRESHOLD

    def schedule(self, tasks: Tasks, running: Sequence[RunningGroup], machine: MachineState) -> Decision:
        """Start the oldest task when nothing runs."""
        queue = TaskQueue.of(tasks, running)
        return start_one_each(queue, running, machine, queue.by_arrival, self.safety, warm=False)


# ---- A baseline like PipeSwitch: one task after another out of one memory pool, with starts that cost nothing.


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


# ---- A baseline like plain MPS: tasks go to free workers in order, whatever memory they take.


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
