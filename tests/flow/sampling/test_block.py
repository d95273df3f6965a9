"""Block: what layers compute on it equals the same computation on a dense matrix, forward and backward."""

from __future__ import annotations

import pytest
import torch

from tests.flow.graphs import NODES, random_graph
from weft import ops
from weft.batches import NeighbourSampler


def block_of(degrees="sampled", fanout=4, **kind):
    graph = random_graph(**kind)
    batch = NeighbourSampler(graph, [fanout], degrees=degrees).sample(torch.tensor([5, 79, 3, 60, 8]))
    return graph, batch, batch.blocks[0]


def dense(adj) -> torch.Tensor:
    """The matrix ``[D, M]`` with all its factors."""
    out = torch.zeros(adj.num_rows, adj.num_cols)
    value = torch.ones(adj.num_edges) if adj.weight is None else adj.weight
    out.index_put_((adj.rows().long(), adj.indices.long()), value, accumulate=True)
    if adj.row_scale is not None:
        out = out * adj.row_scale[:, None]
    return out if adj.col_scale is None else out * adj.col_scale


@pytest.mark.parametrize("weighted", [False, True])
@pytest.mark.parametrize("form", ["plain", "mean", "self loops", "gcn", "full"])
def test_products_and_gradients(form, weighted):
    _, _, block = block_of("full" if form == "full" else "sampled", weighted=weighted)
    adj = block.adjacency()
    adj = {"mean": adj.mean, "self loops": adj.with_self_loops, "gcn": adj.gcn, "full": adj.gcn}.get(
        form, lambda: adj
    )()
    x = torch.randn(block.num_src, 7, requires_grad=True)
    out = ops.spmm(adj, x)
    torch.testing.assert_close(out, dense(adj) @ x)
    grad = torch.randn_like(out)
    (mine,) = torch.autograd.grad(out, x, grad)
    torch.testing.assert_close(mine, dense(adj).T @ grad)


def test_transposed_equals_the_sorted_one():
    _, _, block = block_of()
    back = block.adjacency().transposed()
    plain = ops.Adjacency(block.indptr, block.indices, block.num_src).transposed()
    assert torch.equal(back.indptr, plain.indptr)
    assert torch.equal(back.indices, plain.indices)
    assert torch.equal(back.perm, plain.perm)


def test_gcn_on_sampled_degrees_is_what_pyg_computes():
    """PyG normalises the batch's edge list as a square graph of its own."""
    gcn_norm = pytest.importorskip("torch_geometric.nn.conv.gcn_conv").gcn_norm
    _, _, block = block_of()
    rows = torch.repeat_interleave(torch.arange(block.num_dst), block.indptr.diff().long())
    edge_index, weight = gcn_norm(torch.stack([block.indices.long(), rows]), None, block.num_src)
    expected = torch.zeros(block.num_src, block.num_src)
    expected.index_put_((edge_index[1], edge_index[0]), weight, accumulate=True)
    torch.testing.assert_close(dense(block.adjacency().gcn()), expected[: block.num_dst])


def test_full_degrees_and_all_neighbours_give_the_graph_s_own_matrix():
    graph, batch, block = block_of("full", fanout=-1)
    rows = dense(graph.adj.gcn())[batch.seeds.long()]
    mine = torch.zeros(block.num_dst, NODES)
    mine.index_add_(1, batch.input_nodes.long(), dense(block.adjacency().gcn()))
    torch.testing.assert_close(mine, rows)


def test_full_degrees_give_an_unbiased_sum():
    """Over 1,500 batches the mean is within five standard errors of the full row, for a hub and another node."""
    graph = random_graph()
    sampler = NeighbourSampler(graph, [3], degrees="full")
    batches = [sampler.sample(torch.tensor([5, 8]), 0, number) for number in range(1500)]
    rows = torch.stack([ops.spmm(b.blocks[0].adjacency().gcn(), graph.x[b.input_nodes.long()]) for b in batches])
    expected = ops.spmm(graph.adj.gcn(), graph.x)[[5, 8]]
    error = rows.std(0) / len(batches) ** 0.5
    assert bool(((rows.mean(0) - expected).abs() < 5 * error).all())


def test_loops_that_were_sampled_count_once():
    graph = type(random_graph()).from_edges([0, 1, 0], [0, 0, 1], 2)
    block = NeighbourSampler(graph, [-1]).sample(torch.tensor([0, 1])).blocks[0]
    looped = block.adjacency().with_self_loops()
    assert dense(looped).tolist() == [[1, 1], [1, 1]]


def test_empty_blocks():
    graph = random_graph()
    for seeds in (torch.tensor([79]), torch.empty(0, dtype=torch.int64)):
        block = NeighbourSampler(graph, [3]).sample(seeds).blocks[0]
        adj = block.adjacency()
        assert ops.spmm(adj, torch.ones(block.num_src, 2)).shape == (seeds.numel(), 2)
        assert adj.gcn().num_edges == seeds.numel()
        assert adj.transposed().num_rows == seeds.numel()
