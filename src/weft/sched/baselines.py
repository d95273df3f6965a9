"""Baselines: one task after another with cold starts or (like PipeSwitch) warm ones, and plain MPS."""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from dataclasses import dataclass
from itertools import chain

from weft.sched.admission import Tasks
from weft.sched.cognn import Base
from weft.sched.device_plan import training_workers
from weft.sched.queue_state import GroupStart, MachineState, QueueDecision, RunningGroup
from weft.sched.task_queue import TaskQueue


class Sequential(Base):
    """First in, first out, one task per device; every start is cold."""

    one_at_a_time, warm = True, False


class PipeSwitchLike(Base):
    """Temporal sharing: inference tasks first, then first in, first out, one task per device.

    A standby worker receives the next model while the active one computes, so every start is warm. Unlike PipeSwitch
    it does not interrupt a running training for an inference task.
    """

    one_at_a_time = True

    def order(self, queue: TaskQueue, machine: MachineState) -> Iterable[str]:
        """Inference tasks, then the others."""
        urgent = dict.fromkeys(queue.inference)
        return chain(urgent, (name for name in queue.by_arrival if name not in urgent))


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
