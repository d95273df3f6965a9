"""Fused groups that were preempted: which can go on as they were, and what becomes of those that cannot.

A policy sees such a group as one task with the bytes of the group, so that priority, ageing, fair shares, memory and
the workers kept for inference hold for it as for any other.
"""

from __future__ import annotations

import time
from dataclasses import dataclass, replace

from weft.core.units import show_bytes
from weft.sched.admission import SAFETY_THRESHOLD
from weft.sched.interference import Interference
from weft.sched.policies.group_draft import GroupDraft
from weft.sched.queue_state import GroupStart, QueuedTask
from weft.sched.task_queue import PATIENCE
from weft.serve.queue.queue_groups import Group
from weft.serve.queue.task_states import ENDED, QueueTask
from weft.serve.supervision.group_starts import GroupStarts
from weft.serve.supervision.leaving import Leaving, known_tasks
from weft.serve.supervision.queue_views import queued_task
from weft.serve.supervision.seconds_left import has_begun
from weft.serve.supervision.supervisor_state import SupervisorState
from weft.serve.supervision.worker_pool import PLANNER, WorkerPool

WAITS = "waits to go on with its group"


@dataclass(frozen=True)
class Preempted:
    """A preempted group, and its members as they are now.

    ``present``: those that go on with it; ``paused``: those that leave it if it goes on before they are resumed;
    ``left``: those that have ended, or go on alone. Members that were deleted from the queue are in none of them.
    """

    group: Group
    present: tuple[QueueTask, ...]
    paused: tuple[QueueTask, ...]
    left: tuple[QueueTask, ...]

    @classmethod
    def of(cls, group: Group, tasks: list[QueueTask]) -> Preempted:
        """``group`` with those of its members that the queue still has."""
        left = [task for task in tasks if task.state in ENDED or "from" in (task.plan or {})]
        paused = [task for task in tasks if task.state == "paused" and task not in left]
        present = [task for task in tasks if task not in left and task not in paused]
        return cls(group, tuple(present), tuple(paused), tuple(left))

    @property
    def names(self) -> list[str]:
        """The members that have not left it."""
        return [task.id for task in (*self.present, *self.paused)]

    @property
    def complete(self) -> bool:
        """Whether the settings of every member are known; without them the checkpoint is not that of the group."""
        return len(self.present) + len(self.paused) + len(self.left) == len(self.group.members)

    def as_task(self, setup_seconds: float, share: float) -> QueuedTask:
        """The group as a policy sees it: as urgent as its most urgent member, and older than its oldest.

        A task of s seconds is passed by shorter ones that arrive ``PATIENCE * s`` later, and so would a group that has
        begun be by all the tasks that were queued with it. Ageing counts from its last start, whenever it arrived.
        """
        members = [queued_task(task, setup_seconds, share) for task in self.present]
        draft = GroupDraft(SAFETY_THRESHOLD, Interference())
        for one in members:
            draft.add(one)
        shape = draft.footprint(time.time())
        begun = any(has_begun(task) for task in self.present)
        seconds = max(shape.seconds if begun else self.group.seconds, draft.start_seconds)
        first = max(members, key=lambda one: (one.priority, -one.must_end_by))
        return replace(
            first,
            id=self.group.folder,
            bytes=int(self.group.bytes / SAFETY_THRESHOLD),
            shared_bytes=0,
            seconds=seconds,
            utilisation=min(shape.demand, 1.0),
            start_seconds=shape.start_seconds,
            turn_seconds=shape.turn_seconds,
            arrival=min(one.arrival for one in members) - PATIENCE * seconds,
            fusable=False,
        )


class PreemptedGroups:
    """Lets preempted groups go on, and takes those apart that cannot."""

    def __init__(self, state: SupervisorState, pool: WorkerPool, leaving: Leaving, starts: GroupStarts) -> None:
        self._state, self._pool, self._leaving, self._starts = state, pool, leaving, starts
        self._members: set[str] = set()

    def has(self, task: str) -> bool:
        """Whether ``task`` was in such a group when they were last looked at."""
        return task in self._members

    def ready(self) -> dict[str, Preempted]:
        """The groups that a policy may start, by the name that it sees; the others wait or are taken apart."""
        found, self._members = {}, set()
        for group in list(self._state.resumable.values()):
            one = Preempted.of(group, known_tasks(self._state.db, group.members))
            self._members |= set(one.names)
            if self._can_go_on(one):
                found[group.folder] = one
        return found

    def resume(self, one: Preempted, start: GroupStart) -> None:
        """Start a group that a policy has chosen; it stays preempted if its members cannot be claimed."""
        worker = self._pool.idle_worker(start.device)
        if worker is None:
            self._state.why |= {task.id: "waits for a free worker" for task in one.present}
            return
        group, now = one.group, time.time()
        self._leaving.split(group, [task.id for task in one.paused])  # what the group saves next is without them
        gone = [*known_tasks(self._state.db, [task.id for task in one.paused]), *one.left]
        again = replace(group, state="running", device=start.device, worker=worker.name, ended=None, started=now)
        again = replace(again, seconds=start.seconds)  # of what is left
        if self._starts.launch(again, worker, one.present, start.utilisation, gone):
            del self._state.resumable[group.id]
        else:
            self._state.why |= {task.id: WAITS for task in one.present}

    def take_apart(self, one: Preempted, why: str) -> None:
        """Let the members go on alone, each from the checkpoint of the group."""
        self._leaving.take_apart(one.group, one.names, f"goes on alone, from the checkpoint of its group: {why}")

    def _can_go_on(self, one: Preempted) -> bool:
        """Whether a group can start as it was; if it never can, its members are released."""
        devices = {worker.device for name, worker in self._pool.workers.items() if name != PLANNER}
        here, there = {_kind(name) for name in devices}, _kind(one.group.device)
        if not one.present:
            self._leaving.take_apart(one.group, one.names, "no member of its group is left to run")
        elif any(task.state != "planned" for task in one.present):
            self._state.why |= {task.id: WAITS for task in one.present}
        elif there not in here:
            why = f"begins anew: the checkpoint of its group is of {there}, and this server has {', '.join(here)}"
            self._leaving.begin_anew(one.group, [task.id for task in one.present], why)
        elif not one.complete:
            self.take_apart(one, "another member was deleted")
        elif not self._largest_fits(one):
            if devices <= self._pool.room.keys():
                self.take_apart(one, f"together they need {show_bytes(one.group.bytes)}, more than there is for tasks")
            else:
                self._state.why |= {task.id: "waits for the workers of its device to start" for task in one.present}
        else:
            return True
        return False

    def _largest_fits(self, one: Preempted) -> bool:
        """Whether some device that is known has the bytes of a group, if nothing else runs there."""
        return one.group.bytes <= max(map(self._pool.task_bytes, self._pool.room))


def _kind(device: str) -> str:
    """``cpu`` or ``cuda``."""
    return device.partition("@")[0].partition(":")[0]
