"""Baselines: one task after another with cold starts or (like PipeSwitch) warm ones, and plain MPS."""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from dataclasses import dataclass, replace
from itertools import chain

from weft.sched.admission import SAFETY_THRESHOLD, Tasks, needed_bytes, refusals
from weft.sched.cognn import Pending, next_group
from weft.sched.device_plan import training_workers
from weft.sched.queue_state import GroupStart, MachineState, QueueDecision, RunningGroup
from weft.sched.task_queue import TaskQueue


def start_one_each(
    queue: TaskQueue,
    running: Sequence[RunningGroup],
    machine: MachineState,
    order: Iterable[str],
    safety: float,
    warm: bool,
) -> QueueDecision:
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
    return QueueDecision(tuple(starts), refuse=refuse, rest="waits for the tasks before it; one task runs at a time")


@dataclass(frozen=True)
class Sequential:
    """First in, first out, one task per device; every start is cold."""

    safety: float = SAFETY_THRESHOLD

    def schedule(self, tasks: Tasks, running: Sequence[RunningGroup], machine: MachineState) -> QueueDecision:
        """Start the oldest task when nothing runs."""
        queue = TaskQueue.of(tasks, running)
        return start_one_each(queue, running, machine, queue.by_arrival, self.safety, warm=False)


@dataclass(frozen=True)
class PipeSwitchLike:
    """Temporal sharing: inference tasks first, then first in, first out, one task per device.

    A standby worker receives the next model while the active one computes, so every start is warm. Unlike PipeSwitch
    it does not interrupt a running training for an inference task.
    """

    safety: float = SAFETY_THRESHOLD

    def schedule(self, tasks: Tasks, running: Sequence[RunningGroup], machine: MachineState) -> QueueDecision:
        """Start the next task when nothing runs."""
        queue = TaskQueue.of(tasks, running)
        urgent = dict.fromkeys(queue.inference)
        order = chain(urgent, (name for name in queue.by_arrival if name not in urgent))
        return start_one_each(queue, running, machine, order, self.safety, warm=True)


@dataclass(frozen=True)
class MPSNoAdmission:
    """First in, first out onto every free worker, without the safety condition.

    The only policy that may exceed the memory budget and that refuses nothing: the device then pages. Workers that are
    kept for inference take the oldest inference tasks, also past trainings that wait.
    """

    def schedule(self, tasks: Tasks, running: Sequence[RunningGroup], machine: MachineState) -> QueueDecision:
        """Start the oldest tasks on all free workers."""
        queue = TaskQueue.of(tasks, running)
        workers: list[tuple[int, str]] = []  # free ones, by number and device
        trainings: dict[str, int] = {}  # how many more each device can take
        for device in machine.devices:
            here = [group for group in running if group.device == device.name]
            workers += [(number, device.name) for number in range(len(here), device.workers)]
            trainings[device.name] = training_workers(device) - sum(group.kind == "training" for group in here)
        free = [name for _, name in sorted(workers, key=lambda worker: worker[0])]  # devices in turn
        starts = []
        for name in queue.by_arrival:
            task = queue[name]
            inference = task.kind == "inference"
            for_training = next((device for device in free if trainings[device] > 0), None)
            if not free or (for_training is None and not queue.inference):
                break
            chosen = free[0] if inference else for_training
            if chosen is not None:
                free.remove(chosen)
                trainings[chosen] -= not inference
                why = "a worker is free; memory is not checked"
                starts.append(GroupStart(chosen, (name,), task.bytes, task.seconds, task.utilisation, why, warm=False))
        return QueueDecision(tuple(starts), rest="waits for a free worker")
