"""The graphs of a job: summaries until they are trained on, then on the device as long as somebody needs them."""

from __future__ import annotations

from collections.abc import Hashable, Iterable

import torch

from weft.core.compatibility import graph_key
from weft.core.graph_stats import GraphStats
from weft.core.task import Task
from weft.engine.base.resolve import check_trainable, find_graph
from weft.engine.planning.estimator import check_plannable
from weft.graph.catalog import names as catalog
from weft.graph.data.graph import Graph
from weft.graph.data.verify import check_ids

HOST = torch.device("cpu")


class Graphs:
    """Graphs by the tasks that train on them; nothing is on ``device`` before :meth:`on_device`.

    A graph of a named shape is made on ``device``, where that is fastest; with ``on_host`` it is made on the host,
    since making one may take more memory than training on it.
    """

    def __init__(self, device: torch.device, on_host: bool = False) -> None:
        self._device, self._maker = device, HOST if on_host else device
        self._summaries: dict[Hashable, Graph | GraphStats] = {}
        self._placed: dict[Hashable, Graph] = {}
        self._stats: dict[Hashable, GraphStats] = {}
        self._true: dict[Hashable, GraphStats] = {}

    def summary(self, task: Task) -> Graph | GraphStats:
        """The graph of ``task`` on the host; of a named shape its summary alone, as a plan would have it."""
        key = graph_key(task)
        if key not in self._summaries:
            self._summaries[key] = _summary(task)
        return self._summaries[key]

    def stats(self, task: Task) -> GraphStats:
        """What grouping knows of the graph of ``task``."""
        key = graph_key(task)
        if key not in self._stats:
            found = self.summary(task)
            self._stats[key] = found if isinstance(found, GraphStats) else found.stats()
        return self._stats[key]

    def check(self, task: Task) -> None:
        """A clear error unless the graph has what ``task`` needs."""
        found = self.summary(task)
        if isinstance(found, GraphStats):
            check_plannable(task, found)
        else:
            check_trainable(task, found)

    def on_device(self, task: Task) -> Graph:
        """The graph of ``task`` where it is trained."""
        key = graph_key(task)
        if key not in self._placed:
            found = self.summary(task)
            if isinstance(found, GraphStats):
                found = find_graph(task, self._maker)
            check_ids(found)
            self._placed[key] = found.to(self._device)
            self._true[key] = self._placed[key].stats()
        return self._placed[key]

    def true_stats(self, task: Task) -> GraphStats:
        """The summary of the graph itself where it was trained on, else what is known of it."""
        return self._true.get(graph_key(task)) or self.stats(task)

    def let_go(self, needed: Iterable[Task]) -> None:
        """Take every graph off the device that none of ``needed`` trains on."""
        keys = {graph_key(task) for task in needed}
        self._placed = {key: graph for key, graph in self._placed.items() if key in keys}


def _summary(task: Task) -> Graph | GraphStats:
    if isinstance(task.graph, Graph):
        return task.graph
    if isinstance(task.graph, str) and task.graph.startswith("shape:"):
        return catalog.stats(task.graph)
    return find_graph(task, HOST)
