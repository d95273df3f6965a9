"""Batches on a GPU: one CUDA graph per batch shape, and sampled training as on a CPU."""

from __future__ import annotations

import pytest
import torch

from tests.graphs_for_tests import tiny_graph
from tests.runtime.row_batches import row_batches
from weft.batches.sampled import Sampling
from weft.core.plan import Plan
from weft.core.task import Task
from weft.graph.generate import citation
from weft.runtime.group import GroupRun

pytestmark = [
    pytest.mark.gpu,
    pytest.mark.skipif(not torch.cuda.is_available(), reason="needs a CUDA device"),
]


def task(model: str, **changes) -> Task:
    return Task(graph="g", model=model, **{"hidden": 8, "epochs": 4, "dropout": 0.5, "lr": 0.05, **changes})


def rows(update) -> list[float]:
    return [value for row in update.rows for value in row]


@pytest.mark.parametrize("members", [1, 3])
@pytest.mark.parametrize("model", ["gcn", "sage", "gin", "gat"])
def test_steps_are_recorded_per_shape_of_batch(model, members):
    """Seven training rows in three batches: two shapes, two recordings, the numbers of eager steps."""
    tasks = [task(model, seed=seed) for seed in range(members)]
    found = {}
    for replay in (True, False):
        plan = Plan(tuple(map(str, range(members))), device="cuda", replay=replay)
        run = GroupRun(tasks, tiny_graph(), plan, torch.device("cuda"), make_source=row_batches(3))
        found[replay] = [rows(update) for update in run.advance(4)]
        assert run.recorded == replay, run.notes
        assert run.stacks[0].state.clock[0, 1].item() == 12
    for mine, theirs in zip(found[True], found[False], strict=True):
        assert mine == pytest.approx(theirs, rel=1e-4, abs=1e-5)


@pytest.mark.parametrize("model", ["gcn", "sage", "gin", "gat"])
def test_sampled_training_is_that_of_a_cpu(model):
    graph = citation(num_nodes=600, num_edges=5000, num_features=12, num_classes=4, seed=1)
    make = Sampling(fanout=(5, 3), batch=64, depth=2)
    tasks = [task(model, seed=seed) for seed in range(2)]
    found = []
    for device in ("cuda", "cpu"):
        place = torch.device(device, 0) if device == "cuda" else torch.device(device)
        run = GroupRun(tasks, graph.to(place), Plan(("0", "1"), device=device), place, make_source=make)
        found.append([rows(update) for update in run.advance(4)])
    for mine, theirs in zip(*found, strict=True):
        assert mine == pytest.approx(theirs, rel=2e-2, abs=2e-2)


@pytest.mark.parametrize("members", [1, 3])
@pytest.mark.parametrize("model", ["gcn", "sage", "gin", "gat"])
def test_sampling_and_training_as_one_recording(model, members):
    """Padded batches sampled inside of the recording give the losses of batches that are sampled before the step."""
    graph = citation(num_nodes=3000, num_edges=30000, num_features=12, num_classes=4, seed=1).to("cuda")
    tasks = [task(model, seed=seed) for seed in range(members)]
    found = []
    for captured in (True, False):
        plan = Plan(tuple(map(str, range(members))), device="cuda", replay=captured)
        make = Sampling(fanout=(5, 3), batch=100, captured=captured)
        run = GroupRun(tasks, graph, plan, torch.device("cuda", 0), make_source=make)
        found.append([rows(update) for update in run.advance(4)])
        assert run.recorded == captured, run.notes
    for mine, theirs in zip(*found, strict=True):
        assert mine == pytest.approx(theirs, rel=2e-3, abs=2e-3)


def test_features_in_host_memory():
    graph = citation(num_nodes=600, num_edges=5000, num_features=12, num_classes=4, seed=1)
    from weft.batches.features import FeatureStore

    device = torch.device("cuda", 0)
    store = FeatureStore(graph.x.pin_memory(), device)
    ids = torch.randint(0, 600, (1000,), device=device, dtype=torch.int32)
    assert torch.equal(store.read(ids).cpu(), graph.x[ids.cpu().long()])
