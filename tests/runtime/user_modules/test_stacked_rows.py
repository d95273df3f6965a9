"""Rows fetched and added by shared positions in a stack: the same numbers, as rows; slower stacks are taken apart."""

from __future__ import annotations

import json
import subprocess
import sys

import pytest
import torch
from torch import nn

import weft
from tests.graphs_for_tests import tiny_graph
from tests.runtime.operator_names import Names
from weft.core.plan import Plan
from weft.nn import BatchNorm, GCNConv
from weft.runtime import epoch
from weft.runtime.group import GroupRun
from weft.runtime.modules.layers import StackedRows

N, E, T = 7, 20, 3


def made(*shape, seed=0):
    return torch.randn(*shape, generator=torch.Generator().manual_seed(seed))


INDEX = torch.randint(0, N, (E,), generator=torch.Generator().manual_seed(1))


def passed(x):
    """Messages along edges, as PyG writes them."""
    messages = x.index_select(0, INDEX) * 2.0 + x[INDEX.flip(0)]
    index = INDEX.view(-1, *(1,) * (x.dim() - 1)).expand_as(messages)
    return x.new_zeros(N, *x.shape[1:]).scatter_add_(0, index, messages)


@pytest.mark.parametrize("shape", [(N, 4), (N, 2, 3), (N, 1)])
def test_the_numbers_and_gradients_are_those_of_every_task_alone(shape):
    x = made(T, *shape).requires_grad_()
    expected = torch.stack([passed(one) for one in x])
    with StackedRows():
        found = torch.vmap(passed)(x)
    assert torch.equal(found, expected)
    slopes = made(*found.shape, seed=2)
    (mine,) = torch.autograd.grad(found, x, slopes)
    (true,) = torch.autograd.grad(expected, x, slopes)
    assert torch.allclose(mine, true, atol=1e-6)


def test_no_number_is_gathered_by_itself():
    with Names() as names, StackedRows():
        torch.vmap(passed)(made(T, N, 4))
    assert "aten::gather" not in names.met
    assert not any("scatter" in name for name in names.met)


def test_what_is_not_rows_of_all_tasks_is_torchs():
    x, mine = made(T, N, 4), made(T, N, 4)
    own = torch.stack([torch.randperm(N)[:3] for _ in range(T)])
    calls = [
        (lambda a: a.index_select(1, INDEX[:3] % 4), (x,)),
        (lambda a: a[:, 1], (x,)),
        (lambda a: a[0], (x,)),
        (lambda a, i: a.index_select(0, i), (x, own)),
        (lambda a, b: a.scatter_add(0, INDEX[:N, None].expand(N, 4) % N, b), (x, mine)),
        (lambda a: a.new_zeros(N, 4).scatter_add_(1, (INDEX[:4] % 4).expand(N, 4), a), (x,)),
    ]
    for call, args in calls:
        expected = torch.stack([call(*(arg[t] for arg in args)) for t in range(T)])
        with StackedRows():
            assert torch.allclose(torch.vmap(call)(*args), expected, atol=1e-6)
            call(*(arg[0] for arg in args))
    with StackedRows(), pytest.raises(IndexError):
        torch.vmap(lambda a: a.index_select(0, torch.tensor([N + 1])))(x)


class Passing(nn.Module):
    """A module that passes messages by itself."""

    def __init__(self, inputs, outputs):
        super().__init__()
        self.first, self.second = nn.Linear(inputs, 8), nn.Linear(8, outputs)

    def forward(self, x, edge_index):
        x = torch.relu(self.first(x))
        messages = x.index_select(0, edge_index[0])
        index = edge_index[1][:, None].expand_as(messages)
        return self.second(x.new_zeros(x.shape).scatter_add_(0, index, messages))


def test_a_stack_of_such_modules_trains_as_each_alone():
    graph = tiny_graph()
    tasks = [weft.Task(graph=graph, model=Passing, seed=seed, epochs=5, name=str(seed)) for seed in range(3)]
    together = weft.run(tasks, device="cpu", progress=False)
    for task, member in zip(tasks, together, strict=True):
        alone = weft.run(task, device="cpu", progress=False)
        assert member.history["loss"] == pytest.approx(alone.history["loss"], rel=1e-5)


@pytest.mark.parametrize(("factor", "stacked"), [(1e9, True), (0.0, False)])
def test_a_stack_that_is_slower_is_taken_apart_and_says_so(monkeypatch, factor, stacked, tmp_path):
    monkeypatch.setattr(epoch, "SLOWER", factor)
    monkeypatch.setattr(epoch, "WORTH_SECONDS", -1e9)
    notes = []

    def listen(event):
        if event.kind == "note":
            notes.append(event.data["message"])

    graph = tiny_graph()
    tasks = [weft.Task(graph=graph, model=Passing, seed=s, epochs=3, name=str(s)) for s in range(2)]
    result = weft.run(tasks, device="cpu", progress=False, on_event=listen, out=tmp_path / "run")
    assert result.statuses == {"finished": 2}
    slower = [note for note in notes if "train side by side, not as one stack: a step of the stack takes" in note]
    assert bool(slower) is not stacked
    (plan,) = result.plan
    assert plan.stack_members == (((0, 1),) if stacked else ((0,), (1,)))
    assert any("side by side" in reason for reason in plan.why) is not stacked
    (saved,) = json.loads((tmp_path / "run" / "sweep.json").read_text())["groups"]
    assert saved["plan"]["stacks"] == [], "a plan stays as it was decided; checkpoints have the stacks that were built"


def test_a_stack_that_was_not_timed_is_left_as_planned(monkeypatch):
    monkeypatch.setattr(epoch, "SLOWER", 0.0)
    monkeypatch.setattr(epoch, "WORTH_SECONDS", -1e9)
    graph = tiny_graph()
    tasks = [weft.Task(graph=graph, model=Passing, seed=s, epochs=3, name=str(s)) for s in range(2)]
    plan = Plan(members=("0", "1"), join="stacked", device="cpu")
    run = GroupRun(tasks, graph, plan, torch.device("cpu"))
    assert len(run.stacks) == 1
    assert run.plan is plan
    assert len(GroupRun(tasks, graph, plan, torch.device("cpu"), measure=True).stacks) == 2


def test_a_stack_of_weft_own_models_is_not_timed():
    graph = tiny_graph()
    tasks = [weft.Task(graph=graph, model="gcn", hidden=4, seed=s, epochs=3, name=str(s)) for s in range(2)]
    run = GroupRun(tasks, graph, Plan(members=("0", "1"), join="stacked", device="cpu"), torch.device("cpu"))
    assert epoch.slower_than_alone(run.stacks[0], run.plan) is None


class Normed(nn.Module):
    """A module over Weft's layers and norms."""

    def __init__(self, inputs, outputs):
        super().__init__()
        self.first, self.norm, self.second = GCNConv(inputs, 8), BatchNorm(8), GCNConv(8, outputs)

    def forward(self, x, adj):
        return self.second(torch.relu(self.norm(self.first(x, adj))), adj)


def test_modules_over_weft_norms_are_one_stack():
    graph = tiny_graph()
    tasks = [weft.Task(graph=graph, model=Normed, seed=s, epochs=3, name=str(s)) for s in range(2)]
    run = GroupRun(tasks, graph, Plan(members=("0", "1"), join="stacked", device="cpu"), torch.device("cpu"))
    assert len(run.stacks) == 1, run.notes


FIRST_OF_PYG = """
import torch, weft
from torch_geometric.nn import GCN
from tests.graphs_for_tests import tiny_graph
from weft.core.plan import Plan
from weft.nn import BatchNorm, GCNConv
from weft.runtime.group import GroupRun

def model(inputs, outputs):
    return GCN(inputs, 8, 2, outputs)

graph = tiny_graph()
tasks = [weft.Task(graph=graph, model=model, seed=s, epochs=3, name=str(s)) for s in range(2)]
run = GroupRun(tasks, graph, Plan(members=("0", "1"), join="stacked", device="cpu"), torch.device("cpu"))
assert len(run.stacks) == 1, run.notes
"""


def test_the_first_modules_of_pyg_in_a_process_are_one_stack():
    pytest.importorskip("torch_geometric")
    done = subprocess.run([sys.executable, "-W", "ignore", "-c", FIRST_OF_PYG], capture_output=True, text=True)
    assert done.returncode == 0, done.stderr
