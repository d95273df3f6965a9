"""Task.keep_top: the weights of the best epochs, in the result, its folder and checkpoints."""

from __future__ import annotations

import math

import pytest
import torch
from torch.nn import functional as F

import weft
from tests.engine.small_sweeps import make_sweep
from tests.graphs_for_tests import small, tiny_graph
from tests.runtime.loop.plain_loop import Net
from weft.core.settings import lower_is_better

QUICK = {"device": "cpu", "progress": False}


def expected(history, column, count):
    """Epochs (from 1) and values of the best evaluations; of equal ones the earlier."""
    sign = 1 if lower_is_better(column) else -1
    values = [(sign * value, epoch, value) for epoch, value in zip(history["epoch"], history[column], strict=True)]
    return [(epoch, value) for _, epoch, value in sorted(v for v in values if not math.isnan(v[2]))[:count]]


def assert_top(result, graph, column="val_accuracy", count=3):
    """They are the best epochs of the history, and their weights give its numbers."""
    assert [best.epoch for best in result.top] == [epoch for epoch, _ in expected(result.history, column, count)]
    assert result.top[0].epoch == result.metrics["best_epoch"]
    for rank, best in enumerate(result.top, 1):
        assert best.score == pytest.approx(result.history[column][best.epoch - 1], rel=1e-6)
        model = result.model_at(rank)
        assert all(torch.equal(model.state_dict()[name], value) for name, value in best.weights.items())
        with torch.no_grad():
            output = model(graph.x) if isinstance(model, Net) else model(graph.x, graph.adj)
        loss = float(F.cross_entropy(output[graph.val], graph.y[graph.val]))
        assert loss == pytest.approx(result.history["val_loss"][best.epoch - 1], abs=1e-5)
    for name, value in result.model.state_dict().items():
        assert torch.equal(result.top[0].weights[name], value)


CASES = {
    "ties": {"lr": 0.1},
    "a loss": {"select": "val_loss", "lr": 0.1, "patience": 6},
    "evaluated now and then": {"eval_every": 4},
    "averaged weights": {"ema": 0.5},
    "batch norm": {"norm": "batch", "select": "val_loss"},
    "sampled": {"mode": "sampled", "fanout": [-1, -1], "batch": 7},
    "a module of one's own": {"model": Net, "lr": 0.05, "select": "val_loss"},
}


@pytest.mark.parametrize("case", CASES)
def test_they_are_the_best_of_the_history(case):
    graph = tiny_graph()
    settings = {**(small("gcn") if "model" not in CASES[case] else {}), **CASES[case]}
    result = weft.run(weft.Task(graph=graph, epochs=30, keep_top=3, **settings), **QUICK)
    assert_top(result, graph, settings.get("select", "val_accuracy"))


def test_of_members_of_a_stack():
    """Padded to one width, with columns and ends of their own."""
    graph = tiny_graph()
    tasks = [
        weft.Task(graph=graph, hidden=hidden, lr=0.1, dropout=0.5, keep_top=4, name=f"{hidden} {select}", **own)
        for hidden in (4, 8)
        for select, own in {
            "val_loss": {"select": "val_loss", "epochs": 25},
            "train_loss": {"select": "train_loss", "epochs": 12},
            "val_accuracy": {"epochs": 25, "patience": 5},
        }.items()
    ]
    result = weft.run(tasks, **QUICK)
    assert result.plan[0].join == "stacked"
    for member in result:
        assert_top(member, graph, member.name.partition(" ")[2], 4)


def test_fewer_evaluations_than_places():
    result = weft.run(weft.Task(graph=tiny_graph(), hidden=8, epochs=3, keep_top=5, select="val_loss"), **QUICK)
    assert sorted(best.epoch for best in result.top) == [1, 2, 3]
    plain = weft.run(weft.Task(graph=tiny_graph(), hidden=8, epochs=3), **QUICK)
    assert plain.top == []
    with pytest.raises(weft.InputError, match=r"model_at\(1\) must be a rank of its best epochs, and it keeps none"):
        plain.model_at(1)
    with pytest.raises(weft.InputError, match=r"model_at\(4\) must be a rank of its best epochs, from 1 to 3"):
        result.model_at(4)


def test_a_resumed_run_keeps_what_an_uninterrupted_one_does(tmp_path):
    sweep = make_sweep(hidden=[4, 8], epochs=[14, 40], dropout=0.5, lr=0.05, keep_top=3, select="val_loss")
    whole, control = weft.run(sweep, **QUICK), weft.Control()

    def leave(event):
        if event.kind == "rows":  # after the first epoch; it takes effect a few epochs later
            control.preempt()

    weft.run(sweep, out=tmp_path, control=control, on_event=leave, **QUICK)
    control.resume()
    resumed = weft.run(sweep, out=tmp_path, control=control, resume=True, **QUICK)
    for results in (resumed, weft.read(tmp_path)):
        for member, other in zip(results, whole, strict=True):
            assert [(best.epoch, best.score) for best in member.top] == [(b.epoch, b.score) for b in other.top]
            for best, true in zip(member.top, other.top, strict=True):
                assert all(torch.equal(best.weights[name], value) for name, value in true.weights.items())


def test_they_are_in_the_folder(tmp_path):
    graph = tiny_graph()
    graph.save(tmp_path / "graph")
    task = weft.Task(graph=str(tmp_path / "graph"), hidden=8, epochs=20, keep_top=3, norm="batch", select="val_loss")
    result = weft.run(task, out=tmp_path / "run", **QUICK)
    read = weft.read(tmp_path / "run")
    assert (tmp_path / "run" / "top.safetensors").is_file()
    for rank in (1, 2, 3):
        with torch.no_grad():
            mine, true = (each.model_at(rank)(graph.x, graph.adj) for each in (read, result))
        assert torch.equal(mine, true)
    weft.run(task.with_values(keep_top=None), out=tmp_path / "run", overwrite=True, **QUICK)
    assert not (tmp_path / "run" / "top.safetensors").exists()


def test_a_plan_counts_their_memory():
    task = weft.Task(graph="demo", hidden=256, epochs=10)
    plain, kept = (weft.plan(each, "h200") for each in (task, task.with_values(keep_top=50)))
    weights = sum(p.numel() for p in weft.run(task.with_values(epochs=1), **QUICK).model.parameters())
    more = kept.groups[0].cost.total_bytes - plain.groups[0].cost.total_bytes
    # Capturing the step holds a copy of the state, too.
    assert 50 * 4 * weights <= more < 2.5 * 50 * 4 * weights


class Counting(Net):
    """It keeps something between calls that is no buffer."""

    def __init__(self, in_features, out_features):
        super().__init__(in_features, out_features)
        self.calls = 0

    def forward(self, x):
        self.calls += 1
        return super().forward(x) * (1 + 0.01 * self.calls)


@pytest.mark.parametrize(
    ("settings", "sentence"),
    [
        ({"keep_top": 0}, "keep_top=0 must be at least 1"),
        ({"keep_top": 101}, "keep_top=101 must be at most 100"),
        ({"keep_top": 3, "select": "last"}, "keep_top=3 needs a column that ranks epochs, not select='last'"),
        (
            {"keep_top": 3, "model": Counting},
            "keep_top keeps weights and buffers alone; model Counting: it keeps 'calls'",
        ),
    ],
)
def test_what_is_refused(settings, sentence):
    with pytest.raises(weft.InputError, match=sentence):
        weft.run(weft.Task(graph=tiny_graph(), **settings), **QUICK)
