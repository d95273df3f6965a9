"""Replay: capture a function of static tensors once as a CUDA graph, then launch it as a whole; and Weft's streams.

On small graphs an epoch is all launch overhead; replaying it as one graph is worth an order of magnitude.

Streams are made once per process. Libraries keep memory for every stream they have been called on, for good: cuBLAS
32 MiB per thread and stream on an H200. Torch returns 32 streams in turn, so a process that took a new one for every
capture would end up holding a gigabyte of workspaces, outside of any budget.
"""

from __future__ import annotations

import gc
import threading
import time
import warnings
from collections.abc import Callable, Iterable, Iterator, Sequence
from contextlib import contextmanager, suppress
from dataclasses import dataclass
from functools import cache
from typing import Any

import torch
from torch import Tensor

from weft.core.startup import no_collections

SIDE_STREAMS = 4
FIRST = -1  # priority of a stream whose kernels go before those of others
COMPILING = 0.3  # a first run that takes longer has compiled something
_ONE_AT_A_TIME = threading.RLock()  # all captures share a stream: another thread's work must not end up in one
_BROKEN: list[torch.cuda.CUDAGraph] = []  # whose capture could not be ended

Steps = Sequence[Callable[[], None]]


@dataclass(frozen=True)
class Streams:
    """Weft's streams of a device.

    ``recording``: for every warm-up and every capture. ``side``: for work inside of a step that may overlap.
    ``fetching``: the next batch is sampled and fetched there while the current one trains. ``urgent``: for capturing
    what other streams run next to; its kernels keep their priority in a replay.
    """

    recording: torch.cuda.Stream
    side: tuple[torch.cuda.Stream, ...]
    fetching: torch.cuda.Stream
    urgent: torch.cuda.Stream


def streams_of(device: torch.device | None = None) -> Streams:
    """The streams of ``device`` (None: the current one)."""
    index = None if device is None else device.index
    return _streams(torch.cuda.current_device() if index is None else index)


@cache
def _streams(index: int) -> Streams:
    # All at once, since consecutive streams of torch are distinct.
    recording, *side, fetching = [torch.cuda.Stream(index) for _ in range(2 + SIDE_STREAMS)]
    return Streams(recording, tuple(side), fetching, torch.cuda.Stream(index, priority=FIRST))


class ConcurrentSteps:
    """Run the steps of several stacks concurrently, on the side streams in turn, joined at the end.

    In a capture they become branches of one CUDA graph, so that kernels too small to fill the device share it: four
    GCNs of 2 to 4 layers on the pubmed shape took 0.446 ms per epoch on an H200, as processes under MPS 0.500. No
    kernels are generated or compiled beyond those of the stacks alone. What the steps build on first use (transposes,
    work lists) must exist before: one stream does not wait for another.
    """

    def __init__(self, device: torch.device) -> None:
        self._device = device

    def __call__(self, steps: Steps) -> None:
        current = torch.cuda.current_stream(self._device)
        side = streams_of(self._device).side
        used = side[: len(steps)]
        for stream in used:
            stream.wait_stream(current)
        for index, step in enumerate(steps):
            with torch.cuda.stream(side[index % SIDE_STREAMS]):
                step()
        for stream in used:
            current.wait_stream(stream)


class Replay:
    """``fn`` (no arguments, no results, works in place on fixed tensors), captured as a CUDA graph if possible.

    ``changed`` are the tensors that ``fn`` writes: the warm-up runs before the capture are undone on them.
    ``reason`` says why the capture failed, and is None if it did not; after a failure ``fn`` is called eagerly.
    ``stream``: where it is warmed up and captured, the one for all captures unless given.
    ``record=False``: nothing is captured until :meth:`warm_up` and :meth:`capture` are called; ``fn`` runs eagerly.
    ``never_waits``: ``fn`` is known not to wait for the device, so one warm-up run is enough if it compiled nothing.
    """

    def __init__(
        self,
        fn: Callable[[], None],
        changed: Iterable[Tensor],
        *,
        record: bool,
        pool: Any = None,
        stream: torch.cuda.Stream | None = None,
        never_waits: bool = False,
    ) -> None:
        self._fn, self._changed, self._stream, self._never_waits = fn, list(changed), stream, never_waits
        self._graph: torch.cuda.CUDAGraph | None = None
        self.reason: str | None = None
        if record:
            self.warm_up()
            self.capture(pool)

    def __call__(self) -> None:
        if self._graph is None:
            self._fn()
        else:
            self._graph.replay()

    @property
    def recorded(self) -> bool:
        """Whether calls replay a CUDA graph."""
        return self._graph is not None

    @property
    def pool(self) -> Any:
        """The memory pool of the CUDA graph, for another one that never runs at the same time."""
        return None if self._graph is None else self._graph.pool()

    def warm_up(self) -> None:
        """Run ``fn`` eagerly until nothing is left to be compiled or built, on the capture stream.

        Workspaces that libraries keep for that stream then exist, outside of the graph's own pool. A compiler leaves
        frames in reference cycles, which hold the tensors of a launch through their callers: they are collected.
        """

        def run(side: torch.cuda.Stream) -> None:
            side.wait_stream(torch.cuda.current_stream())
            # Nothing is collected meanwhile, so all new objects are of the youngest generation: only those are scanned.
            with torch.cuda.stream(side), no_collections():
                begin = time.perf_counter()
                self._fn()
                compiled = time.perf_counter() - begin > COMPILING
                if compiled:
                    gc.collect(0)
                if compiled or not self._never_waits:
                    with _waiting_is_an_error():  # a second time: whatever the first had to wait for is there by now
                        self._fn()
            torch.cuda.current_stream().wait_stream(side)

        # What ran before leaves its blocks cached for its own stream, where the recording stream cannot use them.
        with _ONE_AT_A_TIME:  # what is allocated here must not end up in another thread's capture
            torch.cuda.empty_cache()
            saved = [tensor.clone() for tensor in self._changed]
            try:
                self._attempt(run)
            finally:
                for tensor, before in zip(self._changed, saved, strict=True):
                    tensor.copy_(before)

    def capture(self, pool: Any = None) -> None:
        """Record ``fn``, warmed up, unless that has failed; ``pool``: that of another one, whose memory it shares.

        A warm-up takes memory in addition to the pool. So where several share one, all are warmed up before any is
        captured.
        """
        if self.reason is not None:
            return
        graph, handle = torch.cuda.CUDAGraph(), pool or torch.cuda.graph_pool_handle()

        def record(side: torch.cuda.Stream) -> None:
            try:
                # A collection could free an older CUDA graph, which breaks a capture in progress.
                with no_collections(), torch.cuda.graph(graph, pool=handle, stream=side):
                    self._fn()
            except BaseException:
                try:
                    graph.pool()
                except RuntimeError:  # it was not ended
                    _BROKEN.append(graph)
                    with suppress(AttributeError, RuntimeError):  # an older torch; or it was never begun
                        torch._C._cuda_endAllocateToPool(torch.cuda.current_device(), handle)
                        torch._C._cuda_releasePool(torch.cuda.current_device(), handle)
                raise
            self._graph = graph

        self._attempt(record)

    def forget(self) -> None:
        """Let go of the CUDA graph; :meth:`capture` records anew, without another warm-up."""
        self._graph = None

    def _attempt(self, work: Callable[[torch.cuda.Stream], None]) -> None:
        """``work(stream)``; stream and generator are then as before; ``reason`` says why it could not be done."""
        with _ONE_AT_A_TIME:
            random, stream = torch.cuda.get_rng_state(), torch.cuda.current_stream()
            try:
                work(self._stream or streams_of().recording)
            except BaseException as error:
                torch.cuda.set_stream(stream)  # end a broken capture
                torch.cuda.synchronize()
                if not isinstance(error, RuntimeError) or isinstance(error, torch.OutOfMemoryError):
                    raise
                self.reason = str(error).strip().splitlines()[0]
            finally:
                torch.cuda.set_rng_state(random)


class Recordings:
    """Replays that never run at the same time, and so share the memory of one pool."""

    def __init__(self) -> None:
        self._all: list[Replay] = []
        self._pool: Any = None

    def add(self, *new: Replay, warm: bool = True) -> None:
        """Warm all of ``new`` up, then capture them; :attr:`reasons` says why any could not be, which then run eagerly.

        ``warm=False``: another one of the same shapes has been. If there is no room for the warm-up next to the pool,
        the pool is released, and captured anew after the warm-up.
        """
        short = False
        try:
            self._warm_up_and_capture(new if warm else (), new)
        except torch.OutOfMemoryError:
            short = bool(self._all)
            if not short:
                raise
        if short:  # only here no frame holds what the failed attempt has allocated
            for replay in (*self._all, *new):
                replay.forget()
            self._pool = None
            self._warm_up_and_capture(new if warm else (), (*self._all, *new))
        self._all += new

    def _warm_up_and_capture(self, cold: Iterable[Replay], replays: Iterable[Replay]) -> None:
        for replay in cold:
            if replay.reason is None:
                replay.warm_up()
        for replay in replays:
            replay.capture(self._pool)
            self._pool = replay.pool or self._pool

    @property
    def reasons(self) -> list[str]:
        """Why some run eagerly, each reason once."""
        return list(dict.fromkeys(replay.reason for replay in self._all if replay.reason is not None))


@contextmanager
def no_capture() -> Iterator[None]:
    """No thread of this process captures a CUDA graph inside: allocations of another thread would break a capture."""
    with _ONE_AT_A_TIME:
        yield


@contextmanager
def _waiting_is_an_error() -> Iterator[None]:
    """Inside, operations that synchronise with the device raise: they would break a capture."""
    before = torch.cuda.get_sync_debug_mode()
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")  # torch calls this mode a prototype
        torch.cuda.set_sync_debug_mode("error")
    try:
        yield
    finally:
        torch.cuda.set_sync_debug_mode(before)
