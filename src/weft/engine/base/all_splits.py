"""Make a sweep of tasks with ``split="all"``: one member per split of the graph."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

from weft.core.errors import SpecError
from weft.core.graph_stats import GraphStats
from weft.core.sweep import Sweep
from weft.core.task import ALL_SPLITS, Task
from weft.graph.catalog import names as catalog
from weft.graph.data.graph import Graph


def with_all_splits(work: Task | Sweep) -> Task | Sweep:
    """``work`` with a number for every split that it asks for; itself if it does not ask for all of them."""
    tasks = [work] if isinstance(work, Task) else work.tasks()
    asking = [task for task in tasks if task.split == ALL_SPLITS]
    if not asking:
        return work
    counts = {_count(graph) for graph in {id(task.graph): task.graph for task in asking}.values()}
    if isinstance(work, Sweep) and len(counts) == 1:
        return _written_out(work, tuple(range(counts.pop())))
    return Sweep.from_tasks([one for task in tasks for one in _numbered(task)], work.name)


def check_split(task: Task, stats: GraphStats) -> None:
    """A clear error unless the graph has the split of ``task``."""
    if isinstance(task.split, int) and task.split >= stats.num_splits:
        several = (
            f"{stats.num_splits} splits, 0..{stats.num_splits - 1}" if stats.num_splits > 1 else "1 split, number 0"
        )
        raise SpecError(f"task {task.label!r}: split={task.split}, but graph {stats.name!r} has {several}")


def _written_out(sweep: Sweep, numbers: tuple[int, ...]) -> Sweep:
    def settled(settings: Any) -> dict[str, Any]:
        return {key: numbers if key == "split" and value == ALL_SPLITS else value for key, value in settings.items()}

    about = {"samples": sweep.samples, "sample_seed": sweep.sample_seed, "name": sweep.name}
    return Sweep(tasks=[settled(entry) for entry in sweep.explicit], **about, **settled(sweep.settings))


def _numbered(task: Task) -> list[Task]:
    if task.split != ALL_SPLITS:
        return [task]
    return [task.with_values(split=number, name=None) for number in range(_count(task.graph))]


def _count(graph: Any) -> int:
    if isinstance(graph, Graph):
        return graph.num_splits
    stats: Callable[[Any], GraphStats] = catalog.stats
    return stats(graph).num_splits
