"""Attributes that cannot be copied do not fail a training: kept activations, locks, PyG's own."""

from __future__ import annotations

import threading

import pytest
import torch
from torch import nn

import weft
from tests.graphs_for_tests import tiny_graph
from weft.core.errors import SpecError
from weft.runtime.modules.build import copy_module


class Base(nn.Module):
    """A graph layer and a product."""

    def __init__(self, in_features, out_features):
        super().__init__()
        self.first, self.last = weft.nn.GCNConv(in_features, 8), nn.Linear(8, out_features)

    def forward(self, x, adj):
        return self.last(torch.relu(self.first(x, adj)))


class Keeps(Base):
    """Keeps its embedding, as users do to look at it later."""

    def forward(self, x, adj):
        self.embedding = torch.relu(self.first(x, adj))
        self.all = {"layers": [self.embedding, (self.embedding * 2,)]}
        return self.last(self.embedding)


class KeepsInTraining(Base):
    """Keeps a number for the loss, in training mode only."""

    def forward(self, x, adj):
        hidden = torch.relu(self.first(x, adj))
        if self.training:
            self.penalty = hidden.square().mean()
        return self.last(hidden)


class Locks(Base):
    """Has something that is not copied, but made anew."""

    def __init__(self, in_features, out_features):
        super().__init__(in_features, out_features)
        self.first.lock = threading.Lock()


class Generates(Base):
    """Has something that nobody can copy."""

    def __init__(self, in_features, out_features):
        super().__init__(in_features, out_features)
        self.first.numbers = (number for number in range(10))


def run(work, **options):
    return weft.run(work, device="cpu", progress=False, **options)


def same_as_base(result, graph):
    """The model that came back is whole: it runs, and has the loss that was reported."""
    logits = result.model(graph.x, graph.adj)
    loss = nn.functional.cross_entropy(logits[graph.val], graph.y[graph.val]).item()
    return loss == pytest.approx(result.metrics["val_loss"], abs=1e-5)


@pytest.mark.parametrize("module", [Keeps, KeepsInTraining, Locks])
def test_alone_and_stacked(module):
    graph = tiny_graph()
    tasks = [weft.Task(graph=graph, model=module, epochs=3, seed=seed, name=f"s{seed}") for seed in range(3)]
    together = run(tasks)
    assert together.statuses == {"finished": 3}
    assert together.plan[0].join == "stacked"
    for task, one in zip(tasks, together, strict=True):
        alone = run(task)
        assert one.history["loss"] == pytest.approx(alone.history["loss"], rel=1e-5)
        assert same_as_base(alone, graph)
        assert same_as_base(one, graph)


def test_what_is_left_out_is_said():
    events = []
    result = run(weft.Task(graph=tiny_graph(), model=Generates, epochs=2), on_event=events.append)
    notes = [event.data["message"] for event in events if event.kind == "note"]
    assert any("cannot be copied: first.numbers" in note for note in notes), notes
    assert result.model.first.numbers is None


def test_a_lock_is_another_one_in_a_copy():
    result = run(weft.Task(graph=tiny_graph(), model=Locks, epochs=2))
    with result.model.first.lock:
        assert result.status == "finished"


def test_a_kept_activation_is_in_the_copy_without_its_history():
    graph = tiny_graph()
    model = Keeps(graph.num_features, graph.num_classes)
    model(graph.x, graph.adj)
    copied, left_out = copy_module(model)
    assert left_out == []
    assert torch.equal(copied.embedding, model.embedding)
    assert copied.embedding.grad_fn is None
    assert copied.all["layers"][0] is copied.embedding
    assert run(weft.Task(graph=graph, model=model, epochs=2)).status == "finished"  # given as an object


def test_a_module_that_refuses_to_be_copied_is_refused_before_it_trains():
    class Stubborn(Base):
        def __deepcopy__(self, memo):
            raise RuntimeError("there is only one of me")

    events = []
    with pytest.raises(SpecError, match=r"model Stubborn cannot be copied.*there is only one of me"):
        run(weft.Task(graph=tiny_graph(), model=Stubborn, epochs=2), on_event=events.append)
    assert not any(event.kind == "epoch" for event in events)


def test_supergat_of_pyg():
    geometric = pytest.importorskip("torch_geometric.nn")

    class Super(nn.Module):
        def __init__(self, inputs, outputs):
            super().__init__()
            self.layer = geometric.SuperGATConv(inputs, outputs, heads=1)

        def forward(self, x, edge_index):
            return self.layer(x, edge_index)

    graph = tiny_graph()
    assert run(weft.Task(graph=graph, model=Super, epochs=3)).status == "finished"
    assert run(weft.Sweep(graph, model=Super, epochs=3, seed=[0, 1])).statuses == {"finished": 2}
