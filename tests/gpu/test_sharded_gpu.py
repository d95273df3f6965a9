"""The sharded SpMM reads the rows of peers on the device and in pinned host memory, in every schedule and in tiles."""

from __future__ import annotations

import pytest
import torch

from weft.dist.shard_csr import shard_csr, tiled_csr
from weft.ops.csr.adjacency import Adjacency
from weft.ops.sharded.sharded_spmm import (
    SCHEDULES,
    ShardedLaunch,
    address_table,
    sharded_spmm_torch,
    sharded_spmm_triton,
)
from weft.ops.sharded.streamed_spmm import streamed_spmm_triton

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


@pytest.mark.parametrize("pinned", [False, True], ids=["device", "pinned host"])
@pytest.mark.parametrize("whole", [0.0, 2.0], ids=["copied", "gathered"])
@pytest.mark.parametrize(
    ("width", "tasks", "dtype"), [(16, 1, torch.float32), (64, 3, torch.float32), (100, 2, torch.bfloat16)]
)
def test_streamed(width, tasks, dtype, whole, pinned):
    """Staging is poisoned before every call: a sum that does not wait for its tile is not a number."""
    adj, half = big(), 2500
    own = adj.indptr[: half + 1]
    columns = adj.indices[: int(own[-1])]
    csr = tiled_csr(own.cuda(), columns.cuda(), (0, half, 5000), 0, tiles=4, whole=whole)
    pieces = shard_csr(own.cuda(), columns.cuda(), (0, half, 5000), 0, 16)
    x = torch.randn(tasks, 5000, width).to(dtype)
    near, far = x[:, :half].contiguous().cuda(), x[:, half:].contiguous()
    far = far.pin_memory() if pinned else far.cuda()
    staging = torch.empty(tasks * csr.staged_rows * width, dtype=dtype, device="cuda")
    runs = [
        streamed_spmm_triton(near, [near, far], csr, None, overlap, staging.fill_(torch.nan))
        for overlap in (True, True, True, False)
    ]
    assert all(torch.equal(runs[0], run) for run in runs)
    close = {"rtol": 1e-4, "atol": 1e-3} if dtype == torch.float32 else {"rtol": 2e-2, "atol": 1.0}
    torch.testing.assert_close(runs[0], sharded_spmm_torch(near, [near, far], pieces), **close)
