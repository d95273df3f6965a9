"""Runs on the tiny graph."""

from __future__ import annotations

import pytest
import torch

from tests.graphs_for_tests import tiny_graph
from tests.runtime.alone import Alone
from tests.stacks import solo_plan
from weft.core.task import Task
from weft.runtime.device.process import cpu_threads, seeded


@pytest.fixture(autouse=True)
def one_thread():
    """As the plan has it for graphs of this size: on a busy machine two threads wait for each other."""
    with cpu_threads(1):
        yield


@pytest.fixture
def graph():
    return tiny_graph()


@pytest.fixture
def start():
    """``start(graph, **settings)``: a run that has not trained yet, as the engine would make it."""

    def make(graph, device="cpu", **settings):
        task = Task(**{"graph": graph, "hidden": 8, "epochs": 20, "dropout": 0.0, "heads": 2, **settings})
        with seeded(task.seed, torch.device(device)):
            return Alone(task, graph, solo_plan(task, graph.stats(), device), torch.device(device))

    return make
