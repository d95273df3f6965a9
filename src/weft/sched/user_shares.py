"""What each user has had of the devices, kept from decision to decision."""

from __future__ import annotations

from collections.abc import Iterable, Mapping
from dataclasses import replace

from weft.sched.queue_state import QueuedTask, UserShare
from weft.sched.task_queue import lane_key, lane_name


class UserShares:
    """Device-seconds of every user, and when each of their lanes was last served.

    Time without tasks earns nothing: who comes anew starts level with the least served of those that are there.
    Otherwise a user who comes after a week would have the devices alone until a week is made up for.
    """

    def __init__(self, known: Iterable[UserShare] = ()) -> None:
        self._shares = {share.user: share for share in known}
        self._present: frozenset[str] | None = None

    def of(self, user: str) -> UserShare:
        """The share of ``user``."""
        return self._shares.get(user, UserShare(user))

    def see(self, present: Iterable[str]) -> None:
        """Note who has tasks that wait or run; those who had none before are made level with the others."""
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
        """Note that a task is started, or has run until now and is to go on: its lane does not age until then."""
        share = self.of(task.user)
        self._shares[task.user] = replace(share, last_start={**share.last_start, lane_name(lane_key(task)): now})

    def with_running(self, running: Mapping[str, float]) -> tuple[UserShare, ...]:
        """All shares, with the device-seconds by user that are being had now."""
        users = dict.fromkeys([*self._shares, *running])
        shares = [self.of(user) for user in users]
        return tuple(replace(one, device_seconds=one.device_seconds + running.get(one.user, 0.0)) for one in shares)
