"""What users' modules keep in other places than buffers and attributes, or in evaluation mode: exact, or said."""

from __future__ import annotations

import random

import numpy as np
import pytest
import torch
from torch import nn

import weft
from tests.runtime.user_modules.odd_modules import Base, ReadsKeptActivation
from tests.runtime.user_modules.test_exact import plain, preempted_after, run, seed_all, tasks_of
from tests.stacks import start
from weft.runtime.modules.state import GlobalsSnapshot

SEEN = [0]
GENERATOR = np.random.default_rng(0)
TORCHS, NUMPYS, PYTHONS = torch.Generator().manual_seed(0), np.random.RandomState(0), random.Random(0)


class KeptInEvaluation(Base):
    """Adds what the last evaluation gave."""

    def __init__(self, i, o):
        super().__init__(i, o)
        self.before = 0.0

    def forward(self, x, adj):
        out = super().forward(x, adj)
        if self.training:
            return out + 0.3 * self.before
        self.before = out.detach()
        return out


class Teacher(Base):
    """A frozen copy of the last layer follows it, as in methods that learn from an average of themselves."""

    def __init__(self, i, o):
        super().__init__(i, o)
        self.teacher = nn.Linear(self.last.in_features, o).requires_grad_(False)

    def follow(self):
        with torch.no_grad():
            for mine, theirs in zip(self.teacher.parameters(), self.last.parameters(), strict=True):
                mine.mul_(0.9).add_(theirs, alpha=0.1)

    def forward(self, x, adj):
        if self.training:
            self.follow()
        h = self.hidden(x, adj)
        return self.last(h) + self.teacher(h)


class TeacherByData(Teacher):
    def follow(self):
        for mine, theirs in zip(self.teacher.parameters(), self.last.parameters(), strict=True):
            mine.data = 0.9 * mine.data + 0.1 * theirs.data


class TeacherFromStart(Teacher):
    """A copy at first: its first step moves nothing."""

    def __init__(self, i, o):
        super().__init__(i, o)
        nn.init.zeros_(self.last.bias)
        self.teacher.load_state_dict(self.last.state_dict())

    def follow(self):
        for mine, theirs in zip(self.teacher.parameters(), self.last.parameters(), strict=True):
            mine.data.mul_(0.9).add_(theirs.data, alpha=0.1)


class Recurrent(Base):
    def __init__(self, i, o):
        super().__init__(i, o)
        self.cells = nn.GRU(self.last.in_features, self.last.in_features, batch_first=True)

    def forward(self, x, adj):
        h = self.hidden(x, adj)
        return self.last(self.cells(torch.stack([h, h.tanh()], 1))[0][:, -1])


class CountsInClosure(Base):
    def __init__(self, i, o):
        super().__init__(i, o)
        calls = 0

        def count():
            nonlocal calls
            calls += 1
            return calls

        self.count = count

    def forward(self, x, adj):
        return super().forward(x, adj) * (1 + 0.1 * (self.count() if self.training else 0))


class CountsInGenerator(Base):
    """A generator of Python says nothing of where it is that could be written down."""

    def __init__(self, i, o):
        super().__init__(i, o)
        self.numbers = (number for number in range(10_000))

    def forward(self, x, adj):
        return super().forward(x, adj) * (1 + 0.1 * (next(self.numbers) if self.training else 0))


class HiddenTeacher(Base):
    """In a list, so that it is no submodule."""

    def __init__(self, i, o):
        super().__init__(i, o)
        self.teachers = [nn.Linear(self.last.in_features, o).requires_grad_(False)]

    def forward(self, x, adj):
        h = self.hidden(x, adj)
        if self.training:
            with torch.no_grad():
                self.teachers[0].weight.mul_(0.9).add_(self.last.weight, alpha=0.1)
        return self.last(h) + self.teachers[0](h)


class CountsInClass(Base):
    calls = 0

    def forward(self, x, adj):
        type(self).calls += self.training
        return super().forward(x, adj) * (1 + 0.1 * self.calls)


class CountsGlobally(Base):
    def forward(self, x, adj):
        SEEN[0] += self.training
        return super().forward(x, adj) * (1 + 0.1 * SEEN[0])


class DrawsGlobally(Base):
    def forward(self, x, adj):
        return super().forward(x, adj) * (drawn() if self.training else 1.0)


def drawn():
    return float(GENERATOR.random()) + 0.5


class CountsForNobody(Base):
    """A class that only counts its calls, which changes no number."""

    calls = 0

    def forward(self, x, adj):
        type(self).calls += 1
        return super().forward(x, adj)


class KeepsForOthers(Base):
    """What it keeps is for its author to look at; no call reads it."""

    def forward(self, x, adj):
        out = super().forward(x, adj)
        self.given, self.seen = x, [out.detach(), x[:2]]
        return out


class ReadsGradient(Base):
    """Scaled in evaluation by the gradient of the last step, which is in ``.grad`` after a plain loop's."""

    def forward(self, x, adj):
        out, grad = super().forward(x, adj), self.last.weight.grad
        return out if self.training or grad is None else out * (1 + grad.norm())


class GradientInHook(Base):
    """A hook that is called with the weight may read its ``.grad``."""

    def __init__(self, i, o):
        super().__init__(i, o)
        self.last.weight.register_post_accumulate_grad_hook(self.halve)

    @staticmethod
    def halve(weight):
        weight.grad.mul_(0.5)


EXACT = [
    KeepsForOthers,
    GradientInHook,
    KeptInEvaluation,
    Teacher,
    TeacherByData,
    TeacherFromStart,
    Recurrent,
    CountsInClosure,
    HiddenTeacher,
    CountsForNobody,
]


@pytest.mark.parametrize("model", EXACT)
def test_alone_and_side_by_side_is_a_plain_loop(model):
    tasks = tasks_of(model, range(2))
    together = run(tasks)
    for seed, task in enumerate(tasks):
        losses, _ = plain(model, seed)
        assert run(task).history["loss"] == pytest.approx(losses, rel=2e-4, abs=2e-5)
        assert together[seed].history["loss"] == pytest.approx(losses, rel=2e-4, abs=2e-5)


RESUMED = [KeptInEvaluation, Teacher, TeacherByData, TeacherFromStart, Recurrent]


@pytest.mark.parametrize("model", RESUMED)
def test_resumed_is_uninterrupted(model, tmp_path, monkeypatch):
    (task,) = tasks_of(model, [0])
    whole = run(task)
    preempted_after(6, task, tmp_path / "out", monkeypatch)
    resumed = run(task, out=tmp_path / "out", resume=True)
    assert resumed.history["loss"] == whole.history["loss"]
    assert resumed.history["val_loss"] == whole.history["val_loss"]


@pytest.mark.parametrize(
    ("model", "name"), [(CountsInGenerator, "numbers"), (CountsInClosure, "count"), (HiddenTeacher, "teachers")]
)
def test_what_no_checkpoint_holds_is_refused_when_resumed(model, name, tmp_path, monkeypatch):
    (task,) = tasks_of(model, [0])
    preempted_after(6, task, tmp_path / "out", monkeypatch)
    with pytest.raises(
        weft.SpecError, match=f"keeps '{name}' between calls, which is not plain data and in no checkpoint"
    ):
        run(task, out=tmp_path / "out", resume=True)


def test_a_queue_knows_what_could_not_go_on_from_a_checkpoint():
    for model, resumable in ((CountsInClosure, False), (Teacher, True)):
        control = weft.Control()
        run(tasks_of(model, [0], epochs=2)[0], control=control)
        assert control.resumable is resumable


def reset():
    SEEN[0] = CountsInClass.calls = 0
    GENERATOR.bit_generator.state = np.random.default_rng(0).bit_generator.state


@pytest.mark.parametrize(
    ("model", "name"), [(CountsInClass, "CountsInClass.calls"), (CountsGlobally, "SEEN"), (DrawsGlobally, "GENERATOR")]
)
def test_what_all_models_share_trains_as_a_plain_loop_and_is_said(model, name):
    notes = []
    reset()
    results = run(
        tasks_of(model, range(2)), on_event=lambda e: notes.append(e.data["message"]) if e.kind == "note" else 0
    )
    assert any(f"keeps '{name}' between calls" in note for note in notes), notes
    for seed, result in enumerate(results):
        reset()
        assert result.history["loss"] == pytest.approx(plain(model, seed)[0], rel=2e-4, abs=2e-5)
    reset()


def test_what_all_models_share_is_refused_where_they_train_in_turn():
    """In one group every member would change it for the others."""
    reset()
    tasks = tasks_of(CountsGlobally, range(2), epochs=3)
    with pytest.raises(weft.SpecError, match="changes SEEN when it is called, which all models of a run share"):
        start(tasks, tasks[0].graph, join="in turn")


class ReadsGraph(Base):
    """Only reads a graph of its file, which builds forms of itself when it is first read."""

    def forward(self, x, adj):
        return super().forward(x, FRESH.adj)


FRESH = None


@pytest.mark.parametrize("seeds", [1, 2])
def test_a_module_that_only_reads_a_graph_is_not_refused(seeds):
    global FRESH
    FRESH = tasks_of(Base, [0])[0].graph
    FRESH = weft.Graph.from_edges(FRESH.adj.indices, FRESH.adj.rows(), FRESH.num_nodes, FRESH.x, FRESH.y, directed=True)
    notes, tasks = [], tasks_of(ReadsGraph, range(seeds), epochs=3)
    results = run(tasks, on_event=lambda e: notes.append(e.data["message"]) if e.kind == "note" else 0)
    assert [result.status for result in results] == ["finished"] * seeds
    assert not any("between calls" in note for note in notes), notes


@pytest.mark.parametrize("seeds", [1, 2])
def test_gradients_read_in_evaluation_are_refused(seeds):
    with pytest.raises(weft.SpecError, match=r"ReadsGradient reads the \.grad of its weights in evaluation"):
        run(tasks_of(ReadsGradient, range(seeds)))


def test_what_only_its_author_reads_is_stacked_and_leaves_the_graph_alone():
    tasks = tasks_of(KeepsForOthers, range(3))
    before = tasks[0].graph.x.clone()
    assert [plan.join for plan in run(tasks).plan] == ["stacked"]
    assert tasks[0].graph.x.equal(before)


def test_a_note_says_that_calls_before_training_advanced_a_function_of_an_object():
    seed_all(0)
    notes, task = [], weft.Task(graph=tasks_of(Base, [0])[0].graph, model=CountsInClosure(6, 3), epochs=2)
    run(task, on_event=lambda e: notes.append(e.data["message"]) if e.kind == "note" else 0)
    note = "keeps 'count' between calls, which is not plain data: it trains alone and eagerly"
    assert any(note in one for one in notes), notes
    assert any("Weft's calls before the first epoch have advanced it" in one for one in notes), notes


@pytest.mark.parametrize("model", [Recurrent, CountsForNobody, Teacher, KeptInEvaluation, ReadsKeptActivation])
def test_who_keeps_nothing_hears_nothing(model):
    notes = []
    run(tasks_of(model, [0], epochs=2), on_event=lambda e: notes.append(e.data["message"]) if e.kind == "note" else 0)
    assert not any("between calls" in one for one in notes), notes


class DrawsByAll(Base):
    """Draws from every kind of generator that is a global variable."""

    def forward(self, x, adj):
        drawn = float(torch.rand(1, generator=TORCHS)) + NUMPYS.random() + PYTHONS.random() + GENERATOR.random()
        return super().forward(x, adj) * drawn


def test_generators_outside_are_compared_by_their_states_and_restored():
    before = GlobalsSnapshot(DrawsByAll(6, 3))
    assert before.changed() == []
    torch.rand(1, generator=TORCHS), NUMPYS.random(), PYTHONS.random(), GENERATOR.random()
    assert set(before.changed()) == {"TORCHS", "NUMPYS", "PYTHONS", "GENERATOR"}
    before.restore()
    assert before.changed() == []
