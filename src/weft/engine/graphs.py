"""Keep the graphs of a plan or a run: summaries until they are trained on, then on the device while they are needed."""

from __future__ import annotations

import os
import threading
from collections import OrderedDict
from collections.abc import Callable, Hashable, Iterable, Iterator, Mapping
from contextlib import contextmanager, nullcontext, suppress
from contextvars import ContextVar
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import torch
from torch import Tensor

from weft.batches.placement import place_graph
from weft.core.compatibility import columns_of, deciding_column, graph_key, metric_name
from weft.core.errors import GraphError, SpecError
from weft.core.graph_stats import GraphStats
from weft.core.placement import DataPlacement, on_device
from weft.core.sweep import Sweep
from weft.core.task import ALL_SPLITS, FIT, Task
from weft.graph.catalog import names as catalog
from weft.graph.graph import Graph, as_graph, check_ids
from weft.planner.cost.calibration import Observation
from weft.runtime.device.cuda_graph import no_capture

# ---- GraphStore: graphs that a worker process keeps between runs, on the host and on its device, evicted by use.
#
# A graph stays with everything derived from it: its transpose, normalised forms, work lists and cached first
# aggregations. The least recently used ones are evicted once they take more than the limit. On a GPU each graph has a
# memory pool of its own, so that its arrays never pin a segment that a training used; it takes the whole segments of
# that pool.
#
# A run is charged for the bytes that it adds. What the process holds when it begins is not its own: its graph has what
# runs of other models derived from it, of which no prediction for this run knows. After a GCN, a GIN and a SAGE the
# graph of the arxiv shape holds 452 MiB by dry runs. A GCN is predicted with 202 of them, and its margin is 185 to 229.

Changed = Callable[[int], None]
_SHARED: ContextVar[GraphStore | None] = ContextVar("shared graphs", default=None)
SEGMENT_ENDS = 48 << 20  # of a graph's own memory pool, beyond its arrays: torch allocates segments of 2 and 20 MiB
ATOMS = (str, bytes, int, float, bool, complex, type(None), torch.dtype, torch.device)
HOST = torch.device("cpu")


@dataclass
class _StoredGraph:
    graph: Graph
    pool: Any = None
    bytes: int = 0
    before: int = 0  # bytes when the run began that is under way


@dataclass
class GraphStore:
    """Graphs of named files and shapes, by name and state of the file.

    ``device_bytes`` and ``host_bytes`` bound what is kept of graphs between runs. ``observations``: what epochs took of
    the runs that shared it last.
    """

    device: torch.device
    device_bytes: int
    host_bytes: int
    observations: list[Observation] = field(default_factory=list)
    _on_change: Changed | None = None
    _in_use: frozenset[str] = frozenset()
    _around: int = 0  # when the run began that is under way
    _placed: OrderedDict[Hashable, _StoredGraph] = field(default_factory=OrderedDict)
    _host: OrderedDict[Hashable, _StoredGraph] = field(default_factory=OrderedDict)
    _handed_out: set[Hashable] = field(default_factory=set)  # to a run that may still use them
    _lock: threading.RLock = field(default_factory=threading.RLock)

    def host(self, name: str, make: Callable[[], Graph]) -> Graph:
        """The graph called ``name`` on the host; ``make`` loads it, unless it is stored."""
        key = state_of(name)
        with no_capture(), self._lock:  # in this order, here and elsewhere; memory is pinned, and given back
            if key not in self._host:
                graph = _pinned(make()) if self.device.type == "cuda" else make()
                self._host[key] = _StoredGraph(graph, bytes=bytes_of(graph, HOST))
                total = sum(stored.bytes for stored in self._host.values())
                while total > self.host_bytes and next(iter(self._host)) != key:
                    total -= self._host.popitem(last=False)[1].bytes
            self._host.move_to_end(key)
            return self._host[key].graph

    def placed(self, name: str, make: Callable[[], Graph]) -> Graph:
        """The graph called ``name`` on the device; ``make`` brings it there, unless it is stored."""
        key = state_of(name)
        with no_capture(), self._lock:
            self._put(key, make)
            self._handed_out.add(key)
            return self._placed[key].graph

    def _put(self, key: Hashable, make: Callable[[], Graph]) -> None:
        if key not in self._placed:
            with _own_pool(self.device) as pool:
                graph = make()
            graph.kept = {}
            unused = {} if pool is None else unused_bytes()
            size = bytes_of(graph, self.device) + unused.get(_number(pool), 0)
            self._placed[key] = _StoredGraph(graph, pool, size)
        self._placed.move_to_end(key)

    def holds(self, name: str) -> bool:
        """True if the graph called ``name`` is on the device."""
        with self._lock:
            return state_of(name) in self._placed

    def prefetch(self, name: str, make: Callable[[], Graph], expected: int) -> bool:
        """Bring a graph of about ``expected`` bytes to the device during a training, if that keeps the limit.

        Copies run on a stream of their own, and never while a CUDA graph is captured.
        """
        with no_capture(), self._lock:  # all of it: a run that begins waits, and finds the graph or nothing of it
            there = self._not_charged()
            if self.holds(name) or there + expected > self.device_bytes:
                return False
            if self._on_change is not None:
                self._on_change(self._around + there + expected + SEGMENT_ENDS)
            try:
                with _side_stream(self.device):
                    self._put(state_of(name), make)
            except torch.OutOfMemoryError:
                return False
            finally:
                self._changed()
        return True

    @contextmanager
    def following(self, in_use: Iterable[str], changed: Changed) -> Iterator[None]:
        """Call ``changed`` with the bytes that a run inside is not charged for; it trains on the graphs ``in_use``.

        They are all that the process holds when the run begins, and graphs that are fetched meanwhile for later runs.
        It is called at once, before the bytes grow and after they shrink, so that the cap of the run can follow.
        """
        with self._lock:
            for stored in self._placed.values():
                stored.before = stored.bytes
            self._around = self.around()
            self._in_use, self._on_change = frozenset(in_use), changed
            self._changed()
        try:
            yield
        finally:
            with self._lock:  # a thread that fetches calls ``changed`` before this, or never again
                self._in_use, self._on_change = frozenset(), None

    def bytes_held(self, without: Iterable[str] = ()) -> int:
        """Bytes on the device of all graphs except those called ``without``, as last counted."""
        left_out = {state_of(name) for name in without}
        with self._lock:
            return sum(stored.bytes for key, stored in self._placed.items() if key not in left_out)

    def around(self) -> int:
        """Bytes of a GPU that the process holds besides graphs now (workspaces, ends of segments); 0 on a CPU."""
        reserved = torch.cuda.memory_reserved(self.device) if self.device.type == "cuda" else 0
        return max(reserved - self.bytes_held(), 0)

    def _not_charged(self) -> int:
        """Bytes of graphs that the run under way is not charged for: of its own, those that they had when it began."""
        in_use = {state_of(name) for name in self._in_use}
        graphs = self._placed.items()
        return sum(min(stored.bytes, stored.before) if key in in_use else stored.bytes for key, stored in graphs)

    def settle(self, in_use: Iterable[str] = ()) -> bool:
        """Count the bytes of every graph again, and evict the least recently used beyond the limit; True if any was.

        Graphs called ``in_use`` stay, and do not count.
        """
        names, before = list(in_use), len(self._placed)
        used = {state_of(name) for name in names}
        with self._lock:
            self._handed_out &= used
            unused = unused_bytes() if any(stored.pool is not None for stored in self._placed.values()) else {}
            for stored in self._placed.values():
                stored.bytes = bytes_of(stored.graph, self.device) + unused.get(_number(stored.pool), 0)
            for stored in self._host.values():  # only here: other threads need graphs while one trains
                stored.bytes = bytes_of(stored.graph, HOST)
            for key in [key for key in self._placed if key not in used]:
                if self.bytes_held(names) <= self.device_bytes:
                    break
                del self._placed[key]
            evicted = len(self._placed) < before
        self._changed()
        return evicted

    def clear(self) -> None:
        """Evict everything from the device."""
        with self._lock:
            self._placed.clear()
            self._handed_out.clear()
        self._changed()

    def _changed(self) -> None:
        with self._lock:
            if self._on_change is not None:
                self._on_change(self._around + self._not_charged())


@contextmanager
def sharing(store: GraphStore) -> Iterator[list[Observation]]:
    """Runs inside take their graphs from ``store``, and leave them there; yields what their epochs took.

    That is not learned from here: they may not have had the device alone.
    """
    token, store.observations = _SHARED.set(store), []
    try:
        yield store.observations
    finally:
        _SHARED.reset(token)


def shared_store() -> GraphStore | None:
    """The store that runs share here; None outside of :func:`sharing`."""
    return _SHARED.get()


def state_of(name: str) -> Hashable:
    """The name of a graph with the state of its file or folder: a file that was written anew is another graph."""
    try:
        path = Path(name)
        if path.is_dir():
            files = [path, *sorted(path.iterdir())]
        else:  # edges.csv is read with the nodes.csv of its folder
            files = [path, *(sorted(path.parent.glob("nodes.*")) if path.name.startswith("edges.") else ())]
        return (name, *((file.name, (status := os.stat(file)).st_mtime_ns, status.st_size) for file in files))
    except OSError:
        return (name,)


def bytes_of(thing: Any, device: torch.device) -> int:
    """Bytes of the distinct tensor storages on ``device`` that are reachable from ``thing``."""
    sizes: dict[int, int] = {}
    seen: set[int] = set()
    waiting = [thing]
    while waiting:
        item = waiting.pop()
        if isinstance(item, ATOMS) or id(item) in seen:
            continue
        seen.add(id(item))
        if isinstance(item, Tensor):
            if item.device.type == device.type:
                storage = item.untyped_storage()
                sizes[storage.data_ptr()] = storage.nbytes()
        elif isinstance(item, (dict, list, tuple, set)):
            waiting += item.values() if isinstance(item, dict) else item
        else:
            slots = (name for name in getattr(type(item), "__slots__", ()) if isinstance(name, str))
            waiting += [getattr(item, name, None) for name in slots]
            waiting += vars(item).values() if hasattr(item, "__dict__") and not callable(item) else ()
    return sum(sizes.values())


def _pinned(graph: Graph) -> Graph:
    """The graph with dense features in page-locked memory, from which a GPU copies several times as fast."""
    if not isinstance(graph.x, Tensor):
        return graph
    try:
        pinned = graph._changed(x=graph.x.pin_memory())
    except RuntimeError:  # so much cannot be locked here
        return graph
    pinned._stats = graph._stats
    return pinned


@contextmanager
def _own_pool(device: torch.device) -> Iterator[Any]:
    """Allocate from a memory pool of its own, which is returned; None on a CPU, and where torch has no pools."""
    pool = None
    with suppress(AttributeError, RuntimeError):
        pool = torch.cuda.MemPool() if device.type == "cuda" else None
    with nullcontext() if pool is None else torch.cuda.use_mem_pool(pool, device=device):
        yield pool


def _number(pool: Any) -> tuple[int, int] | None:
    return None if pool is None else tuple(pool.id)


def unused_bytes() -> dict[tuple[int, int] | None, int]:
    """Bytes of the segments of every memory pool on the GPU that no array has.

    Not by ``torch.cuda.memory_snapshot(pool.id)``: that gives up a reference too many of both numbers of the id (torch
    2.11). Python never frees those up to 256; a later one is freed while it is in use, and the process crashes some
    time after, wherever it allocates the next number: 3 times in some 500 trainings on an H200, and not once since.
    """
    unused: dict[tuple[int, int] | None, int] = {}
    for segment in torch.cuda.memory_snapshot():  # type: ignore[no-untyped-call]
        number = tuple(segment["segment_pool_id"])
        unused[number] = unused.get(number, 0) + segment["total_size"] - segment["allocated_size"]
    return unused


@contextmanager
def _side_stream(device: torch.device) -> Iterator[None]:
    """Copy on a stream of its own, synchronised at the end: what was copied is there for every other stream."""
    if device.type != "cuda":
        yield
        return
    stream = torch.cuda.Stream(device)  # type: ignore[no-untyped-call]
    with torch.cuda.stream(stream):
        try:
            yield
        finally:
            stream.synchronize()


# ---- Make a sweep of tasks with ``split="all"``: one member per split of the graph.


def with_all_splits(work: Task | Sweep) -> Task | Sweep:
    """``work`` with a member per split for tasks with ``split="all"``; itself if there are none."""
    tasks = [work] if isinstance(work, Task) else work.tasks()
    graphs = {id(task.graph): task.graph for task in tasks if task.split == ALL_SPLITS}
    if not graphs:
        return work
    counts = {key: (as_graph(graph) or catalog.stats(graph)).num_splits for key, graph in graphs.items()}
    if isinstance(work, Sweep) and len(set(counts.values())) == 1:
        numbers = tuple(range(next(iter(counts.values()))))

        def numbered(settings: Mapping[str, Any]) -> dict[str, Any]:
            return {**settings, **({"split": numbers} if settings.get("split") == ALL_SPLITS else {})}

        explicit = [numbered(entry) for entry in work.explicit]
        drawn = {"samples": work.samples, "sample_seed": work.sample_seed, "name": work.name}
        return Sweep(tasks=explicit, **drawn, **numbered(work.settings))
    members = []
    for task in tasks:
        several = range(counts[id(task.graph)]) if task.split == ALL_SPLITS else ()
        members += [task.with_values(split=number, name=None) for number in several] or [task]
    return Sweep.from_tasks(members, work.name)


# ---- Graphs of the tasks of a plan or a run


class Graphs:
    """Graphs by the tasks that train on them, each found once; nothing is on ``device`` before :meth:`on_device`.

    A graph of a named shape is made on ``device``, where that is fastest; with ``on_host`` it is made on the host,
    since making one may take more memory than training on it. ``store``: where a worker keeps graphs between runs.
    """

    def __init__(self, device: torch.device = HOST, on_host: bool = False, store: GraphStore | None = None) -> None:
        self._device, self._maker, self._store = device, HOST if on_host else device, store
        self._found: dict[Hashable, Graph | GraphStats] = {}
        self._placed: dict[Hashable, tuple[tuple[str, str], Graph]] = {}  # where its parts lie, and the graph
        self._true: dict[Hashable, GraphStats] = {}

    def summary(self, task: Task) -> Graph | GraphStats:
        """The graph of ``task`` on the host; of a named shape its summary alone, as a plan would have it."""
        key, graph = graph_key(task), task.graph
        if key not in self._found:
            if isinstance(graph, str) and graph.startswith("shape:"):
                self._found[key] = catalog.stats(graph)
            elif self._store is not None and isinstance(graph, str):
                self._found[key] = self._store.host(graph, lambda: find_graph(task, HOST))
            else:
                self._found[key] = find_graph(task, HOST)
        return self._found[key]

    def stats(self, task: Task) -> GraphStats:
        """What grouping knows of the graph of ``task``; a Graph remembers its own."""
        summary = self.summary(task)
        return summary if isinstance(summary, GraphStats) else summary.stats()

    def on_device(self, task: Task) -> Graph:
        """The graph of ``task`` where it is trained, all of it."""
        return self.placed(task, on_device(self._device.type))

    def placed(self, task: Task, placement: DataPlacement) -> Graph:
        """The graph of ``task`` with its parts where ``placement`` says; one that lies elsewhere is let go."""
        key, where = graph_key(task), (placement.features, placement.topology)
        if self._placed.get(key, (None,))[0] != where:
            self._placed.pop(key, None)
            device = on_device(self._device.type)
            if self._store is None or where != (device.features, device.topology) or not isinstance(task.graph, str):
                graph = self.bring(task, placement)
            else:
                graph = self._store.placed(task.graph, lambda: self.bring(task, placement))
            self._placed[key], self._true[key] = (where, graph), graph.stats()
        return self._placed[key][1]

    def bring(self, task: Task, placement: DataPlacement | None = None) -> Graph:
        """The graph of ``task``, copied to where ``placement`` says (None: to the device)."""
        graph = self.summary(task)
        if isinstance(graph, GraphStats):
            graph = find_graph(task, self._maker)
        check_ids(graph)
        return place_graph(graph, placement or on_device(self._device.type), self._device)

    def true_stats(self, task: Task) -> GraphStats:
        """The summary of the graph itself where it was trained on, else what is known of it."""
        return self._true.get(graph_key(task)) or self.stats(task)

    def let_go(self, needed: Iterable[Task]) -> None:
        """Take every graph off the device that none of ``needed`` trains on."""
        keys = {graph_key(task) for task in needed}
        self._placed = {key: graph for key, graph in self._placed.items() if key in keys}
        if self._store is not None:
            self._store.settle(key for key in keys if isinstance(key, str))


def find_graph(task: Task, device: torch.device) -> Graph:
    """The graph that ``task.graph`` is or names; a generated one is made on ``device``."""
    return as_graph(task.graph) or catalog.load(task.graph, device=device)


def check_trainable(task: Task, graph: Graph | GraphStats) -> None:
    """Raise an error unless the graph has the features, labels and splits that ``task`` needs: for plans and runs."""
    stats = graph if isinstance(graph, GraphStats) else graph.stats()
    if isinstance(task.split, int) and task.split >= stats.num_splits:
        several = (
            f"{stats.num_splits} splits, 0..{stats.num_splits - 1}" if stats.num_splits > 1 else "1 split, number 0"
        )
        raise SpecError(f"task {task.label!r}: split={task.split}, but graph {stats.name!r} has {several}")
    labelled = stats.num_classes > 0 if isinstance(graph, GraphStats) else graph.y is not None
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
    if task.objective == "auto" and isinstance(graph, Graph) and graph.one_hot:
        raise GraphError(
            f"{name}: every row of y has a single 1, which is one class per node if it is one-hot, and many labels "
            'else; give y.argmax(1) for classes, or objective="multilabel" with the task for labels'
        )
    if task.sampled and task.norm == "batch" and task.batch != FIT and not isinstance(graph, GraphStats):
        batch_of_one = task.batch == 1 or graph.train.numel() % task.batch == 1  # the last one, or all of them
        node = lone_node(graph) if batch_of_one else None
        if node is not None:  # a batch of one node has no variance
            raise SpecError(
                f"task {task.label!r}: norm='batch' takes a variance over at least two nodes, but of "
                f"{graph.train.numel():,} training nodes in batches of {task.batch:,} one is left over, and node "
                f"{node} has no neighbours; choose another batch, or norm='layer'"
            )
    sizes = {"train": stats.num_train, "val": stats.num_val, "test": stats.num_test}
    metric = metric_name(task, stats.multilabel, stats.regression)
    decides = deciding_column(task, metric, columns_of([split for split, size in sizes.items() if size], metric))
    for setting in ("patience", "keep_top") if task.select is None and decides < 0 else ():
        if getattr(task, setting) is not None:
            raise SpecError(
                f"task {task.label!r}: {setting}={getattr(task, setting)} needs validation nodes, but {name} has none; "
                f"leave {setting} out or give val="
            )


def lone_node(graph: Graph) -> int | None:
    """A training node without neighbours except itself, if there is one: it is sampled alone."""
    adj, train = graph.adj, graph.train.to(graph.adj.indptr.device)
    start, end = adj.indptr[train], adj.indptr[train + 1]
    lone = start == end
    single = (end - start == 1).nonzero().flatten()
    lone[single] = adj.indices[start[single]].to(train.dtype) == train[single]
    nodes = torch.nonzero(lone)
    return int(train[nodes[0, 0]]) if nodes.numel() else None
