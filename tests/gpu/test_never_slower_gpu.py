"""A sweep of a user's module on a GPU is not slower than its tasks in turn, and has their numbers."""

from __future__ import annotations

from argparse import Namespace

import pytest
import torch
from torch import nn
from torch.nn import functional as F

import weft
from benchmarks.suites import never_slower
from tests.gpu.conftest import held_by_others
from weft.nn import GCNConv
from weft.runtime import epoch

pytestmark = [
    pytest.mark.gpu,
    pytest.mark.skipif(not torch.cuda.is_available(), reason="needs a CUDA device"),
]

ATTEMPTS = 3  # other processes may use the GPU meanwhile


class Attention(nn.Module):
    """Attention of every node over groups of its own features; ``by``: how groups are multiplied by a matrix."""

    by = staticmethod(F.linear)

    def __init__(self, inputs: int, outputs: int) -> None:
        super().__init__()
        self.first = nn.Linear(inputs, 32)
        self.query, self.key, self.value = (nn.Parameter(torch.randn(8, 8) / 3) for _ in range(3))
        self.last = GCNConv(32, outputs)

    def forward(self, x, adj):
        h = F.dropout(torch.relu(self.first(x)), 0.5, self.training)
        parts = h.unflatten(-1, (4, -1))
        scores = self.by(parts, self.query) @ self.by(parts, self.key).transpose(-1, -2)
        return self.last(h + (torch.softmax(scores, -1) @ self.by(parts, self.value)).flatten(-2), adj)


class Repeated(Attention):
    """The same by a product per node, for which the matrix of every task of a stack is repeated."""

    by = staticmethod(lambda parts, weight: torch.bmm(parts, weight.T.expand(len(parts), 8, 8)))


def tasks_of(model, graph, epochs=1_000):
    return [weft.Task(graph=graph, model=model, seed=seed, epochs=epochs, name=str(seed)) for seed in range(4)]


@pytest.fixture(scope="module")
def pubmed_and_bytes():
    before = held_by_others()
    graph = weft.load("shape:pubmed", device=torch.device("cuda"))
    return graph, held_by_others() - before


@pytest.fixture
def pubmed(pubmed_and_bytes):
    return pubmed_and_bytes[0]


@pytest.fixture
def others(pubmed_and_bytes):
    """Bytes of earlier tests, without the graph's, which plans count."""
    return held_by_others() - pubmed_and_bytes[1]


@pytest.mark.parametrize("model", [Attention, Repeated])
def test_a_sweep_is_not_slower_than_its_tasks_in_turn(model, pubmed, monkeypatch):
    monkeypatch.setitem(never_slower.MODULES, "own", lambda: model)
    found = {}
    for _ in range(ATTEMPTS):
        found = never_slower.measure("own", pubmed, Namespace(tasks=4, runs=5))
        if found["turn_over_sweep"] >= never_slower.BOUND:
            break
    assert found["turn_over_sweep"] >= never_slower.BOUND, found


@pytest.mark.parametrize("model", [Attention, Repeated])
def test_taken_apart_or_not_the_numbers_are_the_same(model, pubmed, others, monkeypatch):
    results = {}
    for factor in (0.0, 1e9):  # every stack is slow, none is
        monkeypatch.setattr(epoch, "REPLAYED", factor)
        monkeypatch.setattr(epoch, "LEAST_SECONDS", 0.0)
        monkeypatch.setattr(epoch, "COMPILED", factor)
        results[factor] = weft.run(tasks_of(model, pubmed, epochs=60), device="cuda", progress=False)
    (apart,), (stacked,) = (results[factor].plan for factor in (0.0, 1e9))
    assert (apart.join, len(apart.stack_members)) == ("in turn", 4), apart.why
    assert (stacked.join, len(stacked.stack_members)) == ("stacked", 1), stacked.why
    assert any("side by side, not as one stack: a step of the stack takes" in reason for reason in apart.why)
    assert apart.measured["peak_bytes"] - others <= 1.05 * apart.cost["peak_bytes"] + (20 << 20)
    for mine, theirs in zip(results[0.0], results[1e9], strict=True):
        assert mine.history["loss"] == pytest.approx(theirs.history["loss"], rel=2e-3, abs=2e-4)


def test_timing_a_stack_changes_nothing(pubmed, monkeypatch):
    monkeypatch.setattr(epoch, "REPLAYED", 1e9)
    timed = weft.run(tasks_of(Attention, pubmed, epochs=40), device="cuda", progress=False)
    monkeypatch.setattr(epoch, "is_timed", lambda *about: False)
    untimed = weft.run(tasks_of(Attention, pubmed, epochs=40), device="cuda", progress=False)
    for mine, theirs in zip(timed, untimed, strict=True):
        assert mine.history["loss"] == pytest.approx(theirs.history["loss"], rel=1e-5)
