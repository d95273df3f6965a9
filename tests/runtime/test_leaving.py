"""Dropped members, and checkpoints of whole groups: their state is kept, and the others train unchanged."""

from __future__ import annotations

import pytest
import torch
from torch import nn

from tests.graphs_for_tests import tiny_graph
from tests.runtime.step.test_stacks import CPU, MEMBERS, Drops, Plain, assert_as_alone, start, tasks_of
from tests.stacks import best_tensors
from weft.core.errors import SpecError
from weft.runtime.checkpoint import read_checkpoint, write_checkpoint
from weft.runtime.device.process import seeded


def same(one, other):
    """Two progresses, in which NaN equals NaN."""
    return str(one) == str(other)


def kept(tensors):
    return {name: value.clone() for name, value in tensors.items()}


@pytest.mark.parametrize("model", ["gcn", "gat"])
@pytest.mark.parametrize("norm", [None, "batch"])
def test_who_stays_trains_as_alone(model, norm):
    graph = tiny_graph()
    members = [{**member, "hidden": hidden} for member, hidden in zip(MEMBERS, (4, 8, 16, 4, 8), strict=True)]
    tasks = tasks_of(graph, members, model=model, norm=norm)
    run = start(tasks, graph)
    run.advance(5)
    run.drop([2, 4])
    assert run.stacks[0].state.members == 3
    assert [member.row for member in run.members] == [0, 1, None, 2, None]
    run.advance(2)
    run.drop([0])
    together = run.advance(100)
    together = run.poll()
    for index in (1, 3):
        assert_as_alone(run, together, index, graph)


def test_who_leaves_keeps_what_it_had():
    graph = tiny_graph()
    tasks = tasks_of(graph, [{**m, "hidden": h} for m, h in zip(MEMBERS, (4, 8, 16, 4, 8), strict=True)], norm="batch")
    run = start(tasks, graph)
    before = run.advance(6)
    best = [kept(best_tensors(run, index)) for index in (0, 3)]
    run.drop([0, 3])
    run.advance(100)
    after = run.poll()
    for index, tensors in zip((0, 3), best, strict=True):
        assert same(after[index], before[index])
        assert all(torch.equal(value, tensors[name]) for name, value in best_tensors(run, index).items())
        model = run.best_model(index)
        assert all(torch.equal(p, tensors[name]) for name, p in model.named_parameters())
        assert model.hidden == tasks[index].hidden
    assert run.poll(first=7)[0].rows == ()


def test_everybody_may_leave():
    graph = tiny_graph()
    tasks = tasks_of(graph, MEMBERS[:3])
    run = start(tasks, graph, stacks=((0, 2), (1,)))
    run.advance(3)
    run.drop([1])
    assert len(run.stacks) == 1
    run.drop([0, 1, 2])
    assert run.stacks == []
    assert run.present == []
    seen = run.advance(5)
    assert run.epoch == 3, "nobody is there to train"
    assert [len(progress.rows) for progress in seen] == [0, 0, 0]
    assert [len(progress.rows) for progress in run.poll()] == [3, 3, 3]
    assert all(isinstance(run.best_model(index), nn.Module) for index in range(3))


def test_the_group_ends_with_its_longest_present_member():
    graph = tiny_graph()
    run = start(tasks_of(graph, [{"epochs": 4}, {"epochs": 9}]), graph)
    run.advance(2)
    run.drop([1])
    run.advance(100)
    assert run.epoch == 4


def test_members_that_are_ended_by_decision():
    graph = tiny_graph()
    run = start(tasks_of(graph, MEMBERS), graph)
    run.advance(4)
    before = kept(best_tensors(run, 1))
    run.stop([1])
    after = run.advance(100)
    assert after[1].end == 4
    assert all(torch.equal(value, before[name]) for name, value in best_tensors(run, 1).items())
    assert_as_alone(run, run.poll(), 0, graph)


# ---- checkpoints -------------------------------------------------------------------------------------


@pytest.mark.parametrize("settings", [{"model": "gcn", "norm": "batch"}, {"model": "gatv2"}, {"model": Plain}])
@pytest.mark.parametrize("left", [[], [1, 2], [0, 1, 3]])
def test_a_group_goes_on_bit_for_bit(tmp_path, settings, left):
    graph = tiny_graph()
    tasks = tasks_of(graph, **settings)
    whole, first, second = (start(tasks, graph) for _ in range(3))
    for run in (whole, first):
        run.advance(5)
        run.drop(left)
        run.advance(2)
    write_checkpoint(tmp_path, first.tensors(), {})
    second.restore(read_checkpoint(tmp_path).tensors)
    assert second.epoch == 7
    for run in (whole, second):
        run.advance(1)
        run.drop([4])
        run.advance(100)
    assert [same(a, b) for a, b in zip(whole.poll(), second.poll(), strict=True)] == [True] * 5
    for index in range(5):
        for name in whole.stacks[0].state.tensors():
            mine, other = whole.members[index].tensor(name), second.members[index].tensor(name)
            assert torch.equal(mine.nan_to_num(-9), other.nan_to_num(-9)), name
        tensors = best_tensors(second, index)
        assert all(torch.equal(value, tensors[name]) for name, value in best_tensors(whole, index).items())


def test_generators_of_members_that_draw_for_themselves_are_saved():
    graph = tiny_graph()
    tasks = tasks_of(graph, MEMBERS[:3], model=Drops)
    with seeded(0, CPU):
        whole = start(tasks, graph)
        whole.advance(100)
    with seeded(1, CPU):
        first = start(tasks, graph)
        first.advance(4)
        saved = kept(first.tensors())
    with seeded(2, CPU):
        second = start(tasks, graph)
        second.restore(saved)
        second.advance(100)
    assert all(same(a, b) for a, b in zip(whole.poll(), second.poll(), strict=True))


def test_checkpoints_of_others_are_refused():
    graph = tiny_graph()
    run = start(tasks_of(graph, MEMBERS[:2]), graph)
    with pytest.raises(SpecError, match="the checkpoint holds 3 tasks, but this group has 2"):
        run.restore(start(tasks_of(graph, MEMBERS[:3]), graph).tensors())
    with pytest.raises(SpecError, match=r"the checkpoint holds \[\d+\] for 'flat', but this model needs \[\d+\]"):
        run.restore(start(tasks_of(graph, MEMBERS[:2], hidden=16), graph).tensors())
    with pytest.raises(SpecError, match="the checkpoint holds 0 tasks"):
        run.restore({})
    assert run.epoch == 0
