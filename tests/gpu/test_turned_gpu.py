"""Weights over sparse features that lie transposed train as others do, to the bit, replayed from a CUDA graph."""

from __future__ import annotations

import pytest
import torch

from tests.graphs_for_tests import tiny_graph
from tests.runtime.step.test_turned import WIDTHS, as_they_are
from tests.stacks import best_tensors, start, tasks_of

pytestmark = [
    pytest.mark.gpu,
    pytest.mark.skipif(not torch.cuda.is_available(), reason="needs a CUDA device"),
]


def weights(model, members):
    graph = tiny_graph(sparse=True).to("cuda")
    run = start(tasks_of(graph, members, model=model, dropout=0.5, weight_decay=0.01, epochs=8), graph, "cuda")
    run.advance(8)
    return [best_tensors(run, index) for index in range(len(members))]


@pytest.mark.parametrize("members", WIDTHS)
@pytest.mark.parametrize("model", ["gcn", "sage", "gin"])
def test_training_is_the_same_to_the_bit(model, members, monkeypatch):
    found = weights(model, members)
    as_they_are(monkeypatch)
    for mine, theirs in zip(found, weights(model, members), strict=True):
        assert all(torch.equal(mine[name], theirs[name]) for name in theirs)
