"""Woven steps: every member trains as if alone, whichever members share its launches."""

from __future__ import annotations

from functools import cache
from itertools import combinations_with_replacement

import pytest
import torch
from torch.fx.experimental.proxy_tensor import make_fx

from tests.graphs_for_tests import tiny_graph
from tests.weave.launch_counts import count_launches
from tests.weave.trainees import STEPS, Trainee, assert_trains_as_alone, restore, snapshot
from weft import ops
from weft.core.errors import InputError
from weft.graph.graph import Graph
from weft.weave.merge import weave
from weft.weave.recorder import record

MODELS = ("gcn", "sage", "gin", "gat", "gatv2")


@cache
def undirected() -> Graph:
    return tiny_graph()


@cache
def directed() -> Graph:
    random = torch.Generator().manual_seed(3)
    src, dst = (torch.randint(0, 60, (200,), generator=random) for _ in range(2))
    base = tiny_graph()
    graph = Graph.from_edges(src, dst, 60, x=base.x, y=base.y, directed=True, name="one way")
    return graph.random_split(train=24, val=16, seed=0)


GRAPHS = {"undirected": undirected, "directed": directed}


def captured(trainees: list[Trainee]):
    return [record(trainee.step, trainee.name, trainee.state()) for trainee in trainees]


@pytest.mark.parametrize("name", GRAPHS)
@pytest.mark.parametrize("pair", list(combinations_with_replacement(MODELS, 2)), ids="-".join)
def test_every_pair_of_models(pair, name):
    trainees = [Trainee(GRAPHS[name](), model, layers, seed=layers) for model, layers in zip(pair, (2, 3), strict=True)]
    woven = assert_trains_as_alone(trainees)
    sums = {"gcn", "sage", "gin"}
    assert bool(woven.fused) == (pair[0] == pair[1] or sums.issuperset(pair))


@pytest.mark.parametrize("structures", ["same", "any"])
@pytest.mark.parametrize("name", GRAPHS)
def test_depths_two_two_three_and_four(name, structures):
    trainees = [
        Trainee(GRAPHS[name](), "gcn", layers, seed=seed, dropout=0.1 * seed, hidden=8 + seed)
        for seed, layers in enumerate((2, 2, 3, 4))
    ]
    woven = assert_trains_as_alone(trainees, (structures,))
    # A layer's aggregation each way; the first needs no gradient, and so no way back.
    assert sum(len(fused.entries) for fused in woven.fused) + woven.single == sum(
        2 * layers - 1 for layers in (2, 2, 3, 4)
    )
    assert len(woven.fused) + woven.single == 7
    assert count_launches(woven)["merged_call"] == len(woven.fused) >= 5


def test_stacks_of_different_sizes():
    graph = directed()
    trainees = [
        Trainee(graph, "gcn", 2, tasks=3),
        Trainee(graph, "sage", 3, tasks=1, seed=5, aggregator="max"),
        Trainee(graph, "gin", 4, tasks=2, seed=9),
        Trainee(graph, "gat", 2, tasks=2, seed=11),
    ]
    assert_trains_as_alone(trainees)


def test_norms_residuals_and_weights():
    graph = tiny_graph(weighted=True)
    trainees = [
        Trainee(graph, "gcn", 3, residual=True, norm="layer"),
        Trainee(graph, "sage", 2, seed=1, norm="layer", aggregator="sum"),
        Trainee(graph, "gin", 2, seed=2, train_eps=True),
    ]
    assert_trains_as_alone(trainees)


def test_only_equal_structures_and_directions_meet_unless_asked_otherwise():
    graph = directed()
    trainees = [Trainee(graph, "gcn", 2), Trainee(graph, "sage", 2, seed=1), Trainee(graph, "gcn", 3, seed=2)]
    same = weave(captured(trainees), ("same",))
    for fused in same.fused:
        assert len({entry.structure for entry in fused.entries}) == 1
        assert len({entry.backward for entry in fused.entries}) == 1
    joined = weave(captured(trainees), ("any",))
    assert len(joined.fused) + joined.single < len(same.fused) + same.single
    assert weave(captured(trainees)).structures == "any"
    assert weave(captured(trainees[::2])).structures == "same"  # as few launches, and one structure to a launch


@pytest.mark.parametrize("weighted", [False, True])
def test_backward_sums_are_pushed_beside_forward_ones(weighted):
    """Not bit for bit: what is pushed is added up in another order."""
    graph = directed()
    if weighted:
        weight = torch.rand(graph.adj.num_edges, generator=torch.Generator().manual_seed(0))
        graph = Graph(graph.adj.scaled(weight=weight), graph.x, graph.y, graph.train, graph.val, graph.test)
    trainees = [Trainee(graph, "gcn", layers, seed=layers) for layers in (2, 4)]
    start = snapshot(trainees)
    for _ in range(STEPS):
        for trainee in trainees:
            trainee.step()
    expected = snapshot(trainees)
    restore(trainees, start)
    woven = weave(captured(trainees), ("any",), push=True)
    pushes = [entry for fused in woven.fused for entry in fused.entries if entry.operator == "spmm_push"]
    assert {entry.member for entry in pushes} == {0}  # the shallow one goes back while the deep one goes on
    assert all(entry.backward for entry in pushes)
    for _ in range(STEPS):
        woven()
    for mine, theirs in zip(snapshot(trainees), expected, strict=True):
        for one, other in zip(mine, theirs, strict=True):
            torch.testing.assert_close(one, other, rtol=1e-4, atol=1e-5)


def test_an_undirected_graph_lets_directions_meet():
    """Its transpose is the same structure."""
    trainees = [Trainee(undirected(), "gcn", layers, seed=layers) for layers in (2, 4)]
    woven = weave(captured(trainees), ("same",))
    assert {True, False} in [{entry.backward for entry in fused.entries} for fused in woven.fused]


def test_a_diverging_member_harms_nobody():
    trainees = [Trainee(undirected(), model, 2, seed=seed) for seed, model in enumerate(("gcn", "gcn", "sage"))]
    start = snapshot(trainees)
    for trainee in trainees[1:]:
        trainee.step()
    expected = snapshot(trainees)[1:]
    restore(trainees, start)
    woven = weave(captured(trainees))
    trainees[0].flat.fill_(torch.nan)
    woven()
    assert trainees[0].flat.isnan().all()
    for mine, theirs in zip(snapshot(trainees)[1:], expected, strict=True):
        assert all(torch.equal(a, b) for a, b in zip(mine, theirs, strict=True))


def test_it_is_known_whom_a_kernel_serves():
    trainees = [Trainee(undirected(), "gcn", 2), Trainee(undirected(), "gcn", 3, tasks=2, seed=1)]
    woven = weave(captured(trainees))
    first = woven.fused[0]
    assert [entry.member for entry in first.entries] == [0, 1]
    assert first.node.args[0] == ["spmm", "spmm"]
    assert (sum(len(fused.entries) for fused in woven.fused), len(woven.fused), woven.single) == (6, 3, 2)


def test_streams():
    trainees = [
        Trainee(undirected(), "gcn", 2),
        Trainee(undirected(), "gat", 2, seed=1),
        Trainee(undirected(), "gcn", 2),
    ]
    woven = weave(captured(trainees))
    streams = {node.meta["stream"] for node in woven.graph.calls}
    assert streams == {0, 1, 2, 3}


def test_one_member_is_a_group_of_one():
    woven = assert_trains_as_alone([Trainee(undirected(), "gcn", 2)])
    assert not woven.fused


def test_operators_between_edges():
    """A model of a user's own: scores of edges, their softmax, a weighted sum."""
    adj = undirected().adj

    class Own:
        def __init__(self, width: int) -> None:
            self.x = torch.randn(60, width, generator=torch.Generator().manual_seed(width))
            self.state = lambda: [self.x]
            self.name = f"own of {width}"

        def step(self):
            leaf = self.x.detach().requires_grad_()
            share = ops.edge_softmax(adj, ops.sddmm(adj, leaf, leaf)).squeeze(-1)
            loss = ops.spmm(adj, leaf, share).square().mean()
            self.x.sub_(0.1 * torch.autograd.grad(loss, leaf)[0])
            return loss.detach()

    members = [Own(4), Own(7)]
    for member in members:
        member.step()
    expected = [member.x.clone() for member in members]
    members = [Own(4), Own(7)]
    woven = weave([record(member.step, member.name, [member.x]) for member in members])
    woven()
    for member, theirs in zip(members, expected, strict=True):
        assert torch.equal(member.x, theirs)
    assert {fused.family for fused in woven.fused} == {"spmm", "sddmm", "softmax"}
    assert not woven.single


def test_writes_keep_their_place_among_reads():
    """A value read before and after it is changed in place, through a view made before."""
    weight = torch.ones(4)
    half = weight[:2]

    def step():
        before = weight * 2
        half.add_(1)
        return before + weight

    first = record(step, "a", [weight])
    other = torch.ones(4)
    second = record(lambda: other.mul_(2), "b", [other])
    mine, theirs = weave([first, second])()
    assert mine.tolist() == [4, 4, 3, 3]
    assert weight.tolist() == [2, 2, 1, 1]
    assert theirs.tolist() == [2, 2, 2, 2]


def test_a_graph_made_by_make_fx_is_recorded_by_running_it():
    trainee = Trainee(undirected(), "gcn", 2)
    trainee.step()
    weight = torch.ones(60, 3)
    adj = undirected().adj
    traced = make_fx(lambda x: ops.spmm(adj, x).relu())(weight)
    step = record(lambda: traced(weight), "traced")
    woven = weave([step, record(trainee.step, "gcn", trainee.state())])
    assert torch.equal(woven()[0], traced(weight))


def test_complaints():
    weight = torch.ones(3)
    with pytest.raises(InputError, match="reads a number back to the host"):
        record(lambda: weight.sum().item(), "greedy")
    steps = [record(lambda: weight.add_(1), "first", [weight]), record(lambda: weight * 2, "second")]
    with pytest.raises(InputError, match="'first' writes to a tensor of 'second'"):
        weave(steps)
