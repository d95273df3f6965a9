"""The queued tasks, indexed for the policies: each order a policy needs is updated, never sorted anew.

A policy reads the queue and changes nothing. The caller adds tasks, takes those that a decision starts or refuses, and
reports those that are done, which releases the tasks that depend on them.
"""

from __future__ import annotations

import math
from bisect import bisect_left, insort
from collections.abc import Iterable, Iterator, Mapping
from dataclasses import replace

from weft.core.errors import SpecError
from weft.sched.queue_state import QueuedTask, RunningGroup, UserShare

Key = tuple[float, ...]


class SortedTasks:
    """Task ids by key, then by their position in the queue. Adding and removing search by bisection."""

    def __init__(self) -> None:
        self._rows: list[tuple[Key, int, str]] = []

    def add(self, key: Key, position: int, task: str) -> None:
        """Insert a task."""
        insort(self._rows, (key, position, task))

    def remove(self, key: Key, position: int, task: str) -> None:
        """Take a task out; it must be there under the same key and position."""
        del self._rows[bisect_left(self._rows, (key, position, task))]

    def __len__(self) -> int:
        return len(self._rows)

    def __getitem__(self, index: int) -> str:
        return self._rows[index][2]

    def __iter__(self) -> Iterator[str]:
        return (row[2] for row in self._rows)


LaneKey = tuple[str, int, bool]
"""User, priority, and whether the tasks must end by a given time."""

# A task of s seconds is passed by shorter ones of its lane that arrive up to PATIENCE * s later, and by none that
# arrive after that: shortest first, without starvation.
PATIENCE = 10.0


class TaskQueue:
    """Queued tasks by id and in the orders that policies use.

    ``by_arrival``, ``by_bytes`` and ``longest_first`` hold the tasks that are ready, i.e. whose dependencies are done.
    ``all_by_bytes`` holds the others as well, ``sharded`` those of them that have several ranks. ``lanes``: the ready
    tasks of one user and priority, with and without a time to end by, in the order of :func:`lane_order`. ``by_join``:
    the ready tasks that may be fused, by join key, shortest first. ``inference``: the ready inference tasks, most
    urgent first; ``inference_lanes``: the same by lane.
    ``ready_work``: seconds of a fully used device that the ready tasks take; ``ready_seconds``: their seconds alone.
    """

    def __init__(self) -> None:
        self.by_arrival, self.by_bytes, self.longest_first = SortedTasks(), SortedTasks(), SortedTasks()
        self.all_by_bytes, self.inference, self.sharded = SortedTasks(), SortedTasks(), SortedTasks()
        self.lanes: dict[LaneKey, SortedTasks] = {}
        self.inference_lanes: dict[LaneKey, SortedTasks] = {}
        self.by_join: dict[str, SortedTasks] = {}
        self.ready_work, self.ready_seconds = 0.0, 0.0
        self._tasks: dict[str, QueuedTask] = {}
        self._position: dict[str, int] = {}  # of every queued or running task
        self._open_dependencies: dict[str, int] = {}
        self._dependents: dict[str, list[str]] = {}
        self._next_position = 0

    @classmethod
    def of(cls, tasks: Iterable[QueuedTask] | TaskQueue, running: Iterable[RunningGroup] = ()) -> TaskQueue:
        """A queue of ``tasks``, in their order; a dependency counts as done if it is neither queued nor running."""
        if isinstance(tasks, TaskQueue):
            return tasks
        queue, waiting = cls(), list(tasks)
        for member in (member for group in running for member in group.members):
            queue._enter(member)
        for task in waiting:
            queue._enter(task.id)
        for task in waiting:
            queue._insert(task)
        blocked = dict(queue._open_dependencies)
        done = [name for name in queue._position if name not in blocked]
        while done:
            for name in queue._dependents.get(done.pop(), ()):
                blocked[name] -= 1
                if blocked[name] == 0:
                    del blocked[name]
                    done.append(name)
        if blocked:
            names = ", ".join(map(repr, sorted(blocked)[:4]))
            raise SpecError(f"tasks {names} wait for each other in a circle; remove one of their 'after' entries")
        return queue

    def __len__(self) -> int:
        return len(self._tasks)

    def __iter__(self) -> Iterator[QueuedTask]:
        return iter(self._tasks.values())

    def __contains__(self, task: str) -> bool:
        return task in self._tasks

    def __getitem__(self, task: str) -> QueuedTask:
        return self._tasks[task]

    def add(self, task: QueuedTask) -> None:
        """Queue a task behind those that arrived at the same time."""
        self._enter(task.id)
        self._insert(task)

    def take(self, task: str) -> QueuedTask:
        """Remove a task from the queue because it starts; what depends on it keeps waiting."""
        taken = self._tasks.pop(task)
        if task in self._open_dependencies:
            del self._open_dependencies[task]
            for name in set(taken.after) & self._dependents.keys():
                self._dependents[name].remove(task)
        else:
            self.ready_work -= taken.work
            self.ready_seconds -= taken.seconds
            for index, key in self._indices(taken):
                index.remove(key, self._position[task], task)
            for lanes in (self.lanes, self.inference_lanes):
                if lane_key(taken) in lanes and not lanes[lane_key(taken)]:
                    del lanes[lane_key(taken)]
            if taken.joinable and not self.by_join[taken.join_key]:
                del self.by_join[taken.join_key]
        self.all_by_bytes.remove((float(taken.bytes),), self._position[task], task)
        if taken.ranks > 1:
            self.sharded.remove((float(taken.bytes),), self._position[task], task)
        return taken

    def drop(self, task: str) -> None:
        """Remove a queued task for good, without releasing what depends on it."""
        self.take(task)
        del self._position[task]

    def put_back(self, task: QueuedTask) -> None:
        """Queue a task that was taken, at its former position."""
        if task.id not in self._position or task.id in self._tasks:
            raise SpecError(f"task {task.id!r} is not running; add it to the queue instead")
        self._insert(task)

    def finish(self, task: str) -> None:
        """Report a taken task as done: what depends on it alone becomes ready."""
        del self._position[task]
        for name in self._dependents.pop(task, ()):
            if name in self._open_dependencies:
                self._open_dependencies[name] -= 1
                if not self._open_dependencies[name]:
                    del self._open_dependencies[name]
                    self._ready(self._tasks[name])

    def position(self, task: str) -> int:
        """Its number among all tasks ever queued, in order of submission."""
        return self._position[task]

    def blocked_by(self, task: str) -> tuple[str, ...]:
        """The dependencies of a queued task that are not done."""
        return tuple(name for name in self._tasks[task].after if name in self._position)

    def dependents(self, task: str) -> list[str]:
        """The queued tasks that wait for ``task``, directly or through others, nearest first."""
        reached: dict[str, None] = {}
        frontier = [task]
        while frontier:
            names = [n for name in frontier for n in self._dependents.get(name, ()) if n in self._tasks]
            frontier = [name for name in dict.fromkeys(names) if name not in reached]
            reached.update(dict.fromkeys(frontier))
        return list(reached)

    def _enter(self, task: str) -> None:
        if task in self._position:
            raise SpecError(f"task {task!r} is queued or running already; give each task a name of its own")
        self._position[task] = self._next_position
        self._next_position += 1

    def _insert(self, task: QueuedTask) -> None:
        self._tasks[task.id] = task
        self.all_by_bytes.add((float(task.bytes),), self._position[task.id], task.id)
        if task.ranks > 1:
            self.sharded.add((float(task.bytes),), self._position[task.id], task.id)
        open_names = [name for name in dict.fromkeys(task.after) if name in self._position]
        for name in open_names:
            self._dependents.setdefault(name, []).append(task.id)
        if open_names:
            self._open_dependencies[task.id] = len(open_names)
        else:
            self._ready(task)

    def _ready(self, task: QueuedTask) -> None:
        self.ready_work += task.work
        self.ready_seconds += task.seconds
        for index, key in self._indices(task):
            index.add(key, self._position[task.id], task.id)

    def _indices(self, task: QueuedTask) -> Iterator[tuple[SortedTasks, tuple[float, ...]]]:
        yield self.by_arrival, (task.arrival,)
        yield self.by_bytes, (float(task.bytes),)
        yield self.longest_first, (-task.seconds,)
        yield self.lanes.setdefault(lane_key(task), SortedTasks()), lane_order(task)
        if task.kind == "inference":
            yield self.inference, (task.must_end_by,)
            yield self.inference_lanes.setdefault(lane_key(task), SortedTasks()), lane_order(task)
        if task.joinable:
            yield self.by_join.setdefault(task.join_key, SortedTasks()), (task.seconds,)


def lane_key(task: QueuedTask) -> LaneKey:
    """The lane that a task waits in."""
    return (task.user, task.priority, task.must_end_by < math.inf)


def lane_order(task: QueuedTask) -> tuple[float, ...]:
    """The order within a lane: earliest end first; without one, by arrival and predicted seconds."""
    return (task.must_end_by, task.arrival + PATIENCE * task.seconds)


def lane_name(lane: LaneKey) -> str:
    """The lane's name in :attr:`UserShare.last_start`: ``"0"``, or ``"0 due"`` for tasks with a time to end by."""
    return f"{lane[1]} due" if lane[2] else str(lane[1])


class UserShares:
    """Device-seconds of every user, and when each of their lanes was last served.

    Time without tasks earns nothing: a new user starts level with the least served of those present. Otherwise a user
    who comes after a week would have the devices alone until a week is made up for.
    """

    def __init__(self, shares: Iterable[UserShare] = ()) -> None:
        self._shares = {share.user: share for share in shares}
        self._present: frozenset[str] | None = None

    def of(self, user: str) -> UserShare:
        """The share of ``user``."""
        return self._shares.get(user, UserShare(user))

    def see(self, present: Iterable[str]) -> None:
        """Update who has tasks that wait or run; users who had none before are made level with the least served."""
        now, before = frozenset(present), self._present
        self._present = now
        if before is None or not now & before:
            return
        least = min(self.of(user).device_seconds for user in now & before)
        for user in now - before:
            share = self.of(user)
            self._shares[user] = replace(share, device_seconds=max(share.device_seconds, least))

    def charge(self, user: str, seconds: float) -> None:
        """Count device-seconds that ``user`` has had."""
        share = self.of(user)
        self._shares[user] = replace(share, device_seconds=share.device_seconds + seconds)

    def started(self, task: QueuedTask, now: float) -> None:
        """Record that a task is started, or ran until now and will resume: its lane does not age until then."""
        share = self.of(task.user)
        self._shares[task.user] = replace(share, last_start={**share.last_start, lane_name(lane_key(task)): now})

    def with_running(self, running: Mapping[str, float]) -> tuple[UserShare, ...]:
        """All shares, with the device-seconds by user that are being had now."""
        users = dict.fromkeys([*self._shares, *running])
        shares = [self.of(user) for user in users]
        return tuple(replace(s, device_seconds=s.device_seconds + running.get(s.user, 0.0)) for s in shares)
