"""The array path gives what the plain one gives, quickly enough for large graphs."""

from __future__ import annotations

import pytest
import torch

from tests.planner import partition_reference as plain
from weft.dist.partition import halo_of, neighbour_pieces, own_rows, own_rows_of_transpose, split_edges, to_block
from weft.graph.catalog import shapes
from weft.ops.csr.adjacency import Adjacency
from weft.planner.partition import split_by_edges


def directed(nodes: int = 30, edges: int = 150) -> Adjacency:
    torch.manual_seed(1)
    keys = torch.unique(torch.randint(0, nodes * nodes, (edges,)))
    rows, cols = keys // nodes, keys % nodes
    indptr = torch.zeros(nodes + 1, dtype=torch.int32)
    indptr[1:] = torch.bincount(rows, minlength=nodes).cumsum(0)
    return Adjacency(indptr, cols.int(), weight=torch.rand(keys.numel()))


@pytest.mark.parametrize("ranks", [1, 2, 3, 5])
def test_split_edges_is_the_plain_one(ranks):
    adj = directed()
    found = split_by_edges(adj.indptr.tolist(), ranks)
    for rank in range(ranks):
        low, high = found.bounds[rank : rank + 2]
        indptr, columns, _, _ = own_rows(adj, low, high)
        split = split_edges(indptr, columns, found.bounds, rank)
        expected = plain.shard_edges(adj.indptr.tolist(), adj.indices.tolist(), found, rank)
        assert split.local_indptr.tolist() == expected.local_indptr
        assert split.local_indices.tolist() == expected.local_indices
        assert split.remote_indptr.tolist() == expected.remote_indptr
        halo = halo_of(columns, low, high)
        assert halo.tolist() == expected.halo
        ids = [expected.halo[place] for place in expected.remote_indices]
        assert split.remote_owner.tolist() == [plain.owner(found, node) for node in ids]
        assert split.remote_row.tolist() == [plain.local_id(found, node) for node in ids]
        block = to_block(columns, halo, low, high)
        back = torch.cat([torch.arange(low, high), halo.long()])[block.long()]
        assert torch.equal(back, columns.long())
        for ps in (1, 4):
            row, start, length = neighbour_pieces(split.remote_indptr, ps)
            pieces = plain.neighbour_pieces(expected.remote_indptr, ps)
            assert (row.tolist(), start.tolist(), length.tolist()) == (pieces.row, pieces.start, pieces.length)


def test_rows_of_the_transpose():
    adj = directed()
    whole = adj.transposed()
    for low, high in ((0, 12), (12, 12), (12, 30)):
        expected, found = own_rows(whole, low, high), own_rows_of_transpose(adj, low, high)
        for mine, theirs in zip(found, expected, strict=True):
            assert torch.equal(mine, theirs) if isinstance(mine, torch.Tensor) else mine == theirs


def test_large_row_offsets_are_searched_not_scanned():
    class Counted(list):
        reads = 0

        def __getitem__(self, place):
            Counted.reads += 1
            return super().__getitem__(place)

    indptr = Counted(range(0, 20 * 100_001, 20))
    found = split_by_edges(indptr, 8)
    assert found.imbalance < 0.01
    assert Counted.reads < 400


@pytest.mark.parametrize("name", ["cora", "citeseer", "pubmed", "proteins", "artist", "ogbn-arxiv"])
def test_ranks_have_equally_many_edges(name):
    """Within one percent, at the shapes' full size; the large shapes are counted by the benchmark."""
    indptr = shapes.make(name).adj.indptr.numpy()
    assert all(split_by_edges(indptr, ranks).imbalance < 0.01 for ranks in (2, 4, 8))
