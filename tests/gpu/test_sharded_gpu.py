"""The sharded SpMM reads the rows of peers on the device and in pinned host memory, in every schedule."""

from __future__ import annotations

import pytest
import torch

from weft.dist.shard_csr import shard_csr
from weft.ops.csr.adjacency import Adjacency
from weft.ops.sharded.shard import ShardedLaunch, address_table, sharded_spmm_torch
from weft.ops.sharded.sharded_spmm import SCHEDULES, sharded_spmm_triton

pytestmark = [
    pytest.mark.gpu,
    pytest.mark.skipif(not torch.cuda.is_available(), reason="needs a CUDA device"),
]


def big(nodes: int = 5000, edges: int = 200_000) -> Adjacency:
    torch.manual_seed(0)
    rows = torch.cat([torch.randint(0, nodes, (edges,)), torch.full((3000,), 7)])
    cols = torch.randint(0, nodes, (edges + 3000,))
    keys = torch.unique(rows * nodes + cols)
    indptr = torch.zeros(nodes + 1, dtype=torch.int64)
    indptr[1:] = torch.bincount(keys // nodes, minlength=nodes).cumsum(0)
    return Adjacency(indptr, (keys % nodes).int())


@pytest.mark.parametrize("pinned", [False, True], ids=["device", "pinned host"])
@pytest.mark.parametrize("schedule", SCHEDULES)
@pytest.mark.parametrize(("width", "ps"), [(16, 4), (64, 16), (100, 32), (128, 1)])
def test_the_kernel(width, ps, schedule, pinned):
    adj, half = big(), 2500
    own = adj.indptr[: half + 1]
    columns = adj.indices[: int(own[-1])]
    csr = shard_csr(own.cuda(), columns.cuda(), (0, half, 5000), 0, ps, chunks=3)
    x = torch.randn(5000, width)
    near, far = x[:half].cuda(), x[half:].pin_memory() if pinned else x[half:].cuda()
    table, counts = address_table([near, far], near.device)
    scratch = torch.full(((csr.local_start.numel() + csr.remote_start.numel()) * width,), torch.nan, device="cuda")
    runs = [
        sharded_spmm_triton(near, table, counts, csr, None, ShardedLaunch(ps, 2, 4), schedule, scratch)
        for _ in range(2)
    ]
    assert torch.equal(*runs)
    torch.testing.assert_close(runs[0], sharded_spmm_torch(near, [near, far], csr), rtol=1e-4, atol=1e-3)
