"""Sampled training through a group: what it shares with full-graph training, and its own guarantees."""

from __future__ import annotations

import pytest
import torch
from torch import nn

from weft.batches import layerwise
from weft.batches.sampled import Sampling
from weft.batches.source import FullGraph
from weft.core.errors import TrainingError
from weft.core.placement import DataPlacement
from weft.core.plan import Plan
from weft.core.task import Task
from weft.graph.generate import citation
from weft.runtime.group import GroupRun

CPU = torch.device("cpu")


@pytest.fixture(scope="module")
def graph():
    return citation(num_nodes=400, num_edges=3000, num_features=12, num_classes=4, seed=1)


def task(model="sage", **changes) -> Task:
    base = {"hidden": 8, "layers": 2, "dropout": 0.3, "epochs": 3, "lr": 0.02}
    return Task(graph="g", model=model, **{**base, **changes})


def group_of(tasks, graph, **sampling) -> GroupRun:
    plan = Plan(tuple(str(place) for place in range(len(tasks))), join="stacked" if len(tasks) > 1 else "solo")
    make = Sampling(**{"fanout": (5, 3), "batch": 32, **sampling})
    return GroupRun(tasks, graph, plan, CPU, make_source=make)


def rows(update) -> list[float]:
    return [value for row in update.rows for value in row]


@pytest.mark.parametrize("model", ["gcn", "sage", "gin", "gat", "gatv2"])
def test_full_neighbourhoods_of_all_seeds_are_the_whole_graph(graph, model):
    """One batch of all seeds with every neighbour: the gradient of full-graph training."""
    one = task(model, dropout=0.0)
    whole = GroupRun([one], graph, Plan(("0",)), CPU).stacks[0]
    mine = group_of([one], graph, fanout=(-1, -1), batch=1 << 20).stacks[0]
    assert mine.source.steps_per_epoch == 1
    (batch,) = mine.source.batches(0)
    losses, grad = mine.gradients(mine.state.flat, batch)
    true_losses, true_grad = whole.gradients(whole.state.flat, whole.source.example())
    torch.testing.assert_close(losses, true_losses, rtol=1e-4, atol=1e-5)
    torch.testing.assert_close(grad, true_grad, rtol=1e-3, atol=1e-5)


@pytest.mark.parametrize("model", ["gcn", "sage", "gin", "gat"])
@pytest.mark.parametrize("members", [1, 3])
def test_evaluation_layer_by_layer_is_exact(graph, model, members, monkeypatch):
    tasks = [task(model, seed=seed, layers=3) for seed in range(members)]
    mine = group_of(tasks, graph, fanout=(5, 3, 2)).stacks[0]
    monkeypatch.setattr(layerwise, "MOST_ROWS", 37)
    monkeypatch.setattr(layerwise, "NEARLY_ALL", 1.0)
    places = DataPlacement("host", "host", evaluation="layers", chunk_edges=200)
    few = graph.with_splits(graph.train[:7], graph.val[:5], graph.test[:2])
    part = group_of(tasks, few, fanout=(5, 3, 2), placement=places).stacks[0]
    with torch.no_grad():
        whole = mine.source.logits(lambda batch: mine.infer(mine.state.flat, batch), 3)
        layers = part.source.logits(lambda batch: mine.infer(mine.state.flat, batch), 3)
    assert layers.shape[1] == 14
    for split in ("train", "val", "test"):
        ids = getattr(few, split)
        torch.testing.assert_close(layers[:, part.source.rows(split)], whole[:, ids], rtol=1e-4, atol=1e-5)
        assert torch.equal(part.source.labels()[part.source.rows(split)], graph.y[ids])


@pytest.mark.parametrize("model", ["gcn", "sage", "gat"])
def test_pipelined_is_synchronous(graph, model):
    overlapped, plain = (group_of([task(model)], graph, depth=depth) for depth in (3, 1))
    assert rows(overlapped.advance(3)[0]) == rows(plain.advance(3)[0])
    assert torch.equal(overlapped.stacks[0].state.flat, plain.stacks[0].state.flat)


def test_members_share_batches_and_train_as_alone(graph):
    tasks = [task(seed=seed, lr=lr) for seed, lr in enumerate((0.01, 0.02, 0.05, 0.1))]
    together = group_of(tasks, graph)
    updates = together.advance(3)
    for one, update in zip(tasks, updates, strict=True):
        assert rows(update) == pytest.approx(rows(group_of([one], graph).advance(3)[0]), rel=1e-3, abs=1e-4)


def test_resumed_inside_an_epoch_is_uninterrupted(graph):
    whole = group_of([task()], graph)
    whole.advance(3)
    answers = iter([False, True])
    part = group_of([task()], graph)
    part.advance(3, lambda: next(answers))
    assert (part.epoch, part.step_in_epoch) == (0, 2)
    other = group_of([task()], graph)
    other.restore({name: tensor.clone() for name, tensor in part.tensors().items()})
    other.advance(3)
    assert torch.equal(other.stacks[0].state.flat, whole.stacks[0].state.flat)


def test_it_learns(graph):
    (update,) = group_of([task(epochs=30, dropout=0.0)], graph).advance(30)
    assert update.rows[-1][0] < 0.5 * update.rows[0][0]
    assert update.best_score > 0.5


class Pyg(nn.Module):
    """As PyG's users write them: over ``edge_index``."""

    def __init__(self, inputs, outputs):
        super().__init__()
        self.lin = nn.Linear(inputs, outputs)

    def forward(self, x, edge_index):
        src, dst = edge_index
        h = self.lin(x)
        return h + torch.zeros_like(h).index_add(0, dst, h[src])


class Blocks(nn.Module):
    def __init__(self, inputs, outputs):
        super().__init__()
        from weft.nn import SAGEConv

        self.first, self.second = SAGEConv(inputs, 8), SAGEConv(8, outputs)

    def forward(self, x, blocks):
        blocks = blocks if isinstance(blocks, tuple) else (blocks, blocks)
        return self.second(torch.relu(self.first(x, blocks[0])), blocks[1])


@pytest.mark.parametrize("model", [Pyg, Blocks])
def test_users_modules_train(graph, model):
    (update,) = group_of([task(model, epochs=20)], graph).advance(20)
    assert update.rows[-1][0] < update.rows[0][0]


def test_an_error_in_a_stage_names_it(graph, monkeypatch):
    run = group_of([task()], graph)
    monkeypatch.setattr(run.stacks[0].source.store, "read", lambda ids: (_ for _ in ()).throw(OSError("disk gone")))
    with pytest.raises(TrainingError, match="stage 'fetch' failed at item 0: OSError: disk gone"):
        run.advance(1)


def test_the_whole_graph_stays_one_recorded_step(graph):
    run = GroupRun([task()], graph, Plan(("0",)), CPU)
    assert isinstance(run.stacks[0].source, FullGraph)
    assert run.stacks[0].source.constant
