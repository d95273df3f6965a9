"""GraphStore: graphs that a worker process keeps between runs, on the host and on its device, evicted by use.

A graph stays with everything derived from it: its transpose, normalised forms, work lists and cached first
aggregations. The least recently used ones are evicted once they take more than the limit. On a GPU each graph has a
memory pool of its own, so that its arrays never pin a segment that a training used; a graph takes the whole segments of
that pool. What else the process holds when no run is under way (workspaces, ends of segments) is ``around``.
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

from weft.core.units import show_bytes
from weft.engine.memory.device_pool import DevicePool
from weft.engine.memory.pooled_graph import arrays_of, into_pool
from weft.graph.data.graph import Graph
from weft.runtime.device.cuda_graph import no_capture
from weft.sched.two_ended_pool import padded

Changed = Callable[[int], None]
_SHARED: ContextVar[GraphStore | None] = ContextVar("shared graphs", default=None)
SEGMENT_ENDS = 48 << 20  # of a graph's own memory pool, beyond its arrays: torch allocates segments of 2 and 20 MiB
ATOMS = (str, bytes, int, float, bool, complex, type(None), torch.dtype, torch.device)
HOST = torch.device("cpu")


@dataclass
class _Kept:
    graph: Graph
    pool: Any = None
    bytes: int = 0


@dataclass
class GraphStore:
    """Graphs of named files and shapes, by name and state of the file.

    ``device_bytes`` and ``host_bytes`` bound what is kept of graphs that no run uses at the moment. ``pool``: one
    buffer of the device that the arrays of graphs lie in, as far as they fit, with the weights that are fetched ahead
    and the state of a group. ``around``: bytes that the process holds beside graphs between runs, as last counted: they
    are none of the next run's.
    """

    device: torch.device
    device_bytes: int
    host_bytes: int
    pool: DevicePool | None = None
    around: int = 0
    _on_change: Changed | None = None
    _in_use: frozenset[str] = frozenset()
    _placed: OrderedDict[Hashable, _Kept] = field(default_factory=OrderedDict)
    _host: OrderedDict[Hashable, _Kept] = field(default_factory=OrderedDict)
    _handed_out: set[Hashable] = field(default_factory=set)  # to a run that may still use them
    _weights: dict[Hashable, dict[str, Tensor]] = field(default_factory=dict)  # fetched ahead, by their file
    _taken: Hashable = None  # those of them that are in use
    _lock: threading.RLock = field(default_factory=threading.RLock)

    def host(self, name: str, make: Callable[[], Any]) -> Any:
        """The graph called ``name`` on the host; ``make`` finds it, unless it is kept."""
        key = state_of(name)
        with no_capture(), self._lock:  # in this order, here and elsewhere; memory is pinned, and given back
            if key not in self._host:
                made = make()
                if not isinstance(made, Graph):
                    return made  # a summary
                kept = _pinned(made) if self.device.type == "cuda" else made
                self._host[key] = _Kept(kept, bytes=bytes_of(kept, HOST))
                self._trim_host(key)
            self._host.move_to_end(key)
            return self._host[key].graph

    def placed(self, name: str, make: Callable[[], Graph]) -> Graph:
        """The graph called ``name`` on the device; ``make`` brings it there, unless it is kept."""
        key = state_of(name)
        with no_capture(), self._lock:
            self._put(key, make)
            self._handed_out.add(key)
            return self._placed[key].graph

    def _put(self, key: Hashable, make: Callable[[], Graph]) -> None:
        if key not in self._placed:
            self._placed[key] = self._place(key, make)
        self._placed.move_to_end(key)

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
            if self._on_change is not None and self.pool is None:
                self._on_change(self.around + others + expected + SEGMENT_ENDS)
        with no_capture(), _side_stream(self.device):
            try:
                with self._lock:
                    self._put(state_of(name), make)
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
        with self._lock:
            self._in_use, self._on_change = frozenset(in_use), changed
            self._changed()
        try:
            yield
        finally:
            with self._lock:  # a thread that fetches calls ``changed`` before this, or never again
                self._in_use, self._on_change = frozenset(), None

    def _place(self, key: Hashable, make: Callable[[], Graph]) -> _Kept:
        if self.pool is not None:
            return self._place_in(self.pool, key, make)
        pool = _own_pool(self.device)
        with _from_pool(pool, self.device):
            graph = make()
        graph.kept = {}
        unused = {} if pool is None else unused_bytes()
        return _Kept(graph, pool, self._bytes_of(graph, key) + unused.get(_number(pool), 0))

    def _place_in(self, pool: DevicePool, key: Hashable, make: Callable[[], Graph]) -> _Kept:
        """A graph in the pool, once enough is evicted of those that no run has; beside it, and said so, if too large.

        ``make`` gives it wherever it is made: on the host, from which it is copied once.
        """
        made = make()
        owner, size = _owner(key), sum(padded(array.nbytes) for array in arrays_of(made).values())
        for other in [other for other in self._placed if other not in self._handed_out]:
            if size <= max((stop - start for start, stop in pool.holes()), default=0):
                break
            self._evict(other)
        graph = into_pool(made, pool, owner)
        if graph is None:
            told = f"graph {made.name!r} ({show_bytes(size)}) does not fit into the worker's pool"
            print(f"{told} of {show_bytes(pool.capacity)}; it lies beside it", flush=True)
            graph = made.to(self.device)
        graph.kept = {}
        return _Kept(graph, None, self._bytes_of(graph, key))

    def _bytes_of(self, graph: Graph, key: Hashable) -> int:
        if self.pool is None:
            return bytes_of(graph, self.device)
        return bytes_of(graph, self.device, self.pool.storage) + self.pool.held(_owner(key))

    def _evict(self, key: Hashable) -> None:
        del self._placed[key]
        if self.pool is not None:
            self.pool.clear(_owner(key))

    def fetch_weights(self, path: str, read: Callable[[], dict[str, Tensor]]) -> bool:
        """Bring the weights of a file into the pool beside a training; whether they are there."""
        key = state_of(path)
        if self.pool is None or key in self._weights:
            return key in self._weights
        for other in [other for other in self._weights if other != self._taken]:  # nobody came for them
            del self._weights[other]
            self.pool.clear(_owner(other))
        with no_capture(), _side_stream(self.device):
            found = self.pool.copy_in(_owner(key), read())
        if found is not None:
            self._weights[key] = found
        return found is not None

    def take_weights(self, path: str) -> dict[str, Tensor] | None:
        """The weights of a file that were fetched ahead, as near to the pool's end as they go; None if they were not.

        They are the caller's until :meth:`drop_weights`.
        """
        key = state_of(path)
        if self.pool is None or key not in self._weights:
            return None
        self._taken = key
        self.pool.pack(_owner(key))
        return self._weights[key]

    def bytes_held(self, without: Iterable[str] = ()) -> int:
        """Bytes on the device of all graphs but those called ``without``, as last counted."""
        left_out = {state_of(name) for name in without}
        with self._lock:
            return sum(kept.bytes for key, kept in self._placed.items() if key not in left_out)

    def settle(self, in_use: Iterable[str] = ()) -> bool:
        """Count the bytes of every graph anew, and evict the least recently used beyond the limit; whether any was.

        Graphs called ``in_use`` stay, and do not count.
        """
        names, before = list(in_use), len(self._placed)
        kept = {state_of(name) for name in names}
        with self._lock:
            self._handed_out &= kept
            unused = unused_bytes() if any(one.pool is not None for one in self._placed.values()) else {}
            for key, one in self._placed.items():
                one.bytes = self._bytes_of(one.graph, key) + unused.get(_number(one.pool), 0)
            for one in self._host.values():  # here alone: other threads ask for graphs while one trains
                one.bytes = bytes_of(one.graph, HOST)
            for key in [key for key in self._placed if key not in kept]:
                if self.bytes_held(names) <= self.device_bytes:
                    break
                self._evict(key)
            evicted = len(self._placed) < before
        self._changed()
        return evicted

    def clear(self) -> None:
        """Evict everything from the device."""
        with self._lock:
            for key in list(self._placed):
                self._evict(key)
            self._handed_out.clear()
        self._changed()

    def drop_weights(self, path: str) -> None:
        """Give back weights that were fetched ahead."""
        if self.pool is not None and self._weights.pop(state_of(path), None) is not None:
            self.pool.clear(_owner(state_of(path)))

    def _changed(self) -> None:
        with self._lock:
            if self._on_change is not None:
                self._on_change(self.around + self.reserved_bytes(self._in_use))

    def reserved_bytes(self, without: Iterable[str] = ()) -> int:
        """Bytes of the device that graphs take, but those called ``without``, and the pool, whoever has what of it."""
        if self.pool is None:
            return self.bytes_held(without)
        left_out = {state_of(name) for name in without}
        with self._lock:
            kept = [(key, one.bytes) for key, one in self._placed.items() if key not in left_out]
            return self.pool.capacity + sum(size - self.pool.held(_owner(key)) for key, size in kept)

    def _trim_host(self, newest: Hashable) -> None:
        total = sum(kept.bytes for kept in self._host.values())
        while total > self.host_bytes and next(iter(self._host)) != newest:
            _, gone = self._host.popitem(last=False)
            total -= gone.bytes


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


def _owner(key: Hashable) -> str:
    return f"kept/{key!r}"


def bytes_of(thing: Any, device: torch.device, without: int | None = None) -> int:
    """Bytes of the distinct tensor storages on ``device`` that are reachable from ``thing``.

    ``without``: the address of one that does not count.
    """
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
    return sum(size for address, size in sizes.items() if address != without)


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


def _number(pool: Any) -> tuple[int, int] | None:
    return None if pool is None else tuple(pool.id)


def unused_bytes() -> dict[tuple[int, int] | None, int]:
    """Bytes of the segments of every memory pool on the GPU that no array has.

    Not by ``torch.cuda.memory_snapshot(pool.id)``: that gives up a reference too many of both numbers of the id (torch
    2.11). Python never frees those up to 256; a later one is freed while it is in use, and the process crashes some
    time after, wherever it allocates the next number.
    """
    found: dict[tuple[int, int] | None, int] = {}
    for one in torch.cuda.memory_snapshot():  # type: ignore[no-untyped-call]
        number = tuple(one["segment_pool_id"])
        found[number] = found.get(number, 0) + one["total_size"] - one["allocated_size"]
    return found


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
