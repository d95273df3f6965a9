"""The contract of a Source: several steps per epoch count, schedule, resume and prune as one does."""

from __future__ import annotations

import math
import threading
from dataclasses import replace

import pytest
import torch

from tests.graphs_for_tests import tiny_graph
from tests.runtime.row_batches import row_batches
from weft.batches.source import FullGraph, SourceRequest
from weft.core.plan import Plan
from weft.core.task import Task
from weft.graph.graph import Graph
from weft.runtime.group import GroupRun
from weft.runtime.step.optimizers import learning_rates

CPU = torch.device("cpu")
SETTINGS = {"hidden": 8, "dropout": 0.5, "epochs": 2, "lr": 0.05}


def group_of(tasks: list[Task], steps: int = 3, **plan) -> GroupRun:
    join = "stacked" if len(tasks) > 1 else "solo"
    plan = Plan(tuple(str(place) for place in range(len(tasks))), join=join, **plan)
    return GroupRun(tasks, tiny_graph(), plan, CPU, make_source=row_batches(steps))


def task(**changes) -> Task:
    return Task(graph="tiny", model=changes.pop("model", "gcn"), **{**SETTINGS, **changes})


@pytest.mark.parametrize("model", ["gcn", "sage", "gin", "gat"])
@pytest.mark.parametrize("steps", [1, 2, 3])
def test_the_gradients_of_all_batches_add_up_to_that_of_one(model, steps):
    """With accumulation: the sum of shares times gradients is the gradient over all rows."""
    one = task(model=model, dropout=0.0, attention_dropout=0.0) if model == "gat" else task(model=model, dropout=0.0)
    stack = group_of([one], steps).stacks[0]
    whole = GroupRun([one], tiny_graph(), Plan(("0",)), CPU).stacks[0]
    losses, grad = whole.gradients(whole.state.flat, whole.source.example())
    parts = [(batch.share, *stack.gradients(stack.state.flat, batch)) for batch in stack.source.batches(0)]
    torch.testing.assert_close(sum(share * part for share, part, _ in parts), losses, rtol=1e-5, atol=1e-6)
    torch.testing.assert_close(sum(share * part for share, _, part in parts), grad, rtol=1e-4, atol=1e-6)


def test_two_epochs_of_three_steps_are_counted():
    run = group_of([task()])
    updates = run.advance(2)
    state = run.stacks[0].state
    assert (run.epoch, run.step_in_epoch) == (2, 0)
    assert state.clock[0, 1].item() == 6, "dropout and rates go by steps"
    assert state.epoch.tolist() == [2]
    assert state.epoch_loss.tolist() == [0.0]
    assert len(updates[0].rows) == 2, "history goes by epochs"
    assert all(math.isfinite(value) for row in updates[0].rows for value in row)
    assert run.stacks[0].source.asked == [(0, 0), (1, 0)]


def test_the_loss_of_an_epoch_is_the_mean_over_its_rows():
    run = group_of([task(lr=1e-12, dropout=0.0)])
    whole = GroupRun([task(lr=1e-12, dropout=0.0)], tiny_graph(), Plan(("0",)), CPU)
    assert run.advance(1)[0].rows[0][0] == pytest.approx(whole.advance(1)[0].rows[0][0], rel=1e-5)


@pytest.mark.parametrize("schedule", ["constant", "cosine", "linear", "step"])
def test_schedules_go_by_steps(schedule):
    one = task(epochs=4, warmup=1, schedule=schedule)
    by_step, by_epoch = learning_rates(one, 3), learning_rates(one)
    assert len(by_step) == 12
    assert by_step[:3] == pytest.approx([one.lr / 3, one.lr * 2 / 3, one.lr])
    assert by_step[3::3] == pytest.approx(by_epoch[1:])
    assert learning_rates(one, 1) == by_epoch


def test_every_step_is_a_step_of_adam():
    """Three steps on one batch each are what torch's Adam makes of the three gradients."""
    run = group_of([task(dropout=0.0, epochs=1)])
    stack = run.stacks[0]
    weights = stack.state.flat[0].clone().requires_grad_()
    adam = torch.optim.Adam([weights], lr=0.05)
    for batch in stack.source.batches(0):
        weights.grad = stack.gradients(weights.detach()[None], batch)[1][0]
        adam.step()
    run.advance(1)
    torch.testing.assert_close(stack.state.flat[0], weights.detach(), rtol=1e-5, atol=1e-6)


@pytest.mark.parametrize("model", ["gcn", "gin", "gat"])
def test_a_stack_is_its_members_alone(model):
    tasks = [task(model=model, seed=seed, lr=lr) for seed, lr in enumerate((0.01, 0.05, 0.1, 0.2))]
    together = group_of(tasks).advance(2)
    for one, update in zip(tasks, together, strict=True):
        (alone,) = group_of([one]).advance(2)
        assert [value for row in update.rows for value in row] == pytest.approx(
            [value for row in alone.rows for value in row], rel=1e-4, abs=1e-5
        )


def test_resumed_inside_an_epoch_is_uninterrupted():
    whole = group_of([task(epochs=3, model="gin", norm="batch")])
    whole.advance(3)
    calls = iter([False, False, False, True])  # after epoch 0, then after steps 1 and 2 of epoch 1
    part = group_of([task(epochs=3, model="gin", norm="batch")])
    part.advance(3, lambda: next(calls))
    assert (part.epoch, part.step_in_epoch) == (1, 1)
    other = group_of([task(epochs=3, model="gin", norm="batch")])
    other.restore({name: tensor.clone() for name, tensor in part.tensors().items()})
    assert (other.epoch, other.step_in_epoch) == (1, 1)
    other.advance(3)
    mine, theirs = whole.stacks[0].state.tensors(), other.stacks[0].state.tensors()
    for name, tensor in mine.items():
        assert torch.equal(tensor.nan_to_num(-9), theirs[name].nan_to_num(-9)), name


def test_patience_and_evaluations_count_epochs():
    run = group_of([task(epochs=20, lr=1e-12, patience=2, eval_every=1)])
    (update,) = run.advance(20)
    assert update.end == 3, "the first epoch is the best, and two more are waited for"
    rare = group_of([task(epochs=5, eval_every=2)])
    rows = rare.advance(5)[0].rows
    assert [math.isnan(row[-1]) for row in rows] == [True, False, True, False, False]


def test_members_are_dropped_between_epochs():
    tasks = [task(seed=seed, epochs=4) for seed in range(3)]
    whole, run = group_of(tasks), group_of(tasks)
    expected = whole.advance(4)
    run.advance(2)
    run.drop([1])
    run.advance(4)
    found = run.poll()
    assert len(found[1].rows) == 2
    for place in (0, 2):
        assert [r[0] for r in found[place].rows] == pytest.approx([r[0] for r in expected[place].rows], rel=1e-5)


# ---- rows spread over ranks ----------------------------------------------------------------------------------


class Threads:
    """A Reduce among threads, each a rank: what they hand in is added up, or concatenated in their order."""

    def __init__(self, ranks: int) -> None:
        self.ranks, self.given = ranks, [None] * ranks
        self.barrier = threading.Barrier(ranks, timeout=60)

    def exchange(self, rank: int, value: torch.Tensor) -> list[torch.Tensor]:
        self.given[rank] = value
        self.barrier.wait()
        found = list(self.given)
        self.barrier.wait()
        return found


class Rank:
    """One rank of :class:`Threads`."""

    def __init__(self, threads: Threads, rank: int) -> None:
        self.threads, self.rank, self.ranks = threads, rank, threads.ranks

    def sum(self, value: torch.Tensor) -> torch.Tensor:
        return _Sum.apply(value, self)

    def gather(self, rows: torch.Tensor, dim: int) -> torch.Tensor:
        return torch.cat(self.threads.exchange(self.rank, rows.detach()), dim)


class _Sum(torch.autograd.Function):
    @staticmethod
    def forward(ctx, value, rank):
        ctx.rank = rank
        return sum(rank.threads.exchange(rank.rank, value.detach()))

    @staticmethod
    def backward(ctx, grad):
        return sum(ctx.rank.threads.exchange(ctx.rank.rank, grad)), None


class Shard(FullGraph):
    """The whole of a graph that is one of several parts without edges between them."""

    def __init__(self, request: SourceRequest, reduce: Rank, of_all: int) -> None:
        super().__init__(request)
        self.reduce = reduce
        self.batch = replace(self.batch, share=torch.tensor([request.graph.train.numel() / of_all]))


def halves() -> tuple[Graph, list[Graph]]:
    """A graph of two unconnected parts of different sizes, and the parts."""
    torch.manual_seed(0)
    parts = []
    for nodes in (30, 20):
        src, dst = torch.randint(0, nodes, (2, 4 * nodes))
        x, y = torch.randn(nodes, 6), torch.arange(nodes) % 3
        split = {
            "train": torch.arange(0, nodes, 2),
            "val": torch.arange(1, nodes, 4),
            "test": torch.arange(3, nodes, 4),
        }
        parts.append(Graph.from_edges(src.numpy(), dst.numpy(), x=x, y=y, num_nodes=nodes, num_classes=3, **split))
    one, other = parts
    index = torch.cat([one.edge_index(), other.edge_index() + one.num_nodes], 1)
    split = {
        name: torch.cat([getattr(one, name), getattr(other, name) + one.num_nodes]) for name in ("train", "val", "test")
    }
    x, y = torch.cat([one.x, other.x]), torch.cat([one.y, other.y])
    whole = Graph.from_edges(index[0].numpy(), index[1].numpy(), x=x, y=y, num_nodes=50, num_classes=3, **split)
    return whole, parts


@pytest.mark.parametrize("metric", ["accuracy", "f1_macro"])
@pytest.mark.parametrize("norm", [None, "batch"])
def test_rows_over_two_ranks_are_rows_over_one(norm, metric):
    """Loss, gradient, metrics and batch norm go through one object that is the identity on one rank."""
    whole, parts = halves()
    one = Task(graph="g", model="gcn", hidden=8, dropout=0.0, epochs=4, norm=norm, metric=metric)
    (expected,) = GroupRun([one], whole, Plan(("0",)), CPU).advance(4)
    threads, found = Threads(2), {}

    def train(rank: int) -> None:
        def make(request: SourceRequest) -> Shard:
            return Shard(request, Rank(threads, rank), whole.train.numel())

        run = GroupRun([one], parts[rank], Plan(("0",)), CPU, make_source=make)
        found[rank] = run.advance(4)[0].rows

    workers = [threading.Thread(target=train, args=(rank,)) for rank in range(2)]
    for worker in workers:
        worker.start()
    for worker in workers:
        worker.join(timeout=120)
    assert found[0] == found[1]
    for mine, theirs in zip(found[0], expected.rows, strict=True):
        assert mine == pytest.approx(theirs, rel=1e-4, abs=1e-5)
