"""R-GCN in training: sampled and full, stacked and alone, resumed; and what only relations tell."""

from __future__ import annotations

import pytest
import torch
from torch import nn

import weft
from tests.nn.relational import relational
from weft.batches import layerwise
from weft.batches.sampled import Sampling
from weft.core.errors import SpecError
from weft.core.placement import DataPlacement
from weft.core.plan import Plan
from weft.core.task import Task
from weft.graph.generate import planted_relations
from weft.runtime.group import GroupRun

CPU = torch.device("cpu")
KINDS = [{"bases": 3}, {"blocks": 4}, {}]


@pytest.fixture(scope="module")
def graph():
    return planted_relations(300, 4, hubs_per_kind=4, random_edges=3, seed=1)


def task(**changes) -> Task:
    return Task(
        graph="g", model="rgcn", **{"hidden": 8, "layers": 2, "dropout": 0.3, "epochs": 3, "lr": 0.02, **changes}
    )


def group_of(tasks, graph, **sampling) -> GroupRun:
    plan = Plan(tuple(str(place) for place in range(len(tasks))), join="stacked" if len(tasks) > 1 else "solo")
    make = Sampling(**{"fanout": (6, 3), "batch": 32, **sampling})
    return GroupRun(tasks, graph, plan, CPU, make_source=make)


def rows(update) -> list[float]:
    return [value for row in update.rows for value in row]


@pytest.mark.parametrize("kind", KINDS, ids=str)
@pytest.mark.parametrize("fanout", [(-1, -1), ((("each", -1),), (-1, -1, -1, -1))], ids=str)
def test_full_neighbourhoods_of_all_seeds_are_the_whole_graph(graph, kind, fanout):
    one = task(dropout=0.0, **kind)
    whole = GroupRun([one], graph, Plan(("0",)), CPU).stacks[0]
    mine = group_of([one], graph, fanout=fanout, batch=1 << 20).stacks[0]
    (batch,) = mine.source.batches(0)
    losses, grad = mine.gradients(mine.state.flat, batch)
    true_losses, true_grad = whole.gradients(whole.state.flat, whole.source.example())
    torch.testing.assert_close(losses, true_losses, rtol=1e-4, atol=1e-5)
    torch.testing.assert_close(grad, true_grad, rtol=1e-3, atol=1e-5)


@pytest.mark.parametrize("members", [1, 3])
def test_evaluation_layer_by_layer_is_exact(graph, members, monkeypatch):
    tasks = [task(seed=seed, layers=3, bases=2) for seed in range(members)]
    mine = group_of(tasks, graph, fanout=(5, 3, 2)).stacks[0]
    monkeypatch.setattr(layerwise, "MOST_ROWS", 37)
    monkeypatch.setattr(layerwise, "NEARLY_ALL", 1.0)
    places = DataPlacement("host", "host", evaluation="layers", chunk_edges=200)
    part = group_of(tasks, graph, fanout=(5, 3, 2), placement=places).stacks[0]
    with torch.no_grad():
        whole = mine.source.logits(lambda batch: mine.infer(mine.state.flat, batch), 3)
        layers = part.source.logits(lambda batch: mine.infer(mine.state.flat, batch), 3)
    for split in ("train", "val", "test"):
        found = layers[:, part.source.rows(split)]
        torch.testing.assert_close(found, whole[:, getattr(graph, split)], rtol=1e-4, atol=1e-5)


@pytest.mark.parametrize("kind", KINDS, ids=str)
@pytest.mark.parametrize("fanout", [(6, 3), ((("each", 2),), (1, 2, 0, 1))], ids=str)
def test_sampled_members_share_batches_and_train_as_alone(graph, kind, fanout):
    tasks = [task(seed=seed, lr=lr, **kind) for seed, lr in enumerate((0.01, 0.02, 0.05))]
    updates = group_of(tasks, graph, fanout=fanout).advance(3)
    for one, update in zip(tasks, updates, strict=True):
        alone = group_of([one], graph, fanout=fanout).advance(3)[0]
        assert rows(update) == pytest.approx(rows(alone), rel=1e-3, abs=1e-4)


@pytest.mark.parametrize("fanout", [(6, 3), ((("each", 2),), 3)], ids=str)
def test_resumed_inside_an_epoch_is_uninterrupted(graph, fanout):
    whole = group_of([task(bases=2)], graph, fanout=fanout)
    whole.advance(3)
    answers = iter([False, True])
    part = group_of([task(bases=2)], graph, fanout=fanout)
    part.advance(3, lambda: next(answers))
    assert (part.epoch, part.step_in_epoch) == (0, 2)
    other = group_of([task(bases=2)], graph, fanout=fanout)
    other.restore({name: tensor.clone() for name, tensor in part.tensors().items()})
    other.advance(3)
    assert torch.equal(other.stacks[0].state.flat, whole.stacks[0].state.flat)


def test_resumed_on_the_whole_graph(graph):
    def fresh() -> GroupRun:
        return GroupRun([task(blocks=2)], graph, Plan(("0",)), CPU)

    whole, part, other = fresh(), fresh(), fresh()
    whole.advance(3)
    part.advance(1)
    other.restore({name: tensor.clone() for name, tensor in part.tensors().items()})
    other.advance(3)
    assert torch.equal(other.stacks[0].state.flat, whole.stacks[0].state.flat)


def accuracy(graph, **settings) -> float:
    one = Task(graph=graph, **{"hidden": 16, "epochs": 40, "dropout": 0.2, **settings})
    return weft.run(one, progress=False).metrics["test_accuracy"]


def test_only_models_that_read_relations_recover_the_classes():
    graph = planted_relations(600, 4, seed=5)
    for kind in KINDS:
        assert accuracy(graph, model="rgcn", **kind) > 0.9
    assert accuracy(graph, model="rgcn", bases=4, mode="sampled", fanout=[{"each": 2}, 4], batch=128) > 0.9
    for model in ("gcn", "sage"):
        assert accuracy(graph, model=model) < 0.4  # of four classes


def test_one_hot_nodes_train():
    graph = planted_relations(300, 3, hubs_per_kind=2, seed=5).with_one_hot_features()
    assert accuracy(graph, model="rgcn", bases=3) > 0.8


def test_relations_without_edges_are_remarked_upon():
    graph = relational(num_relations=7)
    run = GroupRun([task(bases=2)], graph, Plan(("0",)), CPU)
    assert any("no edge of graph 'toy' has relation 5, 6" in note for note in run.notes)


def test_a_graph_without_relations_is_refused():
    with pytest.raises(SpecError, match="rgcn needs relations, and the edges of graph 'demo' have none"):
        weft.run(Task(graph="demo", model="rgcn", epochs=1), progress=False)
    with pytest.raises(SpecError, match="gcn has no bases"):
        weft.run(Task(graph="demo", model="gcn", bases=2, epochs=1), progress=False)


class PygStyle(nn.Module):
    """Takes ``edge_type`` as PyG's relational layers do."""

    def __init__(self, in_features: int, out_features: int) -> None:
        super().__init__()
        self.lins = nn.ModuleList(nn.Linear(in_features, out_features) for _ in range(4))

    def forward(self, x, edge_index, edge_type):
        src, dst = edge_index
        out = x.new_zeros(x.shape[0], self.lins[0].out_features)
        for relation, lin in enumerate(self.lins):
            weight = (edge_type == relation).to(x.dtype)[:, None]
            out = out.index_add(0, dst, lin(x)[src] * weight)
        return out


@pytest.mark.parametrize("sampled", [{}, {"mode": "sampled", "fanout": [{"each": 2}], "batch": 64}], ids=str)
def test_users_modules_get_edge_type(sampled):
    graph = planted_relations(400, 4, seed=5)
    one = Task(graph=graph, model=PygStyle, epochs=30, lr=0.02, **sampled)
    assert weft.run(one, progress=False).metrics["test_accuracy"] > 0.9
