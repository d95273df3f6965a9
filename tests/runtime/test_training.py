"""Training against a plain PyTorch loop with the same weights, and the book-keeping around it."""

from __future__ import annotations

import math

import pytest
import torch
from torch import nn
from torch.nn import functional as F

from tests.graphs_for_tests import tiny_graph
from weft import nn as weft_nn
from weft.core.errors import SpecError
from weft.graph.sparse_features import SparseFeatures
from weft.runtime.modules.build import build_model
from weft.runtime.step.evaluation import accuracy


def plain_optimizer(task, parameters):
    if task.optimizer == "sgd":
        return torch.optim.SGD(parameters, lr=task.lr, momentum=task.momentum, weight_decay=task.weight_decay)
    kind = torch.optim.AdamW if task.optimizer == "adamw" else torch.optim.Adam
    return kind(parameters, lr=task.lr, weight_decay=task.weight_decay)


def plain_loop(task, graph, call=None, model=None):
    """The loop one would write by hand: returns the model, the losses and the validation accuracies."""
    model = model or build_model(task, graph.num_features, graph.num_classes)
    call = call or (lambda m: m(graph.x, graph.adj))
    optimizer = plain_optimizer(task, model.parameters())
    losses, scores = [], []
    for _ in range(task.epochs):
        model.train()
        optimizer.zero_grad()
        logits = call(model)
        if graph.multilabel:
            loss = F.binary_cross_entropy_with_logits(logits[graph.train], graph.y[graph.train])
        else:
            loss = F.cross_entropy(logits[graph.train], graph.y[graph.train])
        loss.backward()
        optimizer.step()
        losses.append(loss.item())
        model.eval()
        with torch.no_grad():
            scores.append(accuracy(call(model)[graph.val], graph.y[graph.val]).item())
    return model, losses, scores


def weights_of(run):
    return run.group.stacks[0].members.layout.named(run.state.flat[0])


def assert_same(run, model, losses, tolerance=2e-5):
    rows = run.poll().rows
    assert [row[0] for row in rows] == pytest.approx(losses, abs=1e-4)
    for name, p in model.named_parameters():
        assert torch.allclose(weights_of(run)[name], p, atol=tolerance), name
    for name, b in run.state.buffers.items():
        assert torch.allclose(b[0], dict(model.named_buffers())[name], atol=1e-4), name


@pytest.mark.parametrize("model", ["gcn", "sage", "gin", "gat", "gatv2"])
def test_every_model_trains_as_by_hand(start, graph, model):
    run = start(graph, model=model)
    run.advance(20)
    by_hand, losses, scores = plain_loop(run.task, graph)
    assert_same(run, by_hand, losses)
    column = run.columns.index("val_accuracy")
    assert [row[column] for row in run.poll().rows] == pytest.approx(scores, abs=1e-6)


@pytest.mark.parametrize("optimizer", ["adam", "adamw", "sgd"])
@pytest.mark.parametrize("norm", [None, "batch", "layer"])
def test_every_optimizer_and_norm_trains_as_by_hand(start, graph, optimizer, norm):
    run = start(graph, optimizer=optimizer, norm=norm, weight_decay=0.01, momentum=0.9, lr=0.02)
    run.advance(20)
    by_hand, losses, _ = plain_loop(run.task, graph)
    assert_same(run, by_hand, losses)


@pytest.mark.parametrize("multilabel", [False, True])
@pytest.mark.parametrize("sparse", [False, True])
def test_labels_and_features_of_every_kind(start, multilabel, sparse):
    graph = tiny_graph(sparse=sparse, multilabel=multilabel, weighted=True)
    run = start(graph)
    run.advance(20)
    by_hand, losses, _ = plain_loop(run.task, graph)
    assert_same(run, by_hand, losses)


def test_the_first_aggregation_is_done_once_without_changing_the_numbers(start, graph, monkeypatch):
    run = start(graph, model="gcn")
    assert run.plan.first_layer == "once"
    monkeypatch.setattr(weft_nn.GCN, "first_aggregate", lambda *_: None)
    other = start(graph, model="gcn")
    assert torch.allclose(
        torch.tensor(run.advance(20).rows), torch.tensor(other.advance(20).rows), atol=1e-4, equal_nan=True
    )


@pytest.mark.parametrize("sparse", [False, True])
def test_features_divided_by_their_sum(start, sparse):
    graph = tiny_graph(sparse=sparse)
    dense = graph.x.to_dense() if sparse else graph.x
    scaled = dense / dense.abs().sum(1, keepdim=True).clamp(min=1e-9)
    run = start(graph, feature_norm="row", epochs=5)
    run.advance(5)
    by_hand, losses, _ = plain_loop(run.task, graph._changed(x=scaled))
    assert_same(run, by_hand, losses)


class Plain(nn.Module):
    """A user's module: BatchNorm, torch's own dropout, dense features."""

    def __init__(self, in_features, out_features, p=0.0):
        super().__init__()
        self.a, self.bn = nn.Linear(in_features, 8), nn.BatchNorm1d(8)
        self.drop, self.b = nn.Dropout(p), nn.Linear(8, out_features)

    def forward(self, x, adj):
        from weft import ops

        hidden = self.drop(torch.relu(self.bn(ops.spmm(adj.gcn(), self.a(x)))))
        return ops.spmm(adj.gcn(), self.b(hidden))


def test_a_module_of_the_users_own(start, graph):
    torch.manual_seed(5)
    mine = Plain(graph.num_features, graph.num_classes)
    before = {name: p.clone() for name, p in mine.named_parameters()}
    run = start(graph, model=mine)
    run.advance(20)
    assert all(torch.equal(before[name], p) for name, p in mine.named_parameters()), "left as it was"
    by_hand, losses, _ = plain_loop(run.task, graph, model=mine)
    assert_same(run, by_hand, losses)


def test_a_factory_draws_its_weights_from_the_seed(start, graph):
    runs = [start(graph, model=Plain, seed=seed) for seed in (0, 0, 1)]
    assert torch.equal(runs[0].state.flat, runs[1].state.flat)
    assert not torch.equal(runs[0].state.flat, runs[2].state.flat)


def test_dense_only_modules_get_dense_features_and_a_note(start):
    graph = tiny_graph(sparse=True)
    run = start(graph, model=Plain)
    run.advance(20)
    assert "features made dense" in run.notes[0]
    dense = graph._changed(x=graph.x.to_dense())
    _, losses, _ = plain_loop(run.task, dense, model=build_model(run.task, dense.num_features, 3))
    assert next(row[0] for row in run.poll().rows) == pytest.approx(losses[0], abs=1e-5)


@pytest.mark.parametrize("sparse", [False, True])
def test_a_pyg_model(start, sparse):
    pyg = pytest.importorskip("torch_geometric.nn")
    graph = tiny_graph(sparse=sparse)
    x = graph.x.to_dense() if isinstance(graph.x, SparseFeatures) else graph.x
    torch.manual_seed(1)
    model = pyg.GCN(graph.num_features, 8, 2, graph.num_classes)
    run = start(graph, model=model)
    run.advance(20)
    edge_index = graph.edge_index()
    by_hand, losses, _ = plain_loop(run.task, graph, call=lambda m: m(x, edge_index), model=model)
    assert_same(run, by_hand, losses)


def test_a_model_that_ignores_the_graph(start, graph):
    run = start(graph, model=lambda i, o: nn.Sequential(nn.Linear(i, 8), nn.ReLU(), nn.Linear(8, o)))
    run.advance(20)
    losses = [row[0] for row in run.poll().rows]
    assert losses[-1] < losses[0]


def test_lazy_modules_learn_their_sizes(start, graph):
    run = start(graph, model=lambda i, o: nn.Sequential(nn.LazyLinear(8), nn.ReLU(), nn.LazyLinear(o)))
    run.advance(2)
    assert run.num_parameters == graph.num_features * 8 + 8 + 8 * 3 + 3


@pytest.mark.parametrize(
    ("factory", "message"),
    [
        (lambda i, o: nn.Linear(i, o + 1), r"returned shape \[60, 4\]; expected logits \[60, 3\]"),
        (lambda i, o: "nothing", "returned str; expected an nn.Module"),
        (lambda i: nn.Linear(i, 3), r"could not be called as \(in_features=9, out_features=3\)"),
        (lambda i, o: nn.Linear(i + 1, o), "failed on graph 'tiny': RuntimeError"),
        (lambda i, o: nn.Identity(), "has no trainable parameters"),
    ],
)
def test_models_that_do_not_fit(start, graph, factory, message):
    with pytest.raises(SpecError, match=message):
        start(graph, model=factory)


class TestBookKeeping:
    def test_history_holds_the_loss_and_metric_of_every_split(self, start, graph):
        run = start(graph, epochs=5)
        last = run.advance(5).rows[-1]
        model = run.best_model()
        with torch.no_grad():
            logits = model(graph.x, graph.adj)
        best = run.poll().rows[run.poll().best_epoch]
        for split in ("train", "val", "test"):
            rows = getattr(graph, split)
            loss = F.cross_entropy(logits[rows], graph.y[rows]).item()
            assert best[run.columns.index(f"{split}_loss")] == pytest.approx(loss, abs=1e-5)
            score = (logits[rows].argmax(1) == graph.y[rows]).float().mean().item()
            assert best[run.columns.index(f"{split}_accuracy")] == pytest.approx(score, abs=1e-6)
        assert len(last) == len(run.columns) == 7

    @pytest.mark.parametrize("norm", [None, "batch"])
    def test_best_weights_are_those_of_the_first_best_epoch(self, start, graph, norm):
        run = start(graph, epochs=30, lr=0.1, dropout=0.5, norm=norm)
        progress = run.advance(30)
        scores = [row[run.columns.index("val_accuracy")] for row in progress.rows]
        assert progress.best_epoch == scores.index(max(scores))
        again = start(graph, epochs=30, lr=0.1, dropout=0.5, norm=norm)
        again.advance(progress.best_epoch + 1)
        assert torch.equal(run.state.best_flat, again.state.flat)
        for name, buffer in again.state.buffers.items():
            assert torch.equal(run.state.best_buffers[name], buffer)

    @pytest.mark.parametrize("patience", [1, 3, 7])
    @pytest.mark.parametrize("eval_every", [1, 2])
    def test_early_stopping_like_a_loop_on_the_host(self, start, graph, patience, eval_every):
        settings = {"epochs": 40, "lr": 0.1, "dropout": 0.5, "eval_every": eval_every}
        full = start(graph, **settings)
        rows = full.advance(40).rows
        column = full.columns.index("val_accuracy")
        best, best_epoch, stop = -1.0, -1, 40
        for epoch, row in enumerate(rows):
            if math.isnan(row[column]):
                continue
            if row[column] > best:
                best, best_epoch = row[column], epoch
            if epoch - best_epoch >= patience:
                stop = epoch + 1
                break
        run = start(graph, **settings, patience=patience)
        progress = run.advance(40)
        assert (progress.end, progress.best_epoch) == (stop, best_epoch)
        assert len(progress.rows) == stop
        assert progress.rows[-1] == rows[stop - 1]

    def test_the_outcome_does_not_depend_on_how_often_the_host_looks(self, start, graph):
        outcomes = []
        for period in (1, 7, 100):
            run = start(graph, epochs=60, lr=0.1, dropout=0.5, norm="batch", patience=5)
            while run.epoch < run.poll().end:
                run.advance(period)
            outcomes.append(run)
        first = outcomes[0].poll()
        assert first.end < 60, "this test wants a run that stops early"
        for run in outcomes[1:]:
            assert run.poll() == first
            assert torch.equal(run.state.best_flat, outcomes[0].state.best_flat)
            for name, buffer in run.state.best_buffers.items():
                assert torch.equal(buffer, outcomes[0].state.best_buffers[name])

    def test_evaluation_every_few_epochs(self, start, graph):
        run = start(graph, epochs=8, eval_every=3)
        rows = run.advance(8).rows
        assert [not math.isnan(row[-1]) for row in rows] == [False, False, True, False, False, True, False, True]
        assert all(math.isfinite(row[0]) for row in rows)

    def test_without_validation_nodes_the_last_epoch_is_the_best(self, start, graph):
        run = start(graph.with_splits(train=graph.train), epochs=6)
        progress = run.advance(6)
        assert run.columns == ["loss", "train_loss", "train_accuracy"]
        assert progress.best_epoch == 5
        assert torch.equal(run.state.best_flat, run.state.flat)

    def test_an_undefined_metric_does_not_stop_training(self, start):
        graph = tiny_graph(multilabel=True)
        graph.y[graph.val] = 0.0  # one class only: ROC-AUC is not defined there
        run = start(graph, metric="roc_auc", epochs=4)
        progress = run.advance(4)
        assert math.isnan(progress.rows[0][run.columns.index("val_roc_auc")])
        assert (progress.end, progress.best_epoch) == (4, 0)

    def test_weights_that_diverge_are_never_the_best(self, start, graph):
        run = start(graph, epochs=30, optimizer="sgd", lr=1e12)
        progress = run.advance(30)
        assert progress.end < 30
        assert not all(math.isfinite(value) for value in progress.rows[-1][:4])
        assert torch.isfinite(run.state.best_flat).all()


class TestRandomness:
    def test_seeds(self, start, graph):
        rows = [start(graph, dropout=0.5, seed=seed).advance(10).rows for seed in (3, 3, 4)]
        assert rows[0] == rows[1]
        assert rows[0] != rows[2]

    @pytest.mark.parametrize("model", ["gcn", "sage", "gin", "gat", "gatv2"])
    def test_dropout_falls_on_every_step_anew(self, start, graph, model):
        run = start(graph, model=model, dropout=0.5, input_dropout=0.5, optimizer="sgd", lr=1e-12, epochs=4)
        losses = [row[0] for row in run.advance(4).rows]
        assert len(set(losses)) == 4
        evaluated = [row[1] for row in run.poll().rows]
        assert evaluated == pytest.approx([evaluated[0]] * 4), "and not on evaluation"


@pytest.mark.parametrize("model", ["gcn", "sage", "gin", "gat", "gatv2"])
@pytest.mark.parametrize("norm", [None, "batch", "layer"])
def test_bfloat16_learns_about_the_same(start, graph, model, norm):
    rows = [
        start(graph, model=model, norm=norm, precision=precision, dropout=0.2).advance(20).rows
        for precision in ("fp32", "bf16")
    ]
    assert rows[0] != rows[1]
    assert rows[1][-1][0] == pytest.approx(rows[0][-1][0], abs=0.15)
