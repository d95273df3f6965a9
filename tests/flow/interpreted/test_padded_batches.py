"""A batch packed by the host has the arrays of one that the GPU's sampler pads, up to entries that do not exist."""

from __future__ import annotations

import pytest
import torch

from tests.flow.graphs import random_graph
from weft.batches import FeatureStore, NeighbourSampler, SeedOrder
from weft.batches.division.preparers import PaddedHost, PaddedLayout, padded_item
from weft.batches.sampler import TritonHops
from weft.ops.sampling.reference import make_clock

CPU = torch.device("cpu")


@pytest.mark.parametrize("cached", [0, 40])
def test_both_sides_make_the_same_batch(cached):
    """Also where a cache has some of the rows, which the host then neither gathers nor copies."""
    graph = random_graph()
    sampler = NeighbourSampler(graph, [3, 2], seed=4)
    ids = torch.arange(0, graph.num_nodes, 2, dtype=torch.int32)[:cached]
    held = FeatureStore(graph.x, cached=ids)
    host = PaddedHost(sampler, graph.x, CPU, slots=1, store=held)
    store = FeatureStore(graph.x)
    store.tier = "device"  # as on a GPU; the interpreter runs its kernels on CPU tensors
    triton = TritonHops(graph.adj.indptr, graph.adj.indices, CPU)
    for seeds in list(SeedOrder(graph.train, 12).epoch(1))[:2]:
        packed = host.prepare(seeds)
        mine = host.transfer(packed)
        wanted = [node for node in mine.nodes[: packed.count].tolist() if node not in set(ids.tolist())]
        assert torch.equal(packed.x, graph.x[wanted])
        assert (packed.positions is not None) == bool(cached)
        host.discard(packed)
        seed_ids, clock = seeds.seeds.to(torch.int32), make_clock(4, seeds.epoch, seeds.batch)
        hops = triton.padded(seed_ids, [3, 2], clock)
        layout = PaddedLayout.of(seeds.seeds.numel(), [3, 2], graph.num_nodes)
        theirs = padded_item(seeds, hops, layout, store)
        assert mine.layout == layout
        assert [t.shape for t in mine.tensors()] == [t.shape for t in theirs.tensors()]
        assert torch.equal(mine.x, theirs.x)
        count = packed.count
        assert torch.equal(mine.nodes[:count], theirs.nodes[:count])
        for (indptr, indices), (their_indptr, their_indices) in zip(mine.hops, theirs.hops, strict=True):
            edges = int(indptr[-1])
            assert torch.equal(indptr, their_indptr)
            assert torch.equal(indices[:edges], their_indices[:edges])
