"""A whole training step as one kernel on a GPU: many programs that wait for each other, replayed as a CUDA graph."""

from __future__ import annotations

import pytest
import torch

from tests.weave.interpreted.test_persistent_step import small_graph
from weft.core.plan import Plan
from weft.core.task import Task
from weft.runtime.group import GroupRun
from weft.weave.persistent.kernel import PhasesLaunch
from weft.weave.persistent.step import PersistentStep

pytestmark = [
    pytest.mark.gpu,
    pytest.mark.skipif(not torch.cuda.is_available(), reason="needs a CUDA device"),
]
REPLAYS = 40


def stack_of(model: str, sparse: bool):
    graph = small_graph(sparse)
    task = Task(graph=graph, model=model, hidden=16, layers=2, dropout=0.5, epochs=REPLAYS + 10)
    (stack,) = GroupRun([task], graph, Plan(members=("a",), join="solo"), torch.device("cuda")).stacks
    return stack


@pytest.mark.parametrize("programs", [16, 128])
@pytest.mark.parametrize(("model", "sparse"), [("gcn", False), ("gcn", True), ("sage", False), ("gat", False)])
def test_replayed_steps_are_those_of_the_stack(model, sparse, programs):
    stack = stack_of(model, sparse)
    batch = stack.source.example()
    step = PersistentStep(stack, PhasesLaunch(programs))
    step.check()
    begin = stack.state.snapshot()
    expected = [stack.train_step(batch).clone() for _ in range(REPLAYS)]
    end = stack.state.snapshot()
    stack.state.restore(begin)
    graph = torch.cuda.CUDAGraph()
    with torch.cuda.graph(graph):
        loss = step()
    found = []
    for _ in range(REPLAYS):
        graph.replay()
        found.append(loss.clone())
    torch.testing.assert_close(found, expected, rtol=1e-3, atol=1e-4)
    torch.testing.assert_close(stack.state.flat, end["flat"], rtol=1e-2, atol=1e-3)
