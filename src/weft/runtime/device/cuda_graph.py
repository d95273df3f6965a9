"""Replay: capture a function of static tensors once as a CUDA graph, then launch it as a whole.

On small graphs an epoch is all launch overhead; replaying it as one graph is worth an order of magnitude.
"""

from __future__ import annotations

import gc
import threading
import time
import warnings
from collections.abc import Callable, Iterable, Iterator
from contextlib import contextmanager, suppress
from typing import Any

import torch
from torch import Tensor

from weft.core.startup import no_collections
from weft.runtime.device.streams import recording_stream

# ---- Disable Python's garbage collection while a CUDA graph is captured or a step is traced.


@contextmanager
def gc_disabled() -> Iterator[None]:
    """No garbage is collected inside, by any thread.

    A collection could free an older CUDA graph, which breaks a capture in progress. And while a step is traced,
    hundreds of small objects trigger collections that scan every live object and find nothing.
    """
    with no_collections():
        yield


COMPILING = 0.3  # a first run that takes longer has compiled something
_ONE_AT_A_TIME = threading.RLock()  # all captures share a stream: another thread's work must not end up in one
_BROKEN: list[torch.cuda.CUDAGraph] = []  # whose capture could not be ended


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
        """Run ``fn`` eagerly until nothing is left to be compiled or built."""
        # What ran before leaves its blocks cached for its own stream, where the recording stream cannot use them.
        with _ONE_AT_A_TIME:  # what is allocated here must not end up in another thread's capture
            torch.cuda.empty_cache()
            saved = [tensor.clone() for tensor in self._changed]
            try:
                self._attempt(self._warm_up)
            finally:
                for tensor, before in zip(self._changed, saved, strict=True):
                    tensor.copy_(before)

    def capture(self, pool: Any = None) -> None:
        """Record ``fn``, warmed up, unless that has failed; ``pool``: that of another one, whose memory it shares.

        A warm-up takes memory beside the pool. So where several share one, all are warmed up before any is captured.
        """
        if self.reason is not None:
            return
        graph, place = torch.cuda.CUDAGraph(), pool or torch.cuda.graph_pool_handle()

        def record(side: torch.cuda.Stream) -> None:
            try:
                with gc_disabled(), torch.cuda.graph(graph, pool=place, stream=side):
                    self._fn()
            except BaseException:
                _give_up(graph, place)
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
                work(self._stream or recording_stream())
            except BaseException as error:
                self._break_off(stream)
                if not isinstance(error, RuntimeError) or isinstance(error, torch.OutOfMemoryError):
                    raise
                self.reason = str(error).strip().splitlines()[0]
            finally:
                torch.cuda.set_rng_state(random)

    @staticmethod
    def _break_off(stream: torch.cuda.Stream) -> None:
        """End a broken capture: wait for the device, and restore the caller's stream."""
        torch.cuda.set_stream(stream)
        torch.cuda.synchronize()

    def _warm_up(self, side: torch.cuda.Stream) -> None:
        """Compile kernels, fill caches and build derived matrices before the capture, on the capture stream.

        Workspaces that libraries keep for that stream then exist, outside of the graph's own pool. A compiler leaves
        frames in reference cycles, which hold the tensors of a launch through their callers: they are collected.
        """
        side.wait_stream(torch.cuda.current_stream())
        # Nothing is collected meanwhile, so all new objects are of the youngest generation: those alone are looked at.
        with torch.cuda.stream(side), gc_disabled():
            begin = time.perf_counter()
            self._fn()
            compiled = time.perf_counter() - begin > COMPILING
            if compiled:
                gc.collect(0)
            if compiled or not self._never_waits:
                with _waiting_is_an_error():  # a second time: whatever the first had to wait for is there by now
                    self._fn()
        torch.cuda.current_stream().wait_stream(side)


class Recordings:
    """Replays that never run at the same time, and so share the memory of one pool."""

    def __init__(self) -> None:
        self._all: list[Replay] = []
        self._pool: Any = None

    def add(self, *new: Replay, warm: bool = True) -> None:
        """Warm all of ``new`` up, then capture them; :attr:`reasons` says why any could not be, which then run eagerly.

        ``warm=False``: another one of the same shapes has been. If there is no room for the warm-up beside the pool,
        that is given back, and captured anew after the warm-up.
        """
        short = False
        try:
            self._warm_up(new if warm else ())
            self._capture(new)
        except torch.OutOfMemoryError:
            short = bool(self._all)
            if not short:
                raise
        if short:  # only here no frame holds what the failed attempt has allocated
            for one in (*self._all, *new):
                one.forget()
            self._pool = None
            self._warm_up(new if warm else ())
            self._capture((*self._all, *new))
        self._all += new

    @property
    def reasons(self) -> list[str]:
        """Why some run eagerly, each reason once."""
        return list(dict.fromkeys(one.reason for one in self._all if one.reason is not None))

    def _warm_up(self, replays: Iterable[Replay]) -> None:
        for one in replays:
            if one.reason is None:
                one.warm_up()

    def _capture(self, replays: Iterable[Replay]) -> None:
        for one in replays:
            one.capture(self._pool)
            self._pool = one.pool or self._pool


def _give_up(graph: torch.cuda.CUDAGraph, pool: Any) -> None:
    """Let torch forget a capture that failed, if it could not be ended: torch itself ends only one that went well.

    Its allocators ask every capture under way, by the address of its graph, whether an allocation belongs to it. So
    they would read memory that is gone, and never give cached memory back again. The graph stays for good: of the
    allocator of pinned memory a capture cannot be ended here.
    """
    try:
        graph.pool()
    except RuntimeError:  # it was not ended
        _BROKEN.append(graph)
        with suppress(AttributeError, RuntimeError):  # an older torch; or it was never begun
            torch._C._cuda_endAllocateToPool(torch.cuda.current_device(), pool)
            torch._C._cuda_releasePool(torch.cuda.current_device(), pool)


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
