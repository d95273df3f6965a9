"""The groups of a run as a queue, decided on like a server's: one device, and one worker, which is this process.

Groups run in order of their tasks, one at a time (the policy ``pipeswitch``): another order would let what a pruning
policy compares depend on predicted times. What shares the device at one time is within a group, as planned. Admission
is that of a server, against the bytes that the run may take now. There a task that is refused fails; here the user
waits for it, and predictions are no proof, so a group that is refused is tried at its turn, and the reason is told.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence

from weft.core.plan import Plan
from weft.core.task import Task
from weft.sched.decide import decide
from weft.sched.policies.pipeswitch_like import PipeSwitchLike
from weft.sched.queue_state import Decision, DeviceState, MachineState, QueuedTask

Group = tuple[str, Plan]
IN_PROCESS = PipeSwitchLike(safety=1.0)  # plans bound their bytes already
CONSIDERED = 32  # of the groups that wait: they start in order
TRIED = "tried all the same: nothing else runs here, and a prediction may be too high"


class GroupQueue:
    """The groups that wait in a run of ``tasks`` on ``device``; ``room()``: the bytes that a group may take now."""

    def __init__(self, device: str, room: Callable[[], int], tasks: Mapping[str, Task]) -> None:
        self._device, self._room, self._tasks = device, room, tasks

    def decide(self, waiting: Sequence[Group]) -> Decision:
        """What the scheduler says of the groups that wait."""
        queued = [queued_group(group, self._tasks) for group in waiting[:CONSIDERED]]
        here = DeviceState(self._device, max(self._room(), 1), workers=1)
        return decide(IN_PROCESS, queued, (), MachineState((here,)))

    def next(self, waiting: Sequence[Group]) -> tuple[Group, str]:
        """The group to train next, and why."""
        decision, first = self.decide(waiting), waiting[0]
        if first[0] in decision.refuse:
            return first, f"{decision.refuse[first[0]]}; {TRIED}"
        (start,) = decision.start
        return next(group for group in waiting if group[0] == start.members[0]), start.why


def queued_group(group: Group, tasks: Mapping[str, Task]) -> QueuedTask:
    """A group as the scheduler sees it: its key, and what it is predicted to take."""
    key, plan = group
    members = [tasks[name] for name in plan.members]
    seconds = float(plan.cost.get("epoch_seconds", 0.0)) * max(task.epochs for task in members)
    return QueuedTask(key, int(plan.cost.get("total_bytes", 0)), seconds, graph=members[0].graph_name, fusable=False)
