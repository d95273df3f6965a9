"""Predictions of some nodes on a GPU: those of the whole graph, wherever the graph lies."""

from __future__ import annotations

import pytest
import torch

import weft

pytestmark = [pytest.mark.gpu, pytest.mark.skipif(not torch.cuda.is_available(), reason="needs a GPU")]
NODES = [3, 5, 8, 5, 169_000]


@pytest.mark.parametrize("model", ["gcn", "sage", "gat"])
def test_some_nodes_have_the_numbers_of_the_whole_graph(model):
    graph = weft.load("shape:ogbn-arxiv")
    task = weft.Task(graph, model=model, hidden=32, epochs=2, mode="sampled", batch=8192, fanout=[5, 5])
    result = weft.run(task, device="cuda", progress=False)
    every = result.predict_logits(layerwise=False, device="cuda")
    for place in (graph, graph.to("cuda")):
        assert torch.allclose(result.predict_logits(place, NODES, device="cuda"), every[NODES], atol=1e-4)
    hidden = result.embed(layerwise=False, device="cuda")
    assert torch.allclose(result.embed(nodes=NODES, device="cuda"), hidden[NODES], atol=1e-4)
    sampled = result.predict_logits(nodes=NODES, fanout=[-1, -1], device="cuda")
    assert torch.allclose(sampled, every[NODES], atol=1e-4)
