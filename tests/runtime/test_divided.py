"""Divided preparation through a group: the numbers of a synchronous run, whatever the division and the hardware."""

from __future__ import annotations

import threading
import time
from functools import partial

import pytest
import torch

from examples.thread_accelerator import ThreadAccelerator
from tests.runtime.test_sampled import CPU, graph, group_of, rows, task  # noqa: F401
from weft.batches.division import profiler
from weft.batches.division.source import DividedSampled
from weft.batches.sampled import Sampling
from weft.core.division import Division
from weft.core.errors import InputError
from weft.core.plan import Plan
from weft.engine.dividing import divided_source, profile_group
from weft.runtime.group import GroupRun

pytestmark = pytest.mark.timeout(120)
SAMPLING = Sampling(fanout=(5, 3), batch=32)
DIVISIONS = [
    Division(1, 0, workers=2, trainer="npu"),
    Division(0, 2, trainer="npu"),
    Division(2, 1, workers=2, trainer="npu", strategy="fixed"),
    Division(1, 2, trainer="npu", strategy="fixed"),
    Division(2, 1, workers=2, trainer="npu", lead=2),
    Division(1, 1, workers=2, trainer="npu", lead=1),
]


@pytest.fixture
def npu():
    fake = ThreadAccelerator("npu")
    yield fake
    fake.stop()


def divided(tasks, graph, division, npu):  # noqa: F811
    plan = Plan(tuple(str(place) for place in range(len(tasks))), join="stacked" if len(tasks) > 1 else "solo")
    make = partial(DividedSampled, sampling=SAMPLING, division=division, hardware=npu)
    return GroupRun(tasks, graph, plan, CPU, make_source=make)


@pytest.mark.parametrize("division", DIVISIONS, ids=[one.kind for one in DIVISIONS])
@pytest.mark.parametrize("model", ["gcn", "sage", "gat"])
def test_a_division_changes_no_number(graph, model, division, npu):  # noqa: F811
    plain = group_of([task(model)], graph, depth=1)
    mine = divided([task(model)], graph, division, npu)
    assert rows(mine.advance(3)[0]) == rows(plain.advance(3)[0])
    assert torch.equal(mine.stacks[0].state.flat, plain.stacks[0].state.flat)
    prepared = divided_source(mine).divided.prepared
    assert (prepared["device"] > 0) == (division.device_batches > 0)


def test_recordings_count_in_the_limit_of_a_profile(graph, npu, monkeypatch):  # noqa: F811
    given = []
    plain = profiler.profile
    monkeypatch.setattr(profiler, "profile", lambda *about: given.append(about[-1]) or plain(*about))
    for recording, limit in ((0.4, 1.0), (0.4, 0.5)):
        mine = divided([task()], graph, DIVISIONS[2], npu)
        source, whole = divided_source(mine), divided_source(mine).whole_step
        monkeypatch.setattr(source, "whole_step", lambda s=recording, w=whole: time.sleep(s) or w())
        profile_group(mine, workers=2, steps=3, limit=limit)
    assert given[0] < 0.6
    assert given[1] == 0.25  # half of it is left in any case


def test_stacked_members_share_divided_batches(graph, npu):  # noqa: F811
    tasks = [task(seed=seed, lr=lr) for seed, lr in enumerate((0.01, 0.05))]
    plain, mine = group_of(tasks, graph), divided(tasks, graph, DIVISIONS[2], npu)
    assert [rows(one) for one in mine.advance(2)] == [rows(one) for one in plain.advance(2)]


def test_a_division_may_change_between_epochs(graph, npu):  # noqa: F811
    plain, mine = group_of([task(epochs=4)], graph), divided([task(epochs=4)], graph, DIVISIONS[2], npu)
    found = []
    for division in (None, Division(1, 3, trainer="npu"), Division(20, 1, workers=2, trainer="npu"), DIVISIONS[1]):
        if division is not None:
            divided_source(mine).divide(division)
        found += rows(mine.advance(1)[0])
    assert found == rows(plain.advance(4)[0])


def test_an_interrupted_epoch_is_resumed_bit_for_bit(graph, npu):  # noqa: F811
    plain = group_of([task()], graph)
    expected = rows(plain.advance(3)[0])
    first = divided([task()], graph, DIVISIONS[2], npu)
    steps = iter(range(100))
    first.advance(3, lambda: next(steps) == 3)
    saved = {name: tensor.clone() for name, tensor in first.tensors().items()}
    again = divided([task()], graph, DIVISIONS[3], npu)
    again.restore(saved)
    again.advance(3)
    assert rows(again.poll(0)[0]) == expected


def test_profiling_leaves_the_state_alone(graph, npu):  # noqa: F811
    mine = divided([task()], graph, DIVISIONS[2], npu)
    before = {name: tensor.clone() for name, tensor in mine.tensors().items()}
    times = profile_group(mine, workers=2, steps=3, limit=2.0)
    assert {"batching_cpu", "transfer_pcie", "batching_npu", "transfer_npu", "training_npu"} == set(times.phases)
    for name, tensor in mine.tensors().items():
        torch.testing.assert_close(tensor, before[name], rtol=0, atol=0, equal_nan=True, msg=name)
    plain = group_of([task()], graph)
    assert rows(mine.advance(3)[0]) == rows(plain.advance(3)[0])


def test_only_divided_groups_are_profiled(graph):  # noqa: F811
    with pytest.raises(InputError, match="divided between two sides"):
        profile_group(group_of([task()], graph), workers=1)


def threads_of_the_host() -> list[threading.Thread]:
    return [one for one in threading.enumerate() if one.name in ("weft-prepare", "weft-transfer")]


def test_the_next_epoch_is_begun_as_one_ends_and_given_up_when_training_does(graph, npu):  # noqa: F811
    elastic = DIVISIONS[-1]
    mine = divided([task(epochs=4)], graph, elastic, npu)
    plain = group_of([task(epochs=4)], graph, depth=1)
    mine.advance(1)
    assert threads_of_the_host()
    mine.close()
    assert threads_of_the_host() == []
    found, expected = mine.advance(3)[0], [plain.advance(1), plain.advance(3)][1][0]
    assert rows(found) == rows(expected)  # the last epoch has none after it
    assert threads_of_the_host() == []
    other = divided([task(epochs=4)], graph, elastic, npu)
    other.advance(1)
    other.drop([0])
    assert threads_of_the_host() == []
