"""Members and groups that are to leave before they end: cancelled, paused, or preempted while the server drains."""

from __future__ import annotations

from collections.abc import Iterable, Sequence

from weft.serve.queue.queue_db import QueueDB
from weft.serve.queue.queue_groups import Group
from weft.serve.queue.task_states import QueueError, QueueTask
from weft.serve.supervision.supervisor_state import Active, SupervisorState, unless_lost


class Leaving:
    """Tells workers which members are to leave, and takes groups apart that cannot go on as they were."""

    def __init__(self, state: SupervisorState) -> None:
        self._state = state

    def heartbeat(self) -> None:
        """Renew the leases; members that were cancelled or paused in the queue are to leave their groups.

        Leases of groups that run are renewed before others are looked at: a clock that was set forward, or a machine
        that slept, ends none of them.
        """
        for active in self._state.active.values():
            held = set(self._state.db.heartbeat(self._state.claimant(active.worker), self._state.options.lease_seconds))
            lost = [name for name in active.members if name not in held]
            if lost:
                self._dismiss(active, lost)
        self._state.db.requeue_expired()

    def _dismiss(self, active: Active, lost: Sequence[str]) -> None:
        states = {task.id: task.state for task in known_tasks(self._state.db, lost)}
        paused = [name for name in lost if states.get(name) in ("paused", "queued", "planned")]
        if paused and not active.leaving:
            self.preempt(active)
        if active.fused:
            for name in paused:
                if name not in active.split:
                    self.split(active.group, [name])
                    active.split.add(name)
        cancelled = [name for name in lost if name not in paused]
        if cancelled:
            active.worker.send("cancel", group=active.group.id, names=cancelled)

    def split(self, group: Group, names: Iterable[str]) -> None:
        """Let members of a group go on alone from its checkpoint when they start again."""
        for name in names:
            unless_lost(self._split, name, group.folder)

    def _split(self, name: str, folder: str) -> None:
        plan = self._state.db.get(name).plan or {}
        self._state.db.replan(name, {**plan, "alone": True, "from": folder})

    def take_apart(self, group: Group, names: Sequence[str], why: str) -> None:
        """Dissolve a preempted group: ``names`` go on alone, each from its checkpoint."""
        self.split(group, names)
        self._dissolve(group, names, why)

    def begin_anew(self, group: Group, names: Sequence[str], why: str) -> None:
        """Dissolve a preempted group whose checkpoint cannot be used: ``names`` are planned anew."""
        for name in names:
            unless_lost(self._state.db.unplan, name)
        self._dissolve(group, names, why)

    def _dissolve(self, group: Group, names: Sequence[str], why: str) -> None:
        self._state.db.record([(name, "note", {"message": why, "group": group.id}) for name in names])
        self._state.db.end_group(group.id, "dissolved", why)
        self._state.resumable.pop(group.id, None)
        self._state.dirty = True

    def preempt(self, active: Active) -> None:
        """Let a group save a checkpoint and return."""
        active.leaving = True
        active.worker.send("preempt", group=active.group.id)

    def preempt_all(self) -> None:
        """Let every group save a checkpoint and return."""
        for active in self._state.active.values():
            if not active.leaving:
                self.preempt(active)


def known_tasks(db: QueueDB, names: Iterable[str]) -> list[QueueTask]:
    """The tasks of those names, less those that were deleted long after they had ended."""
    found = []
    for name in names:
        try:
            found.append(db.get(name))
        except QueueError:
            continue
    return found
