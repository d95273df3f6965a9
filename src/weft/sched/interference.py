"""Predict how much groups on one device slow each other down, from the share of the device each uses."""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from dataclasses import dataclass


@dataclass(frozen=True)
class Interference:
    """The model's three constants.

    Demand is the share of a device that a group would keep busy if it ran alone at full speed; it exceeds 1 if a fused
    group has more work than the device does in the time of its members. Groups whose demands sum to more than 1 share
    the device in proportion.

    ``contention``: what each group loses in addition, per unit of its neighbours' demand, to caches and memory
    bandwidth; an assumption until it is fitted to measured groups. ``fused_work``: work of a member of a fused group
    relative to the task alone; ten mixed tasks of which some stack took 1 / 1.13 of the time (docs/measured.md).
    ``paging``: slowdown if groups take more memory than the device has; CoGNN measured 9.87 for GAT under MPS with
    unified memory.
    """

    contention: float = 0.1
    fused_work: float = 0.88
    paging: float = 9.87

    def slowdown(self, own: float, others: float) -> float:
        """How many times longer than alone at full speed a group takes beside others of that total demand.

        A group that asks nothing of the device, one that is being built on the host, loses nothing there.
        """
        if own == 0.0:
            return 1.0
        return max(1.0, own + others) * (1.0 + self.contention * min(others, 1.0))

    def demand(self, members: Sequence[float]) -> float:
        """The demand of a group from its members' utilisation."""
        return sum(members) * (self.fused_work if len(members) > 1 else 1.0)

    def throughput(self, demands: Iterable[float]) -> float:
        """The share of the device that does useful work when groups of these demands run side by side."""
        groups = list(demands)
        total = sum(groups)
        return sum(own / self.slowdown(own, total - own) for own in groups)
