"""Converted layers of PyG on a GPU: the same training as without, recorded."""

from __future__ import annotations

import pytest
import torch

pytest.importorskip("torch_geometric")
import weft
from tests.runtime.user_modules import test_converting as cases
from tests.runtime.user_modules.test_input_writes import Touches

pytestmark = [
    pytest.mark.gpu,
    pytest.mark.skipif(not torch.cuda.is_available(), reason="needs a CUDA device"),
]


@pytest.mark.parametrize("model", [cases.Jumping, cases.Weighted, cases.OtherEdges, cases.Dropping])
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


def pair(model, graph, seeds, **settings):
    """Losses of the members, converted and not."""
    found = []
    for convert in (settings.pop("convert", None), False):
        shared = {"graph": graph, "model": model, "epochs": cases.EPOCHS, "convert": convert, **settings}
        tasks = [weft.Task(seed=seed, name=f"s{seed}", **shared) for seed in seeds]
        found.append(weft.run(tasks, device="cuda", progress=False))
    return found


@pytest.mark.parametrize("model", [cases.Jumping, cases.Weighted])
@pytest.mark.parametrize("seeds", [(0,), (0, 1)])
def test_over_sampled_batches_too(model, seeds):
    found = pair(model, cases.small(weight=True), seeds, mode="sampled", batch=8, fanout=(3, 3), convert=True)
    for one, other in zip(*found, strict=True):
        assert one.history["loss"] == pytest.approx(other.history["loss"], rel=2e-3)
        assert one.history["val_loss"] == pytest.approx(other.history["val_loss"], rel=2e-3)


@pytest.mark.parametrize("model", [cases.DropsCoefficients, cases.DropsCoefficientsV2])
@pytest.mark.parametrize("seeds", [(0,), (0, 1)])
def test_attention_with_dropout_has_the_masks_of_a_cpu(model, seeds):
    shared = {"graph": cases.small(), "model": model, "epochs": cases.EPOCHS, "convert": True}
    tasks = [weft.Task(seed=seed, name=f"s{seed}", **shared) for seed in seeds]
    cpu, gpu = (weft.run(tasks, device=device, progress=False) for device in ("cpu", "cuda"))
    for one, other in zip(gpu, cpu, strict=True):
        assert one.history["loss"] == pytest.approx(other.history["loss"], rel=2e-3)


def test_edges_whose_memory_is_reached_are_left_to_pyg():
    one, other = pair(Touches, cases.small(), (0,))
    assert one[0].history["loss"] == pytest.approx(other[0].history["loss"], rel=2e-3)
