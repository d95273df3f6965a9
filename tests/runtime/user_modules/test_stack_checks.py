"""A stack is used only if every member has its own losses, gradients and logits in it: the check is always made."""

from __future__ import annotations

import weakref

import numpy as np
import pytest
import torch
from torch import nn

import weft
from tests.stacks import start
from weft.runtime.step.preflight import Preflight


def small() -> weft.Graph:
    draw = np.random.default_rng(0)
    src, dst = draw.integers(0, 30, (2, 90))
    x, y = draw.normal(size=(30, 5)).astype("float32"), draw.integers(0, 3, 30)
    return weft.Graph.from_edges(src, dst, num_nodes=30, x=x, y=y, directed=False).random_split(0.5, 0.25)


GRAPH = small()


def wrong_function(member: int, backward: bool):
    """The identity alone; in a stack, 1.5 times as much for one of the members, forward or backward only."""

    class Scale(torch.autograd.Function):
        @staticmethod
        def forward(x):
            return x.clone()

        @staticmethod
        def setup_context(ctx, inputs, output):
            ctx.factor = 1.0

        @staticmethod
        def backward(ctx, grad):
            return grad

        @staticmethod
        def vmap(info, dims, x):
            factor = torch.ones(info.batch_size)
            factor[member] = 1.5
            factor = factor.view(-1, *[1] * (x.dim() - 1))
            x = x.movedim(dims[0], 0)
            return (x * factor + (x - x * factor).detach() if backward else x + (x * factor - x).detach()), 0

    return Scale


def model_of(member: int, backward: bool):
    scale = wrong_function(member, backward)

    class Net(nn.Module):
        def __init__(self, i, o):
            super().__init__()
            self.first, self.last = nn.Linear(i, 6), nn.Linear(6, o)

        def forward(self, x):
            return self.last(scale.apply(torch.tanh(self.first(x))))

    return Net


@pytest.mark.parametrize("backward", [False, True])
@pytest.mark.parametrize("member", [0, 1, 2])
def test_one_wrong_member_of_three_is_found(member, backward):
    model = model_of(member, backward)
    tasks = [weft.Task(graph=GRAPH, model=model, epochs=3, lr=0.05, seed=seed) for seed in range(3)]
    group = start(tasks, GRAPH, join="stacked")
    assert len(group.stacks) == 3
    assert any("gives other results for several at once than for one" in note for note in group.notes)
    group.advance(3)
    alone = start(tasks[member : member + 1], GRAPH)
    alone.advance(3)
    mine = group.members[member].stack.state.history[0]
    assert torch.equal(mine, alone.stacks[0].state.history[0])


class Plain(nn.Module):
    """One layer."""

    def __init__(self, i, o):
        super().__init__()
        self.last = nn.Linear(i, o)

    def forward(self, x):
        return self.last(x)


def test_members_that_are_right_stay_one_stack():
    tasks = [weft.Task(graph=GRAPH, model=Plain, epochs=1, seed=seed) for seed in range(3)]
    assert len(start(tasks, GRAPH, join="stacked").stacks) == 1


def test_what_members_return_alone_is_not_kept_while_all_run_at_once(monkeypatch):
    """It would take memory that no plan counts: one trial of one member at most is there, and all together once."""

    order, alive, logits = [], [], []
    together, is_same = Preflight._together, Preflight._is_same

    def all_at_once(self):
        order.append("together")
        return together(self)

    def compared(self, row, alone, found, others):
        order.append(row)
        alive.append(sum(ref() is not None for ref in logits))
        logits.append(weakref.ref(found))
        return is_same(self, row, alone, found, others)

    monkeypatch.setattr(Preflight, "_together", all_at_once)
    monkeypatch.setattr(Preflight, "_is_same", compared)
    tasks = [weft.Task(graph=GRAPH, model=Plain, epochs=1, seed=seed) for seed in range(4)]
    assert len(start(tasks, GRAPH, join="stacked").stacks) == 1
    assert order == ["together", 0, 1, 2, 3]
    assert max(alive) <= 1


def test_equal_tasks_that_have_no_dry_run_are_one_group():
    """They were apart, since the error that says so names the task."""

    class Fixed(nn.Module):
        def __init__(self, i, o):
            super().__init__()
            self.conv, self.last = weft.nn.GCNConv(i, 6), nn.Linear(6, o)

        def forward(self, x, adj):
            return self.last(self.conv(x, adj) * torch.from_numpy(np.ones((30, 1), "float32")))

    result = weft.run(weft.Sweep(GRAPH, model=Fixed, epochs=2, seed=[0, 1, 2]), device="cpu", progress=False)
    assert [plan.join for plan in result.plan] == ["stacked"]


def test_the_result_says_that_a_stack_was_not_one():
    """The plan says stacked; what ran says otherwise, with the reason, in the result and its report."""
    model = model_of(1, backward=False)
    result = weft.run(weft.Sweep(GRAPH, model=model, epochs=2, seed=[0, 1]), device="cpu", progress=False)
    (plan,) = result.plan
    assert any(reason.startswith("as it ran: 2 tasks train side by side, not as one stack") for reason in plan.why)
