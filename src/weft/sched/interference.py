"""Predict how much groups on one device slow each other down, from what each asks and how long its kernels are."""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from dataclasses import dataclass
from typing import NamedTuple


class Load(NamedTuple):
    """What a group asks of a device.

    ``demand``: the share of the device that it would keep busy if it ran alone at full speed; it exceeds 1 if a fused
    group has more work than the device does in the time of its members. ``turn``: mean seconds of a kernel of it, for
    which it has the device when its turn has come; 0 if that is not known.
    """

    demand: float
    turn: float = 0.0


@dataclass(frozen=True)
class Interference:
    """The model's three constants.

    Groups whose demands sum to no more than 1 do not wait for each other. Otherwise their kernels take turns: a group
    gets the device in proportion to what it asks and to how long its kernels are, and no more than it asks. So groups
    with kernels of one length share it in proportion to their demands, and one with short kernels beside long ones is
    slowed down by far more than they are.

    ``contention``: what each group loses in addition, per unit of its neighbours' demand, to caches and memory
    bandwidth; an assumption until it is fitted to measured groups. ``fused_work``: work of a member of a fused group
    relative to the task alone; ten mixed tasks of which some stack took 1 / 1.13 of the time (docs/measured.md).
    ``paging``: slowdown if groups take more memory than the device has; CoGNN measured 9.87 for GAT under MPS with
    unified memory.
    """

    contention: float = 0.1
    fused_work: float = 0.88
    paging: float = 9.87

    def slowdowns(self, loads: Sequence[Load]) -> list[float]:
        """How many times longer than alone at full speed each of the groups takes beside the others.

        A group that asks nothing of the device, one that is being built on the host, loses nothing there.
        """
        total = sum(load.demand for load in loads)
        return [
            load.demand / share * (1.0 + self.contention * min(max(total - load.demand, 0.0), 1.0)) if share else 1.0
            for load, share in zip(loads, shares(loads), strict=True)
        ]

    def slowdown(self, own: Load, others: Sequence[Load]) -> float:
        """How many times longer than alone at full speed a group takes beside others."""
        return self.slowdowns([own, *others])[0]

    def demand(self, members: Sequence[float]) -> float:
        """The demand of a group from its members' utilisation."""
        return sum(members) * (self.fused_work if len(members) > 1 else 1.0)

    def throughput(self, loads: Sequence[Load]) -> float:
        """The share of the device that does useful work when groups run side by side."""
        return sum(load.demand / slowdown for load, slowdown in zip(loads, self.slowdowns(loads), strict=True))


def shares(loads: Sequence[Load]) -> list[float]:
    """The share of the device that each of the groups gets, by turns.

    A group whose turn is not known counts as one whose kernels are as long as the others' are on average.
    """
    if sum(load.demand for load in loads) <= 1.0:
        return [load.demand for load in loads]
    usual = mean_turn(load.turn for load in loads) or 1.0
    weights = [load.demand * (load.turn if load.turn > 0 else usual) for load in loads]
    found, room = [0.0] * len(loads), 1.0
    left = [place for place, weight in enumerate(weights) if weight > 0]
    while left:
        unit = room / sum(weights[place] for place in left)
        content = [place for place in left if loads[place].demand < unit * weights[place]]
        for place in content or left:
            found[place] = loads[place].demand if content else unit * weights[place]
        room -= sum(found[place] for place in content)
        left = [place for place in left if place not in content] if content else []
    return found


def mean_turn(turns: Iterable[float]) -> float:
    """The turn of a group: the mean of its members' as far as they are known, else 0."""
    known = [turn for turn in turns if turn > 0]
    return sum(known) / len(known) if known else 0.0
