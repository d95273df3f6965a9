"""Barrier: ranks of one host wait for each other through counters in shared memory.

A rank that has died is noticed while it is waited for, so a run ends with an error within seconds instead of hanging.
"""

from __future__ import annotations

import errno
import os
import time
from collections.abc import Callable, Sequence

from torch import Tensor

from weft.core.errors import TrainingError

# ---- What goes wrong between ranks


class RankLostError(TrainingError):
    """A rank is gone, or did not arrive in time: the run cannot go on."""

    def __init__(self, message: str, rank: int = -1) -> None:
        super().__init__(message)
        self.rank = rank


LOOK_SECONDS = 0.2  # between two looks at whether a late rank is alive
SPINS = 200  # polls before a wait begins to sleep


def is_alive(pid: int) -> bool:
    """Whether a process with this id is there and has not ended."""
    try:
        os.kill(pid, 0)
    except OSError as error:
        return error.errno == errno.EPERM
    try:
        with open(f"/proc/{pid}/stat", encoding="ascii", errors="replace") as file:
            return file.read().rsplit(")", 1)[-1].split()[0] != "Z"
    except (OSError, IndexError):
        return True


class Barrier:
    """``counters [ranks]`` int64 in shared memory, one per rank; ``pids`` are the processes behind them.

    :meth:`wait` returns once every rank has called it as often. What a rank wrote to shared memory before is then
    visible to all (a GPU's work has to be finished first: ``before`` is called for that).
    """

    def __init__(
        self,
        counters: Tensor,
        rank: int,
        pids: Sequence[int],
        timeout: float,
        before: Callable[[], None] | None = None,
    ) -> None:
        self._counters, self._numbers = counters, counters.numpy()
        self._rank, self._pids, self._timeout, self._before = rank, tuple(pids), timeout, before
        self._count = 0

    def wait(self) -> None:
        """Arrive, and wait for all others."""
        if self._before is not None:
            self._before()
        self._count += 1
        self._numbers[self._rank] = self._count
        spins, begin, looked = 0, 0.0, 0.0
        while (self._numbers < self._count).any():
            spins += 1
            if spins < SPINS:
                continue
            now = time.monotonic()
            begin = begin or now
            if now - looked > LOOK_SECONDS:
                self._check(now - begin)
                looked = now
            time.sleep(2e-5 if now - begin < 0.01 else 5e-4)

    def late(self) -> list[int]:
        """The ranks that have not arrived."""
        return [rank for rank in range(len(self._pids)) if self._numbers[rank] < self._count]

    def dead(self) -> list[int]:
        """The ranks whose processes have ended."""
        return [rank for rank, pid in enumerate(self._pids) if rank != self._rank and not is_alive(pid)]

    def _check(self, waited: float) -> None:
        gone = [rank for rank in self.dead() if rank in self.late()]
        if gone:
            raise RankLostError(f"rank {gone[0]} of {len(self._pids)} has died; the run cannot go on", gone[0])
        if waited > self._timeout:
            late = self.late()[0]
            raise RankLostError(
                f"rank {late} of {len(self._pids)} did not arrive within {self._timeout:g} s; the run cannot go on",
                late,
            )
