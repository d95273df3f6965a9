"""R-GCN on a GPU: the numbers of a CPU, captured equal to eager, samplers with the CPU's bits."""

from __future__ import annotations

import pytest
import torch

from tests.nn.relational import relational
from weft.batches import NeighbourSampler
from weft.batches.sampled import Sampling
from weft.core.plan import Plan
from weft.core.task import Task
from weft.graph.catalog import shapes
from weft.graph.generate import planted_relations
from weft.nn import RGCNConv
from weft.runtime.group import GroupRun

pytestmark = [
    pytest.mark.gpu,
    pytest.mark.skipif(not torch.cuda.is_available(), reason="needs a CUDA device"),
]

KINDS = [{"bases": 3}, {"blocks": 2}, {}]
PER_RELATION = ((("each", 2),), (1, 0, 2, 1))


def task(**changes) -> Task:
    return Task(graph="g", model="rgcn", **{"hidden": 8, "epochs": 4, "dropout": 0.5, "lr": 0.02, **changes})


def rows(update) -> list[float]:
    return [value for row in update.rows for value in row]


def graph_of(nodes: int = 2000):
    return planted_relations(nodes, 4, random_edges=3, seed=1)


@pytest.mark.parametrize("kind", KINDS, ids=str)
def test_a_layer_gives_the_cpus_output_and_gradients(kind):
    graph = relational()
    torch.manual_seed(0)
    conv = RGCNConv(6, 4, 5, **kind)
    found = []
    for device in ("cpu", "cuda"):
        there, placed = conv.to(device), graph.to(device)
        x = placed.x.clone().requires_grad_()
        out = there(x, placed.adj)
        grads = torch.autograd.grad(out.sin().sum(), [x, *there.parameters()])
        found.append([out.detach().cpu(), *(grad.cpu() for grad in grads)])
    for mine, other in zip(*found, strict=True):
        torch.testing.assert_close(mine, other, rtol=1e-4, atol=1e-5)


def test_runs_have_the_same_bits():
    graph = shapes.make("bgs", scale=0.1, device="cuda")
    torch.manual_seed(0)
    conv = RGCNConv(64, 16, 96, bases=4).cuda()
    found = []
    for _ in range(2):
        out = conv(graph.x, graph.adj)
        found.append([out, *torch.autograd.grad(out.sin().sum(), list(conv.parameters()))])
    for mine, other in zip(*found, strict=True):
        assert torch.equal(mine, other)


@pytest.mark.parametrize("members", [1, 3])
@pytest.mark.parametrize("kind", KINDS, ids=str)
def test_captured_is_eager_is_the_cpu(kind, members):
    graph, found = graph_of(), []
    tasks = [task(seed=seed, **kind) for seed in range(members)]
    for device, replay in (("cuda", True), ("cuda", False), ("cpu", False)):
        place = torch.device(device, 0) if device == "cuda" else torch.device(device)
        plan = Plan(tuple(map(str, range(members))), device=device, replay=replay)
        run = GroupRun(tasks, graph.to(place), plan, place)
        found.append([rows(update) for update in run.advance(4)])
        assert run.recorded == replay, run.notes
    for captured, eager, cpu in zip(*found, strict=True):
        assert captured == pytest.approx(eager, rel=1e-4, abs=1e-5)
        assert captured == pytest.approx(cpu, rel=2e-2, abs=2e-2)


@pytest.mark.parametrize("fanouts", [[5, 3], [{"each": 2}, [1, 0, 2, 1], 3], [{"each": 40}]], ids=str)
def test_the_gpu_samples_the_cpus_batches(fanouts):
    graph, seeds = graph_of(), torch.tensor([3, 700, 3, 2001, 55])
    mine, theirs = (NeighbourSampler(graph.to(device), fanouts).sample(seeds, 2, 5) for device in ("cuda", "cpu"))
    assert torch.equal(mine.input_nodes.cpu(), theirs.input_nodes)
    for block, other in zip(mine.blocks, theirs.blocks, strict=True):
        assert all(torch.equal(one.cpu(), two) for one, two in zip(block.tensors(), other.tensors(), strict=True))


@pytest.mark.parametrize("members", [1, 3])
@pytest.mark.parametrize("fanout", [(5, 3), PER_RELATION], ids=str)
def test_sampling_and_training_as_one_recording(fanout, members):
    """Padded batches sampled inside of the recording give the losses of batches that are sampled before the step."""
    graph = shapes.make("bgs", scale=0.05)
    relation = graph.relation % 4
    graph = type(graph)(graph.adj.scaled(), graph.x, graph.y, graph.train, graph.val, graph.test, relation).to("cuda")
    tasks = [task(seed=seed, bases=2) for seed in range(members)]
    found = []
    for captured in (True, False):
        plan = Plan(tuple(map(str, range(members))), device="cuda", replay=captured)
        make = Sampling(fanout=fanout, batch=256, captured=captured)
        run = GroupRun(tasks, graph, plan, torch.device("cuda", 0), make_source=make)
        found.append([rows(update) for update in run.advance(4)])
        assert run.recorded == captured, run.notes
    for mine, theirs in zip(*found, strict=True):
        assert mine == pytest.approx(theirs, rel=2e-3, abs=2e-3)


def test_one_hot_nodes_on_a_gpu():
    graph = graph_of(500).with_one_hot_features()
    found = []
    for device in ("cuda", "cpu"):
        place = torch.device(device, 0) if device == "cuda" else torch.device(device)
        run = GroupRun([task(bases=2)], graph.to(place), Plan(("0",), device=device, replay=device == "cuda"), place)
        found.append(rows(run.advance(4)[0]))
    assert found[0] == pytest.approx(found[1], rel=2e-2, abs=2e-2)
