"""The two sides that prepare batches, and the clock of the trainer: what hardware implements to take part."""

from __future__ import annotations

import time
from typing import Any, Protocol

import torch

from weft.flow.sampling.seeds import SeedBatch


class HostSide(Protocol):
    """Prepares batches in host memory, several threads at once, and carries them to the trainer."""

    def prepare(self, seeds: SeedBatch) -> Any:
        """A batch in host memory with its features; called by any worker."""

    def transfer(self, item: Any) -> Any:
        """The same batch where it is trained, once it has arrived; called by one thread at a time."""

    def discard(self, item: Any) -> None:
        """Give the host memory of ``item`` back: it was transferred, or nobody is going to train on it."""


class DeviceSide(Protocol):
    """Prepares batches on the trainer, in the thread that trains.

    Where a division prepares beside training, another thread calls it, and calls return when their work is done.
    """

    def batch(self, seeds: SeedBatch) -> Any:
        """Sample: the structure of a batch."""

    def read(self, item: Any) -> Any:
        """The batch with its features."""


class DeviceClock(Protocol):
    """Marks in the work of the trainer; ``lags``: it may lag behind the thread that submits it."""

    lags: bool

    def mark(self) -> Any:
        """A mark behind all work submitted so far."""

    def seconds(self, begin: Any, end: Any) -> float:
        """Seconds between two marks, once both are reached."""

    def wait(self, mark: Any) -> None:
        """Wait until the work in front of ``mark`` is done."""


class HostClock:
    """Work that is done when its call returns."""

    lags = False

    def mark(self) -> float:
        """Now."""
        return time.perf_counter()

    def seconds(self, begin: float, end: float) -> float:
        """Their difference."""
        return end - begin

    def wait(self, mark: float) -> None:
        """Nothing to wait for."""


class CudaClock:
    """Events on the current stream of a GPU."""

    lags = True

    def mark(self) -> torch.cuda.Event:
        """An event recorded now."""
        event = torch.cuda.Event(enable_timing=True)
        event.record()
        return event

    def seconds(self, begin: torch.cuda.Event, end: torch.cuda.Event) -> float:
        """By the GPU's clock."""
        end.synchronize()
        return begin.elapsed_time(end) / 1e3

    def wait(self, mark: torch.cuda.Event) -> None:
        """Until the event has happened; other threads run meanwhile."""
        mark.synchronize()


def clock_of(device: torch.device) -> DeviceClock:
    """The clock of a device."""
    return CudaClock() if device.type == "cuda" else HostClock()
