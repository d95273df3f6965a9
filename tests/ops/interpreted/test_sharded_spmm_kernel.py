"""sharded_spmm: every schedule against the torch reference, with partial rows poisoned before."""

from __future__ import annotations

import itertools

import pytest
import torch

from tests.graphs_for_tests import from_pairs
from tests.ops.interpreted.packed import assert_same, numbers
from weft.core.errors import InputError
from weft.dist.partition import own_rows
from weft.dist.shard_csr import shard_csr
from weft.ops.sharded.sharded_spmm import (
    SCHEDULES,
    ShardedLaunch,
    address_table,
    sharded_spmm_torch,
    sharded_spmm_triton,
)
from weft.ops.sparse.spmm import spmm

BOUNDS = (0, 7, 7, 13, 20)


def graph(nodes: int = 20):
    """Node 8 is joined to all, node 3 has no edge, most others have a few."""
    there = torch.rand(nodes, nodes, generator=torch.Generator().manual_seed(2)) < 0.15
    there[8] = True
    there[3] = False
    return from_pairs(*there.nonzero(as_tuple=True), nodes, nodes)


def parts(adj, rank, ps, weighted, lead=(), width=5, dtype=torch.float32, chunks=1):
    indptr, columns, _, first = own_rows(adj, BOUNDS[rank], BOUNDS[rank + 1])
    weight = numbers(adj.num_edges, seed=3, dtype=dtype) if weighted else None
    own = None if weight is None else weight[first : first + columns.numel()]
    x = numbers(*lead, adj.num_cols, width, dtype=dtype)
    peers = [x[..., low:high, :].contiguous() for low, high in itertools.pairwise(BOUNDS)]
    return shard_csr(indptr, columns, BOUNDS, rank, ps, own, chunks), peers, x, weight


@pytest.mark.parametrize("schedule", SCHEDULES)
@pytest.mark.parametrize(("ps", "dist", "warps"), [(1, 1, 1), (4, 2, 2), (3, 1, 4), (16, 4, 1)])
@pytest.mark.parametrize("rank", [0, 1, 2, 3])
def test_schedules(rank, ps, dist, warps, schedule):
    adj = graph()
    csr, peers, x, weight = parts(adj, rank, ps, weighted=ps > 1)
    scale = numbers(csr.num_rows, seed=4)
    scratch = torch.full((20 * 20 * 5,), torch.nan)
    table, counts = address_table(peers, x.device)
    launch = ShardedLaunch(ps, dist, warps)
    staging = torch.full((20 * 5,), torch.nan)
    found = sharded_spmm_triton(peers[rank], table, counts, csr, scale, launch, schedule, scratch, staging)
    assert_same(found, sharded_spmm_torch(peers[rank], peers, csr, scale), x.dtype)
    low, high = BOUNDS[rank], BOUNDS[rank + 1]
    assert_same(found, spmm(adj, x, weight)[low:high] * scale[:, None], x.dtype)


@pytest.mark.parametrize("dtype", [torch.float32, torch.float64, torch.bfloat16], ids=str)
@pytest.mark.parametrize("width", [1, 17, 40])
def test_widths_and_types(width, dtype):
    csr, peers, x, _ = parts(graph(), 2, 4, weighted=False, width=width, dtype=dtype)
    table, counts = address_table(peers, x.device)
    found = sharded_spmm_triton(peers[2], table, counts, csr, None, ShardedLaunch(4, 2, 2))
    assert_same(found, sharded_spmm_torch(peers[2], peers, csr), dtype)


def test_tasks():
    csr, peers, x, weight = parts(graph(), 3, 4, weighted=True, lead=(3,))
    table, counts = address_table(peers, x.device)
    for schedule in SCHEDULES:
        found, again = (
            sharded_spmm_triton(peers[3], table, counts, csr, None, ShardedLaunch(4, 1, 2), schedule) for _ in range(2)
        )
        assert_same(found, spmm(graph(), x, weight)[:, 13:], x.dtype)
        assert torch.equal(found, again)


@pytest.mark.parametrize(("ps", "chunks"), [(1, 2), (4, 3), (3, 5), (4, 40), (0, 3)])
def test_chunks_of_remote_rows(ps, chunks):
    """Chunks may be empty; the same pieces in another order have the same bits."""
    csr, peers, x, weight = parts(graph(), 2, ps, weighted=True, chunks=chunks)
    assert csr.chunk_pieces[-1] == csr.remote_start.numel()
    assert csr.chunk_rows[-1] == csr.halo_row.numel()
    for chunk in range(chunks):
        for piece in csr.remote_order[csr.chunk_pieces[chunk] : csr.chunk_pieces[chunk + 1]].tolist():
            start, length = int(csr.remote_start[piece]), int(csr.remote_length[piece])
            places = csr.remote_place[start : start + length]
            assert 0 < length <= (ps or 20)
            assert bool(((places >= csr.chunk_rows[chunk]) & (places < csr.chunk_rows[chunk + 1])).all())
    table, counts = address_table(peers, x.device)
    launch = ShardedLaunch(ps, 2, 2)
    found = {
        schedule: sharded_spmm_triton(
            peers[2], table, counts, csr, None, launch, schedule, torch.full((20 * 60 * 5,), torch.nan),
            torch.full((20 * 5,), torch.nan),
        )
        for schedule in ("pipelined", "fetch_first")
    }  # fmt: skip
    assert_same(found["pipelined"], spmm(graph(), x, weight)[7:13], x.dtype)
    assert torch.equal(found["pipelined"], found["fetch_first"])


def test_a_launch_for_other_pieces_is_refused():
    csr, peers, x, _ = parts(graph(), 0, 4, weighted=False)
    with pytest.raises(InputError, match="pieces of 4"):
        sharded_spmm_triton(peers[0], *address_table(peers, x.device), csr, None, ShardedLaunch(8))
    with pytest.raises(InputError, match="ps=33"):
        ShardedLaunch(33)
    csr, *_ = parts(graph(), 0, 0, weighted=False)
    with pytest.raises(InputError, match="leaves rows whole"):
        sharded_spmm_triton(peers[0], *address_table(peers, x.device), csr, None, ShardedLaunch(0), "apart")
