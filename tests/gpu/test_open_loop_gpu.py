"""The open parts of the training loop on a GPU: captured as on the CPU, or eager with a sentence that says why."""

from __future__ import annotations

import pytest
import torch

import weft
from tests import stacks
from tests.graphs_for_tests import tiny_graph
from tests.runtime.loop.plain_loop import Net
from tests.runtime.loop.test_plain_torch import Two as TwoOutputs
from tests.runtime.loop.test_plain_torch import focal, regression_graph, several_numbers, two, two_right
from tests.runtime.loop.test_stacked_and_resumed import STACKS, plateau

pytestmark = [
    pytest.mark.gpu,
    pytest.mark.skipif(not torch.cuda.is_available(), reason="needs a CUDA device"),
]
EPOCHS = 8


def rows_of(group):
    return [torch.tensor(update.rows) for update in group.poll(0)]


def both(tasks, graph):
    """The same tasks captured on the GPU and eagerly on the CPU, trained."""
    there, here = stacks.start(tasks, graph, "cuda"), stacks.start(tasks, graph)
    for group in (there, here):
        group.advance(EPOCHS)
    return there, here


@pytest.mark.parametrize("model", ["gcn", Net])
@pytest.mark.parametrize("case", STACKS)
def test_captured_is_the_cpu(case, model):
    graph = tiny_graph()
    shared = {"hidden": 8, "dropout": 0.3} if model == "gcn" else {}
    fixed = {"graph": graph, "model": model, "epochs": EPOCHS, "lr": 0.05, "eps": 1e-3}
    if "sgd" in case:
        del fixed["eps"]
    tasks = [weft.Task(**{**fixed, "seed": seed, **shared, **own}) for seed, own in enumerate(STACKS[case])]
    there, here = both(tasks, graph)
    assert there.recorded, there.notes
    for mine, true in zip(rows_of(there), rows_of(here), strict=True):
        torch.testing.assert_close(mine, true, rtol=5e-3, atol=5e-3, equal_nan=True)


@pytest.mark.parametrize("make", [regression_graph, several_numbers])
@pytest.mark.parametrize("name", ["mse", "mae", "huber"])
def test_regression(name, make):
    graph = make()
    there, here = both([weft.Task(graph=graph, model=Net, epochs=EPOCHS, objective=name, metric="mse")], graph)
    assert there.recorded, there.notes
    torch.testing.assert_close(rows_of(there)[0], rows_of(here)[0], rtol=1e-3, atol=1e-3)
    assert there.poll(0)[0].best_epoch == here.poll(0)[0].best_epoch


def test_whatever_a_model_returns():
    graph = tiny_graph()
    how = {"objective": two, "metric": two_right, "lr": 0.05}
    there, here = both([weft.Task(graph=graph, model=TwoOutputs, epochs=EPOCHS, **how)], graph)
    assert there.recorded, there.notes
    torch.testing.assert_close(rows_of(there)[0][:, :4], rows_of(here)[0][:, :4], rtol=1e-3, atol=1e-3)


def test_torch_optimizers_run_eagerly():
    graph = tiny_graph()
    settings = {"optimizer": torch.optim.NAdam, "lr": 0.05, "clip_norm": 0.1, "ema": 0.5, **plateau(patience=0)}
    there, here = both([weft.Task(graph=graph, model=Net, epochs=EPOCHS, **settings)], graph)
    assert not there.recorded
    torch.testing.assert_close(rows_of(there)[0], rows_of(here)[0], rtol=5e-3, atol=5e-3)
    result = weft.run(weft.Task(graph=graph, model=Net, epochs=2, **settings), device="cuda", progress=False)
    assert any("NAdam keeps numbers in Python" in why for why in result.plan.why)


def test_a_function_that_reads_numbers_back_runs_eagerly():
    def peeking(logits, y, rows):
        loss = focal(logits, y, rows)
        return loss * (2 if loss.item() > 0.5 else 1)

    def on_host(logits, y, rows):
        return float((logits[rows].argmax(-1) == y[rows]).float().mean().cpu())

    graph = tiny_graph()
    for own in ({"objective": peeking}, {"metric": on_host}):
        there, here = both([weft.Task(graph=graph, model=Net, epochs=EPOCHS, lr=0.05, **own)], graph)
        assert not there.recorded
        assert any("runs eagerly" in note for note in there.notes)
        torch.testing.assert_close(rows_of(there)[0], rows_of(here)[0], rtol=5e-3, atol=5e-3)


def test_random_functions_run_eagerly():
    def noisy(logits, y, rows):
        return focal(logits + 0.1 * torch.randn_like(logits), y, rows)

    group = stacks.start([weft.Task(graph=tiny_graph(), hidden=8, epochs=4, objective=noisy)], tiny_graph(), "cuda")
    group.advance(4)
    assert not group.recorded
    assert any("objective noisy draws random numbers" in note for note in group.notes)


def test_a_callback_changes_the_rate_of_a_captured_step():
    graph, seen = tiny_graph(), []

    def still(moment):
        seen.append(moment.epoch)
        moment.scale_lr(0.0)

    task = weft.Task(graph=graph, hidden=8, epochs=6, dropout=0.0, callbacks=[weft.Callback(still, at=[3])])
    result = weft.run(task, device="cuda", progress=False)
    assert seen == [3]
    assert result.history["val_loss"][3:] == [result.history["val_loss"][2]] * 3


def test_resumed_on_a_gpu():
    graph = tiny_graph()
    for settings in ({"optimizer": torch.optim.NAdam}, {"ema": 0.9, "accumulate": 3, **plateau(patience=0)}):
        task = weft.Task(graph=graph, model=Net, epochs=EPOCHS, lr=0.05, **settings)
        whole, first, second = (stacks.start([task], graph, "cuda") for _ in range(3))
        whole.advance(EPOCHS)
        first.advance(4)
        second.restore(first.tensors())
        second.advance(EPOCHS)
        torch.testing.assert_close(rows_of(second)[0], rows_of(whole)[0], rtol=1e-4, atol=1e-5)
