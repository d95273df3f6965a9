"""The groups of a run as a queue, decided on like a server's: one device, and one worker, which is this process.

Groups run in order of their tasks, one at a time (the policy ``pipeswitch``): another order would let what a pruning
policy compares depend on predicted times. Admission is the planner's, which made the groups to fit.
"""

from __future__ import annotations

from collections.abc import Sequence

from weft.core.plan import Plan
from weft.core.task import Task
from weft.sched.decide import decide
from weft.sched.policies.pipeswitch_like import PipeSwitchLike
from weft.sched.queue_state import Decision, DeviceState, MachineState, QueuedTask

Group = tuple[str, Plan]
IN_PROCESS = PipeSwitchLike(safety=1.0)  # plans bound their bytes already
CONSIDERED = 32  # of the groups that wait: they start in order


def next_group(waiting: Sequence[Group], tasks: dict[str, Task]) -> tuple[Group, Decision]:
    """The group that this process trains next, and the decision that says so."""
    queued = [queued_group(group, tasks) for group in waiting[:CONSIDERED]]
    room = max(1, *(one.bytes for one in queued))
    decision = decide(IN_PROCESS, queued, (), MachineState((DeviceState("here", room, workers=1),)))
    (name,) = decision.started
    return next(group for group in waiting if group[0] == name), decision


def queued_group(group: Group, tasks: dict[str, Task]) -> QueuedTask:
    """A group as the scheduler sees it: its key, and what it is predicted to take."""
    key, plan = group
    members = [tasks[name] for name in plan.members]
    seconds = float(plan.cost.get("epoch_seconds", 0.0)) * max(task.epochs for task in members)
    return QueuedTask(key, int(plan.cost.get("total_bytes", 0)), seconds, graph=members[0].graph_name, fusable=False)
