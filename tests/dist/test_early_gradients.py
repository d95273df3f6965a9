"""Gradients are sent while the backward pass goes on, and their sums have the bits of one sum at the end."""

from __future__ import annotations

import pytest
import torch

from tests.dist.cases import CPU, GRAPHS, Case, TwoBranches
from weft.batches.sharded import Sharding
from weft.core.task import Task
from weft.dist.launch import start_ranks
from weft.dist.ranks import Ranks
from weft.dist.reduce import EarlyGradients
from weft.dist.sharded_adjacency import ShardGraph
from weft.planner.partition import split_by_edges
from weft.runtime.step.forward import Layout

CASES = [
    Case("gcn", (Task(graph="tiny", model="gcn", hidden=8, layers=3),)),
    Case("gin", (Task(graph="tiny", model="gin", hidden=8, layers=3, norm="batch"),)),
    Case("stacked", tuple(Task(graph="tiny", model="gcn", hidden=8, layers=3, seed=seed) for seed in range(2))),
    Case("user", (Task(graph="tiny", model=TwoBranches),)),
    Case("empty", (Task(graph="tiny", model="gcn", hidden=8, norm="batch"),), bounds=(0, 60, 60)),
]


def both_ways(ranks: Ranks) -> list[dict]:
    """Losses and gradients of every case as they are computed, and as one sum after the pass; what happened when."""
    torch.set_num_threads(1)
    found = []
    for case in CASES:
        whole = GRAPHS[case.graph]()
        bounds = case.bounds or split_by_edges(whole.adj.indptr.tolist(), ranks.ranks).bounds
        group = case.group(ShardGraph(whole, bounds, ranks), CPU, make_source=Sharding(ranks))
        (stack,) = group.stacks
        state, batch, reduce = stack.state, stack.source.example(), stack.source.reduce
        log: list[str] = []
        publish, start = ranks.staging.publish, reduce.start_sum
        buffers = {name: value.clone() for name, value in state.buffers.items()}
        ranks.staging.publish = lambda *given, publish=publish, log=log: (log.append("exchange"), publish(*given))[1]
        reduce.start_sum = lambda value, start=start, log=log: (log.append("send"), start(value))[1]
        losses, grad = stack.gradients(state.flat, batch)
        del ranks.staging.publish, reduce.start_sum
        for name, value in buffers.items():
            state.buffers[name].copy_(value)
        leaf = state.flat.detach().requires_grad_()
        mine = stack._loss(stack.forward(leaf, training=True, batch=batch), batch)
        (plain,) = torch.autograd.grad(mine, leaf, torch.ones_like(mine))
        expected = (reduce.sum(mine.detach()), reduce.sum(plain))
        found.append({"name": case.name, "log": log, "found": (losses, grad), "expected": expected})
    ranks.gather_objects(None)
    return found


def test_sums_have_the_same_bits_and_begin_before_the_last_exchange():
    with start_ranks(2, CPU, both_ways, timeout=120) as here:
        cases = both_ways(here)
    for case in cases:
        for mine, theirs in zip(case["found"], case["expected"], strict=True):
            assert torch.equal(mine, theirs), case["name"]
        assert case["log"].count("send") == 2, case["name"]
    for case in cases[:3]:
        first, last = case["log"].index("send"), len(case["log"]) - 1 - case["log"][::-1].index("exchange")
        assert first < last, f"{case['name']}: {case['log']}"


class Here:
    """A sum over one rank."""

    def __init__(self, value: torch.Tensor) -> None:
        self.value = value

    def wait(self) -> torch.Tensor:
        return self.value


class Alone:
    def start_sum(self, value: torch.Tensor) -> Here:
        return Here(value)


@pytest.mark.parametrize("late", [(True, True, True), (False, False, False), (True, False, True), (False, True, False)])
def test_parameters_come_back_in_their_places(late):
    layout = Layout(("a", "b", "c"), (torch.Size([2]), torch.Size([3, 2]), torch.Size([1])), (True,) * 3)
    grad, losses = torch.arange(18.0).view(2, 9), torch.tensor([5.0, 6.0])
    early = EarlyGradients(layout.sizes, 2, late, Alone())
    parts = [part.view(2, *shape) for part, shape in zip(grad.split(layout.sizes, 1), layout.shapes, strict=True)]
    for place in (2, 0):  # the middle one has no gradient of its own
        early.take(place, parts[place])
    found = early.finish(losses, parts)
    assert torch.equal(found[0], losses)
    assert torch.equal(found[1], grad)
