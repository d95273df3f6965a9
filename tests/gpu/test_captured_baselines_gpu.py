"""Baselines captured as one CUDA graph train as their eager steps do."""

from __future__ import annotations

import pytest
import torch
from torch.nn import functional as F

from benchmarks.baselines import epochs
from weft.graph.generate import citation

pytestmark = [
    pytest.mark.gpu,
    pytest.mark.skipif(not torch.cuda.is_available(), reason="needs a CUDA device"),
    pytest.mark.filterwarnings("ignore::UserWarning", "ignore::DeprecationWarning"),
]

REPLAYS = 20


@pytest.mark.parametrize("name", epochs.MODELS)
@pytest.mark.parametrize("side", ["pyg", "cusparse"])
def test_a_captured_step_trains_like_the_eager_one(name, side):
    if side == "pyg":
        pytest.importorskip("torch_geometric")
    graph = citation(300, 1500, 12, 3, seed=1).to("cuda")
    setting = epochs.Setting(layers=2, hidden=8, heads=2, dropout=0.0)
    target, losses = graph.y[graph.train], []
    for replayed in (True, False):
        torch.manual_seed(0)
        model, call = (epochs.pyg_forward if side == "pyg" else epochs.cusparse_forward)(name, graph, setting)
        first = loss_of(call, graph.train, target)
        optimizer = epochs.capturable_adam(model, setting.lr)
        whole = epochs.captured(model, call, graph.train, target, optimizer)
        assert whole.note == {"captured": True}
        for _ in range(REPLAYS):
            (whole.train if replayed else whole.eager)()
        losses.append(loss_of(call, graph.train, target))
        assert losses[-1] < first
    assert losses[0] == pytest.approx(losses[1], rel=0.05, abs=0.01)


@torch.no_grad()
def loss_of(call, rows, target) -> float:
    return F.cross_entropy(call()[rows], target).item()
