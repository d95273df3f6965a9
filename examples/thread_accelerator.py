"""ThreadAccelerator: a thread that prepares and trains batches as a device does, throttled if so desired.

It takes commands from a queue one at a time, as a stream of a GPU does, and shares a bus with copies from the host.
With it a division runs on real threads and queues where there is no GPU.
"""

from __future__ import annotations

import math
import threading
import time
from collections.abc import Callable, Mapping
from concurrent.futures import ThreadPoolExecutor
from contextlib import AbstractContextManager, nullcontext
from dataclasses import dataclass
from typing import Any

import torch

from weft.batches.division.preparers import (
    DevicePreparer,
    ExactDevice,
    ExactHost,
    HostClock,
    HostPreparer,
    Parts,
    Preparers,
)
from weft.batches.sampler import SeedBatch
from weft.core.division import Operator, Registry, built_in
from weft.core.errors import InputError

Delays = Mapping[str, float] | Callable[[str], float]


class ThreadAccelerator:
    """Hardware called ``name``. ``delays``: seconds that a phase takes at least, by its name (or a function of it).

    Names that no phase has, and seconds that are none, are refused.
    """

    def __init__(self, name: str = "npu", delays: Delays | None = None) -> None:
        self.name, self._delays = name, delays or {}
        self._stopped = False
        for key in () if callable(self._delays) else self._delays:
            if key not in self._phases:
                raise InputError(f"delays of {name!r}: {key!r} is no phase of it; those are {', '.join(self._phases)}")
            self._delay(key)
        self._commands = ThreadPoolExecutor(1, f"weft-{name}")
        self.bus = threading.Lock()
        self._lock, self.spans = threading.Lock(), list[tuple[str, float, float]]()

    @property
    def _phases(self) -> tuple[str, ...]:
        device = (f"{phase}_{self.name}" for phase in ("batching", "transfer", "training"))
        return ("batching_cpu", "transfer_pcie", *device)

    @property
    def profile_key(self) -> str:
        """Its name and pace: phases that were measured at another pace are not its own."""
        if callable(self._delays):
            return f"{self.name} paced by {getattr(self._delays, '__qualname__', 'an object')}"
        paces = ",".join(f"{key}:{seconds:g}" for key, seconds in sorted(self._delays.items()))
        return f"{self.name}({paces})"

    def registry(self) -> Registry:
        """Weft's own operators and those of this accelerator."""
        return built_in().registered(
            Operator("batching", self.name, "ThreadAccelerator.batch", (self.name, "pcie")),
            Operator("transfer", self.name, "ThreadAccelerator.read", (self.name, "pcie")),
            Operator("training", self.name, "ThreadAccelerator.train", (self.name,)),
        )

    def run(self, key: str, work: Callable[[], Any], bus: bool = False) -> Any:
        """``work()`` as a command of the accelerator; returns when it is done."""
        with self._lock:
            self._check_running()
            done = self._commands.submit(self.paced, key, work, self.bus if bus else nullcontext())
        return done.result()

    def _check_running(self) -> None:
        if self._stopped:
            raise InputError(f"accelerator {self.name!r} was stopped; make another one")

    def paced(self, key: str, work: Callable[[], Any], held: AbstractContextManager[Any]) -> Any:
        """``work()`` with ``held`` held, for at least as long as the phase is to take."""
        with held:
            begin = time.perf_counter()
            result = work()
            remaining = self._delay(key) - (time.perf_counter() - begin)
            if remaining > 0:
                time.sleep(remaining)
            with self._lock:
                self.spans.append((key, begin, time.perf_counter()))
        return result

    def _delay(self, key: str) -> float:
        seconds = self._delays(key) if callable(self._delays) else self._delays.get(key, 0.0)
        if isinstance(seconds, bool) or not isinstance(seconds, (int, float)) or not 0.0 <= seconds < math.inf:
            raise InputError(
                f"delays of {self.name!r}: {key!r} takes {seconds!r}, which is no number of seconds from 0 on"
            )
        return seconds

    def train(self, work: Callable[[], Any]) -> Any:
        """A training step."""
        return self.run(f"training_{self.name}", work)

    def preparers(self, parts: Parts) -> Preparers:
        """Sampling and gathering on the CPU, by the host's threads and by this accelerator's."""
        self._check_running()
        host = ExactHost(parts.host_sampler(), parts.store.x.cpu(), torch.device("cpu"), parts.slots)
        return Preparers(PacedHost(self, host), PacedDevice(self, ExactDevice(parts.sampler, parts.store)), HostClock())

    def stop(self) -> None:
        """End the thread after what it has been given; nothing runs on it afterwards."""
        with self._lock:
            self._stopped = True
            self._commands.shutdown(wait=False)


@dataclass(frozen=True)
class PacedHost:
    """``inner`` at the pace of an accelerator, over its bus."""

    accelerator: ThreadAccelerator
    inner: HostPreparer

    def prepare(self, seeds: SeedBatch) -> Any:
        """At least as long as the accelerator says."""
        return self.accelerator.paced("batching_cpu", lambda: self.inner.prepare(seeds), nullcontext())

    def transfer(self, item: Any) -> Any:
        """While the bus is held."""
        return self.accelerator.paced("transfer_pcie", lambda: self.inner.transfer(item), self.accelerator.bus)

    def discard(self, item: Any) -> None:
        """At once."""
        self.inner.discard(item)


@dataclass(frozen=True)
class PacedDevice:
    """``inner`` as commands of an accelerator."""

    accelerator: ThreadAccelerator
    inner: DevicePreparer

    def batch(self, seeds: SeedBatch) -> Any:
        """A command that also holds the bus."""
        key = f"batching_{self.accelerator.name}"
        return self.accelerator.run(key, lambda: self.inner.batch(seeds), bus=True)

    def read(self, item: Any) -> Any:
        """A command that also holds the bus."""
        key = f"transfer_{self.accelerator.name}"
        return self.accelerator.run(key, lambda: self.inner.read(item), bus=True)
