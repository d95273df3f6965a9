"""Stacks that are slower than their members in turn are taken apart: the decision, and runs with given timings."""

from __future__ import annotations

import json
import math

import pytest
import torch
from torch import nn

import weft
from tests.graphs_for_tests import tiny_graph
from weft.core.cost import Cost
from weft.core.plan import Plan
from weft.runtime import epoch
from weft.runtime.device import cuda_graph
from weft.runtime.epoch import StepTimer
from weft.runtime.group import GroupRun
from weft.runtime.step.inputs import Inputs
from weft.runtime.step.stack import Stack

CPU = torch.device("cpu")


def plan_of(device="cuda", epoch_seconds=None, **about) -> Plan:
    cost = {} if epoch_seconds is None else Cost(seconds={"gpu": epoch_seconds}).to_dict()
    return Plan(members=("0", "1", "2", "3"), join="stacked", device=device, cost=cost, **about)


# ---- the decision ------------------------------------------------------------------------------------


@pytest.mark.parametrize(
    ("together", "alone", "compiled", "apart"),
    [
        (9.159e-3, 3.495e-3, False, True),  # attention over groups of features on pubmed's shape, an H200
        (6.889e-3, 5.571e-3, False, True),  # two of PyG's on arxiv's
        (9.040e-3, 7.676e-3, False, True),
        (3.172e-3, 3.504e-3, False, False),
        (0.1813e-3, 0.6215e-3, False, False),
        (1.01, 1.0, False, False),  # noise
        (1.2, 1.0, True, False),  # compiled, both are others
        (9.159e-3, 3.495e-3, True, True),
    ],
)
def test_what_a_step_of_a_stack_may_take_on_a_gpu(together, alone, compiled, apart):
    assert (together > epoch.most_seconds(alone, 1000, plan_of(compiled=compiled))) is apart


def test_a_stack_on_a_cpu_must_be_faster_unless_it_is_short():
    most = epoch.most_seconds
    assert most(0.1, 1000, plan_of("cpu")) == pytest.approx(epoch.SLOWER * 0.1)
    assert most(1e-3, 10, plan_of("cpu")) == pytest.approx(1e-3 + epoch.WORTH_SECONDS / 10)


def test_what_is_shorter_than_timing_it_or_sampled_is_not_timed():
    timed = epoch.is_timed
    assert timed(plan_of(epoch_seconds=1e-3), True, 1000)
    assert not timed(plan_of(epoch_seconds=1e-3), True, 20)
    assert timed(plan_of(), True, 20)  # nothing is predicted: the first timing tells
    assert not timed(plan_of(epoch_seconds=1e-3), False, 1000)
    assert timed(plan_of("cpu"), False, 1)


# ---- a run -------------------------------------------------------------------------------------------


class Own(nn.Module):
    """A user's module with dropout and a norm."""

    def __init__(self, inputs, outputs):
        super().__init__()
        self.first, self.norm, self.drop = nn.Linear(inputs, 8), nn.BatchNorm1d(8), nn.Dropout(0.5)
        self.second = nn.Linear(8, outputs)

    def forward(self, x):
        return self.second(self.drop(torch.relu(self.norm(self.first(x)))))


class Given:
    """A clock that says what it is told to."""

    def __init__(self, one, *together, spent=0.0):
        self.one, self.times, self.spent, self.looks = one, list(together), spent, 0
        self.attempts = len(together)

    def alone(self):
        return self.one

    def together(self):
        self.looks += 1
        return self.times[self.looks - 1]


def tasks_of(graph, epochs=6):
    return [weft.Task(graph=graph, model=Own, seed=s, epochs=epochs, name=str(s)) for s in range(4)]


@pytest.fixture
def as_on_a_gpu(monkeypatch):
    """Decide as on a GPU, by the timings of a clock."""

    def use(clock):
        monkeypatch.setattr(epoch, "StepTimer", lambda stack, record: clock)
        monkeypatch.setattr(epoch, "is_timed", lambda *about: True)
        monkeypatch.setattr(epoch, "most_seconds", lambda alone, *about: epoch.REPLAYED * alone)
        return clock

    return use


@pytest.mark.parametrize(
    ("clock", "looks", "apart"),
    [
        (Given(1.0, 9.0, 8.0), 2, True),
        (Given(1.0, 9.0, 3.0), 2, False),  # the second look decides
        (Given(1.0, 3.0, 9.0), 1, False),
        (Given(None, 9.0), 0, False),
        (Given(1.0, math.inf, 9.0), 1, False),  # no memory for timing it
        (Given(1.0, 9.0, spent=25.0), 0, False),  # 4 members x 6 epochs are shorter than timing took
    ],
)
def test_stacks_are_taken_apart_by_what_the_clock_says(as_on_a_gpu, clock, looks, apart):
    as_on_a_gpu(clock)
    clock.looks = 0
    graph = tiny_graph()
    plan = Plan(members=("0", "1", "2", "3"), join="stacked", device="cpu")
    run = GroupRun(tasks_of(graph), graph, plan, CPU, measure=True)
    assert clock.looks == looks
    assert len(run.stacks) == (4 if apart else 1)
    assert run.plan is plan
    assert all(stack.members.alone is None for stack in run.stacks)  # nothing of the trial is kept


def test_a_run_that_is_taken_apart_has_the_same_numbers_says_why_and_is_resumed_so(as_on_a_gpu, tmp_path):
    graph, notes = tiny_graph(), []
    as_on_a_gpu(Given(1.0, 1.0))
    stacked = weft.run(tasks_of(graph), device="cpu", progress=False)
    as_on_a_gpu(Given(1.0, 9.0))

    def listen(event):
        if event.kind == "note":
            notes.append(event.data["message"])

    apart = weft.run(tasks_of(graph), device="cpu", progress=False, on_event=listen, out=tmp_path / "run")
    for mine, theirs in zip(apart, stacked, strict=True):
        assert mine.history["loss"] == pytest.approx(theirs.history["loss"], rel=1e-4)
    why = "a step of the stack takes 9e+03 ms, the steps of its members 4e+03 ms"
    assert f"4 tasks train side by side, not as one stack: {why}" in notes
    (plan,) = apart.plan
    assert (plan.join, plan.stack_members) == ("in turn", ((0,), (1,), (2,), (3,)))
    assert f"as it ran: 4 tasks train side by side, not as one stack: {why}" in plan.why
    (saved,) = json.loads((tmp_path / "run" / "sweep.json").read_text())["groups"]
    assert (saved["plan"]["join"], saved["plan"]["stacks"]) == ("stacked", [])  # as it was decided
    as_on_a_gpu(Given(1.0, 1.0))  # what is resumed is not timed again
    longer = weft.run(tasks_of(graph, epochs=9), device="cpu", progress=False, out=tmp_path / "run", extend=True)
    assert longer.plan[0].join == "in turn"
    assert longer[0].history["loss"][:6] == pytest.approx(apart[0].history["loss"])


def test_layers_of_pyg_are_converted_once_for_what_is_taken_apart(as_on_a_gpu):
    pyg = pytest.importorskip("torch_geometric.nn")

    def model(inputs, outputs):
        return pyg.GCN(inputs, 8, 2, outputs)

    def losses(clock):
        as_on_a_gpu(clock)
        graph = tiny_graph()
        tasks = [weft.Task(graph=graph, model=model, seed=s, epochs=4, name=str(s)) for s in range(3)]
        plan = Plan(members=("0", "1", "2"), join="stacked", device="cpu")
        run = GroupRun(tasks, graph, plan, CPU, measure=True)
        assert sum(note.startswith("converted: 2 GCNConv") for note in run.notes) == 1, run.notes
        return len(run.stacks), [[row[0] for row in update.rows] for update in run.advance(4)]

    (one, stacked), (three, apart) = losses(Given(1.0, 1.0)), losses(Given(1.0, 9.0))
    assert (one, three) == (1, 3)
    for mine, theirs in zip(apart, stacked, strict=True):
        assert mine == pytest.approx(theirs, rel=1e-4)


# ---- clocks ------------------------------------------------------------------------------------------


def test_clocks_leave_everything_as_it_was():
    graph = tiny_graph()
    plan = Plan(members=("0", "1", "2", "3"), join="stacked", device="cpu")
    run = GroupRun(tasks_of(graph), graph, plan, CPU)
    untimed = GroupRun(tasks_of(graph), graph, plan, CPU)
    stack = weft_stack(tasks_of(graph), graph)
    for replays in (False, True):
        before, drawn = stack.state.snapshot(), torch.get_rng_state()
        clock = clock_of(stack, replays)
        assert clock.alone() > 0
        assert clock.together() > 0
        assert torch.equal(torch.get_rng_state(), drawn)
        for name, tensor in stack.state.tensors().items():
            torch.testing.assert_close(tensor, before[name], rtol=0, atol=0, equal_nan=True, msg=name)
    assert clock_of(run.stacks[0], replays=True).alone() is None  # the group has let go of it
    assert [u.rows for u in run.advance(3)] == [u.rows for u in untimed.advance(3)]


def weft_stack(tasks, graph):
    return Stack(tasks, Inputs(graph))


def clock_of(stack, replays):
    timer = StepTimer(stack, record=False)
    timer.replays = replays
    return timer


def test_a_replay_clock_counts_calls_and_what_it_spent(monkeypatch):
    graph = tiny_graph()
    stack, called = weft_stack(tasks_of(graph), graph), []
    monkeypatch.setattr(cuda_graph.Replay, "__call__", lambda replay: called.append(1))
    clock = clock_of(stack, replays=True)
    assert clock.together() >= 0
    assert 2 + 3 <= len(called) <= 2 + 3 * 20
    assert clock.spent > 0


def test_a_replay_clock_without_memory_knows_nothing(monkeypatch):
    graph = tiny_graph()
    stack = weft_stack(tasks_of(graph), graph)

    def too_much(replay):
        raise torch.OutOfMemoryError

    monkeypatch.setattr(cuda_graph.Replay, "__call__", too_much)
    clock = clock_of(stack, replays=True)
    assert clock.alone() is None
    assert math.isinf(clock.together())
