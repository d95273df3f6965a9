"""Converted layers of PyG on a GPU: the same training as without, recorded."""

from __future__ import annotations

import pytest
import torch

pytest.importorskip("torch_geometric")
import weft
from tests.runtime.user_modules import test_converting as cases

pytestmark = [
    pytest.mark.gpu,
    pytest.mark.skipif(not torch.cuda.is_available(), reason="needs a CUDA device"),
]


@pytest.mark.parametrize("model", [cases.Jumping, cases.Weighted, cases.OtherEdges, cases.Changing, cases.Dropping])
@pytest.mark.parametrize("seeds", [(0,), (0, 1)])
def test_a_converted_run_is_the_run_without(model, seeds):
    graph, found = cases.small(weight=True), []
    for convert in (None, False):
        shared = {"graph": graph, "model": model, "epochs": cases.EPOCHS, "convert": convert}
        tasks = [weft.Task(seed=seed, name=f"s{seed}", **shared) for seed in seeds]
        found.append(weft.run(tasks, device="cuda", progress=False))
    for one, other in zip(*found, strict=True):
        assert one.history["loss"] == pytest.approx(other.history["loss"], rel=2e-3)
        assert [type(layer) for layer in one.model.modules()] == [type(layer) for layer in other.model.modules()]
