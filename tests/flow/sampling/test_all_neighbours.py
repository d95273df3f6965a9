"""A hop that takes all neighbours picks each edge of the graph once at most, and plans know that."""

from __future__ import annotations

import weft
from weft.batches.sampler import capacity

GIB = 1 << 30


def test_all_neighbours_are_at_most_all_edges():
    assert capacity((-1, -1), 8, 100, 500).edges == (500, 500)
    assert capacity((-1, 3), 8, 100, 500).edges == (500, 300)
    assert capacity((-1,), 8, 100).edges == (800,)


def test_a_plan_for_a_gpu_takes_them_for_that():
    """Of arxiv's shape 28 billion edges were counted, which do not fit."""
    settings = {"graph": "shape:ogbn-arxiv", "model": "sage", "mode": "sampled"}
    every = weft.plan(weft.Task(**settings, fanout=[-1, -1]), machine="h200")
    many = weft.plan(weft.Task(**settings, fanout=[1000, 1000]), machine="h200")
    assert every.fits
    assert every.groups[0].cost.total_bytes < 1.5 * many.groups[0].cost.total_bytes < 10 * GIB
