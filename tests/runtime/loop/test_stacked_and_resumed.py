"""A stack trains every member as alone, and a resumed run is the uninterrupted one, for every part of the loop."""

from __future__ import annotations

import pytest
import torch

from tests.graphs_for_tests import tiny_graph
from tests.runtime.loop.plain_loop import Net
from tests.runtime.loop.test_plain_torch import decayed, focal, regression_graph, several_numbers
from tests.runtime.test_sampled import group_of
from tests.stacks import best_tensors, start
from weft.core.compatibility import stack_obstacle
from weft.core.settings import Callback
from weft.core.task import Task
from weft.runtime.step.optimizers import is_update

EPOCHS = 8
PLATEAU = {"schedule": "plateau"}


def plateau(**settings):
    return PLATEAU | {"plateau": {"threshold": 0.1, **settings}}


STACKS = {
    "objective": [{"objective": focal}] * 2,
    "class weights": [{"class_weights": (1.0, 2.0, 3.0)}, {"class_weights": "balanced", "label_smoothing": 0.1}],
    "groups": [
        {"param_groups": {"*weight": {"lr": 0.03}}, "optimizer": "adamw"},
        {"param_groups": {"*bias": {"weight_decay": 0.2}}},
    ],
    "groups of sgd": [
        {"param_groups": {"*weight": {"lr": 0.03}}, "optimizer": "sgd", "momentum": 0.9},
        {"param_groups": {"*bias": {"weight_decay": 0.2}}, "optimizer": "sgd"},
    ],
    "clip norm": [{"clip_norm": 0.05}, {"clip_norm": 0.5}],
    "clip value": [{"clip_value": 0.001}, {"clip_value": 0.01}],
    "accumulation": [{"accumulate": 2}, {"accumulate": 3}],
    "averaging": [{"ema": 0.5}, {"ema": 0.9, "epochs": 6}],
    "schedule": [{"schedule": decayed}, {"schedule": "cosine"}],
    "plateau": [plateau(patience=0), plateau(patience=1, factor=0.5, cooldown=1, watch="train_accuracy")],
    "the best epochs": [{"select": "val_loss", "keep_top": 3}, {"select": "train_loss", "keep_top": 3, "patience": 3}],
    "all": [{"accumulate": 2, "ema": 0.9, "clip_norm": 0.1, **plateau(patience=0)}] * 2,
}


def rows_of(group):
    return [torch.tensor(update.rows) for update in group.poll(0)]


@pytest.mark.parametrize("model", ["gcn", Net])
@pytest.mark.parametrize("case", STACKS)
def test_stacked_is_alone(case, model):
    graph = tiny_graph()
    shared = {"hidden": 8, "dropout": 0.3} if model == "gcn" else {}
    tasks = [
        Task(**{"graph": graph, "model": model, "epochs": EPOCHS, "lr": 0.05, "seed": seed, **shared, **own})
        for seed, own in enumerate(STACKS[case])
    ]
    assert stack_obstacle(tasks, multilabel=False) is None
    together = start(tasks, graph)
    assert len(together.stacks) == 1, together.notes
    together.advance(EPOCHS)
    for place, task in enumerate(tasks):
        alone = start([task], graph)
        alone.advance(EPOCHS)
        torch.testing.assert_close(rows_of(together)[place], rows_of(alone)[0], rtol=1e-4, atol=1e-5)
        mine, true = best_tensors(together, place), best_tensors(alone, 0)
        for name, weight in true.items():
            torch.testing.assert_close(mine[name], weight, rtol=1e-3, atol=1e-4)


def test_a_member_leaves_with_its_numbers():
    """Weights of classes are per member: those of the others follow when one leaves."""
    graph = tiny_graph()
    weights = [(1.0, 2.0, 3.0), (5.0, 1.0, 1.0), (0.2, 1.0, 4.0)]
    tasks = [Task(graph=graph, hidden=8, epochs=EPOCHS, class_weights=own, ema=0.5) for own in weights]
    together, alone = start(tasks, graph), start([tasks[2]], graph)
    together.advance(3)
    together.stop([0])
    together.drop([0])
    together.advance(EPOCHS)
    alone.advance(EPOCHS)
    torch.testing.assert_close(rows_of(together)[2], rows_of(alone)[0], rtol=1e-4, atol=1e-5)


RESUMED = {
    "torch's optimizer": {"optimizer": torch.optim.NAdam},
    "a schedule of torch's optimizer": {"optimizer": torch.optim.RMSprop, **plateau(patience=0), "accumulate": 3},
    "averaging": {"ema": 0.9, "accumulate": 3, "clip_norm": 0.1},
    "plateau": plateau(patience=1, cooldown=1),
    "callbacks": {"callbacks": [Callback(print, at=100)]},
    "the best epochs": {"keep_top": 3, "ema": 0.5},
}


@pytest.mark.parametrize("case", RESUMED)
def test_resumed_is_uninterrupted(case):
    graph = tiny_graph()
    task = Task(graph=graph, model=Net, epochs=EPOCHS, lr=0.05, **RESUMED[case])
    whole, first, second = (start([task], graph) for _ in range(3))
    whole.advance(EPOCHS)
    first.advance(4)
    if task.callbacks:
        whole, first_scaled = start([task], graph), first
        whole.advance(4)
        for one in (whole, first_scaled):
            one.scale_rates({0: 0.5})
        whole.advance(EPOCHS)
    second.restore(first.tensors())
    second.advance(EPOCHS)
    torch.testing.assert_close(rows_of(second), rows_of(whole), rtol=0, atol=0)
    for name, tensor in whole.tensors().items():
        if name != "0.optimizer" and not name.startswith("random"):
            torch.testing.assert_close(second.tensors()[name], tensor, rtol=0, atol=0, equal_nan=True)


def test_torch_optimizers_train_side_by_side():
    graph = tiny_graph()
    tasks = [Task(graph=graph, model=Net, epochs=EPOCHS, optimizer=torch.optim.RMSprop, lr=lr) for lr in (0.01, 0.02)]
    together = start(tasks, graph)
    assert len(together.stacks) == 2
    assert any("RMSprop of torch updates the parameters of one task" in note for note in together.notes)
    together.advance(EPOCHS)
    for place, task in enumerate(tasks):
        alone = start([task], graph)
        alone.advance(EPOCHS)
        torch.testing.assert_close(rows_of(together)[place], rows_of(alone)[0], rtol=0, atol=0)


@pytest.mark.parametrize("make", [regression_graph, several_numbers])
def test_regression_stacks(make):
    graph = make()
    tasks = [
        Task(graph=graph, hidden=8, epochs=EPOCHS, objective="huber", huber_delta=delta, metric="mae", dropout=0.0)
        for delta in (0.1, 2.0)
    ]
    together = start(tasks, graph)
    assert len(together.stacks) == 1
    together.advance(EPOCHS)
    for place, task in enumerate(tasks):
        alone = start([task], graph)
        alone.advance(EPOCHS)
        torch.testing.assert_close(rows_of(together)[place], rows_of(alone)[0], rtol=1e-4, atol=1e-5)


def test_updates_of_sampled_epochs():
    """After every second step and after the last of three: as torch's optimizer, which counts on the host."""
    graph = tiny_graph()
    shared = {"graph": graph, "hidden": 8, "epochs": 4, "lr": 0.05, "dropout": 0.0, "accumulate": 2, "ema": 0.5}
    batches = {"mode": "sampled", "batch": 9, "fanout": [3, 3]}
    found = []
    for optimizer in ("adam", torch.optim.Adam):
        group = group_of([Task(**shared, **batches, optimizer=optimizer)], graph, fanout=(3, 3), batch=9)
        assert group.stacks[0].source.steps_per_epoch == 3
        group.advance(4)
        found.append(rows_of(group)[0])
    torch.testing.assert_close(found[0], found[1], rtol=1e-4, atol=1e-5)
    assert [is_update(Task(graph=graph, accumulate=2), step, 3) for step in range(6)] == [False, True, True] * 2
    assert [is_update(Task(graph=graph, accumulate=2), step, 1) for step in range(4)] == [False, True] * 2
