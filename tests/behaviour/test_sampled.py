"""Training on sampled batches: the whole graph where all neighbours are drawn, and the same batches for all members."""

from __future__ import annotations

from types import SimpleNamespace

import pytest
import torch

import weft
from tests.behaviour import calls, modules
from tests.behaviour.cases import graph
from tests.behaviour.plain_loop import assert_losses, assert_same_run


def task(**settings) -> weft.Task:
    usual = {"graph": graph(), "epochs": 5, "lr": 0.02}
    return weft.Task(**{**usual, **settings})


@pytest.mark.parametrize("model", ["gcn", "sage", "gin"])
def test_one_batch_of_all_neighbours_is_the_whole_graph(model):
    shared = {"model": model, "hidden": 8, "dropout": 0.0}
    sampled = task(**shared, mode="sampled", fanout=(-1, -1), batch=1000)
    assert_losses(calls.run(sampled).history["loss"], calls.run(task(**shared, mode="full")).history["loss"])


def test_a_module_of_pyg_over_all_neighbours_is_the_whole_graph():
    pytest.importorskip("torch_geometric")
    sampled = task(model=modules.PygSAGE, mode="sampled", fanout=(-1, -1), batch=1000)
    assert_losses(calls.run(sampled).history["loss"], calls.run(task(model=modules.PygSAGE)).history["loss"])


@pytest.mark.parametrize("model", ["sage", "gcn"])
def test_members_over_the_same_batches_are_as_alone(model):
    shared = {"model": model, "hidden": 8, "dropout": 0.0, "fanout": (4, 3), "batch": 12}
    tasks = [task(**shared, seed=seed, name=f"s{seed}") for seed in range(3)]
    together = calls.run(tasks)
    assert {plan.mode for plan in together.plan} == {"sampled"}
    for one, found in zip(tasks, together, strict=True):
        assert_same_run(found, calls.run(one))


def test_batches_follow_their_seed():
    first, again, other = (
        calls.run(task(model="sage", hidden=8, dropout=0.0, fanout=(2, 2), batch=10, batch_seed=seed)).history["loss"]
        for seed in (1, 1, 2)
    )
    assert first == again
    assert first != other


def test_batches_of_a_loader_of_ones_own():
    pytest.importorskip("torch_geometric")
    data = graph()
    rest = torch.tensor(sorted(set(range(data.num_nodes)) - set(data.train.tolist())))
    nodes = torch.cat([data.train.long(), rest])
    edges = nodes.argsort()[data.edge_index().long()]
    whole = SimpleNamespace(
        n_id=nodes, x=data.x[nodes], y=data.y[nodes], edge_index=edges, batch_size=data.train.numel()
    )
    shared = {"model": modules.PygSAGE, "convert": False}
    found = calls.run(task(**shared, mode="sampled", fanout=(-1, -1), batch=40), batches=[whole])
    assert_losses(found.history["loss"], calls.run(task(**shared, mode="full")).history["loss"])


def test_sampled_weights_predict_on_the_whole_graph():
    found = calls.run(task(model="sage", hidden=8, fanout=(4, 3), batch=16))
    data = graph()
    assert torch.equal(found.predict(), found.model(data.x, data.adj).argmax(1))


def test_a_smaller_last_batch_counts_by_its_rows_in_the_loss_of_an_epoch():
    """With all neighbours and a rate too small to move a weight, the epoch's loss is that of the whole graph."""
    graph = weft.load("demo")
    settings = {"graph": graph, "model": "gcn", "hidden": 8, "dropout": 0.0, "epochs": 1, "lr": 1e-30}
    whole = weft.run(weft.Task(mode="full", **settings), progress=False)
    batch = int(graph.train.numel()) - 1
    parts = weft.run(weft.Task(mode="sampled", fanout=[-1, -1], batch=batch, **settings), progress=False)
    assert parts.history["loss"] == pytest.approx(whole.history["loss"], rel=1e-5)
