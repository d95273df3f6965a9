"""The array path gives what the plain one gives, quickly enough for large graphs, and orders are permutations."""

from __future__ import annotations

import pytest
import torch

from tests.graphs_for_tests import tiny_graph
from weft.core.errors import SpecError
from weft.dist.partition_arrays import (
    count_remote,
    halo_of,
    neighbour_pieces,
    order_nodes,
    own_rows,
    own_rows_of_transpose,
    reordered,
    split_edges,
    to_block,
)
from weft.ops.csr.adjacency import Adjacency
from weft.planner import partition as plain


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
    found = plain.split_by_edges(adj.indptr.tolist(), ranks)
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
        assert split.remote_owner.tolist() == [found.owner(node) for node in ids]
        assert split.remote_row.tolist() == [found.local_id(node) for node in ids]
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


@pytest.mark.parametrize("kind", ["given", "degree", "bfs", "rcm"])
def test_orders_are_permutations_that_keep_the_graph(kind):
    if kind in ("bfs", "rcm"):
        pytest.importorskip("scipy")
    adj = tiny_graph().adj
    order = order_nodes(adj, kind)
    assert torch.equal(order.sort().values, torch.arange(adj.num_rows))
    other = reordered(adj, order)
    assert torch.equal(other.degrees(), adj.degrees()[order])
    new = {(int(order[a]), int(order[b])) for a, b in zip(other.rows().tolist(), other.indices.tolist(), strict=True)}
    assert new == set(zip(adj.rows().tolist(), adj.indices.tolist(), strict=True))


def test_an_order_that_keeps_neighbours_together_has_fewer_remote_edges():
    pytest.importorskip("scipy")
    ids = torch.randperm(400, generator=torch.Generator().manual_seed(0))
    src, dst = ids, ids.roll(1)
    keys = torch.unique(torch.cat([src * 400 + dst, dst * 400 + src]))
    indptr = torch.zeros(401, dtype=torch.int32)
    indptr[1:] = torch.bincount(keys // 400, minlength=400).cumsum(0)
    ring = Adjacency(indptr, (keys % 400).int(), symmetric=True)
    counts = {}
    for kind in ("given", "bfs", "rcm"):
        adj = reordered(ring, order_nodes(ring, kind))
        counts[kind] = sum(count_remote(adj, plain.split_by_edges(adj.indptr.tolist(), 4).bounds))
    assert counts["rcm"] < counts["given"] / 10
    assert counts["bfs"] < counts["given"] / 10


def test_an_unknown_order_is_refused():
    with pytest.raises(SpecError, match="given, degree, bfs, rcm"):
        order_nodes(directed(), "random")


def test_large_row_offsets_are_searched_not_walked():
    class Counted(list):
        reads = 0

        def __getitem__(self, place):
            Counted.reads += 1
            return super().__getitem__(place)

    indptr = Counted(range(0, 20 * 100_001, 20))
    found = plain.split_by_edges(indptr, 8)
    assert found.imbalance < 0.01
    assert Counted.reads < 400
