"""The graphs that a worker keeps between groups, and those that it fetches before their group starts."""

from __future__ import annotations

import queue
import threading
from collections.abc import Callable
from contextlib import suppress

import torch

from weft.core.lazy.names import collect_everything, leave_out_of_collections
from weft.core.task import Task
from weft.engine.base.graph_cache import Graphs
from weft.engine.base.graph_store import GraphStore, bytes_of
from weft.engine.base.memory_errors import give_back_memory
from weft.engine.inference import read_weights
from weft.engine.memory.device_pool import DevicePool
from weft.runtime.device.cuda_graph import no_capture
from weft.serve.options import LEFTOVER_BYTES

HOST_BYTES = 8 << 30  # of graphs on the host; those in files are mapped, and take memory only as far as it is free


class KeptGraphs:
    """A store for ``device``; graphs that no run uses take at most ``keep_bytes`` there.

    ``pooled``: their arrays lie in one buffer of so many bytes, allocated now, with the weights that are fetched ahead
    and the state of a group.
    """

    def __init__(self, device: str, keep_bytes: int, pooled: bool = False) -> None:
        self._device = torch.device(device)
        pool = DevicePool(self._device, keep_bytes) if pooled and keep_bytes else None
        self.store = GraphStore(self._device, keep_bytes, HOST_BYTES, pool)
        self._fetching = threading.Lock()  # from when a graph is wanted until it is there
        self._wanted: queue.SimpleQueue[tuple[str, str | None]] = queue.SimpleQueue()
        self._thread: threading.Thread | None = None

    def prefetch(self, graph: str, weights: str | None = None) -> None:
        """Fetch a graph in a thread, while the main thread trains; one at a time, and none if it cannot be kept.

        ``weights``: a file of weights to fetch as well, into the pool.
        """
        wanted = weights is not None or (graph and not self.store.holds(graph))
        if self.store.device_bytes and wanted and self._fetching.acquire(blocking=False):
            self._wanted.put((graph, weights))
            if self._thread is None:  # one for all: CUDA has state of every thread, which goes when the thread ends
                self._thread = threading.Thread(target=self._fetch_on, name="fetches graphs", daemon=True)
                self._thread.start()

    def _fetch_on(self) -> None:
        while True:
            self._fetch(*self._wanted.get())

    def _fetch(self, graph: str, weights: str | None) -> None:
        try:
            if weights is not None:
                with suppress(Exception):  # as with a graph
                    self.store.fetch_weights(weights, lambda: read_weights(weights))
            if not graph:
                return
            # Whatever is wrong with the graph, its own task will report. What the error holds goes before a capture.
            with no_capture(), suppress(Exception):
                task = Task(graph=graph, model="gcn")
                graphs = Graphs(self._device, on_host=True, store=self.store)
                expected = bytes_of(graphs.summary(task), torch.device("cpu"))  # 0 of a shape, which is not fetched
                if expected:
                    self.store.prefetch(graph, lambda: graphs.for_store(task), expected)
        finally:
            self._fetching.release()

    def settle(self) -> int:
        """After a group: evict what is too much, and all if more than graphs stays; the bytes that stay beside them.

        Beyond ``LEFTOVER_BYTES`` a model has leaked, and the process has to go. 0 on a CPU, where it cannot be told.
        """
        evicted = self.store.settle()
        if self._device.type != "cuda":
            return 0
        torch.cuda.synchronize(self._device)  # says so if a kernel has failed
        # What stays after a group, kernels above all, is not looked through after the next: up to 0.15 s.
        collect = collect_everything if evicted else leave_out_of_collections
        if not self._fetching.acquire(blocking=False):  # a graph on its way is on the device, and not in the store yet
            self._give_back(collect)
            return self.store.around
        try:
            if self._count_around(collect) > LEFTOVER_BYTES:
                self.store.clear()
                self._count_around(collect_everything)
            return self.store.around
        finally:
            self._fetching.release()

    def _give_back(self, collect: Callable[[], None]) -> None:
        torch._C._cuda_clearCublasWorkspaces()
        collect()
        give_back_memory(self._device, gone=True)

    def _count_around(self, collect: Callable[[], None]) -> int:
        """Count what the process holds beside graphs; what is cached and free is given back first."""
        self._give_back(collect)
        self.store.around = max(torch.cuda.memory_reserved(self._device) - self.store.reserved_bytes(), 0)
        return self.store.around
