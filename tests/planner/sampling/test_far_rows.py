"""Rows that a GPU reads out of much host memory: each is a walk through page tables."""

from __future__ import annotations

import pytest

from weft.core.batches.batch_sizes import ExpectedBatch, NodeKind
from weft.planner.sampling.transfers import BatchTraffic

GIB, ROWS, RATE = 2**30, 230_000, 49.8e9


def seconds(gib: float, rows: int = ROWS, hits: float = 0.0) -> float:
    batch = ExpectedBatch((NodeKind(1.0, rows, ((rows, 1.0),)),), (1.0,), (1.0,))
    return BatchTraffic(batch, 512, gib * GIB, hits).read_by_gpu(RATE)


@pytest.mark.parametrize(("gib", "measured"), [(1, 2.37e-3), (4, 5.74e-3), (16, 7.66e-3), (32, 8.07e-3)])
def test_as_measured_on_an_h200(gib, measured):
    assert seconds(gib) == pytest.approx(measured, rel=0.06)


def test_a_cache_spares_walks():
    assert seconds(32, hits=0.5) == pytest.approx(seconds(32) / 2)
    assert seconds(0.5) == seconds(1)
