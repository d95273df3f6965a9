"""A running group in the simulator: its progress, what it asks of the device now, and when that changes."""

from __future__ import annotations

import math
from dataclasses import dataclass, field

from weft.sched.interference import Interference, Load, mean_turn
from weft.sched.policies.device_plan import slowdown_limit
from weft.sched.policies.group_draft import fused_cost
from weft.sched.queue_state import GroupStart, QueuedTask, RunningGroup

ROUNDING = 1e-9


@dataclass
class LiveGroup:
    """Members advance together at ``rate`` (seconds of their own per second); each ends after its own seconds.

    A member asks nothing of the device before its ``start_seconds`` have passed.
    ``as_planned``: policies are told the end and the utilisation that were predicted, not those that are to be.
    """

    id: str
    plan: GroupStart
    worker: int
    start: float
    left: list[QueuedTask]  # longest first
    model: Interference
    progress: float = 0.0
    rate: float = 1.0
    as_planned: bool = False
    load: Load = field(init=False)

    def __post_init__(self) -> None:
        self.left.sort(key=lambda task: -task.seconds)
        self._update_load()

    @property
    def _fused(self) -> float:
        return self.model.fused_work if len(self.plan.members) > 1 else 1.0

    def _update_load(self) -> None:
        asking = [task for task in self.left if not self._starting(task)]
        demand = math.fsum(task.demand for task in asking) * self._fused
        self.load = Load(demand, mean_turn(task.turn_seconds for task in asking))

    def _starting(self, task: QueuedTask) -> bool:
        return task.start_seconds > 0 and task.start_seconds - self.progress > ROUNDING * max(1.0, task.start_seconds)

    @property
    def seconds_to_next_change(self) -> float:
        """Until a member ends or has started, at the present rate."""
        marks = [task.start_seconds for task in self.left if self._starting(task)]
        return max(min([self.left[-1].seconds, *marks]) - self.progress, 0.0) / self.rate

    def advance(self, seconds: float) -> None:
        """Let time pass."""
        self.progress += seconds * self.rate
        self._update_load()

    def ended(self) -> list[QueuedTask]:
        """The members that end now, removed."""
        done: list[QueuedTask] = []
        while self.left and self.left[-1].seconds - self.progress <= ROUNDING * max(1.0, self.left[-1].seconds):
            done.append(self.left.pop())
        if done:
            self._update_load()
        return done

    @property
    def _mean_demand(self) -> float:
        """Of the members that are left, over the time that they take alone on the device."""
        first = self.left[0]
        if len(self.plan.members) == 1:
            return first.utilisation
        start, work = max(task.start_seconds for task in self.left), math.fsum(task.work for task in self.left)
        return fused_cost(first.seconds, start, work, self.model)[1]

    def state(self, now: float) -> RunningGroup:
        """What a policy sees of it."""
        first = self.left[0]
        ends = now + max(first.seconds - self.progress, 0.0) / self.rate
        if self.as_planned:
            ends = self.start + self.plan.seconds
        return RunningGroup(
            id=self.id,
            device=self.plan.device,
            members=tuple(task.id for task in self.left),
            bytes=self.plan.bytes,
            utilisation=self.plan.utilisation if self.as_planned else self._mean_demand,
            started=self.start,
            ends=ends,
            graph=first.graph,
            kind=first.kind,
            slowdown_limit=slowdown_limit(first, now),
            priority=max(task.priority for task in self.left),
            start_seconds=self.plan.start_seconds,
            turn_seconds=self.plan.turn_seconds if self.as_planned else self.load.turn,
        )
