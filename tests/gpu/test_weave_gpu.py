"""Shared launches and woven groups on a GPU: every member as if alone, on streams and from a recording."""

from __future__ import annotations

from functools import cache

import pytest
import torch
from ops.graphs import from_pairs
from tiny import tiny_graph

from weft import ops
from weft.core.plan import Plan
from weft.core.task import Task
from weft.ops.multi import Call, together
from weft.ops.multi_spmm import Source, joined_spmm, multi_spmm, pull_push_spmm
from weft.ops.walk import pack
from weft.run.group import GroupRun
from weft.run.weave import WovenStep

pytestmark = [
    pytest.mark.gpu,
    pytest.mark.skipif(not torch.cuda.is_available(), reason="needs a CUDA device"),
]

NODES = 3000
EPOCHS = 6


@cache
def adjacency():
    """One way, with hubs among rows and columns."""
    random = torch.Generator().manual_seed(0)
    rows, cols = torch.randint(20, NODES, (2, 30_000), generator=random)
    many = torch.randperm(NODES - 20, generator=random)[:2500] + 20
    rows = torch.cat([rows, torch.full((2500,), 30), many])
    cols = torch.cat([cols, many, torch.full((2500,), 31)])
    return from_pairs(rows, cols, NODES, NODES).to("cuda")


def made(*shape: int, seed: int = 0) -> torch.Tensor:
    return torch.randn(*shape, generator=torch.Generator().manual_seed(seed)).to("cuda")


def sources() -> list[Source]:
    adj = adjacency()
    gcn = adj.gcn()
    return [
        Source(made(2, NODES, 64)),
        Source(made(NODES, 64, seed=1), "mean"),
        Source(made(NODES, 40, seed=2), "max"),
        Source(made(NODES, 7, seed=3), weight=made(adj.num_edges, seed=4).abs()),
        Source(made(3, NODES, 16, seed=5), row_scale=gcn.row_scale, col_scale=gcn.col_scale),
    ]


def test_every_source_has_the_bits_it_has_alone():
    adj = adjacency()
    with torch.no_grad():
        done = multi_spmm(adj, sources())
        alone = [multi_spmm(adj, [source])[0] for source in sources()]
        assert torch.equal(done[0], ops.spmm(adj, sources()[0].x))
    for mine, theirs in zip(done, alone, strict=True):
        assert torch.equal(mine, theirs)


def test_gradients_share_launches_too():
    adj = adjacency()
    given = [made(NODES, 32, seed=seed).requires_grad_() for seed in range(3)]
    outs = multi_spmm(adj, [Source(given[0]), Source(given[1], "mean"), Source(given[2], "max")])
    grads = torch.autograd.grad(sum(out.square().sum() for out in outs), given)
    alone = [ops.spmm(adj, x, reduce=reduce) for x, reduce in zip(given, ("sum", "mean", "max"), strict=True)]
    expected = torch.autograd.grad(sum(out.square().sum() for out in alone), given)
    for mine, theirs in zip(grads, expected, strict=True):
        assert torch.equal(mine, theirs)


@pytest.mark.parametrize("form", [joined_spmm, pull_push_spmm])
def test_both_directions(form):
    adj = adjacency()
    pulls, pushes = sources()[:2], [Source(made(NODES, 64, seed=8)), Source(made(2, NODES, 16, seed=9))]
    pulled, pushed = form(adj, pulls, pushes)
    for mine, source in zip(pulled, pulls, strict=True):
        assert torch.equal(mine, multi_spmm(adj, [source])[0])
    for mine, source in zip(pushed, pushes, strict=True):
        torch.testing.assert_close(mine, ops.spmm(adj.transposed(), source.x), rtol=1e-4, atol=1e-4)


def test_attention_of_different_heads():
    looped = adjacency().with_self_loops()
    walk, back = pack(looped), pack(looped.transposed(), perm=True)
    calls = [
        Call(
            "graph_attention_packed", (made(NODES, heads * (16 + 2), seed=heads), heads, 0.2, None, None, 0, walk, back)
        )
        for heads in (1, 4, 8)
    ]
    for mine, call in zip(together(calls), calls, strict=True):
        for one, other in zip(mine, call(), strict=True):
            assert torch.equal(one, other)


def tasks() -> list[Task]:
    fixed = {"graph": "tiny", "epochs": EPOCHS, "dropout": 0.4}
    sums = [
        Task(model=m, layers=l, hidden=h, seed=l, **fixed)
        for m, l, h in (("gcn", 2, 16), ("gcn", 4, 32), ("gin", 3, 16))
    ]
    rest = [Task(model="sage", layers=3, hidden=16, aggregator=a, seed=7, **fixed) for a in ("mean", "max")]
    return [
        *sums,
        *rest,
        *(Task(model=m, layers=2, hidden=16, heads=4, seed=9, **fixed) for m in ("gat", "gat", "gatv2")),
    ]


def run_of(join: str, replay: bool) -> GroupRun:
    given = tasks()
    plan = Plan(
        members=tuple(task.label for task in given),
        join=join,
        device="cuda",
        replay=replay,
        stacks=tuple((place,) for place in range(len(given))),
    )
    return GroupRun(given, tiny_graph(), plan, torch.device("cuda"))


@pytest.mark.parametrize("replay", [False, True])
def test_a_woven_group_trains_as_its_stacks_do_apart(replay):
    mine, theirs = run_of("woven", replay), run_of("stacked", replay)
    mine.advance(EPOCHS)
    theirs.advance(EPOCHS)
    assert mine.woven is not None, mine.notes
    assert mine.recorded == replay, mine.notes
    assert len(mine.woven.table.fused) >= 5
    for one, other in zip(mine.stacks, theirs.stacks, strict=True):
        for name, tensor in one.state.tensors().items():
            torch.testing.assert_close(
                tensor, other.state.tensors()[name], rtol=1e-5, atol=1e-6, equal_nan=True, msg=name
            )


@pytest.mark.parametrize("side_streams", [0, 1, 4])
def test_streams_change_nothing(side_streams):
    mine, theirs = run_of("stacked", False), run_of("stacked", False)
    step = WovenStep(mine.stacks, side_streams=side_streams)
    for _ in range(EPOCHS):
        step()
        theirs.step()
    torch.cuda.synchronize()
    for one, other in zip(mine.stacks, theirs.stacks, strict=True):
        torch.testing.assert_close(one.state.flat, other.state.flat, rtol=1e-5, atol=1e-6)
