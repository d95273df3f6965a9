"""GPU tests run in many processes at once: what they compare with on a CPU is computed by one thread each."""

from __future__ import annotations

import gc
from collections.abc import Iterator

import pytest
import torch


def held_by_others() -> int:
    """Bytes that tests before this one have left with the process: workspaces of cuBLAS, a graph."""
    gc.collect()
    torch.cuda.empty_cache()
    return torch.cuda.memory_allocated()


@pytest.fixture(autouse=True)
def one_thread() -> Iterator[None]:
    """Fifteen processes of sixteen threads took 300 s for a reference that one thread computes in 3."""
    before = torch.get_num_threads()
    torch.set_num_threads(1)
    yield
    torch.set_num_threads(before)
