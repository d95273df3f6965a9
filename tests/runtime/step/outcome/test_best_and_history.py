"""Book-keeping on the host and on the device come to the same state, whatever rows arrive."""

from __future__ import annotations

import math

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st

from weft.core.task import Task
from weft.runtime.step.evaluation import Bookkeeper
from weft.runtime.step.state import State

EPOCHS, COLUMNS = 8, 4  # loss, val_loss, train metric, val metric
CPU = torch.device("cpu")

number = st.sampled_from([0.0, 0.25, 0.5, 0.5, 0.75, 1.0, 1.0, math.nan])
loss = st.sampled_from([0.5, 0.5, 0.5, 1.0, 1.0, math.inf, math.nan])
rows = st.lists(st.tuples(loss, loss, number, number), min_size=EPOCHS, max_size=EPOCHS)
member = st.builds(
    lambda patience, every, epochs: Task(graph="g", patience=patience, eval_every=every, epochs=epochs),
    st.sampled_from([None, 1, 2, 3]), st.sampled_from([1, 1, 2, 3]), st.sampled_from([EPOCHS, EPOCHS, 5]),
)  # fmt: skip


def replayed(record, tasks, tables, steps):
    """The state after the epochs of ``tables`` (one a member), evaluated in ``steps``."""
    buffers = {"b": torch.zeros(len(tasks), 1)}
    state = State.new(tasks, torch.zeros(len(tasks), 3), buffers, COLUMNS, EPOCHS)
    for epoch, table in enumerate(zip(*tables, strict=True)):
        state.flat.fill_(epoch)
        state.buffers["b"].fill_(-epoch)
        if epoch in steps:
            record(state, torch.tensor(table), 1)
        else:
            state.steps.add_(1)
            state.epoch.add_(1)
    return state.tensors()


@settings(max_examples=150, deadline=None)
@given(
    members=st.lists(st.tuples(member, rows, st.sampled_from([-1, 0, 1, 3])), min_size=1, max_size=3),
    steps=st.sets(st.integers(0, EPOCHS - 1)),
    metric=st.sampled_from(["accuracy", "mse", "r2"]),
)
def test_host_and_device_agree_and_members_do_not_see_each_other(members, steps, metric):
    tasks, tables, watched = ([member[part] for member in members] for part in range(3))
    recorder = Bookkeeper(tasks, 2, watched, CPU, metric)
    on_host = replayed(recorder.on_host, tasks, tables, steps)
    on_device = replayed(recorder.on_device, tasks, tables, steps)
    for name, tensor in on_host.items():
        assert torch.equal(tensor.nan_to_num(-9), on_device[name].nan_to_num(-9)), name
    for row, (task, table, column) in enumerate(members):
        alone = replayed(Bookkeeper([task], 2, [column], CPU, metric).on_host, [task], [table], steps)
        for name, tensor in alone.items():
            assert torch.equal(tensor[0].nan_to_num(-9), on_host[name][row].nan_to_num(-9)), name


def test_by_hand():
    task = Task(graph="g", patience=3, epochs=EPOCHS)
    recorder = Bookkeeper([task], 2, [3], CPU)
    scores = [0.2, 0.6, 0.6, 0.5, 0.5, 0.9, 0.9, 0.9]
    state = replayed(recorder.on_host, [task], [[(1.0, 1.0, 0.0, s) for s in scores]], range(EPOCHS))
    assert state["best_epoch"].tolist() == [1]
    assert state["end"].tolist() == [5]
    assert state["best_flat"].tolist() == [[1.0, 1.0, 1.0]]
    assert state["best_buffer.b"].item() == -1.0


SCORES = [float("nan"), 7.0, 8.0, 9.0, 3.0, 2.0, 4.0, 5.0]


@pytest.mark.parametrize(("metric", "sign", "best"), [("accuracy", 1, 3), ("r2", -1, 5), ("mse", 1, 5)])
def test_the_best_of_an_error_is_the_least(metric, sign, best):
    """An undefined score ranks below every defined one, however bad that is."""
    task, table = Task(graph="g", epochs=EPOCHS), [(1.0, 1.0, 0.0, sign * score) for score in SCORES]
    recorder = Bookkeeper([task], 2, [3], CPU, metric)
    for record in (recorder.on_host, recorder.on_device):
        assert replayed(record, [task], [table], range(EPOCHS))["best_epoch"].tolist() == [best]


def test_evaluations_that_a_member_does_not_want_count_for_others_alone():
    tasks = [Task(graph="g", epochs=EPOCHS), Task(graph="g", epochs=5, eval_every=4)]
    tables = [[(1.0, 1.0, 0.0, 0.1 * epoch) for epoch in range(EPOCHS)]] * 2
    state = replayed(Bookkeeper(tasks, 2, [3, 3], CPU), tasks, tables, range(EPOCHS))
    assert state["best_epoch"].tolist() == [7, 4], "its last epoch is always evaluated"
    measured = ~state["history"][1, :, 3].isnan()
    assert measured.tolist() == [False, False, False, True, True, False, False, True]
    assert state["history"][1, :, 0].tolist() == [1.0] * EPOCHS
