"""PaddedAdjacency: a block with room to spare is the block, in every form that layers derive from it."""

from __future__ import annotations

import pytest
import torch

from weft import nn, ops
from weft.batches.block import PaddedAdjacency
from weft.batches.sampler import NeighbourSampler
from weft.graph.generate import citation


def padded(block, spare_rows=5, spare_cols=7, spare_edges=11):
    """The block with more rows, columns and entries than it needs, the spare ones full of nonsense."""
    count, edges, cols = block.num_dst + spare_rows, block.num_edges, block.num_src + spare_rows + spare_cols
    indptr = torch.cat([block.indptr, block.indptr[-1:].expand(spare_rows)]).int()
    indices = torch.cat([block.indices, torch.randint(0, cols, (spare_edges,))]).int()
    scale = torch.cat([block.gcn_scale, torch.full((cols - block.num_src,), 3.0)])
    degree = torch.cat([block.degree, torch.full((spare_rows,), 2)])
    assert indices.numel() == edges + spare_edges
    return PaddedAdjacency(indptr, indices, cols, full=lambda: (scale, degree)), count


@pytest.fixture(scope="module")
def block():
    graph = citation(num_nodes=300, num_edges=2000, num_features=4, num_classes=3, seed=2)
    sampler = NeighbourSampler(graph, [4, 3], degrees="full")
    return sampler.sample(torch.arange(20, dtype=torch.int32)).blocks[0]


@pytest.mark.parametrize("layer", ["GCNConv", "SAGEConv", "GINConv", "GATConv", "GATv2Conv"])
def test_layers_give_the_blocks_rows_and_gradients(block, layer):
    torch.manual_seed(0)
    mine, _ = padded(block)
    conv = getattr(nn, layer)(6, 4)
    nn.reset_parameters(conv, 1)
    x = torch.randn(mine.num_cols, 6)
    found = []
    for adj, features in ((mine, x), (block.adjacency(), x[: block.num_src])):
        leaf = features.clone().requires_grad_()
        out = conv(leaf, adj)[: block.num_dst]
        grads = torch.autograd.grad(out.square().sum(), [leaf, *conv.parameters()])
        found.append([out, grads[0][: block.num_src], *grads[1:]])
    for one, other in zip(*found, strict=True):
        torch.testing.assert_close(one, other, rtol=1e-4, atol=1e-5)


def test_its_transpose_is_the_blocks(block):
    mine, _ = padded(block)
    x = torch.randn(mine.num_rows, 3)
    back = ops.spmm(mine.transposed(), x)[: block.num_src]
    true = ops.spmm(block.adjacency().transposed(), x[: block.num_dst])
    torch.testing.assert_close(back, true)
