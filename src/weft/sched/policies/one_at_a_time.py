"""Start one task per device at a time: common to the sequential and the temporal baseline."""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from dataclasses import replace

from weft.sched.admission import needed_bytes, refusals
from weft.sched.policies.group_barrier import Pending, next_group
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
