"""Users' modules of every kind: alone as a plain loop of torch, stacked as alone, or not stacked with the reason."""

from __future__ import annotations

import random
from functools import partial

import numpy as np
import pytest
import torch
from torch.nn import functional as F

import weft
from tests.runtime.user_modules.odd_modules import (
    ALL,
    STACKED,
    Base,
    ClampedData,
    ClampedInPlace,
    ClampedLater,
    ClampedLaterInBackward,
    CountsInDict,
    CountsInPython,
    Detached,
    Draws,
    DrawsWithNumpy,
    DrawsWithPython,
    MaxNorm,
    ParameterInAnyType,
    ReadsKeptActivation,
)
from weft.runtime.group import GroupRun

EPOCHS, RATE = 12, 0.02


def small(nodes: int = 40) -> weft.Graph:
    draw = np.random.default_rng(0)
    src, dst = draw.integers(0, nodes, (2, 4 * nodes))
    x, y = draw.normal(size=(nodes, 6)).astype("float32"), draw.integers(0, 3, nodes)
    graph = weft.Graph.from_edges(src, dst, num_nodes=nodes, x=x, y=y, directed=False, name="g")
    return graph.random_split(0.5, 0.25)


GRAPH = small()


def seed_all(seed):
    torch.manual_seed(seed)
    random.seed(seed)
    np.random.seed(seed)


def plain(model, seed=0, decay=0.0, optimizer=torch.optim.Adam):
    """The loop that a user would write."""
    seed_all(seed)
    module, losses = model(6, 3), []
    update = optimizer(module.parameters(), lr=RATE, weight_decay=decay)
    for _ in range(EPOCHS):
        module.train()
        update.zero_grad()
        loss = F.cross_entropy(module(GRAPH.x, GRAPH.adj)[GRAPH.train], GRAPH.y[GRAPH.train])
        loss.backward()
        update.step()
        losses.append(loss.item())
        module.eval()
        with torch.no_grad():
            module(GRAPH.x, GRAPH.adj)
    return losses, module


def tasks_of(model, seeds, **settings):
    settings = {"epochs": EPOCHS, "lr": RATE, "graph": GRAPH, "model": model} | settings
    return [weft.Task(seed=seed, name=f"{model.__name__}-{seed}", **settings) for seed in seeds]


run = partial(weft.run, device="cpu", progress=False)


@pytest.mark.parametrize("model", ALL)
def test_alone_is_a_plain_loop(model):
    (task,) = tasks_of(model, [0], weight_decay=0.05)
    seed_all(0)
    mine = run(task)
    losses, module = plain(model, decay=0.05)
    assert mine.history["loss"] == pytest.approx(losses, rel=2e-4, abs=2e-5)
    assert mine.status == "finished"
    assert {name: t.dtype for name, t in mine.model.state_dict().items()} == {
        name: t.dtype for name, t in module.state_dict().items()
    }


@pytest.mark.parametrize("model", [m for m in ALL if m not in (DrawsWithPython, DrawsWithNumpy)])
def test_stacked_is_alone(model):
    tasks = tasks_of(model, range(3), weight_decay=0.05)
    together = run(tasks)
    for task, one in zip(tasks, together, strict=True):
        alone = run(task)
        assert one.history["loss"] == pytest.approx(alone.history["loss"], rel=2e-4, abs=2e-5)
        for name, value in alone.model.state_dict().items():
            torch.testing.assert_close(one.model.state_dict()[name], value, rtol=1e-2, atol=1e-3)


@pytest.mark.parametrize("model", ALL)
def test_what_stacks_is_one_stack_and_the_rest_says_why_not(model):
    notes = []

    def collect(event):
        if event.kind == "note":
            notes.append(event.data["message"])

    run(tasks_of(model, range(3), epochs=2), on_event=collect)
    why = [note for note in notes if "not as one stack" in note]
    assert bool(why) != (model in STACKED), notes


def test_bf16_refuses_parameters_that_are_read_elsewhere():
    with pytest.raises(weft.WeftError, match="reads a parameter other than as an attribute"):
        run(tasks_of(ParameterInAnyType, [0], precision="bf16")[0])


@pytest.mark.parametrize("optimizer", ["sgd", "adamw"])
def test_parameters_without_a_gradient_do_not_decay(optimizer):
    kinds = {"sgd": torch.optim.SGD, "adamw": torch.optim.AdamW}
    mine = run(tasks_of(Detached, [0], weight_decay=0.05, optimizer=optimizer)[0])
    losses, _ = plain(Detached, decay=0.05, optimizer=kinds[optimizer])
    assert mine.history["loss"] == pytest.approx(losses, rel=2e-4)


@pytest.mark.parametrize("settings", [{}, {"optimizer": "sgd"}, {"optimizer": torch.optim.AdamW}])
def test_parameters_without_a_gradient_do_not_decay_in_bf16_either(settings):
    tasks = tasks_of(Detached, [0, 1], weight_decay=0.5, precision="bf16", **settings)
    for task, together in zip(tasks, run(tasks), strict=True):
        seed_all(task.seed)
        before = Detached(6, 3).conv.weight
        for found in (run(task), together):
            assert torch.equal(found.model.conv.weight, before)


def preempted_after(epochs, task, out, monkeypatch):
    """Looked at after every epoch: how many are trained between two looks depends on how long they take."""
    control, one_epoch, advance = weft.Control(), GroupRun._one_epoch, GroupRun.advance

    def counted(group, stop):
        ended = one_epoch(group, stop)
        if group.epoch == epochs:
            control.preempt()
        return ended

    with monkeypatch.context() as patch:
        patch.setattr(GroupRun, "_one_epoch", counted)
        patch.setattr(GroupRun, "advance", lambda group, epochs, stop=bool: advance(group, 1, stop))
        assert run(task, out=out, control=control).status == "preempted"


class Collects(Base):
    """Its set is not JSON."""

    def __init__(self, i, o):
        super().__init__(i, o)
        self.seen = set()

    def forward(self, x, adj):
        self.seen.add(len(self.seen) if self.training else -1)
        return super().forward(x, adj) * (1 + 0.1 * len(self.seen))


KEEPING = [CountsInPython, CountsInDict, ReadsKeptActivation, DrawsWithPython, DrawsWithNumpy, Draws, Collects]


@pytest.mark.parametrize("model", KEEPING)
def test_resumed_is_uninterrupted(model, tmp_path, monkeypatch):
    (task,) = tasks_of(model, [0])
    seed_all(0)
    whole = run(task).history["loss"]
    seed_all(0)
    preempted_after(6, task, tmp_path / "out", monkeypatch)
    seed_all(1)
    assert run(task, out=tmp_path / "out", resume=True).history["loss"] == whole


@pytest.mark.parametrize("model", [ClampedLater, ClampedLaterInBackward])
def test_weights_that_a_module_changes_itself_are_not_compiled(model):
    notes = []
    collect = lambda event: notes.append(event.data["message"]) if event.kind == "note" else None  # noqa: E731
    run(tasks_of(model, range(1), epochs=2), options=weft.RunOptions(compile=True), on_event=collect)
    assert "the step is not compiled: it changes its own weights" in notes


@pytest.mark.parametrize("model", [ClampedInPlace, ClampedData, ClampedLater, MaxNorm, ClampedLaterInBackward])
def test_weights_that_a_module_changes_itself_are_refused_where_they_are_copies(model):
    with pytest.raises(weft.SpecError, match="changes its own weights when it is called; only precision='fp32'"):
        run(tasks_of(model, range(1), epochs=2, precision="bf16"))


class Student(Base):
    """Only its last layer is for the optimizer."""

    def parameters(self, recurse=True):
        return self.last.parameters(recurse)


@pytest.mark.parametrize("seeds", [1, 3])
def test_an_overridden_parameters_says_what_is_trained(seeds):
    for seed, result in enumerate(run(tasks_of(Student, range(seeds)))):
        losses, _ = plain(Student, seed)
        assert result.history["loss"] == pytest.approx(losses, rel=2e-4, abs=2e-5)
        seed_all(seed)
        untouched = Student(6, 3)
        assert torch.equal(result.model.conv.weight, untouched.conv.weight)
        assert not torch.equal(result.model.last.weight, untouched.last.weight)


class Unregistered(Base):
    def parameters(self, recurse=True):
        return [*super().parameters(recurse), torch.zeros(3, requires_grad=True)]


def test_parameters_that_are_not_registered_are_refused():
    with pytest.raises(weft.SpecError, match=r"parameters\(\) of model Unregistered returns 1 tensors"):
        run(tasks_of(Unregistered, [0]))


class DenseAdjacency(Base):
    """Knows how many nodes it has, and writes out of bounds on a graph with more."""

    def __init__(self, i, o):
        super().__init__(i, o)
        self.rows = torch.nn.Linear(40, o)

    def forward(self, x, edge_index):
        ones = torch.ones(edge_index.shape[1])
        return self.rows(torch.sparse_coo_tensor(edge_index, ones, (40, 40)).to_dense()) + self.last(
            torch.relu(x @ MAP)
        )


MAP = torch.linspace(-1.0, 1.0, 48).view(6, 8)


def test_no_other_graph_than_the_users_is_given_to_a_module(monkeypatch):
    seen, forward = [], DenseAdjacency.forward

    def noted(self, x, edge_index):
        seen.append(x.shape[0])
        return forward(self, x, edge_index)

    monkeypatch.setattr(DenseAdjacency, "forward", noted)
    assert run(tasks_of(DenseAdjacency, [0], epochs=3)[0]).status == "finished"
    assert set(seen) == {40}
