"""The safety condition: which tasks fit together in a device's memory, and why a task waits or is refused.

The predicted bytes of the groups on a device, each times the safety threshold, must not exceed what the device has
for tasks. CoGNN multiplies its estimates by 1.15 to cover temporary tensors that no estimate knows of.
"""

from __future__ import annotations

import math
from collections.abc import Iterable

from weft.core.units import show_bytes
from weft.sched.queue_state import Decision, DeviceState, MachineState, QueuedTask, RunningGroup
from weft.sched.task_queue import TaskQueue

SAFETY_THRESHOLD = 1.15


def needed_bytes(predicted: int, safety: float = SAFETY_THRESHOLD) -> int:
    """The bytes to set aside for a prediction."""
    return math.ceil(predicted * safety)


def free_bytes(device: DeviceState, running: Iterable[RunningGroup]) -> int:
    """What the groups on ``device`` leave for others."""
    return device.task_bytes - sum(group.bytes for group in running if group.device == device.name)


def is_safe(device: DeviceState, running: Iterable[RunningGroup], extra: int) -> bool:
    """Whether ``extra`` bytes fit on ``device`` beside what runs there."""
    return extra <= free_bytes(device, running)


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


def waiting_reason(task: str, queue: TaskQueue, decision: Decision) -> str:
    """Why a queued task is not running, in one sentence: its dependencies first, then the policy's reason."""
    if task in decision.refuse:
        return decision.refuse[task]
    blockers = queue.blocked_by(task)
    if blockers:
        more = f" and {len(blockers) - 3} more" if len(blockers) > 3 else ""
        return f"waits for {', '.join(map(repr, blockers[:3]))}{more} to be done"
    return decision.reason(task)
