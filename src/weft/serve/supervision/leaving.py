"""Members and groups that are to leave before they end: cancelled, paused, or preempted while the server drains."""

from __future__ import annotations

from collections.abc import Sequence

from weft.serve.supervision.supervisor_state import Active, SupervisorState


class Leaving:
    """Tells workers which members are to leave."""

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
        paused = [name for name in lost if self._state.db.get(name).state in ("paused", "queued", "planned")]
        if paused and not active.leaving:
            self.preempt(active)
        if active.fused:
            for name in paused:
                if name not in active.split:
                    active.split.add(name)
                    plan = self._state.db.get(name).plan or {}
                    self._state.db.replan(name, {**plan, "alone": True, "from": active.group.folder})
        cancelled = [name for name in lost if name not in paused]
        if cancelled:
            active.worker.send("cancel", group=active.group.id, names=cancelled)

    def preempt(self, active: Active) -> None:
        """Let a group save a checkpoint and return."""
        active.leaving = True
        active.worker.send("preempt", group=active.group.id)

    def preempt_all(self) -> None:
        """Let every group save a checkpoint and return."""
        for active in self._state.active.values():
            if not active.leaving:
                self.preempt(active)
