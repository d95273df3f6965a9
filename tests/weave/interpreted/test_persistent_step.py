"""A whole training step as one kernel: the phases respect every dependency, and the numbers are those of the stack.

One program takes all the work here, since the interpreter runs programs one after another; that many of them wait for
each other is for a GPU to show (tests/gpu/test_persistent_gpu.py).
"""

from __future__ import annotations

import pytest
import torch

from weft.core.errors import InputError
from weft.core.plan import Plan
from weft.core.task import Task
from weft.graph.data.graph import Graph
from weft.ops.launch import backend
from weft.runtime.group import GroupRun
from weft.weave.persistent import kernel
from weft.weave.persistent.kernel import PhasesLaunch
from weft.weave.persistent.step import PersistentStep

AS_ON_A_GPU = (lambda tensor: True).__code__
NODES = 70
STEPS = 1


@pytest.fixture
def as_on_a_gpu(monkeypatch):
    monkeypatch.setattr(backend.on_gpu, "__code__", AS_ON_A_GPU)


def small_graph(sparse: bool = False) -> Graph:
    """With a node without edges, and a hub."""
    draw = torch.Generator().manual_seed(0)
    src, dst = (torch.randint(1, NODES, (90,), generator=draw) for _ in range(2))
    hub = torch.arange(2, NODES)
    x = torch.randn(NODES, 24, generator=draw)
    x = torch.where(torch.rand(NODES, 24, generator=draw) < 0.1, x, 0.0) if sparse else x
    edges = torch.cat([src, hub]), torch.cat([dst, torch.ones_like(hub)])
    graph = Graph.from_edges(*edges, NODES, x=x, y=torch.arange(NODES) % 3, directed=False, name="small")
    return graph.random_split(train=20, val=10)


def stack_of(graph: Graph, seeds=(0,), **settings):
    tasks = [Task(graph=graph, hidden=8, layers=2, dropout=0.5, epochs=3, seed=seed, **settings) for seed in seeds]
    plan = Plan(members=tuple(map(str, seeds)), join="stacked", device="cpu")
    (stack,) = GroupRun(tasks, graph, plan, torch.device("cpu")).stacks
    return stack


@pytest.mark.parametrize(
    ("settings", "kernels"),
    [
        ({"model": "gcn"}, 1),
        ({"model": "sage"}, 1),
        ({"model": "gin", "seeds": (0, 1)}, 1),
    ],
    ids=lambda value: "-".join(map(str, value.values())) if isinstance(value, dict) else "",
)
def test_numbers_of_the_stack(as_on_a_gpu, settings, kernels):
    stack = stack_of(small_graph(), **settings)
    step = PersistentStep(stack, PhasesLaunch(1))
    begin = stack.state.snapshot()
    expected = [stack.train_step(stack.source.example()).clone() for _ in range(STEPS)]
    end = stack.state.snapshot()
    stack.state.restore(begin)
    found = [step().clone() for _ in range(STEPS)]
    assert step.kernels == kernels
    assert step.phases < step.launches
    torch.testing.assert_close(found, expected, rtol=1e-4, atol=1e-5)
    for name, tensor in stack.state.tensors().items():
        torch.testing.assert_close(tensor, end[name], rtol=1e-4, atol=1e-5, equal_nan=True, msg=name)


def test_sparse_features_and_partial_sums_wait_for_what_they_read(as_on_a_gpu):
    step = PersistentStep(stack_of(small_graph(sparse=True), model="gcn"), PhasesLaunch(1))
    step.check()
    assert step.kernels == 1
    (phases,) = step.collected()
    names = [{part.kernel.fn.__name__ for part in phase} for phase in phases]
    assert names[-2:] == [{"_copy_kernel"}, {"_adam_kernel"}]
    assert "_copy_kernel" not in names[-3]  # the transposed gradient goes into the flat one at once


def test_programs_must_be_a_power_of_two():
    with pytest.raises(InputError, match="of 132 programs: a power of two is needed"):
        PhasesLaunch(132)


def test_a_wrong_step_is_noticed(as_on_a_gpu, monkeypatch):
    step = PersistentStep(stack_of(small_graph(), model="gcn"), PhasesLaunch(1))
    monkeypatch.setattr(kernel, "launch_alone", None)
    monkeypatch.setattr("weft.weave.persistent.step.launch_phases", lambda phases, *rest: None)
    with pytest.raises(InputError, match="a loss of the persistent step"):
        step.check()


def test_a_wrong_gradient_is_noticed(as_on_a_gpu, monkeypatch):
    step = PersistentStep(stack_of(small_graph(), model="gcn"), PhasesLaunch(1))
    monkeypatch.setattr(
        "weft.weave.persistent.step.launch_phases",
        lambda phases, *rest: kernel.launch_phases([p for p in phases if len(p) < 4], *rest),  # no flat gradient
    )
    with pytest.raises(InputError, match="a gradient of the persistent step"):
        step.check()
