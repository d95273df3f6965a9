"""Suggest the nearest change that makes a task fit, by what it gives up.

Tried in this order, each with what the ones before could not do: lower precision (where the machine has units for
it), narrower layers, both. Fewer tasks in a group is not among them: groups are cut to the budget before suggestions
are made (``weft.planner.grouping.groups``).
"""

from __future__ import annotations

from collections.abc import Callable, Iterable, Mapping
from typing import Any

from weft.core.cost import Cost
from weft.core.machine import Machine
from weft.core.task import Task
from weft.core.units import show_bytes
from weft.planner.report.plan_report import Suggestion

CostOf = Callable[[Task], Cost]


def nearest(task: Task, cost_of: CostOf, budget: int, bf16: bool = True) -> Suggestion | None:
    """The smallest change of ``task`` that fits into ``budget`` bytes, None if none of those tried does."""
    for changes in candidates(task, bf16):
        cost = cost_of(task.with_values(**changes))
        if cost.total_bytes <= budget:
            return _suggestion(task, changes, cost)
    return None


def candidates(task: Task, bf16: bool = True) -> list[dict[str, Any]]:
    """Changes to try, the least first: bf16 where the machine has it, then narrower layers, then both."""
    lower: list[dict[str, Any]] = [{"precision": "bf16"}] if bf16 and task.precision != "bf16" else []
    narrower: list[dict[str, Any]] = [{"hidden": width} for width in widths_below(task)]
    return [*lower, *narrower, *({**low, **narrow} for low in lower for narrow in narrower)]


def widths_below(task: Task) -> list[int]:
    """Narrower hidden layers to try, widest first; none where ``hidden`` does not shape the model."""
    if task.traits is None or task.layers < 2:
        return []
    step = task.heads if task.traits.has_heads else 1
    widths, width = [], task.hidden // 2
    while width >= max(step, 4):
        widths += [width // step * step]
        width //= 2
    return list(dict.fromkeys(widths))


def _suggestion(task: Task, changes: Mapping[str, Any], cost: Cost) -> Suggestion:
    sets = " ".join(f"--set {'model' if key == 'hidden' else 'train'}.{key}={value}" for key, value in changes.items())
    words = f"task {task.label!r} with {_listed(changes)} takes {show_bytes(cost.total_bytes)} ({sets})"
    return Suggestion(dict(changes), words, cost, (task.label,))


def _listed(changes: Mapping[str, Any]) -> str:
    return " and ".join(f"{key}={value!r}" for key, value in changes.items())


def roomy_machines(total_bytes: int, machines: Iterable[Machine], here: Machine) -> list[str]:
    """Names of the GPUs that have the memory for it as it is, smallest first."""
    fixed = here.context_bytes + here.workspace_bytes
    able = [
        machine
        for machine in machines
        if machine.device == "cuda"
        and machine.name != here.name
        and total_bytes - fixed + machine.context_bytes + machine.workspace_bytes <= machine.memory_bytes
    ]
    return [machine.name for machine in sorted(able, key=lambda machine: machine.memory_bytes)]
