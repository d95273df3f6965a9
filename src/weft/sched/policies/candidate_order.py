"""The order in which the backfill policy considers tasks: priority with ageing, deadlines, fair share, then length."""

from __future__ import annotations

import heapq
from collections.abc import Iterator, Mapping
from dataclasses import dataclass

from weft.sched.queue_state import MachineState, QueuedTask
from weft.sched.sorted_tasks import SortedTasks
from weft.sched.task_queue import LaneKey, TaskQueue, lane_name, lane_order

Rank = tuple[float, float, float, float, float]


@dataclass
class _Head:
    """The next task of a lane that has not been considered."""

    task: QueuedTask
    rest: Iterator[str]
    level: float


class CandidateOrder:
    """Ready tasks one by one, best first; tasks taken meanwhile are skipped.

    A lane (user, priority, with or without a time to end by) rises by one priority level per ``age_seconds`` in which
    none of its tasks was started. Within a level: earliest end, then the user with the fewest device-seconds, then the
    order of the lane, which is by arrival and predicted seconds.
    """

    def __init__(self, queue: TaskQueue, machine: MachineState, age_seconds: float) -> None:
        self._queue, self._now, self._age_seconds = queue, machine.now, age_seconds
        self._used = {share.user: share.device_seconds for share in machine.users}
        self._last = {share.user: share.last_start for share in machine.users}
        self._taken: set[str] = set()
        self._heap: list[tuple[Rank, LaneKey, _Head]] = []
        self._begin(queue.lanes)

    def __iter__(self) -> Iterator[QueuedTask]:
        while self._heap:
            rank, key, head = heapq.heappop(self._heap)
            current = self._rank(head)
            if current > rank:  # a task of this user was started meanwhile
                heapq.heappush(self._heap, (current, key, head))
                continue
            self._push(key, head.rest)
            if head.task.id not in self._taken:
                yield head.task

    def begin_with_inference(self) -> None:
        """Go through the inference tasks alone, from the first of them that is not taken."""
        self._heap.clear()
        self._begin(self._queue.inference_lanes)

    def take(self, task: QueuedTask) -> None:
        """Skip ``task`` from now on; its user has had its device-seconds."""
        self._taken.add(task.id)
        self._used[task.user] = self._used.get(task.user, 0.0) + task.work

    def is_taken(self, task: str) -> bool:
        """Whether ``task`` was taken."""
        return task in self._taken

    def _begin(self, lanes: Mapping[LaneKey, SortedTasks]) -> None:
        for key, lane in lanes.items():
            self._push(key, iter(lane))

    def _push(self, key: LaneKey, lane: Iterator[str]) -> None:
        name = next(lane, None)
        if name is None:
            return
        task = self._queue[name]
        head = _Head(task, lane, self._level(key, task))
        heapq.heappush(self._heap, (self._rank(head), key, head))

    def _level(self, key: LaneKey, task: QueuedTask) -> float:
        last = self._last.get(task.user, {}).get(lane_name(key), task.arrival)
        waited = max(self._now - max(last, task.arrival), 0.0)
        return task.priority + waited // self._age_seconds

    def _rank(self, head: _Head) -> Rank:
        task = head.task
        due, virtual_arrival = lane_order(task)
        return (-head.level, due, self._used.get(task.user, 0.0), virtual_arrival, self._queue.position(task.id))
