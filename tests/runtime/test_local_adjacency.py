"""The local subgraph of a batch as a matrix: its products are those of the sampled edges, with loops and without."""

from __future__ import annotations

from dataclasses import replace

import pytest
import torch

from tests.flow.graphs import random_graph
from weft.batches import NeighbourSampler
from weft.batches.block import local_adjacency
from weft.ops.sparse.spmm import spmm


def dense(form: str, edge_index, weight, count: int) -> torch.Tensor:
    """The matrix by its definition."""
    matrix = torch.zeros(count, count)
    src, dst = edge_index
    matrix.index_put_((dst, src), torch.ones(src.numel()) if weight is None else weight, accumulate=True)
    if form == "mean":
        return matrix / torch.bincount(dst, minlength=count).clamp(min=1)[:, None]
    if form == "gcn":
        loops = torch.eye(count, dtype=torch.bool)
        matrix = torch.where(loops & (matrix == 0), torch.ones(()), matrix)
        scale = matrix.sum(1).rsqrt()
        matrix = scale[:, None] * matrix * scale
    return matrix


@pytest.mark.parametrize("weighted", [False, True])
@pytest.mark.parametrize("loops", [False, True])
@pytest.mark.parametrize("form", ["plain", "mean", "gcn"])
def test_products_are_those_of_the_matrix(form, loops, weighted):
    """Neighbours come in the order in which they were picked, sources before and behind their destination."""
    graph = random_graph(weighted=weighted)
    local = NeighbourSampler(graph, [4, 3], subgraph=True).sample(torch.tensor([5, 79, 3, 60]))
    if not loops:
        kept = local.edge_index[0] != local.edge_index[1]
        weight = None if local.weight is None else local.weight[kept]
        local = replace(local, edge_index=local.edge_index[:, kept], weight=weight)
    count = local.nodes.numel()
    adj = local_adjacency(local)
    adj = adj if form == "plain" else getattr(adj, form)()
    expected = dense(form, local.edge_index, local.weight, count)
    x = torch.randn(count, 5, generator=torch.Generator().manual_seed(0))
    torch.testing.assert_close(spmm(adj, x), expected @ x, rtol=1e-4, atol=1e-5)
    torch.testing.assert_close(spmm(adj.transposed(), x), expected.T @ x, rtol=1e-4, atol=1e-5)


def test_columns_ascend():
    graph = random_graph()
    local = NeighbourSampler(graph, [4, 3], subgraph=True).sample(torch.tensor([5, 79, 3, 60]))
    adj = local_adjacency(local)
    keys = adj.rows().long() * adj.num_cols + adj.indices
    assert torch.equal(keys, (local.edge_index[1] * adj.num_cols + local.edge_index[0]).sort().values)


def test_gcn_is_pygs():
    pyg = pytest.importorskip("torch_geometric.nn.conv.gcn_conv")
    graph = random_graph()
    local = NeighbourSampler(graph, [4, 3], subgraph=True).sample(torch.tensor([5, 79, 3, 60]))
    count = local.nodes.numel()
    edges, weight = pyg.gcn_norm(local.edge_index, None, count, False, True, dtype=torch.float32)
    x = torch.randn(count, 5, generator=torch.Generator().manual_seed(0))
    expected = torch.zeros(count, 5).index_add_(0, edges[1], weight[:, None] * x[edges[0]])
    torch.testing.assert_close(spmm(local_adjacency(local).gcn(), x), expected, rtol=1e-4, atol=1e-5)


def test_no_edges():
    graph = random_graph()
    local = NeighbourSampler(graph, [4], subgraph=True).sample(torch.tensor([79]))
    assert local_adjacency(local).indptr.tolist() == [0, 0]
