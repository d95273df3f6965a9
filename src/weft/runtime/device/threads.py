"""Limit the number of threads that torch and Weft's kernels use during a run on a CPU, and time what they do."""

from __future__ import annotations

import time
from collections.abc import Iterator
from contextlib import contextmanager

import torch


@contextmanager
def cpu_threads(count: int | None) -> Iterator[None]:
    """At most ``count`` threads inside (None: unchanged), restored outside."""
    before = torch.get_num_threads()
    if count is not None and count < before:
        torch.set_num_threads(count)
    try:
        yield
    finally:
        torch.set_num_threads(before)


def step_seconds() -> float:
    """A clock for steps on a CPU: seconds that this thread computed, if torch computes in it alone, else the time.

    What other processes do meanwhile counts in the second case only.
    """
    return time.thread_time() if torch.get_num_threads() == 1 else time.perf_counter()
