"""Limit the number of threads that torch and Weft's kernels use during a run on a CPU."""

from __future__ import annotations

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
