"""The local subgraph of a batch as a matrix: the same edges in the order of a stable sort, and the same products."""

from __future__ import annotations

import pytest
import torch

from tests.flow.graphs import random_graph
from weft.flow import NeighbourSampler
from weft.ops.csr.adjacency import Adjacency
from weft.ops.sparse.spmm import spmm
from weft.runtime.batches.local_adjacency import local_adjacency


@pytest.mark.parametrize("weighted", [False, True])
@pytest.mark.parametrize("form", ["plain", "mean", "gcn"])
def test_edges_and_products(form, weighted):
    graph = random_graph(weighted=weighted)
    local = NeighbourSampler(graph, [4, 3], subgraph=True).sample(torch.tensor([5, 79, 3, 60]))
    mine = local_adjacency(local)
    src, dst = local.edge_index
    order = torch.sort(dst, stable=True).indices
    assert torch.equal(mine.indices.long(), src[order])
    assert torch.equal(mine.rows().long(), dst[order])
    weight = None if local.weight is None else local.weight[order]
    theirs = Adjacency(mine.indptr, mine.indices, mine.num_cols, weight=weight)
    x = torch.randn(mine.num_cols, 5, generator=torch.Generator().manual_seed(0))
    got, expected = (adj if form == "plain" else getattr(adj, form)() for adj in (mine, theirs))
    torch.testing.assert_close(spmm(got, x), spmm(expected, x))
    back, other = got.transposed(), expected.transposed()
    assert torch.equal(back.indptr, other.indptr)
    assert torch.equal(back.indices, other.indices)
    torch.testing.assert_close(spmm(back, x), spmm(other, x))


def test_no_edges():
    graph = random_graph()
    local = NeighbourSampler(graph, [4], subgraph=True).sample(torch.tensor([79]))
    assert local_adjacency(local).indptr.tolist() == [0, 0]
