"""Concurrent stacks on a GPU: branches of one CUDA graph, every member trains as alone."""

from __future__ import annotations

import pytest
import torch

import weft
from tests import stacks
from tests.graphs_for_tests import tiny_graph
from weft.graph.catalog import shapes

pytestmark = [
    pytest.mark.gpu,
    pytest.mark.skipif(not torch.cuda.is_available(), reason="needs a CUDA device"),
]

MEMBERS = [
    {"model": "gcn", "seed": 1, "lr": 0.01, "epochs": 12},
    {"model": "gat", "seed": 2, "lr": 0.05, "epochs": 10, "dropout": 0.3},
    {"model": "gcn", "seed": 3, "lr": 0.02, "epochs": 9, "dropout": 0.6},
    {"model": "gin", "seed": 4, "lr": 0.02, "epochs": 12, "layers": 3, "norm": "batch"},
]
STACKS = ((0, 2), (1,), (3,))


@pytest.mark.parametrize("eval_every", [1, 4])
@pytest.mark.parametrize("large", [False, True])
def test_members_train_as_alone(eval_every, large):
    graph = shapes.make("pubmed", device=torch.device("cuda"), scale=0.2) if large else tiny_graph()
    tasks = stacks.tasks_of(graph, MEMBERS, eval_every=eval_every, eps=1e-3)
    run = stacks.start(tasks, graph, "cuda", join="concurrent", stacks=STACKS)
    looks = run.advance(100)
    assert run.recorded, run.notes
    for poll, task in zip(looks, tasks, strict=True):
        alone = stacks.start([task], graph, "cuda")
        (own,) = alone.advance(100)
        assert torch.allclose(torch.tensor(poll.rows)[:, 0], torch.tensor(own.rows)[:, 0], atol=1e-3)


def test_a_mixed_sweep_is_run_beside():
    tasks = [weft.Task(graph="demo", epochs=5, name=f"{model}", model=model) for model in ("gcn", "gat", "gin")]
    result = weft.run(tasks, device="cuda", budget=8 << 30, progress=False)  # planned by a dry run, for a budget
    (plan,) = result.plan
    assert plan.join == "concurrent"
    assert {member.status for member in result} == {"finished"}
    assert plan.measured["peak_bytes"] <= 1.05 * plan.cost["peak_bytes"] + (20 << 20)
