"""How many threads torch, and the kernels that follow it, use during a run on a CPU."""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager

import torch


@contextmanager
def cpu_threads(count: int | None) -> Iterator[None]:
    """At most ``count`` threads inside (None: as they are), as before outside."""
    before = torch.get_num_threads()
    if count is not None and count < before:
        torch.set_num_threads(count)
    try:
        yield
    finally:
        torch.set_num_threads(before)
