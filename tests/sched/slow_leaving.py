"""Works off a queue as a server does: a group that is preempted keeps its worker and its memory until it has saved."""

from __future__ import annotations

import math
from dataclasses import replace

from tests.sched.random_search import MAKES_WAY, Watched
from weft.sched.admission import Policy, decide
from weft.sched.queue_state import DeviceState, GroupStart, MachineState, QueuedTask, RunningGroup
from weft.sched.task_queue import UserShares

SAVING = 0.7  # seconds
MOST_DECISIONS = 40  # for each task


class SlowLeaving:
    """A queue and its devices, with groups that take as long as predicted whatever runs beside them."""

    def __init__(self, policy: Policy, tasks: list[QueuedTask], devices: list[DeviceState]) -> None:
        self.policy, self.devices, self.tasks = Watched(policy, leaves_at_once=False), tuple(devices), tasks
        self.coming = sorted(tasks, key=lambda task: task.arrival)
        self.queued: dict[str, QueuedTask] = {}
        self.taken: dict[str, QueuedTask] = {}
        self.running: list[RunningGroup] = []
        self.saved_at: dict[str, float] = {}
        self.shares = UserShares()
        self.ended: set[str] = set()
        self.refused: set[str] = set()
        self.passed: list[str] = []  # tasks that did not start in the place that was made for them
        self.now, self.started, self.again = 0.0, 0, math.inf

    def until_empty(self) -> None:
        """Decide at every event until nothing is left."""
        wanted = ""
        for _ in range(MOST_DECISIONS * len(self.tasks)):
            if not (self.coming or self.queued or self.running):
                return
            self._next_event()
            leave = bool(self.saved_at)
            waits = self._decide()
            if wanted and not leave and wanted in self.queued:
                self.passed.append(wanted)
            wanted = waits
        raise AssertionError("the queue is not worked off")

    def _decide(self) -> str:
        """Carry out a decision; returns the task for which groups leave."""
        waiting = [task for task in self.queued.values() if not self._depends(task)]
        machine = MachineState(self.devices, self.now, self.shares.with_running({}))
        found = decide(self.policy, waiting, list(self.running), machine)
        self.again = math.inf if found.again is None else found.again
        for name in found.refuse:
            self.refused.add(self.queued.pop(name).id)
        for name in found.preempt:
            self.saved_at[name] = self.now + SAVING
        self.running = [replace(one, leaving=one.id in self.saved_at) for one in self.running]
        for start in found.start:
            self._start(start)
        return next((name for name, why in found.wait.items() if MAKES_WAY in why), "")

    def _depends(self, task: QueuedTask) -> bool:
        return any(name not in self.ended | self.refused for name in task.after)

    def _start(self, start: GroupStart) -> None:
        self.started += 1
        members = [self.queued.pop(name) for name in start.members]
        self.taken |= {task.id: task for task in members}
        for task in members:
            self.shares.started(task, self.now)
        group = RunningGroup(
            f"g{self.started}", start.device, start.members, start.bytes, start.utilisation, self.now,
            self.now + start.seconds, members[0].graph, members[0].kind,
            priority=max(task.priority for task in members), start_seconds=start.start_seconds, devices=start.devices,
        )  # fmt: skip
        self.running.append(group)

    def _end_of(self, group: RunningGroup) -> float:
        return min(self.saved_at.get(group.id, math.inf), group.ends)

    def _next_event(self) -> None:
        times = [self._end_of(group) for group in self.running] + [task.arrival for task in self.coming[:1]]
        self.now = max(min([*times, self.again]), self.now)
        for group in [one for one in self.running if self._end_of(one) <= self.now]:
            self.running.remove(group)
            self._end(group)
        while self.coming and self.coming[0].arrival <= self.now:
            task = self.coming.pop(0)
            self.queued[task.id] = task

    def _end(self, group: RunningGroup) -> None:
        saved = self.saved_at.pop(group.id, math.inf)
        for task in [self.taken.pop(name) for name in group.members]:
            busy = group.utilisation * len(group.places) / len(group.members)
            self.shares.charge(task.user, (self.now - group.started) * busy)
            if saved < group.ends:
                self.queued[task.id] = task.rest(self.now - group.started)
                self.shares.started(task, self.now)
            else:
                self.ended.add(task.id)
