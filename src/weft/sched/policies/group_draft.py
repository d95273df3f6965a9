"""A fused group being formed: its cost, updated per member."""

from __future__ import annotations

from dataclasses import dataclass, field

from weft.sched.admission import needed_bytes
from weft.sched.interference import Interference
from weft.sched.policies.device_plan import Footprint, slowdown_limit
from weft.sched.queue_state import QueuedTask


@dataclass
class GroupDraft:
    """The members so far, and the sums that the group's footprint is made from."""

    safety: float
    model: Interference
    members: list[QueuedTask] = field(default_factory=list)
    shared_bytes: int = 0
    own_bytes: int = 0
    longest: float = 0.0
    work: float = 0.0
    utilisation: float = 0.0
    start_seconds: float = 0.0

    def add(self, task: QueuedTask) -> None:
        """Let ``task`` join."""
        self.members.append(task)
        self.shared_bytes = max(self.shared_bytes, task.shared_bytes)
        self.own_bytes = max(self.own_bytes, task.bytes - task.shared_bytes)
        self.longest = max(self.longest, task.seconds)
        self.work += task.work
        self.utilisation += task.utilisation
        self.start_seconds = max(self.start_seconds, task.start_seconds)

    def footprint(self, now: float) -> Footprint:
        """What the group takes as it is."""
        total = self.shared_bytes + len(self.members) * self.own_bytes
        return self._footprint(total, self.longest, self.work, self.utilisation, 0, now)

    def with_one_more(self, task: QueuedTask, now: float) -> Footprint:
        """What the group would take with ``task`` as well."""
        own = max(self.own_bytes, task.bytes - task.shared_bytes)  # narrower members are padded to the widest
        total = max(self.shared_bytes, task.shared_bytes) + (len(self.members) + 1) * own
        longest, demand = max(self.longest, task.seconds), self.utilisation + task.utilisation
        return self._footprint(total, longest, self.work + task.work, demand, 1, now)

    def _footprint(
        self, total: int, longest: float, work: float, utilisation: float, more: int, now: float
    ) -> Footprint:
        first, start_seconds = self.members[0], self.start_seconds
        seconds, demand, asked = longest, utilisation, utilisation
        if len(self.members) + more > 1:
            seconds, demand = fused_cost(longest, start_seconds, work, self.model)
            asked = utilisation * self.model.fused_work
        return Footprint(
            bytes=needed_bytes(total, self.safety),
            seconds=seconds,
            demand=demand,
            asked=asked,
            inference=first.kind == "inference",
            slowdown_limit=slowdown_limit(first, now),
            start_seconds=start_seconds,
            turn_seconds=first.turn_seconds,
        )


def fused_cost(longest: float, start_seconds: float, work: float, model: Interference) -> tuple[float, float]:
    """Seconds of a fused group alone on the device, and the share of it that it keeps busy, as a mean over them.

    ``longest``: seconds of its longest member. ``work``: of its members alone, in seconds of a fully used device.
    """
    busy = work * model.fused_work
    seconds = max(longest, start_seconds + busy)
    return seconds, busy / seconds if seconds > 0 else 0.0
