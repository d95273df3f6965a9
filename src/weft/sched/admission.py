"""The safety condition: which tasks fit together in a device's memory, and why a task waits or is refused.

The predicted bytes of the groups on a device, each times the safety threshold, must not exceed what the device has
for tasks. CoGNN multiplies its estimates by 1.15 to cover temporary tensors that no estimate knows of.
"""

from __future__ import annotations

import math
from collections.abc import Iterable, Sequence

from weft.core.units import show_bytes
from weft.sched.queue_state import DeviceState, MachineState, QueuedTask, RunningGroup
from weft.sched.task_queue import TaskQueue

SAFETY_THRESHOLD = 1.15


def needed_bytes(predicted: int, safety: float = SAFETY_THRESHOLD) -> int:
    """The bytes to set aside for a prediction."""
    return math.ceil(predicted * safety)


def free_bytes(device: DeviceState, running: Iterable[RunningGroup]) -> int:
    """What the groups on ``device`` leave for others."""
    return device.task_bytes - sum(group.bytes for group in running if group.device == device.name)


def refusals(queue: TaskQueue, machine: MachineState, safety: float = SAFETY_THRESHOLD) -> dict[str, str]:
    """The queued tasks that fit on no device even alone, and those that depend on them, with the reason.

    Reads the queue from the largest task down, so it costs one comparison if every task fits.
    """
    largest = max(machine.devices, key=lambda device: device.task_bytes)
    refused: dict[str, str] = {}
    for name in reversed(queue.all_by_bytes):
        needed = needed_bytes(queue[name].bytes, safety)
        if needed <= largest.task_bytes:
            break
        refused[name] = never_fits(queue[name], largest, needed)
        for dependent in queue.dependents(name):
            refused.setdefault(dependent, f"depends on {name!r}, which can never run")
    return refused


def never_fits(task: QueuedTask, largest: DeviceState, needed: int) -> str:
    """Why a task is refused."""
    return (
        f"needs {show_bytes(needed)} (predicted {show_bytes(task.bytes)} and the safety margin), more than the "
        f"{show_bytes(largest.task_bytes)} that {largest.name} has for tasks; lower its memory or raise the budget"
    )


def lacks_bytes(needed: int, free: int, device: str) -> str:
    """Why a task waits for memory."""
    return f"needs {show_bytes(needed)}, and {device} has {show_bytes(max(free, 0))} free"


def waits_for(tasks: Sequence[str]) -> str:
    """Why a task waits for those that it depends on."""
    more = f" and {len(tasks) - 3} more" if len(tasks) > 3 else ""
    return f"waits for {', '.join(map(repr, tasks[:3]))}{more} to be done"
