"""Modules that keep state between calls are not compiled, unless all of it is in buffers."""

import random
from dataclasses import replace

import numpy as np
import pytest
import torch
from torch import nn

from tests.dry_runs import default_plan
from weft.core.task import Task
from weft.runtime import compile as compiled
from weft.runtime.group import GroupRun


class Keeping(nn.Module):
    """A dense layer; subclasses keep something between calls."""

    def __init__(self, in_features, out_features):
        super().__init__()
        self.dense = nn.Linear(in_features, out_features)
        self.register_buffer("steps", torch.zeros((), dtype=torch.int64))
        self.calls, self.last, self.counter = 0, torch.zeros(()), torch.zeros(())

    def forward(self, x, graph):
        return self.dense(x) * self.factor(x)


class Counts(Keeping):
    def factor(self, x):
        self.calls += 1
        return 1.0 if self.calls < 5 else 2.0


class Replaces(Keeping):
    def factor(self, x):
        self.last = 0.9 * self.last + 0.01
        return 1.0 + self.last


class Decides(Keeping):
    def factor(self, x):
        few = self.steps.item() < 5
        self.steps += 1
        return 1.0 if few else 2.0


class DecidesByItsOwn(Keeping):
    def factor(self, x):
        few = self.counter.item() < 5
        self.counter += 1
        return 1.0 if few else 2.0


class DecidesByResults(Keeping):
    def factor(self, x):
        return 1.0 if self.dense(x).mean().item() < 0.5 else 2.0


class DecidesByLists(Keeping):
    def factor(self, x):
        return 1.0 if sum(self.dense(x).detach().mean(0).tolist()) < 0.5 else 2.0


class DecidesByArrays(Keeping):
    def factor(self, x):
        few = np.asarray(self.steps) < 5
        self.steps += 1
        return 1.0 if few else 2.0


class DrawsWithPython(Keeping):
    def factor(self, x):
        return 1.0 + 1e-4 * random.random()


class DrawsWithNumpy(Keeping):
    def factor(self, x):
        return 1.0 + 1e-4 * torch.from_numpy(np.random.rand(1)).float()


@pytest.fixture
def notes_of(monkeypatch, graph):
    monkeypatch.setattr(compiled, "_by_inductor", lambda traced, flat: traced)

    def train(model, members=1):
        tasks = [Task(graph=graph, model=model, seed=seed, name=str(seed), epochs=3) for seed in range(members)]
        run = GroupRun(tasks, graph, replace(default_plan(tasks, "cpu"), compiled=True), torch.device("cpu"))
        run.advance(3)
        return run.notes

    return train


@pytest.mark.parametrize(
    ("model", "reason"),
    [
        (Counts, "it keeps 'calls' from call to call"),
        (Replaces, "it keeps 'last' from call to call, which is no buffer"),
        (Decides, "it branches on numbers that change in training"),
        (DecidesByItsOwn, "it keeps 'counter' from call to call, which is no buffer"),
        (DecidesByResults, "it reads numbers back from its data"),
        (DecidesByLists, "it reads numbers back from its data"),
        (DecidesByArrays, "it reads numbers back from its data"),
        (DrawsWithPython, "it draws from Python's or NumPy's generator"),
        (DrawsWithNumpy, "it draws from Python's or NumPy's generator"),
    ],
)
def test_what_a_trace_would_not_keep_up_with_is_not_compiled(model, reason, notes_of):
    (note,) = notes_of(model)
    assert note.startswith(f"the step is not compiled: {reason}")


class Stores(Keeping):
    """Leaves its last result for others to look at."""

    def factor(self, x):
        self.shown = self.dense(x).mean()
        return 1.0 + self.steps


class Asks(Keeping):
    """Asks for what does not change."""

    def factor(self, x):
        return 1.0 + self.counter.item()


@pytest.mark.parametrize(("model", "members"), [(Asks, 1), (Stores, 1), (Stores, 2)])
def test_what_nobody_reads_again_does_not_matter(model, members, notes_of):
    assert not notes_of(model, members)
