"""FreeThreads: compute with as many threads as there are free cores, chosen again while a run on a CPU trains.

On a machine that does other things, threads of one operator wait for each other: the same sweep took 97 s with two
threads and 25 s with one. Sums of several threads may differ from those of one in the last bits; ``OMP_NUM_THREADS``
says how many threads there are to be, and then they stay.
"""

from __future__ import annotations

import os
import time

import torch

from weft.engine.probing.machine_load import Look
from weft.planner.grouping.step_options import free_threads

LOOK_SECONDS = 1.0  # between two choices
FIXED = "OMP_NUM_THREADS"  # the user's own word on the number of threads
FIRST_SECONDS = 0.2  # that the first choice must have seen


class FreeThreads:
    """Sets torch's threads, at most as many as it has now; ``since``: what the machine did from there on counts."""

    def __init__(self, since: Look | None = None) -> None:
        self._most, self._last, self._wait = torch.get_num_threads(), since or Look.here(), FIRST_SECONDS

    def choose(self) -> str | None:
        """Choose anew if it is time to; what changed, in words, or None."""
        if (
            self._most == 1
            or FIXED in os.environ
            or self._last is None
            or time.monotonic() - self._last.now < self._wait
        ):
            return None
        seen = Look.here()
        if seen is None:
            return None
        others, self._last, self._wait = seen.others(self._last), seen, LOOK_SECONDS
        before, count = torch.get_num_threads(), free_threads(self._most, seen.cores, others)
        if count == before:
            return None
        torch.set_num_threads(count)
        return f"{count} of {self._most} threads: other processes take {others:.1f} of {seen.cores} cores"
