"""Replay: capture a function of static tensors once as a CUDA graph, then launch it as a whole.

On small graphs an epoch is all launch overhead; replaying it as one graph is worth an order of magnitude.
"""

from __future__ import annotations

import gc
import threading
import time
import warnings
from collections.abc import Callable, Iterable, Iterator
from contextlib import contextmanager
from typing import Any

import torch
from torch import Tensor

from weft.runtime.device.gc_pause import gc_disabled
from weft.runtime.device.streams import recording_stream

COMPILING = 0.3  # a first run that takes longer has compiled something
WARMUP = 2  # the first compiles and builds, the second settles the allocator, the third detects host syncs
_ONE_AT_A_TIME = threading.RLock()  # all captures share a stream: another thread's work must not end up in one


class Replay:
    """``fn`` (no arguments, no results, works in place on fixed tensors), captured as a CUDA graph if possible.

    ``changed`` are the tensors that ``fn`` writes: the warm-up runs before the capture are undone on them.
    ``reason`` says why the capture failed, and is None if it did not; after a failure ``fn`` is called eagerly.
    ``stream``: where it is warmed up and captured, the one for all captures unless given.
    """

    def __init__(
        self,
        fn: Callable[[], None],
        changed: Iterable[Tensor],
        *,
        record: bool,
        pool: Any = None,
        warmup: int = WARMUP,
        stream: torch.cuda.Stream | None = None,
    ) -> None:
        self._fn, self._stream = fn, stream
        self._graph: torch.cuda.CUDAGraph | None = None
        self.reason: str | None = None
        if record:
            self._record(list(changed), pool, warmup)

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

    def _record(self, changed: list[Tensor], pool: Any, warmup: int) -> None:
        with _ONE_AT_A_TIME:
            self._record_alone(changed, pool, warmup)

    def _record_alone(self, changed: list[Tensor], pool: Any, warmup: int) -> None:
        saved = [tensor.clone() for tensor in changed]
        random = torch.cuda.get_rng_state()
        stream, side = torch.cuda.current_stream(), self._stream or recording_stream()
        # What ran before leaves its blocks cached for its own stream, where the recording stream cannot use them.
        torch.cuda.empty_cache()
        try:
            self._warm_up(side, warmup)
            graph = torch.cuda.CUDAGraph()
            with gc_disabled(), torch.cuda.graph(graph, pool=pool, stream=side):
                self._fn()
            self._graph = graph
        except torch.OutOfMemoryError:
            self._break_off(stream)
            raise
        except RuntimeError as error:
            self._break_off(stream)
            self.reason = str(error).strip().splitlines()[0]
        finally:
            for tensor, before in zip(changed, saved, strict=True):
                tensor.copy_(before)
            torch.cuda.set_rng_state(random)

    @staticmethod
    def _break_off(stream: torch.cuda.Stream) -> None:
        """End a broken capture: wait for the device, and restore the caller's stream."""
        torch.cuda.set_stream(stream)
        torch.cuda.synchronize()

    def _warm_up(self, side: torch.cuda.Stream, times: int) -> None:
        """Compile kernels, fill caches and build derived matrices before the capture, on the capture stream.

        Workspaces that libraries keep for that stream then exist, outside of the graph's own pool. A compiler leaves
        frames in reference cycles, which hold the tensors of a launch through their callers: they are collected.
        """
        side.wait_stream(torch.cuda.current_stream())
        with torch.cuda.stream(side):
            begin = time.perf_counter()
            self._fn()
            if time.perf_counter() - begin > COMPILING:
                gc.collect()
            with gc_disabled():
                for _ in range(times - 1):
                    self._fn()
                with _waiting_is_an_error():
                    self._fn()
        torch.cuda.current_stream().wait_stream(side)


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
