"""Graphs that a worker keeps on a GPU: what their memory pools take, however many there were before."""

from __future__ import annotations

import sys

import pytest
import torch

from weft.engine.graphs import unused_bytes

pytestmark = [
    pytest.mark.gpu,
    pytest.mark.skipif(not torch.cuda.is_available(), reason="needs a CUDA device"),
]
MANY = 300  # Python keeps numbers up to 256 for ever


def test_unused_bytes_of_a_pool_are_the_rest_of_its_segments():
    pool = torch.cuda.MemPool()
    before, held = torch.cuda.memory_reserved(), torch.cuda.memory_allocated()
    with torch.cuda.use_mem_pool(pool):
        kept = torch.empty(3 << 20, dtype=torch.uint8, device="cuda")
    segments, arrays = torch.cuda.memory_reserved() - before, torch.cuda.memory_allocated() - held
    assert unused_bytes()[tuple(pool.id)] == segments - arrays > 0
    assert arrays == kept.numel()


def test_counting_frees_no_number_of_a_pool():
    """``torch.cuda.memory_snapshot(pool.id)`` gives up a reference of each: a worker crashed after some 250 pools."""
    pools = [torch.cuda.MemPool() for _ in range(MANY)]
    with torch.cuda.use_mem_pool(pools[-1]):
        kept = torch.empty(3 << 20, dtype=torch.uint8, device="cuda")
    numbers = [tuple(pool.id) for pool in pools]
    before = [sys.getrefcount(number[1]) for number in numbers]
    for _ in range(20):
        assert unused_bytes()[numbers[-1]] > 0
    assert [sys.getrefcount(number[1]) for number in numbers] == before
    assert kept.numel() == 3 << 20
