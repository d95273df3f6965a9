"""GraphStore: graphs that a worker process keeps between runs, on the host and on its device, evicted by use.

A graph stays with everything derived from it: its transpose, normalised forms, work lists and cached first
aggregations. The least recently used ones are evicted once they take more than the limit. On a GPU each graph has a
memory pool of its own, so that its arrays never pin a segment that a training used.
"""

from __future__ import annotations

import os
import threading
from collections import OrderedDict
from collections.abc import Callable, Hashable, Iterable, Iterator
from contextlib import AbstractContextManager, contextmanager, nullcontext
from contextvars import ContextVar
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import torch
from torch import Tensor

from weft.graph.data.graph import Graph
from weft.runtime.device.cuda_graph import no_capture

Changed = Callable[[int], None]
_SHARED: ContextVar[GraphStore | None] = ContextVar("shared graphs", default=None)
ATOMS = (str, bytes, int, float, bool, complex, type(None), torch.dtype, torch.device)


@dataclass
class _Kept:
    graph: Graph
    pool: Any = None
    bytes: int = 0


@dataclass
class GraphStore:
    """Graphs of named files and shapes, by name and state of the file.

    ``device_bytes`` and ``host_bytes`` bound what is kept of graphs that no run uses at the moment.
    """

    device: torch.device
    device_bytes: int
    host_bytes: int
    _on_change: Changed | None = None
    _in_use: frozenset[str] = frozenset()
    _placed: OrderedDict[Hashable, _Kept] = field(default_factory=OrderedDict)
    _host: OrderedDict[Hashable, Graph] = field(default_factory=OrderedDict)
    _lock: threading.RLock = field(default_factory=threading.RLock)

    def host(self, name: str, make: Callable[[], Any]) -> Any:
        """The graph called ``name`` on the host; ``make`` finds it, unless it is kept."""
        key = state_of(name)
        with self._lock:
            if key not in self._host:
                made = make()
                if not isinstance(made, Graph):
                    return made  # a summary
                self._host[key] = _pinned(made) if self.device.type == "cuda" else made
            self._host.move_to_end(key)
            self._trim_host(key)
            return self._host[key]

    def placed(self, name: str, make: Callable[[], Graph]) -> Graph:
        """The graph called ``name`` on the device; ``make`` brings it there, unless it is kept."""
        key = state_of(name)
        with self._lock:
            if key not in self._placed:
                self._placed[key] = self._place(make)
            self._placed.move_to_end(key)
            return self._placed[key].graph

    def holds(self, name: str) -> bool:
        """Whether the graph called ``name`` is on the device."""
        with self._lock:
            return state_of(name) in self._placed

    def prefetch(self, name: str, make: Callable[[], Graph], expected: int) -> bool:
        """Bring a graph of about ``expected`` bytes to the device beside a training, if that keeps the limit.

        Copies run on a stream of their own, and never while a CUDA graph is captured.
        """
        with self._lock:
            others = self.bytes_held(self._in_use)
            if self.holds(name) or others + expected > self.device_bytes:
                return False
            if self._on_change is not None:
                self._on_change(others + expected)
        with no_capture(), _side_stream(self.device):
            try:
                self.placed(name, make)
            except torch.OutOfMemoryError:
                return False
            finally:
                self._changed()
        return True

    @contextmanager
    def following(self, in_use: Iterable[str], changed: Changed) -> Iterator[None]:
        """A run of the graphs called ``in_use`` is under way inside: ``changed`` is called with the bytes of others.

        It is called at once, before they grow and after they shrink, so that the cap of the run can follow.
        """
        self._in_use, self._on_change = frozenset(in_use), changed
        self._changed()
        try:
            yield
        finally:
            self._in_use, self._on_change = frozenset(), None

    def _place(self, make: Callable[[], Graph]) -> _Kept:
        pool = _own_pool(self.device)
        with _from_pool(pool, self.device):
            graph = make()
        graph.kept = {}
        return _Kept(graph, pool, bytes_of(graph, self.device))

    def bytes_held(self, without: Iterable[str] = ()) -> int:
        """Bytes on the device of all graphs but those called ``without``, as last counted."""
        left_out = {state_of(name) for name in without}
        with self._lock:
            return sum(kept.bytes for key, kept in self._placed.items() if key not in left_out)

    def settle(self, in_use: Iterable[str] = ()) -> None:
        """Count the bytes of every graph anew, and evict the least recently used beyond the limit.

        Graphs called ``in_use`` stay, and do not count.
        """
        kept = {state_of(name) for name in in_use}
        with self._lock:
            for one in self._placed.values():
                one.bytes = bytes_of(one.graph, self.device)
            for key in [key for key in self._placed if key not in kept]:
                if self.bytes_held(in_use) <= self.device_bytes:
                    break
                del self._placed[key]
        self._changed()

    def clear(self) -> None:
        """Evict everything from the device."""
        with self._lock:
            self._placed.clear()
        self._changed()

    def _changed(self) -> None:
        if self._on_change is not None:
            self._on_change(self.bytes_held(self._in_use))

    def _trim_host(self, newest: Hashable) -> None:
        host = torch.device("cpu")
        total = sum(bytes_of(graph, host) for graph in self._host.values())
        while total > self.host_bytes and next(iter(self._host)) != newest:
            _, gone = self._host.popitem(last=False)
            total -= bytes_of(gone, host)


@contextmanager
def sharing(store: GraphStore) -> Iterator[None]:
    """Runs inside take their graphs from ``store``, and leave them there."""
    token = _SHARED.set(store)
    try:
        yield
    finally:
        _SHARED.reset(token)


def shared_store() -> GraphStore | None:
    """The store that runs share here; None outside of :func:`sharing`."""
    return _SHARED.get()


def state_of(name: str) -> Hashable:
    """The name of a graph with the state of its file or folder: a file that was written anew is another graph."""
    try:
        path = Path(name)
        places = [path, *sorted(path.iterdir())] if path.is_dir() else [path]
        return (name, *((place.name, (found := os.stat(place)).st_mtime_ns, found.st_size) for place in places))
    except OSError:
        return (name,)


def bytes_of(thing: Any, device: torch.device) -> int:
    """Bytes of the distinct tensor storages on ``device`` that are reachable from ``thing``."""
    sizes: dict[int, int] = {}
    seen: set[int] = set()
    waiting = [thing]
    while waiting:
        one = waiting.pop()
        if isinstance(one, ATOMS) or id(one) in seen:
            continue
        seen.add(id(one))
        if isinstance(one, Tensor):
            if one.device.type == device.type:
                storage = one.untyped_storage()
                sizes[storage.data_ptr()] = storage.nbytes()
        else:
            waiting += _inside(one)
    return sum(sizes.values())


def _inside(thing: Any) -> list[Any]:
    if isinstance(thing, dict):
        return list(thing.values())
    if isinstance(thing, (list, tuple, set)):
        return list(thing)
    slots = [getattr(thing, name, None) for name in getattr(type(thing), "__slots__", ()) if isinstance(name, str)]
    inside = list(vars(thing).values()) if hasattr(thing, "__dict__") and not callable(thing) else []
    return [*slots, *inside]


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


def _own_pool(device: torch.device) -> Any:
    """A memory pool for one graph; None on a CPU, and where torch has none."""
    if device.type != "cuda":
        return None
    try:
        return torch.cuda.MemPool()
    except (AttributeError, RuntimeError):
        return None


def _from_pool(pool: Any, device: torch.device) -> AbstractContextManager[Any]:
    return nullcontext() if pool is None else torch.cuda.use_mem_pool(pool, device=device)


def _side_stream(device: torch.device) -> AbstractContextManager[Any]:
    return _SideStream(device) if device.type == "cuda" else nullcontext()


class _SideStream:
    """A stream for copies, waited for by the host on leaving: what was copied is there for every other stream."""

    def __init__(self, device: torch.device) -> None:
        self._stream = torch.cuda.Stream(device)  # type: ignore[no-untyped-call]
        self._inside = torch.cuda.stream(self._stream)

    def __enter__(self) -> None:
        self._inside.__enter__()

    def __exit__(self, *error: Any) -> None:
        self._stream.synchronize()
        self._inside.__exit__(*error)
