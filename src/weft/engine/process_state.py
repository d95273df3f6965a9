"""Enter and leave state that torch and Python keep once per process.

Matmul precision, torch's generators and garbage collection are one each per process, the cap on a GPU's memory one per
process and device, the number of CPU threads one per thread. Runs inside each other, in one thread, nest: each restores
what it found. Concurrent runs, in several threads, share them: the first one in remembers, the last one out
restores, and a run that would need them otherwise than one that is under way is refused.
"""

from __future__ import annotations

import os
import sys
import threading
import time
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager, suppress
from dataclasses import dataclass
from functools import partial
from importlib import import_module
from pathlib import Path

import torch

from weft.core.errors import SpecError
from weft.core.startup import collects, gc_paused, let_collect, start_in_background
from weft.core.task import Task
from weft.engine.memory import memory_fraction, set_memory_fraction
from weft.ops.launch.backend import have_triton
from weft.planner.grouping.step_options import free_threads
from weft.runtime.device.process import generator_states, restore_generators


@dataclass(frozen=True)
class Needs:
    """What a run needs of the process: which precisions, a memory cap on which GPU, torch's generators for itself."""

    precisions: frozenset[str]
    device: str
    capped: bool = False
    draws: bool = False

    @classmethod
    def of(cls, tasks: Sequence[Task], device: torch.device, budget: int | None) -> Needs:
        """What a run of ``tasks`` needs."""
        precisions = frozenset("tf32" if task.precision == "tf32" else "fp32" for task in tasks)
        own_models = any(task.traits is None for task in tasks)
        return cls(precisions, str(device), budget is not None and device.type == "cuda", own_models)

    def conflict(self, other: Needs) -> str:
        """Why this run and ``other`` cannot be concurrent in one process; empty if they can."""
        if len(self.precisions | other.precisions) > 1:
            return "another precision, and torch has one setting for all products of a process"
        if self.device == other.device and (self.capped or other.capped):
            return f"a budget on {self.device}, and torch has one cap per process and device"
        if self.draws or other.draws:
            return "users' modules, which may draw from torch's generator, and a process has one"
        return ""


_LOCK = threading.Lock()
# The process has one of everything above, so it has one list of who uses it: threads, and what their runs need.
_UNDER_WAY: list[tuple[int, Needs]] = []
_OUTSIDE: list[Callable[[], None]] = []  # restores what the first of them found


@contextmanager
def process_state(needs: Needs, device: torch.device) -> Iterator[None]:
    """A run that needs ``needs`` is under way inside; outside everything is as it was, however it ended."""
    here, threads = threading.get_ident(), torch.get_num_threads()
    with _LOCK:
        for thread, other in _UNDER_WAY:
            reason = "" if thread == here else needs.conflict(other)
            if reason:
                raise SpecError(
                    f"another run is under way in this process, and one of the two has {reason}; "
                    "wait for it, or start a process for each"
                )
        precision, collecting = torch.get_float32_matmul_precision(), collects()
        generators, fraction = generator_states(device), memory_fraction(device)

        def restore() -> None:
            torch.set_float32_matmul_precision(precision)
            let_collect(collecting)
            restore_generators(generators, device)
            if memory_fraction(device) != fraction:
                set_memory_fraction(fraction, device)

        if not _UNDER_WAY:
            _OUTSIDE[:] = [restore]
        _UNDER_WAY.append((here, needs))
    try:
        yield
    finally:
        torch.set_num_threads(threads)
        with _LOCK:
            _UNDER_WAY.remove((here, needs))
            if not _UNDER_WAY:
                _OUTSIDE.pop()()
            elif any(thread == here for thread, _ in _UNDER_WAY):
                restore()


# ---- Start a GPU, which takes a tenth of a second, while Triton is imported, which takes as long.


def start_device(device: torch.device) -> None:
    """What the first run of a process on ``device`` begins with; nothing on a CPU, or where a run was before."""
    if device.type == "cuda" and "triton" not in sys.modules and have_triton():
        start_in_background(partial(torch.cuda.synchronize, device), "start of the device")
        with gc_paused(), suppress(ImportError):  # what needs it says what is missing
            import_module("triton")


# ---- The load of the machine

STAT = Path("/proc/stat")
TICKS = 100.0  # of a second, as Linux counts them for every program
MOST_BUSY = 0.15  # of all cores that others may take while something is measured


@dataclass(frozen=True)
class LoadSample:
    """CPU seconds until the moment ``time`` of the clock: of this process and of all, on ``cores`` cores."""

    time: float
    process: float
    all: float
    cores: int

    @classmethod
    def now(cls) -> LoadSample | None:
        """The load now, on the cores that this process may use; None where the system does not say."""
        try:
            usable = {f"cpu{number}" for number in os.sched_getaffinity(0)}
            lines = [line.split() for line in STAT.read_text(encoding="ascii").splitlines()]
            busy = [sum(map(int, [*words[1:4], *words[6:9]])) for words in lines if words and words[0] in usable]
        except (OSError, ValueError, AttributeError):
            return None
        times = os.times()
        process = times.user + times.system + times.children_user + times.children_system
        return cls(time.monotonic(), process, sum(busy) / TICKS, len(busy)) if busy else None

    def others(self, before: LoadSample) -> float:
        """Cores that other processes took since ``before``."""
        seconds = max(self.time - before.time, 1e-9)
        return max((self.all - before.all) - (self.process - before.process), 0.0) / seconds


# ---- FreeThreads: compute with as many threads as there are free cores, chosen again while a run on a CPU trains.
#
# On a machine that does other things, threads of one operator wait for each other: the same sweep took 97 s with two
# threads and 25 s with one. Sums of several threads may differ from those of one in the last bits; ``OMP_NUM_THREADS``
# says how many threads there are to be, and then they stay.

LOOK_SECONDS = 1.0  # between two choices
FIXED = "OMP_NUM_THREADS"  # the user's own word on the number of threads
FIRST_SECONDS = 0.2  # that the first choice must have seen


class FreeThreads:
    """Sets torch's threads, at most as many as it has now; ``since``: what the machine did from there on counts."""

    def __init__(self, since: LoadSample | None = None) -> None:
        self._most, self._last, self._wait = torch.get_num_threads(), since or LoadSample.now(), FIRST_SECONDS

    def choose(self) -> str | None:
        """Choose anew if it is time to; what changed, in words, or None."""
        if (
            self._most == 1
            or FIXED in os.environ
            or self._last is None
            or time.monotonic() - self._last.time < self._wait
        ):
            return None
        seen = LoadSample.now()
        if seen is None:
            return None
        others, self._last, self._wait = seen.others(self._last), seen, LOOK_SECONDS
        before, count = torch.get_num_threads(), free_threads(self._most, seen.cores, others)
        if count == before:
            return None
        torch.set_num_threads(count)
        return f"{count} of {self._most} threads: other processes take {others:.1f} of {seen.cores} cores"
