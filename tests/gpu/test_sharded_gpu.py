"""Ranks that share one GPU through CUDA IPC train as one rank does; the kernel reads peers and pinned host memory."""

from __future__ import annotations

import pytest
import torch

from tests.dist import cases
from tests.dist.cases import Case, TwoBranches, train_alone
from weft.core.task import Task
from weft.dist.launch import start_ranks
from weft.dist.shard_walk import shard_walk
from weft.ops.csr.adjacency import Adjacency
from weft.ops.sparse.sharded_spmm_triton import (
    SCHEDULES,
    ShardedLaunch,
    address_table,
    sharded_spmm_torch,
    sharded_spmm_triton,
)

pytestmark = [
    pytest.mark.gpu,
    pytest.mark.skipif(not torch.cuda.is_available(), reason="needs a CUDA device"),
]


def task(model="gcn", graph="tiny", **changes) -> Task:
    given = {"epochs": 10, "lr": 0.05, **changes}
    return Task(graph=graph, model=model, **({"hidden": 8, **given} if isinstance(model, str) else given))


CASES = [
    Case("gcn", (task("gcn", epochs=20),), epochs=20),
    Case("sage", (task("sage"),)),
    Case("gin batch norm", (task("gin", norm="batch"),)),
    Case("gat", (task("gat", heads=2),)),
    Case("a user's module", (task(TwoBranches),)),
    Case("weights", (task("gcn"),), graph="weighted"),
    Case("hub", (task("gcn", "hub"),), graph="hub"),
    Case("stacked", tuple(task("gcn", seed=seed, dropout=0.2 * seed) for seed in range(3))),
]


@pytest.mark.parametrize("ranks", [2, 3])
def test_ranks_that_share_a_gpu(ranks):
    device = torch.device("cuda:0")
    alone = [train_alone(case, device) for case in CASES]
    with start_ranks(ranks, device, cases.work, (CASES,), timeout=240) as here:
        found = cases.train_all(here, CASES)
        every = here.gather_objects([(one["rows"], one["weights"]) for one in found])
    for place, case in enumerate(CASES):
        close = {"rtol": 2e-3, "atol": 2e-4, "equal_nan": True, "msg": lambda words, case=case: f"{case.name}: {words}"}
        torch.testing.assert_close(found[place]["rows"], alone[place]["rows"], **close)
        torch.testing.assert_close(found[place]["weights"], alone[place]["weights"], **close)
        for _, weights in (one[place] for one in every):
            assert torch.equal(weights, found[place]["weights"]), f"{case.name}: ranks hold different weights"


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
    walk = shard_walk(own.cuda(), columns.cuda(), (0, half, 5000), 0, ps)
    x = torch.randn(5000, width)
    near, far = x[:half].cuda(), x[half:].pin_memory() if pinned else x[half:].cuda()
    table, counts = address_table([near, far], near.device)
    scratch = torch.full(((walk.local_start.numel() + walk.remote_start.numel()) * width,), torch.nan, device="cuda")
    runs = [
        sharded_spmm_triton(near, table, counts, walk, None, ShardedLaunch(ps, 2, 4), schedule, scratch)
        for _ in range(2)
    ]
    assert torch.equal(*runs)
    torch.testing.assert_close(runs[0], sharded_spmm_torch(near, [near, far], walk), rtol=1e-4, atol=1e-3)
