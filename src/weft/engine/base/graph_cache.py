"""Keep the graphs of a plan or a run: summaries until they are trained on, then on the device while they are needed."""

from __future__ import annotations

from collections.abc import Callable, Hashable, Iterable

import torch

from weft.core.compatibility import graph_key
from weft.core.errors import GraphError, SpecError
from weft.core.graph_stats import GraphStats
from weft.core.placement import Placement, on_device
from weft.core.task import Task
from weft.engine.base.all_splits import check_split
from weft.engine.base.graph_store import GraphStore
from weft.flow.sampling.lone_nodes import has_batch_of_one, lone_node
from weft.graph.catalog import names as catalog
from weft.graph.data.graph import Graph
from weft.graph.data.verify import check_ids
from weft.runtime.batches.placing import place_graph

HOST = torch.device("cpu")


class Graphs:
    """Graphs by the tasks that train on them, each found once; nothing is on ``device`` before :meth:`on_device`.

    A graph of a named shape is made on ``device``, where that is fastest; with ``on_host`` it is made on the host,
    since making one may take more memory than training on it. ``find``: the graph of a task, or its summary, as a plan
    needs it (None: by its name). ``store``: where a worker keeps graphs between runs.
    """

    def __init__(
        self,
        device: torch.device = HOST,
        on_host: bool = False,
        find: Callable[[Task], Graph | GraphStats] | None = None,
        store: GraphStore | None = None,
    ) -> None:
        self._device, self._maker = device, HOST if on_host else device
        self._store = store
        self._find = find or _find_for_plan
        self._found: dict[Hashable, Graph | GraphStats] = {}
        self._placed: dict[Hashable, Graph] = {}
        self._where: dict[Hashable, tuple[str, str]] = {}
        self._true: dict[Hashable, GraphStats] = {}

    def summary(self, task: Task) -> Graph | GraphStats:
        """The graph of ``task`` on the host; of a named shape its summary alone, as a plan would have it."""
        key = graph_key(task)
        if key not in self._found:
            self._found[key] = self._kept_on_host(task)
        return self._found[key]

    def _kept_on_host(self, task: Task) -> Graph | GraphStats:
        if self._store is None or not isinstance(task.graph, str):
            return self._find(task)
        found: Graph | GraphStats = self._store.host(task.graph, lambda: self._find(task))
        return found

    def stats(self, task: Task) -> GraphStats:
        """What grouping knows of the graph of ``task``; a Graph remembers its own."""
        found = self.summary(task)
        return found if isinstance(found, GraphStats) else found.stats()

    def check(self, task: Task) -> None:
        """A clear error unless the graph has what ``task`` needs."""
        check_trainable(task, self.summary(task))

    def on_device(self, task: Task) -> Graph:
        """The graph of ``task`` where it is trained, all of it."""
        return self.placed(task, on_device(self._device.type))

    def placed(self, task: Task, placement: Placement) -> Graph:
        """The graph of ``task`` with its parts where ``placement`` says; one that lies elsewhere is let go."""
        key, where = graph_key(task), (placement.features, placement.topology)
        if self._where.get(key) != where:
            self._placed.pop(key, None)
        if key not in self._placed:
            self._placed[key], self._where[key] = self._kept_in_place(task, placement), where
            self._true[key] = self._placed[key].stats()
        return self._placed[key]

    def _kept_in_place(self, task: Task, placement: Placement) -> Graph:
        device = on_device(self._device.type)
        whole = (placement.features, placement.topology) == (device.features, device.topology)
        if self._store is None or not whole or not isinstance(task.graph, str):
            return self.bring(task, placement)
        return self._store.placed(task.graph, lambda: self.for_store(task, placement))

    def for_store(self, task: Task, placement: Placement | None = None) -> Graph:
        """The graph of ``task`` for its store: on the device, or wherever it is made, to be copied to a pool."""
        copies = self._store is not None and self._store.pool is not None
        return self._made(task) if copies else self.bring(task, placement)

    def bring(self, task: Task, placement: Placement | None = None) -> Graph:
        """The graph of ``task``, copied to where ``placement`` says (None: to the device)."""
        return place_graph(self._made(task), placement or on_device(self._device.type), self._device)

    def _made(self, task: Task) -> Graph:
        found = self.summary(task)
        if isinstance(found, GraphStats):
            found = find_graph(task, self._maker)
        check_ids(found)
        return found

    def true_stats(self, task: Task) -> GraphStats:
        """The summary of the graph itself where it was trained on, else what is known of it."""
        return self._true.get(graph_key(task)) or self.stats(task)

    def let_go(self, needed: Iterable[Task]) -> None:
        """Take every graph off the device that none of ``needed`` trains on."""
        keys = {graph_key(task) for task in needed}
        self._placed = {key: graph for key, graph in self._placed.items() if key in keys}
        if self._store is not None:
            self._store.settle(key for key in keys if isinstance(key, str))


def _find_for_plan(task: Task) -> Graph | GraphStats:
    if isinstance(task.graph, Graph):
        return task.graph
    if isinstance(task.graph, str) and task.graph.startswith("shape:"):
        return catalog.stats(task.graph)
    return find_graph(task, HOST)


def find_graph(task: Task, device: torch.device) -> Graph:
    """The graph that ``task.graph`` names; a generated one is made on ``device``."""
    if not isinstance(task.graph, str):
        raise SpecError(
            f"task {task.label!r}: graph={task.graph!r} must be a name, a path or a weft.Graph "
            "(see weft.Graph.from_pyg and from_edges)"
        )
    return catalog.load(task.graph, device=device)


def check_trainable(task: Task, found: Graph | GraphStats) -> None:
    """A clear error unless the graph has the features, labels and splits that ``task`` needs: for plans and runs."""
    stats = found if isinstance(found, GraphStats) else found.stats()
    check_split(task, stats)
    labelled = stats.num_classes > 0 if isinstance(found, GraphStats) else found.y is not None
    name = f"graph {stats.name!r}"
    if not stats.num_features:
        raise GraphError(f"{name} has no features; give x [nodes, features], one-hot degrees for example")
    if not labelled:
        raise GraphError(f"{name} has no labels; give y: one class per node, or 0/1 [nodes, labels]")
    if not stats.num_train:
        raise GraphError(
            f"{name} has no training nodes; give train=, or make a split: graph.random_split(train=0.6, val=0.2), "
            "in a shell `weft data convert IN OUT --split 0.6,0.2`"
        )
    if stats.num_classes < 2 and not stats.multilabel and not stats.regression and not task.has_own("objective"):
        raise GraphError(f"{name} has {stats.num_classes} class; training needs at least 2")
    if not isinstance(found, GraphStats):
        _check_batch_norm(task, found)
    if task.patience is not None and not stats.num_val:
        raise SpecError(
            f"task {task.label!r}: patience={task.patience} needs validation nodes, but {name} has none; "
            "leave patience out or give val="
        )


def _check_batch_norm(task: Task, graph: Graph) -> None:
    """A clear error if batch norm would meet a batch of one node, which has no variance."""
    if not task.sampled or task.norm != "batch" or not has_batch_of_one(graph, task.batch):
        return
    node = lone_node(graph)
    if node is not None:
        raise SpecError(
            f"task {task.label!r}: norm='batch' takes a variance over at least two nodes, but of "
            f"{graph.train.numel():,} training nodes in batches of {task.batch:,} one is left over, and node {node} "
            "has no neighbours; choose another batch, or norm='layer'"
        )
