"""Decide what starts now: the one way from queued tasks and devices to a checked decision.

A server decides with it for its worker processes, ``weft.run`` for the one worker that is the process itself, and the
simulator for devices that are not there.
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Sequence

from weft.core.errors import WeftError
from weft.sched.policies.policy import Policy, Tasks
from weft.sched.queue_state import Decision, MachineState, RunningGroup
from weft.sched.task_queue import TaskQueue


def decide(policy: Policy, tasks: Tasks, running: Sequence[RunningGroup], machine: MachineState) -> Decision:
    """What ``policy`` starts, preempts and refuses; a :class:`WeftError` for a decision that cannot be carried out."""
    queue = TaskQueue.of(tasks, running)
    decision = policy.schedule(queue, running, machine)
    problem = fault_of(decision, queue, running, machine)
    if problem:
        raise WeftError(f"{type(policy).__name__}: {problem}; this is a fault of the policy")
    return decision


def fault_of(
    decision: Decision, queue: TaskQueue, running: Sequence[RunningGroup], machine: MachineState
) -> str:  # fmt: skip
    """Why a decision cannot be carried out: a task that does not wait, a device or a worker that is not there."""
    started = Counter(decision.started)
    for name, times in started.items():
        if times > 1 or name not in queue:
            return f"starts {name!r}, which {'is started twice' if times > 1 else 'does not wait'}"
        if queue.blocked_by(name) or name in decision.refuse:
            return f"starts {name!r}, which waits for others or is refused"
    workers = {device.name: device.workers for device in machine.devices}
    used = Counter([group.device for group in running] + [start.device for start in decision.start])
    crowded = next((name for name, count in used.items() if count > workers.get(name, 0)), None)
    if crowded is not None:
        return f"{used[crowded]} groups on {crowded}, which has {workers.get(crowded, 0)} workers"
    unknown = set(decision.preempt) - {group.id for group in running}
    return f"preempts {sorted(unknown)[0]!r}, which does not run" if unknown else ""
