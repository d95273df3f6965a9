"""Merged launches and woven groups on a GPU: every member as if alone, on streams and in a CUDA graph."""

from __future__ import annotations

from functools import cache

import pytest
import torch

from tests.graphs_for_tests import from_pairs, tiny_graph
from weft import ops
from weft.core.plan import Plan
from weft.core.task import Task
from weft.ops.csr.packed import pack_csr, unpack_csr
from weft.runtime.group import GroupRun
from weft.weave.lab.multi import Source, joined_spmm, multi_spmm, multi_spmm_torch, pull_push_spmm
from weft.weave.merged_launch import OpCall, together
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


def exact(adj, source: Source) -> torch.Tensor:
    """What a source should get, in double precision."""
    wide = [None if value is None else value.double() for value in (source.x, source.weight)]
    scales = [None if value is None else value.double() for value in (source.row_scale, source.col_scale)]
    return multi_spmm_torch(unpack_csr(pack_csr(adj)), [Source(wide[0], source.reduce, wide[1], *scales)])[0]


def assert_rounded(mine: torch.Tensor, expected: torch.Tensor, what: str) -> None:
    """Every row within rounding of ``expected``; a wrong row is named, since its error is as large as its numbers."""
    error = (mine.double() - expected).abs().amax(-1) / expected.abs().amax(-1).clamp(min=1e-3)
    worst = error.flatten().argmax().item()
    where = f"{what}: row {worst % mine.shape[-2]} of task {worst // mine.shape[-2]}"
    assert error.max() < 1e-5, f"{where} is off by {error.max().item():.1e} of its largest number"


def test_every_source_has_the_numbers_it_has_alone():
    """Bit for bit where a launch of its own would have as many warps to a tile, and to rounding otherwise."""
    adj = adjacency()
    with torch.no_grad():
        done = multi_spmm(adj, sources())
        for place, (mine, source) in enumerate(zip(done, sources(), strict=True)):
            assert_rounded(mine, exact(adj, source), f"together, source {place}")
            assert_rounded(multi_spmm(adj, [source])[0], exact(adj, source), f"alone, source {place}")


def test_alike_sources_have_the_bits_they_have_alone():
    """Parts that ask for the same number of warps run the very code that they run alone."""
    adj = adjacency()
    gcn = adj.gcn()
    alike = [
        Source(made(2, NODES, 64)),
        Source(made(NODES, 64, seed=1), "mean"),
        Source(made(NODES, 64, seed=2), row_scale=gcn.row_scale, col_scale=gcn.col_scale),
    ]
    with torch.no_grad():
        for mine, source in zip(multi_spmm(adj, alike), alike, strict=True):
            assert torch.equal(mine, multi_spmm(adj, [source])[0])


def test_gradients_share_launches_too():
    adj = adjacency()
    given = [made(NODES, 32, seed=seed).requires_grad_() for seed in range(3)]
    weights = [made(NODES, 32, seed=10 + seed) for seed in range(3)]
    outs = multi_spmm(adj, [Source(given[0]), Source(given[1], "mean"), Source(given[2], "max")])
    grads = torch.autograd.grad(outs, given, weights)
    wide = [x.detach().cpu().double().requires_grad_() for x in given]
    alone = [ops.spmm(adj.to("cpu"), x, reduce=reduce) for x, reduce in zip(wide, ("sum", "mean", "max"), strict=True)]
    expected = torch.autograd.grad(alone, wide, [weight.cpu().double() for weight in weights])
    for place, (mine, theirs) in enumerate(zip(grads, expected, strict=True)):
        assert_rounded(mine, theirs.to("cuda"), f"gradient of source {place}")


@pytest.mark.parametrize("form", [joined_spmm, pull_push_spmm])
def test_both_directions(form):
    adj = adjacency()
    pulls, pushes = sources()[:2], [Source(made(NODES, 64, seed=8)), Source(made(2, NODES, 16, seed=9))]
    pulled, pushed = form(adj, pulls, pushes)
    for place, (mine, source) in enumerate(zip(pulled, pulls, strict=True)):
        assert_rounded(mine, exact(adj, source), f"pulled source {place}")
    for mine, source in zip(pushed, pushes, strict=True):
        torch.testing.assert_close(mine, ops.spmm(adj.transposed(), source.x), rtol=1e-4, atol=1e-4)


def test_attention_of_different_heads():
    looped = adjacency().with_self_loops()
    csr, back = pack_csr(looped), pack_csr(looped.transposed(), perm=True)
    calls = [
        OpCall(
            "graph_attention_packed", (made(NODES, heads * (16 + 2), seed=heads), heads, 0.2, None, None, 0, csr, back)
        )
        for heads in (1, 4, 8)
    ]
    for mine, call in zip(together(calls), calls, strict=True):
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


def run_of(join: str, replay: bool) -> GroupRun:
    given = tasks()
    plan = Plan(
        members=tuple(task.label for task in given),
        join=join,
        device="cuda",
        replay=replay,
        stacks=tuple((place,) for place in range(len(given))),
    )
    return GroupRun(given, tiny_graph(), plan, torch.device("cuda"), Weaver())


@pytest.mark.parametrize("replay", [False, True])
def test_a_woven_group_trains_as_its_stacks_do_apart(replay):
    mine, theirs = run_of("woven", replay), run_of("stacked", replay)
    mine.advance(EPOCHS)
    theirs.advance(EPOCHS)
    assert mine.merged is not None, mine.notes
    assert mine.recorded == replay, mine.notes
    assert len(mine.merged.table.fused) >= 5
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
