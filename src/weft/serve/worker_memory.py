"""How many bytes a worker holds, how many its device has for tasks, and a limit on what a group may take of a CPU."""

from __future__ import annotations

import os
import queue
import threading
import time
from collections.abc import Callable, Iterator
from contextlib import contextmanager, suppress
from pathlib import Path

import torch

from weft.core.gpus import busy_share
from weft.core.startup import collect_everything, leave_out_of_collections
from weft.core.task import Task
from weft.engine.errors import give_back_memory
from weft.engine.graphs import Graphs, GraphStore, bytes_of
from weft.engine.machine import machine_with
from weft.engine.memory import room
from weft.runtime.device.cuda_graph import no_capture
from weft.serve.options import LEFTOVER_BYTES
from weft.serve.processes import computing

try:
    import resource
except ImportError:  # Windows: no limit
    resource = None  # type: ignore[assignment]


def room_for_tasks(device: str) -> int:
    """Bytes that groups may take on ``device``, as far as it is free now."""
    there = torch.device(device)
    return room(there, machine_with(there))


def bytes_beside(device: str) -> int:
    """Bytes of a GPU that a worker may hold between groups in addition to graphs (context, workspaces); 0 on a CPU."""
    if not device.startswith("cuda"):
        return 0
    return machine_with(torch.device(device)).context_bytes + LEFTOVER_BYTES


def held_bytes(device: str) -> int:
    """Bytes that this worker holds: reserved on a GPU by this process; resident on a CPU, those of its ranks too."""
    if device.startswith("cuda"):
        begun = torch.cuda.is_initialized()  # type: ignore[no-untyped-call]
        return int(torch.cuda.memory_reserved(device)) if begun else 0
    return sum(_process_bytes(1, pid) or 0 for pid in computing(os.getpid())[0])


def busy_since(device: str, before: tuple[float, float]) -> tuple[float | None, tuple[float, float]]:
    """How much of ``device`` is in use: of a GPU in all, of a CPU by this worker; and two clocks for the next call."""
    now = time.perf_counter(), max(time.process_time(), computing(os.getpid())[1])
    if not device.startswith("cuda"):
        return (now[1] - before[1]) / max(now[0] - before[0], 1e-9) / (os.cpu_count() or 1), now
    begun = torch.cuda.is_initialized()  # type: ignore[no-untyped-call]
    return (busy_share(f"GPU-{torch.cuda.get_device_properties(device).uuid}") if begun else 0.0), now


@contextmanager
def byte_limit(device: str, limit: int | None) -> Iterator[None]:
    """Inside, allocations of a CPU worker fail once it has ``limit`` bytes more than now, small ones included.

    The failure is an error in the task that needs the memory. A GPU has a cap of its own. The system counts
    private writable memory, mapped or not yet touched, so ``limit`` has to leave room for threads and libraries.
    """
    if limit is None or device.startswith("cuda") or resource is None or (now := _process_bytes(5)) is None:
        yield
        return
    before = resource.getrlimit(resource.RLIMIT_DATA)
    highest = before[1] if before[1] != resource.RLIM_INFINITY else now + limit
    resource.setrlimit(resource.RLIMIT_DATA, (min(now + limit, highest), before[1]))
    try:
        yield
    finally:
        resource.setrlimit(resource.RLIMIT_DATA, before)


def _process_bytes(column: int, pid: int | str = "self") -> int | None:
    """Memory of a process: resident (1) or private and writable (5); None where the system does not say."""
    try:
        pages = int(Path(f"/proc/{pid}/statm").read_text(encoding="utf-8").split()[column])
    except (OSError, ValueError, IndexError):
        return None
    return pages * os.sysconf("SC_PAGE_SIZE")


# ---- Graphs that a worker keeps between groups, or fetches while the group before theirs trains.
#
# Fetching ahead saves the reading: 1.4 s for an .npz file of 1.1 million edges and 170,000 x 128 features on two cores,
# nothing for a folder of ``Graph.save``, which is mapped.

HOST_BYTES = 8 << 30  # of graphs on the host; those in files are mapped, and take memory only as far as it is free


class KeptGraphs:
    """A store for ``device``; graphs that no run uses take at most ``keep_bytes`` there."""

    def __init__(self, device: str, keep_bytes: int) -> None:
        self._device = torch.device(device)
        self.store = GraphStore(self._device, keep_bytes, HOST_BYTES)
        self._fetching = threading.Lock()  # held while a graph is on its way
        self._wanted: queue.SimpleQueue[str] = queue.SimpleQueue()
        self._thread: threading.Thread | None = None

    def fetch_next(self, graph: str) -> None:
        """Fetch the graph of the group that is likely next; in a thread of its own."""
        self._wanted.put(graph)
        if self._thread is None:  # one for all: CUDA has state of every thread, which goes when the thread ends
            self._thread = threading.Thread(target=self._fetch_on, name="fetches graphs", daemon=True)
            self._thread.start()

    def _fetch_on(self) -> None:
        while True:
            graph = self._wanted.get()
            while not self._wanted.empty():  # only the last request is likely to be next
                graph = self._wanted.get()
            self.fetch(graph)

    def fetch(self, graph: str) -> None:
        """Fetch a graph to the device, unless it is there or cannot be kept."""
        if not self.store.device_bytes:
            return
        with self._fetching:
            if not graph or self.store.holds(graph):
                return
            # Whatever is wrong with the graph, its own task will report. What the error holds goes before a capture.
            with no_capture(), suppress(Exception):
                task = Task(graph=graph, model="gcn")
                graphs = Graphs(self._device, on_host=True, store=self.store)
                expected = bytes_of(graphs.summary(task), torch.device("cpu"))  # 0 of a shape, which is not fetched
                if expected:
                    self.store.prefetch(graph, lambda: graphs.bring(task), expected)

    def settle(self) -> int:
        """After a group: evict what is too much, and all if more than graphs stays; the bytes that stay besides graphs.

        Beyond ``LEFTOVER_BYTES`` a model has leaked, and the process has to go. 0 on a CPU, which does not report it.
        """
        evicted = self.store.settle()
        if self._device.type != "cuda":
            return 0
        torch.cuda.synchronize(self._device)  # says so if a kernel has failed
        # What stays after a group, kernels above all, is not looked through after the next: up to 0.15 s.
        collect = collect_everything if evicted else leave_out_of_collections
        self._give_back(collect)
        if not self._fetching.acquire(blocking=False):  # a graph on its way is on the device, and not in the store yet
            return 0
        try:
            if self.store.around() > LEFTOVER_BYTES:
                self.store.clear()
                self._give_back(collect_everything)
            return self.store.around()
        finally:
            self._fetching.release()

    def _give_back(self, collect: Callable[[], None]) -> None:
        torch._C._cuda_clearCublasWorkspaces()
        collect()
        give_back_memory(self._device, gone=True)
