"""Several splits in one captured step, and predictions, on a GPU."""

from __future__ import annotations

import pytest
import torch

import weft
from tests.graphs_for_tests import tiny_graph

pytestmark = [
    pytest.mark.gpu,
    pytest.mark.skipif(not torch.cuda.is_available(), reason="needs a CUDA device"),
]


@pytest.mark.parametrize("model", ["gcn", "gat"])
def test_splits_in_one_captured_stack_are_the_splits_alone(model):
    graph = tiny_graph().random_splits(3, train=24, val=16)
    settings = {"model": model, "hidden": 8, "epochs": 10, "lr": [0.01, 0.05], "dropout": 0.3}
    settings |= {"heads": 2} if model == "gat" else {}
    together = weft.run(weft.Sweep(graph, splits="all", **settings), device="cuda", progress=False)
    assert [plan.join for plan in together.plan] == ["stacked"]
    for number in range(3):
        for one in weft.run(weft.Sweep(graph.split(number), **settings), device="cuda", progress=False):
            member = together[f"{one.name} split={number}"]
            assert torch.allclose(
                torch.tensor(member.history["val_loss"]), torch.tensor(one.history["val_loss"]), atol=1e-3
            )


@pytest.mark.parametrize("settings", [{}, {"model": "gat", "heads": 2}, {"precision": "bf16"}, {"feature_norm": "row"}])
def test_predictions_are_the_evaluation_of_the_training(settings):
    graph = tiny_graph(sparse=True)
    result = weft.run(weft.Task(graph=graph, hidden=8, epochs=10, **settings), device="cuda", progress=False)
    near = 5e-2 if settings.get("precision") == "bf16" else 1e-4
    for layerwise in (False, True):
        logits = result.predict_logits(nodes="test", layerwise=layerwise)
        loss = torch.nn.functional.cross_entropy(logits, graph.y[graph.test]).item()
        assert loss == pytest.approx(result.metrics["test_loss"], abs=near)
    on_cpu = result.predict_logits(device="cpu")
    assert torch.allclose(on_cpu, result.predict_logits(), atol=10 * near)
