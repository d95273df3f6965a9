"""Rows that a GPU reads out of much host memory: each is a walk through page tables."""

from __future__ import annotations

import pytest

from weft.core.batch_sizes import ExpectedBatch, NodeKind
from weft.planner.transfers import BatchTraffic

GIB, ROWS, RATE = 2**30, 230_000, 49.8e9


def seconds(gib: float, rows: int = ROWS, hits: float = 0.0) -> float:
    batch = ExpectedBatch((NodeKind(1.0, rows, ((rows, 1.0),)),), (1.0,), (1.0,))
    return BatchTraffic(batch, 512, gib * GIB, 0.0, hits).features_by_gpu(RATE)


@pytest.mark.parametrize(("gib", "measured"), [(1, 2.37e-3), (4, 5.74e-3), (16, 7.66e-3), (32, 8.07e-3)])
def test_as_measured_on_an_h200(gib, measured):
    assert seconds(gib) == pytest.approx(measured, rel=0.06)


def test_a_cache_spares_walks():
    assert seconds(32, hits=0.5) == pytest.approx(seconds(32) / 2)
    assert seconds(0.5) == seconds(1)


def test_neighbour_lists_are_found_the_same_way():
    """Of a batch's lists, 180,000 out of 16 GiB of edges: most of them are a walk each."""
    batch = ExpectedBatch((), (1_000.0, 15_000.0, 164_000.0), (4e5,))
    near, far = (BatchTraffic(batch, 512, 0.0, gib * GIB).edges_by_gpu(RATE) for gib in (1, 16))
    assert near == pytest.approx(4e5 * 40 / RATE)
    assert far == pytest.approx(180_000 * (1 - 2 / 16) / 2.7e7, rel=0.02)
