"""Groups whose stacks train as one merged step."""

from __future__ import annotations

import os
import subprocess
import sys
from functools import partial
from itertools import combinations
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import nn

from tests.graphs_for_tests import tiny_graph
from tests.stacks import best_tensors
from tests.weave.launch_counts import issued_in_order
from weft.core.plan import Plan
from weft.core.task import Task
from weft.runtime.group import GroupRun
from weft.weave.merge import weave
from weft.weave.recorder import record
from weft.weave.step import START, Weaver, WovenStep, schedule

CPU = torch.device("cpu")
EPOCHS = 5


def task(model: str, layers: int, **options: Any) -> Task:
    fixed = {"hidden": 8, "heads": 2, "epochs": EPOCHS, "dropout": 0.4, "lr": 0.02}
    if model not in ("gat", "gatv2"):
        del fixed["heads"]
    return Task(graph="tiny", model=model, layers=layers, **(fixed | options))


def run_of(tasks: list[Task], join: str, stacks: tuple[tuple[int, ...], ...] | None = None) -> GroupRun:
    stacks = stacks or tuple((place,) for place in range(len(tasks)))
    plan = Plan(members=tuple(t.label for t in tasks), join=join, stacks=stacks, first_layer="once")
    return GroupRun(tasks, tiny_graph(), plan, CPU, Weaver())


def apart(tasks: list[Task], stacks: tuple[tuple[int, ...], ...] | None = None) -> GroupRun:
    """The same group, its stacks one after another."""
    return run_of(tasks, "stacked", stacks)


def assert_same_state(mine: GroupRun, theirs: GroupRun) -> None:
    for one, other in zip(mine.stacks, theirs.stacks, strict=True):
        for name, tensor in one.state.tensors().items():
            torch.testing.assert_close(tensor, other.state.tensors()[name], rtol=0, atol=0, equal_nan=True, msg=name)


@pytest.mark.parametrize("pair", list(combinations(("gcn", "sage", "gin", "gat", "gatv2"), 2)), ids="-".join)
def test_every_pair_of_models_trains_as_apart(pair):
    tasks = [task(model, layers, seed=layers) for model, layers in zip(pair, (2, 3), strict=True)]
    mine, theirs = run_of(tasks, "woven"), apart(tasks)
    progress, expected = mine.advance(EPOCHS), theirs.advance(EPOCHS)
    assert mine.merged is not None
    assert theirs.merged is None
    assert progress == expected
    assert_same_state(mine, theirs)


def test_stacks_of_several_members_of_four_depths():
    tasks = [task("gcn", layers, seed=seed, lr=0.01 * (seed + 1)) for layers in (2, 3, 4) for seed in range(3)]
    stacks = ((0, 1, 2), (3, 4, 5), (6, 7, 8))
    mine, theirs = run_of(tasks, "woven", stacks), apart(tasks, stacks)
    assert mine.advance(EPOCHS) == theirs.advance(EPOCHS)
    assert_same_state(mine, theirs)
    assert [len(fused.entries) for fused in mine.merged.woven.fused] == [3, 3, 2, 2]


@pytest.mark.parametrize("norm", ["batch", "layer"])
def test_norms_keep_their_statistics(norm):
    tasks = [task("gcn", 2, norm=norm), task("sage", 3, norm=norm, seed=1)]
    mine, theirs = run_of(tasks, "woven"), apart(tasks)
    assert mine.advance(EPOCHS) == theirs.advance(EPOCHS)
    assert_same_state(mine, theirs)


def test_epochs_without_evaluation_and_other_optimizers():
    tasks = [task("gcn", 2, eval_every=3, optimizer="sgd"), task("sage", 2, eval_every=3, optimizer="adamw", seed=1)]
    mine, theirs = run_of(tasks, "woven"), apart(tasks)
    mine.advance(EPOCHS)
    theirs.advance(EPOCHS)
    assert_same_state(mine, theirs)


def test_a_member_leaves_and_the_rest_is_woven_anew():
    tasks = [task("gcn", 2), task("gcn", 2, seed=1), task("sage", 3, seed=2), task("gin", 2, seed=3)]
    stacks = ((0, 1), (2,), (3,))
    mine, theirs = run_of(tasks, "woven", stacks), apart(tasks, stacks)
    for run in (mine, theirs):
        run.advance(2)
        run.drop([1, 3])
        run.advance(EPOCHS)
    assert mine.merged is not None
    assert len(mine.merged.stacks) == 2
    assert_same_state(mine, theirs)
    for index in range(4):
        for name, tensor in best_tensors(mine, index).items():
            assert torch.equal(tensor, best_tensors(theirs, index)[name])


class Nosy(nn.Module):
    """A model that reads a number back to the host in every step."""

    def __init__(self, in_features: int, out_features: int) -> None:
        super().__init__()
        self.linear = nn.Linear(in_features, out_features)

    def forward(self, x, adj):
        out = self.linear(x)
        return out * 2 if float(out.detach().sum()) > 1e9 else out


def test_a_step_that_cannot_be_woven_trains_apart_with_a_note():
    tasks = [task("gcn", 2), task("sage", 2, seed=1), Task(graph="tiny", model=Nosy, epochs=EPOCHS)]
    mine, theirs = run_of(tasks, "woven"), apart(tasks)
    assert mine.advance(EPOCHS) == theirs.advance(EPOCHS)
    assert_same_state(mine, theirs)
    if mine.merged is None:
        assert any("reads a number back to the host" in note for note in mine.notes)
    else:  # a model of a user's own keeps its own random numbers, and so its own step
        assert len(mine.merged.stacks) == 2


def test_steps_are_recorded_without_moving_the_state():
    run = run_of([task("gcn", 2), task("gat", 2, seed=1)], "woven")
    before = [tensor.clone() for stack in run.stacks for tensor in stack.state.tensors().values()]
    WovenStep(run.stacks)
    after = [tensor for stack in run.stacks for tensor in stack.state.tensors().values()]
    for mine, theirs in zip(after, before, strict=True):
        torch.testing.assert_close(mine, theirs, rtol=0, atol=0, equal_nan=True)


@pytest.mark.rest
def test_generated_kernels_train_a_group_under_the_interpreter():
    """The whole way of a GPU but for its streams: recording, weaving, and kernels written for the group."""
    pytest.importorskip("triton")
    root = Path(__file__).parents[2]
    paths = os.pathsep.join([str(root / "src"), str(root)])
    environment = os.environ | {"TRITON_INTERPRET": "1", "OMP_NUM_THREADS": "1", "PYTHONPATH": paths}
    command = [sys.executable, str(Path(__file__).with_name("interpreted_weave.py"))]
    done = subprocess.run(command, env=environment, capture_output=True, text=True, check=False)
    assert done.returncode == 0, done.stderr
    assert done.stdout.strip() == "equal"


# ---- streams: what a GPU would be asked to do --------------------------------------------------------------


def woven_group():
    run = run_of([task("gcn", 2), task("sage", 3, seed=1), task("gat", 2, seed=2), task("gin", 4, seed=3)], "woven")
    return run, weave(
        [record(partial(s.train_step, s.source.example()), "s", s.state.tensors().values()) for s in run.stacks]
    )


@pytest.mark.parametrize("side_streams", [1, 2, 4])
def test_every_wait_is_there(side_streams):
    """Follow what each stream knows: everything a node needs has run, and nothing is dropped while it may be read."""
    _, woven = woven_group()
    plan = schedule(woven, side_streams)
    place = {action.node: number for number, action in enumerate(plan.actions)}
    knows: dict[int, set[int]] = {}  # stream to the actions its work comes after
    at_event: dict[int, set[int]] = {}
    dropped: set[int] = set()
    for number, action in enumerate(plan.actions):
        mine = knows.setdefault(action.stream, set())
        for other in action.waits:
            if other != START:
                mine |= at_event[other]
        if action.stream and not mine:
            assert START in action.waits
        needs = {place[n] for n in (*action.node.meta["after"], *action.node.all_input_nodes) if n in place}
        assert needs <= mine, "a node runs before what it needs"
        assert not {place[n] for n in action.node.all_input_nodes if n in place} & dropped, "what it reads is gone"
        mine.add(number)
        if action.event:
            at_event[number] = set(mine)
        for node in action.drops:
            gone = place[node]
            readers = {place[user] for user in node.users if user in place}
            home = next(plan.actions[place[n]].stream for n in place if same_memory(n, node))
            assert readers <= knows[home], "memory is given back while another stream reads it"
            dropped.add(gone)
    kept = set(range(len(plan.actions))) - dropped
    assert len(kept) < len(plan.actions) / 4
    final = knows.setdefault(0, set())
    for number in plan.joins:
        final |= at_event[number]
    assert final == set(range(len(plan.actions)))


def same_memory(one, other) -> bool:
    return one is other or ("storage" in one.meta and one.meta["storage"] == other.meta.get("storage"))


def test_the_order_of_issue_gives_the_same_numbers():
    run, woven = woven_group()
    start = [tensor.clone() for stack in run.stacks for tensor in stack.state.tensors().values()]
    woven()
    expected = [tensor.clone() for stack in run.stacks for tensor in stack.state.tensors().values()]
    for stack_tensor, value in zip((t for s in run.stacks for t in s.state.tensors().values()), start, strict=True):
        stack_tensor.copy_(value)
    issued_in_order(woven, 2)
    for mine, theirs in zip((t for s in run.stacks for t in s.state.tensors().values()), expected, strict=True):
        torch.testing.assert_close(mine, theirs, rtol=0, atol=0, equal_nan=True)


@pytest.mark.parametrize("wrong", ["numbers", "error"])
def test_a_merged_step_that_goes_wrong_costs_a_note(monkeypatch, wrong):
    """Kernels made for a group are tried before they are trusted."""
    train = WovenStep.train

    def broken(step: WovenStep) -> tuple[torch.Tensor, ...]:
        if wrong == "error":
            raise ZeroDivisionError("a kernel that does not compile")
        return tuple(loss + 1 for loss in train(step))

    monkeypatch.setattr(WovenStep, "train", broken)
    tasks = [task("gcn", 2), task("gin", 2)]
    mine, theirs = run_of(tasks, "woven"), apart(tasks)
    assert mine.advance(EPOCHS) == theirs.advance(EPOCHS)
    assert mine.merged is None
    assert "2 stacks train side by side, not as one step" in mine.notes[0]
    assert_same_state(mine, theirs)
