"""Book-keeping on the host and on the device come to the same state, whatever rows arrive."""

from __future__ import annotations

import math

import torch
from hypothesis import given, settings
from hypothesis import strategies as st

from weft.run.record import Recorder
from weft.run.state import State

EPOCHS, COLUMNS = 8, 4  # loss, val_loss, train metric, val metric

number = st.sampled_from([0.0, 0.25, 0.5, 0.5, 0.75, 1.0, 1.0, math.nan])
loss = st.sampled_from([0.5, 0.5, 0.5, 1.0, 1.0, math.inf, math.nan])
rows = st.lists(st.tuples(loss, loss, number, number), min_size=EPOCHS, max_size=EPOCHS)


def replayed(record, table, steps):
    state = State.new(torch.zeros(3), {"b": torch.zeros(1)}, 2, seed=0, epochs=EPOCHS, columns=COLUMNS)
    for epoch, row in enumerate(table):
        state.flat.fill_(epoch)
        state.buffers["b"].fill_(-epoch)
        if epoch in steps:
            record(state, torch.tensor(row))
        state.step.add_(1)
    return state.tensors()


@settings(max_examples=150, deadline=None)
@given(
    table=rows,
    watched=st.sampled_from([None, 3]),
    patience=st.sampled_from([None, 1, 2, 3]),
    steps=st.sets(st.integers(0, EPOCHS - 1)),
)
def test_host_and_device_agree(table, watched, patience, steps):
    recorder = Recorder(losses=2, watched=watched, patience=patience)
    on_host = replayed(recorder.on_host, table, steps)
    on_device = replayed(recorder.on_device, table, steps)
    for name, tensor in on_host.items():
        assert torch.equal(tensor.nan_to_num(-9), on_device[name].nan_to_num(-9)), name


def test_by_hand():
    recorder = Recorder(losses=2, watched=3, patience=3)
    scores = [0.2, 0.6, 0.6, 0.5, 0.5, 0.9, 0.9, 0.9]
    state = replayed(recorder.on_host, [(1.0, 1.0, 0.0, s) for s in scores], range(EPOCHS))
    assert state["best_epoch"].item() == 1
    assert state["end"].item() == 5
    assert state["best_flat"].tolist() == [1.0, 1.0, 1.0]
    assert state["best_buffer.b"].item() == -1.0
