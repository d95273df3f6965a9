"""Built-in models train as a plain loop of PyTorch does, and their results can be used."""

from __future__ import annotations

import copy

import pytest
import torch

import weft
from tests.behaviour import calls
from tests.behaviour.cases import graph
from tests.behaviour.plain_loop import EPOCHS, RATE, assert_losses, train

SETTINGS = {"hidden": 8, "dropout": 0.0, "epochs": EPOCHS, "lr": RATE}


def task(**changes) -> weft.Task:
    return weft.Task(**{"graph": graph(), "model": "gcn", **SETTINGS, **changes})


def untrained(one: weft.Task) -> torch.nn.Module:
    """The model with its first weights: after one step of no length, without the statistics of that step."""
    model = copy.deepcopy(calls.run(one.with_values(epochs=1, lr=1e-30, weight_decay=0.0)).model)
    for name, buffer in model.named_buffers():
        if "running" in name:
            buffer.fill_(float(name.endswith("var")))
    return model


@pytest.mark.parametrize(
    "model",
    [
        {"model": "gcn", "layers": 3},
        {"model": "sage"},
        {"model": "gin"},
        {"model": "gat", "heads": 2},
        {"model": "gatv2", "heads": 4, "residual": True},
        {"model": "rgcn", "bases": 2, "norm": "layer"},
    ],
    ids=lambda one: one["model"],
)
def test_a_model_trains_as_in_a_plain_loop(model):
    one = task(**model)
    found = calls.run(one)
    losses, validation = train(_WithAdjacency(untrained(one)))
    assert_losses(found.history["loss"], losses)
    assert_losses(found.history["val_loss"], validation)


class _WithAdjacency(torch.nn.Module):
    """A built-in model with the call style of a user's."""

    def __init__(self, model):
        super().__init__()
        self.model = model

    def forward(self, x, adj):
        return self.model(x, adj)


@pytest.mark.parametrize(
    "model", [{"model": "gcn"}, {"model": "sage"}, {"model": "gat", "heads": 2}], ids=lambda one: one["model"]
)
def test_a_model_trains_as_the_one_of_pyg(model):
    pytest.importorskip("torch_geometric")
    one = task(**model)
    losses, _ = train(_WithEdges(weft.nn.to_pyg(untrained(one))))
    assert_losses(calls.run(one).history["loss"], losses)


class _WithEdges(torch.nn.Module):
    def __init__(self, model):
        super().__init__()
        self.model = model

    def forward(self, x, edge_index):
        return self.model(x, edge_index)


@pytest.mark.parametrize(
    ("settings", "make"),
    [
        ({"optimizer": "adamw", "weight_decay": 0.1}, lambda w: torch.optim.AdamW(w, lr=RATE, weight_decay=0.1)),
        ({"optimizer": "sgd", "momentum": 0.9, "norm": "batch"}, lambda w: torch.optim.SGD(w, lr=RATE, momentum=0.9)),
        ({"weight_decay": 0.05, "betas": (0.8, 0.9)}, lambda w: torch.optim.Adam(w, RATE, (0.8, 0.9), 1e-8, 0.05)),
        ({"optimizer": torch.optim.RMSprop}, lambda w: torch.optim.RMSprop(w, lr=RATE)),
    ],
    ids=["adamw", "sgd", "adam", "a class of torch"],
)
def test_optimizers_are_those_of_torch(settings, make):
    one = task(**settings)
    found = calls.run(one)
    losses, validation = train(_WithAdjacency(untrained(one)), make)
    assert_losses(found.history["loss"], losses)
    assert_losses(found.history["val_loss"], validation)


def test_the_best_epoch_is_kept_and_predicts_as_it_was_evaluated():
    found = calls.run(task(epochs=30, dropout=0.5))
    best = found.history["val_accuracy"].index(max(found.history["val_accuracy"])) + 1
    assert found.metrics["best_epoch"] == best
    data = graph()
    right = (found.predict(nodes="test") == data.y[data.test]).float().mean().item()
    assert right == pytest.approx(found.metrics["test_accuracy"])
    assert torch.equal(found.model(data.x, data.adj), found.predict_logits())


def test_patience_ends_a_run_early():
    found = calls.run(task(epochs=400, patience=3))
    assert found.metrics["epochs_run"] < 400
    assert found.metrics["epochs_run"] - found.metrics["best_epoch"] >= 3


def test_a_seed_draws_the_same_numbers_again_and_another_seed_others():
    first, again, other = (calls.run(task(dropout=0.5, seed=seed)).history["loss"] for seed in (1, 1, 2))
    assert first == again
    assert first != other


def test_a_loss_that_is_no_number_is_an_error_of_one_sentence():
    with pytest.raises(weft.DivergedError) as caught:
        calls.run(task(optimizer="sgd", lr=1e30, epochs=20))
    assert "\n" not in str(caught.value)


@pytest.mark.parametrize(
    ("settings", "words"),
    [
        ({"model": "gcm"}, "gcn"),
        ({"hidden": 0}, "hidden=0"),
        ({"lrr": 0.1}, "lr"),
        ({"model": "gat", "heads": 3}, "heads=3"),
        ({"model": "gcn", "momentum": 0.5}, "momentum"),
    ],
)
def test_a_mistake_is_named_in_one_sentence(settings, words):
    with pytest.raises(weft.SpecError, match=words) as caught:
        calls.run(task(**settings))
    assert "\n" not in str(caught.value)


def test_a_listener_sees_every_event_in_order():
    seen: list[weft.Event] = []
    calls.run(task(), on_event=seen.append)
    assert [event.seq for event in seen] == list(range(1, len(seen) + 1))
    assert seen[-1].kind == "finish"


def test_callbacks_stop_a_task():
    def stop(context):
        if context.epoch == 4:
            context.stop("enough")

    found = calls.run(task(callbacks=[weft.Callback(stop, every=1)]))
    assert found.metrics["epochs_run"] == 4


def test_a_result_is_read_in_another_process_as_it_was(tmp_path):
    graph().save(tmp_path / "graph")
    found = calls.run(task(graph=str(tmp_path / "graph"), feature_norm="row"), out=tmp_path / "run")
    again = calls.read(tmp_path / "run", "result")
    assert again.history == found.history
    assert torch.equal(again.predict_logits(), found.predict_logits())


def test_a_saved_graph_is_the_same(tmp_path):
    graph("weighted").save(tmp_path / "graph")
    again = calls.load(tmp_path / "graph")
    assert torch.equal(again.edge_index(), graph("weighted").edge_index())
    assert torch.equal(again.x, graph("weighted").x)
    for one in (again, graph("weighted")):
        assert calls.run(task(graph=one)).status == "finished"


def test_operators_equal_their_formula():
    adj, x = graph().adj, graph().x
    src, dst = graph().edge_index()
    expected = torch.zeros_like(x).index_add(0, dst, x[src])
    torch.testing.assert_close(weft.ops.spmm(adj, x), expected)
