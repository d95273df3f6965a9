"""Predict how much groups on one device slow each other down, from their demands and how long their kernels are."""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from dataclasses import dataclass
from typing import NamedTuple


class DeviceLoad(NamedTuple):
    """How a group uses a device.

    ``demand``: the share of the device that it would keep busy if it ran alone at full speed; it exceeds 1 if a fused
    group has more work than the device does in the time of its members. ``turn``: mean seconds of its kernels, for
    which it has the device when its turn has come; 0 if unknown.
    """

    demand: float
    turn: float = 0.0


@dataclass(frozen=True)
class Interference:
    """The model's three constants.

    Groups whose demands sum to no more than 1 do not wait for each other. Otherwise their kernels take turns: a group
    gets the device in proportion to its demand and to how long its kernels are, and no more than its demand. So groups
    with kernels of one length share it in proportion to their demands, and a group with short kernels is slowed down by
    far more than one with long kernels.

    ``contention``: what each group loses in addition, per unit of its neighbours' demand, to caches and memory
    bandwidth; an assumption until it is fitted to measured groups. ``fused_work``: work of a member of a fused group
    relative to the task alone; ten mixed tasks of which some stack took 1 / 1.13 of the time (docs/measured.md).
    ``paging``: slowdown if groups take more memory than the device has; CoGNN measured 9.87 for GAT under MPS with
    unified memory.
    """

    contention: float = 0.1
    fused_work: float = 0.88
    paging: float = 9.87

    def slowdowns(self, loads: Sequence[DeviceLoad]) -> list[float]:
        """How many times longer than alone at full speed each of the concurrent groups takes.

        A group without demand, one that is being built on the host, loses nothing.
        """
        total = sum(load.demand for load in loads)
        return [
            load.demand / share * (1.0 + self.contention * min(max(total - load.demand, 0.0), 1.0)) if share else 1.0
            for load, share in zip(loads, shares(loads), strict=True)
        ]

    def slowdown(self, load: DeviceLoad, neighbours: Sequence[DeviceLoad]) -> float:
        """How many times longer than alone at full speed a group takes next to ``neighbours``."""
        return self.slowdowns([load, *neighbours])[0]

    def throughput(self, loads: Sequence[DeviceLoad]) -> float:
        """The share of the device that does useful work when groups run concurrently."""
        return sum(load.demand / slowdown for load, slowdown in zip(loads, self.slowdowns(loads), strict=True))


def shares(loads: Sequence[DeviceLoad]) -> list[float]:
    """The share of the device that each of the groups gets, by turns.

    A group whose turn is unknown counts as one with kernels of the groups' mean length.
    """
    if sum(load.demand for load in loads) <= 1.0:
        return [load.demand for load in loads]
    usual = mean_turn(load.turn for load in loads) or 1.0
    weights = [load.demand * (load.turn if load.turn > 0 else usual) for load in loads]
    granted, room = [0.0] * len(loads), 1.0
    waiting = [index for index, weight in enumerate(weights) if weight > 0]
    while waiting:
        unit = room / sum(weights[index] for index in waiting)
        content = [index for index in waiting if loads[index].demand < unit * weights[index]]
        for index in content or waiting:
            granted[index] = loads[index].demand if content else unit * weights[index]
        room -= sum(granted[index] for index in content)
        waiting = [index for index in waiting if index not in content] if content else []
    return granted


def mean_turn(turns: Iterable[float]) -> float:
    """The turn of a group: the mean of its members' that are known, else 0."""
    positive = [turn for turn in turns if turn > 0]
    return sum(positive) / len(positive) if positive else 0.0
