"""PlanReport: everything a plan has to say about a sweep on a machine, as data. ``str()`` of it is what is printed."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, field
from typing import Any

from weft.core.cost import Cost
from weft.core.machine import Machine
from weft.core.plan import Plan
from weft.planner.report.plan_text import explain


@dataclass(frozen=True)
class TaskEstimate:
    """One task: what it would take alone, and in which group it trains (counted from 0).

    ``parameters`` and ``cost`` are None where that was not looked into: of thousands of tasks with many structures.
    """

    name: str
    model: str
    graph: str
    epochs: int
    parameters: int | None
    cost: Cost | None
    group: int

    def to_dict(self) -> dict[str, Any]:
        """Plain data for JSON."""
        return {
            "name": self.name,
            "model": self.model,
            "graph": self.graph,
            "epochs": self.epochs,
            "parameters": self.parameters,
            "group": self.group,
            "cost": None if self.cost is None else self.cost.to_dict(),
        }


@dataclass(frozen=True)
class GroupEstimate:
    """One group: its plan with the reason for every decision, and what it takes while it trains.

    ``timeline``: live bytes after every operator, by kind of value; ``phases`` the phase of each operator.
    ``at_peak``: the largest things alive at the peak, in words; ``advice``: what would lower it.
    ``unknown``: operators whose cost nobody knows. ``extrapolated``: worked out by size from another group.
    """

    plan: Plan
    cost: Cost
    epochs: int
    fits: bool
    at_peak: tuple[str, ...] = ()
    advice: tuple[str, ...] = ()
    unknown: tuple[str, ...] = ()
    note: str = ""
    timeline: Mapping[str, tuple[int, ...]] = field(default_factory=dict)
    phases: tuple[str, ...] = ()
    extrapolated: bool = False

    @property
    def run_seconds(self) -> float:
        """Seconds of all epochs, set-up apart."""
        return self.epochs * self.cost.epoch_seconds

    def to_dict(self) -> dict[str, Any]:
        """Plain data for JSON."""
        return {
            "plan": self.plan.to_dict(),
            "cost": self.cost.to_dict(),
            "epochs": self.epochs,
            "run_seconds": self.run_seconds,
            "fits": self.fits,
            "at_peak": list(self.at_peak),
            "advice": list(self.advice),
            "unknown": list(self.unknown),
            "note": self.note,
            "extrapolated": self.extrapolated,
        }


@dataclass(frozen=True)
class Suggestion:
    """The nearest plan that fits: what to change, as settings, and what it then takes."""

    changes: Mapping[str, Any]
    words: str
    cost: Cost
    tasks: tuple[str, ...] = ()

    def to_dict(self) -> dict[str, Any]:
        """Plain data for JSON."""
        return {
            "changes": dict(self.changes),
            "words": self.words,
            "tasks": list(self.tasks),
            "cost": self.cost.to_dict(),
        }


@dataclass(frozen=True)
class PlanReport:
    """Tasks, groups, what each takes on ``machine`` within ``budget`` bytes, and why.

    ``fits`` says whether every group does; where one does not, ``nearest`` names the nearest plan that would, if
    there is one. ``notes`` are remarks on how much to trust the figures.
    """

    name: str
    machine: Machine
    budget: int
    tasks: tuple[TaskEstimate, ...]
    groups: tuple[GroupEstimate, ...]
    nearest: tuple[Suggestion, ...] = ()
    notes: tuple[str, ...] = ()
    graphs: tuple[str, ...] = ()

    @property
    def fits(self) -> bool:
        """Whether every group keeps within the budget."""
        return all(group.fits for group in self.groups)

    @property
    def peak_bytes(self) -> int:
        """What the device must have: the largest group, everything counted. Groups train one after another."""
        return max(group.cost.total_bytes for group in self.groups)

    @property
    def run_seconds(self) -> float:
        """Seconds of all epochs of all groups, set-up apart."""
        return sum(group.run_seconds for group in self.groups)

    def __str__(self) -> str:
        return explain(self)

    def to_dict(self) -> dict[str, Any]:
        """Plain data for JSON."""
        return {
            "name": self.name,
            "fits": self.fits,
            "peak_bytes": self.peak_bytes,
            "run_seconds": self.run_seconds,
            "budget_bytes": self.budget,
            "machine": self.machine.to_dict(),
            "graphs": list(self.graphs),
            "tasks": [task.to_dict() for task in self.tasks],
            "groups": [group.to_dict() for group in self.groups],
            "nearest": [one.to_dict() for one in self.nearest],
            "notes": list(self.notes),
        }
