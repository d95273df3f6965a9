"""Stacks on a GPU: captured as one CUDA graph, equal to separate runs, shared tensors not materialised T times."""

from __future__ import annotations

import math

import pytest
import torch

from tests import stacks
from tests.graphs_for_tests import tiny_graph
from tests.stacks import MODELS, best_tensors
from weft.graph.graph import Graph

pytestmark = [
    pytest.mark.gpu,
    pytest.mark.skipif(not torch.cuda.is_available(), reason="needs a CUDA device"),
]

MEMBERS = [
    {"seed": 1, "lr": 0.01, "dropout": 0.5, "epochs": 10, "eps": 1e-3},
    {"seed": 2, "lr": 0.05, "dropout": 0.0, "epochs": 13, "schedule": "cosine", "weight_decay": 1e-2, "eps": 1e-3},
    {"seed": 3, "lr": 0.05, "dropout": 0.3, "epochs": 12, "betas": (0.8, 0.99), "label_smoothing": 0.2, "eps": 1e-3},
    {"seed": 4, "lr": 0.02, "dropout": 0.6, "epochs": 9, "eval_every": 4, "patience": 3, "eps": 1e-3},
]


def tasks_of(graph, members=MEMBERS, **shared):
    return stacks.tasks_of(graph, members, **shared)


def start(tasks, graph, device="cuda", **changes):
    return stacks.start(tasks, graph, device, **changes)


def check(tasks, graph, tolerance=1e-3):
    run = start(tasks, graph)
    together = run.advance(100)
    assert len(run.stacks) == 1
    assert run.recorded, run.notes
    assert run.notes == []
    for index, task in enumerate(tasks):
        alone = start([task], graph)
        (progress,) = alone.advance(task.epochs)
        mine, theirs = torch.tensor(together[index].rows)[:, 0], torch.tensor(progress.rows)[:, 0]
        assert torch.allclose(mine, theirs, atol=tolerance), (mine - theirs).abs().max()
        if together[index].best_epoch == progress.best_epoch:  # accuracies of a few nodes may tie
            tensors = best_tensors(run, index)
            for name, value in best_tensors(alone, 0).items():
                assert torch.allclose(tensors[name], value, atol=10 * tolerance), name
    return run


@pytest.mark.parametrize("model", MODELS)
@pytest.mark.parametrize("norm", [None, "batch", "layer"])
def test_stacked_is_separate(model, norm):
    graph = tiny_graph()
    check(tasks_of(graph, model=model, norm=norm), graph)


@pytest.mark.parametrize("model", MODELS)
@pytest.mark.parametrize("sparse", [False, True])
def test_input_dropout_and_sparse_features(model, sparse):
    graph = tiny_graph(sparse=sparse)
    members = [{**member, "input_dropout": rate} for member, rate in zip(MEMBERS, (0.5, 0.1, 0.3, 0.6), strict=True)]
    check(tasks_of(graph, members, model=model), graph)


@pytest.mark.parametrize("model", MODELS)
def test_padded_widths(model):
    graph = tiny_graph()
    members = [{**member, "hidden": hidden} for member, hidden in zip(MEMBERS, (4, 8, 16, 4), strict=True)]
    run = check(tasks_of(graph, members, model=model, norm="batch", layers=3, residual=True), graph)
    assert run.best_model(0).hidden == 4


@pytest.mark.parametrize("model", MODELS)
def test_the_gpu_trains_like_the_cpu(model):
    graph = tiny_graph()
    tasks = tasks_of(graph, model=model)
    there, here = start(tasks, graph).advance(8), start(tasks, graph, "cpu").advance(8)
    for mine, theirs in zip(there, here, strict=True):
        assert torch.allclose(torch.tensor(mine.rows)[:, 0], torch.tensor(theirs.rows)[:, 0], atol=2e-3)


def test_optimizers_and_bfloat16():
    graph = tiny_graph()
    plain = [{"seed": seed, "lr": 0.05, "momentum": 0.5 * seed, "epochs": 10} for seed in range(2)]
    check(tasks_of(graph, plain, optimizer="sgd"), graph)
    tasks = tasks_of(graph, [{**m, "epochs": 4} for m in MEMBERS], precision="bf16")
    check(tasks, graph, tolerance=0.05)


def test_leaving_records_anew():
    graph = tiny_graph()
    tasks = tasks_of(graph)
    run = start(tasks, graph)
    run.advance(5)
    run.drop([0, 2])
    run.advance(100)
    assert run.recorded
    whole = start(tasks, graph)
    whole.advance(100)
    for index in (1, 3):
        mine, other = run.poll()[index].rows, whole.poll()[index].rows
        assert torch.allclose(torch.tensor(mine)[:, 0], torch.tensor(other)[:, 0], atol=1e-3)
    assert len(run.poll()[0].rows) == 5


def test_a_member_that_diverges_does_not_touch_its_neighbours():
    graph = tiny_graph()
    for model in ("gcn", "gat"):
        sound = tasks_of(graph, model=model, norm="batch")
        wild = [*sound[:1], sound[1].with_values(lr=1e30, schedule="constant"), *sound[2:]]
        runs = [start(tasks, graph) for tasks in (sound, wild)]
        looks = [run.advance(100) for run in runs]
        assert not all(map(math.isfinite, looks[1][1].rows[-1]))
        for index in (0, 2, 3):
            for name in runs[0].stacks[0].state.tensors():
                mine, other = (run.members[index].tensor(name) for run in runs)
                assert torch.equal(mine.nan_to_num(-9), other.nan_to_num(-9)), name


@pytest.mark.parametrize("model", ["gcn", "sage"])
@pytest.mark.parametrize("first_layer", ["once", "per_step"])
def test_features_are_never_written_out_for_every_member(model, first_layer):
    """Sixteen members on 20,000 nodes with 512 features: a copy each would be 655 MB."""
    random = torch.Generator().manual_seed(0)
    edges = torch.randint(0, 20_000, (2, 60_000), generator=random)
    x, y = torch.randn(20_000, 512, generator=random), torch.randint(0, 5, (20_000,), generator=random)
    graph = Graph.from_edges(*edges, 20_000, x=x, y=y, name="wide").random_split(train=100, val=100, seed=0).to("cuda")
    tasks = tasks_of(graph, [{"seed": seed} for seed in range(16)], model=model, hidden=8, epochs=3)
    run = start(tasks, graph, first_layer=first_layer)
    torch.cuda.synchronize()
    torch.cuda.reset_peak_memory_stats()
    before = torch.cuda.memory_allocated()
    run.step()
    assert torch.cuda.max_memory_allocated() - before < 16 * 20_000 * 512 * 4 / 3
