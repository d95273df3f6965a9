"""The safety condition: which tasks fit together in a device's memory, and why a task waits or is refused.

The predicted bytes of the groups on a device, each times the safety threshold, must not exceed what the device has
for tasks. CoGNN multiplies its estimates by 1.15 to cover temporary tensors that no estimate knows of.
"""

from __future__ import annotations

import math
from collections import Counter
from collections.abc import Callable, Iterable, Sequence
from typing import Protocol

from weft.core.errors import WeftError
from weft.core.units import show_bytes
from weft.sched.queue_state import DeviceState, MachineState, QueueDecision, QueuedTask, RunningGroup
from weft.sched.task_queue import TaskQueue

SAFETY_THRESHOLD = 1.15


def needed_bytes(predicted: int, safety: float = SAFETY_THRESHOLD) -> int:
    """The bytes to set aside for a prediction."""
    return math.ceil(predicted * safety)


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
        refused[name] = (
            f"needs {show_bytes(needed)} (predicted {show_bytes(queue[name].bytes)} and the safety margin), more than "
            f"the {show_bytes(largest.task_bytes)} that {largest.name} has for tasks; "
            "lower its memory or raise the budget"
        )
    for name in queue.sharded:
        ranks, needed = queue[name].ranks, needed_bytes(queue[name].bytes, safety)

        def holds(device: DeviceState, count: int, needed: int = needed) -> bool:
            return count * needed <= device.task_bytes

        remedy = "fewer ranks" if ranks > len(machine.devices) else "more ranks on more devices"  # that they share
        if name not in refused and not rank_places(ranks, machine.devices, holds):
            refused[name] = (
                f"its {ranks} ranks need {show_bytes(needed)} each, and no host has as much for tasks on the devices "
                f"that they would share; give it {remedy}, or raise the budget"
            )
    for name in list(refused):
        for dependent in queue.dependents(name):
            refused.setdefault(dependent, f"depends on {name!r}, which can never run")
    return refused


def rank_places(
    ranks: int, devices: Sequence[DeviceState], takes: Callable[[DeviceState, int], bool]
) -> tuple[str, ...]:
    """The device of every rank of a sharded task; empty if no host takes all of them.

    Ranks are spread evenly over the devices of one host, one rank per device if there are as many. ``devices``: those
    to be preferred first. ``takes(device, count)``: whether ``count`` ranks can start there.
    """
    for host in dict.fromkeys(device.host for device in devices) if ranks > 1 else (None,):
        here = [device for device in devices if host in (None, device.host)]
        used, places = min(ranks, len(here)), list[str]()
        for index in range(used):  # the larger counts first: a device that takes them takes the others as well
            count = ranks // used + (index < ranks % used)
            places += next(([d.name] * count for d in here if d.name not in places and takes(d, count)), [])
        if len(places) == ranks:
            return tuple(places)
    return ()


def waits_for(tasks: Sequence[str]) -> str:
    """Why a task waits for those that it depends on."""
    more = f" and {len(tasks) - 3} more" if len(tasks) > 3 else ""
    return f"waits for {', '.join(map(repr, tasks[:3]))}{more} to be done"


Tasks = TaskQueue | Iterable[QueuedTask]


class Policy(Protocol):
    """Decides what starts now. A policy keeps nothing between calls: equal input gives an equal decision.

    ``tasks`` may be any iterable of queued tasks; a :class:`TaskQueue` spares indexing them anew at each call.
    """

    def schedule(self, tasks: Tasks, running: Sequence[RunningGroup], machine: MachineState) -> QueueDecision:
        """The groups to start now, and why the other tasks wait."""
        ...


def decide(policy: Policy, tasks: Tasks, running: Sequence[RunningGroup], machine: MachineState) -> QueueDecision:
    """What ``policy`` starts, preempts and refuses; a :class:`WeftError` for a decision that cannot be carried out.

    A server decides with it for its worker processes, and the simulator for simulated devices.
    """
    queue = TaskQueue.of(tasks, running)
    decision = policy.schedule(queue, running, machine)
    problem = _fault_of(decision, queue, running, machine)
    if problem:
        raise WeftError(f"{type(policy).__name__}: {problem}; this is a fault of the policy")
    return decision


def _fault_of(decision: QueueDecision, queue: TaskQueue, running: Sequence[RunningGroup], machine: MachineState) -> str:
    """Why a decision cannot be carried out: a task that does not wait, a device or a worker that does not exist."""
    started = Counter(decision.started)
    for name, times in started.items():
        if times > 1 or name not in queue:
            return f"starts {name!r}, which {'is started twice' if times > 1 else 'does not wait'}"
        if queue.blocked_by(name) or name in decision.refuse:
            return f"starts {name!r}, which waits for other tasks or is refused"
    for start in decision.start:
        ranks = max(queue[name].ranks for name in start.members)
        if len(start.places) != ranks or start.places[0] != start.device:
            return f"starts {start.members[0]!r} of {ranks} ranks on {', '.join(start.places)}"
    devices = {device.name: device for device in machine.devices}
    used = Counter[str]()
    for places in [*(group.places for group in running), *(start.places for start in decision.start)]:
        for name, count in Counter(places).items():
            used[name] += devices[name].workers_for(count) if name in devices else 1
    crowded = next((name for name, count in used.items() if name not in devices or count > devices[name].workers), None)
    if crowded is not None:
        workers = devices[crowded].workers if crowded in devices else 0
        return f"{used[crowded]} groups on {crowded}, which has {workers} workers"
    unknown = set(decision.preempt) - {group.id for group in running}
    return f"preempts {sorted(unknown)[0]!r}, which does not run" if unknown else ""
