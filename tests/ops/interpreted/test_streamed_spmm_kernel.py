"""streamed_spmm: tiles of remote rows against the torch reference, with the staging area poisoned before."""

from __future__ import annotations

import pytest
import torch

from tests.ops.interpreted.packed import assert_same, numbers
from tests.ops.interpreted.test_sharded_spmm_kernel import BOUNDS, graph, parts
from weft.core.errors import InputError
from weft.dist.partition import own_rows
from weft.dist.shard_csr import tiled_csr
from weft.ops.sharded.sharded_spmm import sharded_spmm_torch
from weft.ops.sharded.streamed_spmm import streamed_spmm_triton
from weft.ops.sparse.spmm import spmm


def tiled(adj, rank, weight=None, tiles=3, whole=0.6):
    indptr, columns, _, first = own_rows(adj, BOUNDS[rank], BOUNDS[rank + 1])
    own = None if weight is None else weight[first : first + columns.numel()]
    return tiled_csr(indptr, columns, BOUNDS, rank, own, tiles, whole)


@pytest.mark.parametrize(("whole", "kinds"), [(0.0, {True}), (2.0, {False})], ids=["copied", "gathered"])
@pytest.mark.parametrize(("rank", "tiles"), [(0, 4), (1, 2), (2, 3), (3, 40)])
def test_tiles(rank, tiles, whole, kinds):
    adj = graph()
    reference, peers, x, weight = parts(adj, rank, 4, weighted=tiles != 4)
    csr = tiled(adj, rank, weight, tiles, whole)
    assert {tile.needed is None for tile in csr.tiles} <= kinds
    scale = numbers(csr.num_rows, seed=4)
    found, again = (
        streamed_spmm_triton(peers[rank], peers, csr, scale, staging=torch.full((200 * 5,), torch.nan))
        for _ in range(2)
    )
    assert torch.equal(found, again)
    assert_same(found, sharded_spmm_torch(peers[rank], peers, reference, scale), x.dtype)


@pytest.mark.parametrize("dtype", [torch.float32, torch.float64, torch.bfloat16], ids=str)
@pytest.mark.parametrize("width", [1, 17])
def test_widths_and_types(width, dtype):
    """Sums of half precision are kept in single precision over the tiles."""
    reference, peers, _, _ = parts(graph(), 2, 4, weighted=False, width=width, dtype=dtype)
    found = streamed_spmm_triton(peers[2], peers, tiled(graph(), 2))
    assert_same(found, sharded_spmm_torch(peers[2], peers, reference), dtype)


@pytest.mark.parametrize("whole", [0.0, 2.0])
def test_tasks(whole):
    _, peers, x, weight = parts(graph(), 3, 4, weighted=True, lead=(2, 3))
    found = streamed_spmm_triton(peers[3], peers, tiled(graph(), 3, weight, 3, whole))
    assert_same(found, spmm(graph(), x, weight)[..., 13:, :], x.dtype)


def test_the_number_of_tiles_changes_no_edge():
    """Every remote edge is in one tile, of the rank that owns its source, and only rows with edges are touched."""
    csr = tiled(graph(), 2, tiles=5)
    whole = tiled(graph(), 2, tiles=1)
    assert sum(tile.csr.num_edges for tile in csr.tiles) == sum(tile.csr.num_edges for tile in whole.tiles)
    for tile in csr.tiles:
        assert tile.last <= BOUNDS[tile.owner + 1] - BOUNDS[tile.owner]
        assert tile.owner != 2
        assert int(tile.csr.work.light_len.min()) > 0


def test_rows_of_another_shard_are_refused():
    _, peers, _, _ = parts(graph(), 0, 4, weighted=False)
    with pytest.raises(InputError, match="x has 7 rows, the shard has 6"):
        streamed_spmm_triton(peers[0], peers, tiled(graph(), 2))
