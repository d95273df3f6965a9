"""Batch norm and batches of one node: refused before the first epoch where such a batch may be met."""

from __future__ import annotations

import numpy as np
import pytest

import weft
from weft.core.errors import SpecError
from weft.engine.graphs import lone_node

TASK = {"model": "gcn", "mode": "sampled", "fanout": [2, 2], "norm": "batch", "epochs": 2, "hidden": 4}


def made(edges, train=8) -> weft.Graph:
    """Twelve nodes with ``edges`` between them, the first ones to train on."""
    src, dst = np.array(edges).T
    x, y = np.random.default_rng(0).normal(size=(12, 3)).astype("float32"), np.arange(12) % 2
    ids = np.arange(12)
    split = {"train": ids[:train], "val": ids[train : train + 2], "test": ids[train + 2 :]}
    return weft.Graph.from_edges(src, dst, x=x, y=y, directed=False, name="made", num_nodes=12, **split)


RING = [(node, (node + 1) % 12) for node in range(12)]


@pytest.mark.parametrize(("edges", "alone"), [(RING, None), (RING[:3], 4), ([*RING[:6], (7, 7)], 7)])
def test_nodes_without_neighbours_but_themselves(edges, alone):
    assert lone_node(made(edges)) == alone


@pytest.mark.parametrize(
    ("train", "batch", "one"), [(8, 7, True), (8, 1, True), (8, 8, False), (8, 3, False), (9, 2, True)]
)
def test_a_batch_of_one_node(train, batch, one):
    task = weft.Task(graph=made([(0, 9), (9, 10)], train), batch=batch, **TASK)  # most have no neighbours
    if one:
        with pytest.raises(SpecError, match="has no neighbours"):
            weft.plan(task, machine="cpu")
    else:
        weft.plan(task, machine="cpu")


def test_batch_norm_is_refused_where_a_batch_may_be_one_node():
    lonely = made(RING[:3])
    with pytest.raises(SpecError, match="of 8 training nodes in batches of 7 one is left over, and node 4 has no"):
        weft.run(weft.Task(graph=lonely, batch=7, **TASK), device="cpu", progress=False)
    with pytest.raises(SpecError, match="node 4"):
        weft.plan(weft.Task(graph=lonely, batch=7, **TASK))
    for graph, more in ((lonely, {"batch": 4}), (lonely, {"batch": 7, "norm": "layer"}), (made(RING), {"batch": 7})):
        weft.run(weft.Task(graph=graph, **TASK | more), device="cpu", progress=False)
