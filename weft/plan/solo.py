"""How one task will run on one device: the plan of a group of one."""

from __future__ import annotations

from weft.core.plan import Plan
from weft.core.stats import GraphStats
from weft.core.task import Task
from weft.plan.grouping import group


def choose(task: Task, stats: GraphStats, device: str) -> Plan:
    """The plan for ``task`` on a graph with ``stats``; ``device`` is ``"cpu"`` or ``"cuda"``."""
    return group([task], stats, device)[0]
