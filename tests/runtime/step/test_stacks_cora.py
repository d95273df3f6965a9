"""Stacked and padded equals separate on a graph of Cora's size: the real one if it is available, else its shape."""

from __future__ import annotations

import os
from pathlib import Path

import pytest

import weft
from tests.runtime.step.test_stacks import assert_as_alone, start, tasks_of

MEMBERS = [
    {"seed": 1, "lr": 0.01, "hidden": 8, "dropout": 0.5, "weight_decay": 5e-4},
    {"seed": 2, "lr": 0.005, "hidden": 16, "dropout": 0.6, "weight_decay": 5e-3},
    {"seed": 3, "lr": 0.02, "hidden": 16, "dropout": 0.3, "label_smoothing": 0.1},
]


@pytest.fixture(scope="module")
def cora():
    folder = os.environ.get("WEFT_DATA", "")
    there = folder and (Path(folder) / "cora.npz").exists()  # a test must not go and fetch it
    return weft.load("cora" if there else "shape:cora")


@pytest.mark.parametrize("model", ["gcn", "sage", "gin", "gat", "gatv2"])
def test_members_train_as_alone(cora, model):
    tasks = tasks_of(cora, MEMBERS, model=model, heads=4, input_dropout=0.5, epochs=5, eps=1e-3)
    run = start(tasks, cora)
    assert len(run.stacks) == 1, run.notes
    together = run.advance(5)
    for index in range(len(tasks)):
        assert_as_alone(run, together, index, cora)
