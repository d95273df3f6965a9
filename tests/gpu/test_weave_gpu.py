"""Merged launches and woven groups on a GPU: every member as if alone, on streams and in a CUDA graph."""

from __future__ import annotations

from functools import cache

import pytest
import torch

from tests.graphs_for_tests import from_pairs, tiny_graph
from tests.weave.merged_calls import merged_call
from weft import ops
from weft.core.plan import Plan
from weft.core.task import Task
from weft.ops.csr.packed import pack_csr, unpack_csr
from weft.ops.sparse.spmm import spmm_torch
from weft.ops.sparse.spmm_max import spmm_max_torch
from weft.runtime.group import GroupRun
from weft.weave.merged_launch import OpCall
from weft.weave.step import Weaver, WovenStep

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


def spmm_call(x, weight=None, row_scale=None, col_scale=None) -> OpCall:
    return OpCall("spmm", (x, weight, row_scale, col_scale, pack_csr(adjacency()), [], None))


def calls() -> list[OpCall]:
    adj = adjacency()
    gcn = adj.gcn()
    return [
        spmm_call(made(2, NODES, 64)),
        spmm_call(made(NODES, 64, seed=1), row_scale=adj.inverse_degrees()),
        OpCall("spmm_max", (made(NODES, 40, seed=2), None, pack_csr(adj), [])),
        spmm_call(made(NODES, 7, seed=3), made(adj.num_edges, seed=4).abs()),
        spmm_call(made(3, NODES, 16, seed=5), None, gcn.row_scale, gcn.col_scale),
    ]


def exact(call: OpCall) -> torch.Tensor:
    """What a call should return, in double precision."""
    wide = [v.double() if isinstance(v, torch.Tensor) else v for v in call.arguments]
    if call.name == "spmm_max":
        return spmm_max_torch(wide[0], wide[1], unpack_csr(wide[2]))[0]
    return spmm_torch(*wide[:4], unpack_csr(wide[4]))


def assert_rounded(mine: torch.Tensor, expected: torch.Tensor, what: str) -> None:
    """Every row within rounding of ``expected``; a wrong row is named, since its error is as large as its numbers."""
    error = (mine.double() - expected).abs().amax(-1) / expected.abs().amax(-1).clamp(min=1e-3)
    worst = error.flatten().argmax().item()
    where = f"{what}: row {worst % mine.shape[-2]} of task {worst // mine.shape[-2]}"
    assert error.max() < 1e-5, f"{where} is off by {error.max().item():.1e} of its largest number"


def test_every_call_has_the_numbers_it_has_alone():
    """Bit for bit where a launch of its own would have as many warps to a tile, and to rounding otherwise."""
    for number, (mine, call) in enumerate(zip(merged_call(calls()), calls(), strict=True)):
        assert_rounded(mine[0], exact(call), f"merged, call {number}")
        assert_rounded(merged_call([call])[0][0], exact(call), f"alone, call {number}")


def test_alike_calls_have_the_bits_they_have_alone():
    """Launches with the same number of warps run the very code that they run alone."""
    alike = [calls()[0], calls()[1], spmm_call(made(NODES, 64, seed=2), None, *scales_of(adjacency().gcn()))]
    for mine, call in zip(merged_call(alike), alike, strict=True):
        assert torch.equal(mine[0], merged_call([call])[0][0])


def scales_of(adj) -> tuple[torch.Tensor, torch.Tensor]:
    return adj.row_scale, adj.col_scale


@pytest.mark.parametrize("push", [False, True])
def test_both_directions(push):
    """Sums over the graph and over its transpose in one launch, the latter pulled or pushed."""
    adj = adjacency()
    pulls, grads = calls()[:2], [made(NODES, 64, seed=8), made(2, NODES, 16, seed=9)]
    csr, back = pack_csr(adj), pack_csr(adj.transposed(), perm=True)
    backward = [
        OpCall("spmm_push", (grad, None, None, None, csr, NODES))
        if push
        else OpCall("spmm", (grad, None, None, None, back, csr, None))
        for grad in grads
    ]
    results = [result[0] for result in merged_call([*pulls, *backward])]
    for number, (mine, call) in enumerate(zip(results, pulls, strict=False)):
        assert_rounded(mine, exact(call), f"pulled call {number}")
    for mine, grad in zip(results[2:], grads, strict=True):
        torch.testing.assert_close(mine, ops.spmm(adj.transposed(), grad), rtol=1e-4, atol=1e-4)


def test_attention_of_different_heads():
    looped = adjacency().with_self_loops()
    csr, back = pack_csr(looped), pack_csr(looped.transposed(), perm=True)
    calls = [
        OpCall(
            "graph_attention_packed", (made(NODES, heads * (16 + 2), seed=heads), heads, 0.2, None, None, 0, csr, back)
        )
        for heads in (1, 4, 8)
    ]
    for mine, call in zip(merged_call(calls), calls, strict=True):
        for one, other in zip(mine, call(), strict=True):
            torch.testing.assert_close(one, other, rtol=1e-5, atol=1e-6)


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


def run_of(join: str, replay: bool, push: bool = False) -> GroupRun:
    given = tasks()
    plan = Plan(
        members=tuple(task.label for task in given),
        join=join,
        device="cuda",
        replay=replay,
        stacks=tuple((place,) for place in range(len(given))),
    )
    return GroupRun(given, tiny_graph(), plan, torch.device("cuda"), Weaver(push))


@pytest.mark.parametrize("push", [False, True])
@pytest.mark.parametrize("replay", [False, True])
def test_a_woven_group_trains_as_its_stacks_do_apart(replay, push):
    mine, theirs = run_of("woven+push" if push else "woven", replay, push), run_of("stacked", replay)
    mine.advance(EPOCHS)
    theirs.advance(EPOCHS)
    assert mine.merged is not None, mine.notes
    assert mine.recorded == replay, mine.notes
    assert len(mine.merged.woven.fused) >= 5
    for one, other in zip(mine.stacks, theirs.stacks, strict=True):
        for name, tensor in one.state.tensors().items():
            near = {"rtol": 1e-3, "atol": 1e-4} if push else {"rtol": 1e-5, "atol": 1e-6}  # pushed rows have no order
            torch.testing.assert_close(tensor, other.state.tensors()[name], **near, equal_nan=True, msg=name)


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
