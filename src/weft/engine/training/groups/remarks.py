"""What a job says before it trains: what reading the graphs changed, what a budget covers, what was planned."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

from weft.core.plan import Plan
from weft.core.units import show_bytes
from weft.graph.data.graph import Graph


def remarks_on_graphs(graphs: Sequence[Any]) -> list[str]:
    """What reading the graphs left out or changed; summaries of graphs have nothing to say."""
    notes = [f"graph {graph.name!r}: {note}" for graph in graphs if isinstance(graph, Graph) for note in graph.notes]
    return list(dict.fromkeys(notes))


def remarks_on_budget(budget: int | None, device: str, plans: Sequence[Plan]) -> list[str]:
    """What a budget covers on a CPU, where nothing stops a process that takes more."""
    most = max((plan.cost.get("process_bytes", 0) for plan in plans), default=0)
    if budget is None or device != "cpu" or most <= budget:
        return []
    return [
        f"the budget of {show_bytes(budget)} covers what training adds; the process will take "
        f"about {show_bytes(most)} in all, Python, torch and kernels included, and nothing on a CPU stops it"
    ]


def planned_words(groups: Sequence[tuple[str, Plan]]) -> str:
    """How many tasks and groups there are."""
    tasks = sum(len(plan.members) for _, plan in groups)
    several = f" in {len(groups)} groups" if len(groups) > 1 else ""
    return f"planned: {tasks} task{'s' if tasks > 1 else ''}{several}"
