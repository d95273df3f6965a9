"""Several splits of one graph: trained together as they train alone, and averaged."""

from __future__ import annotations

import statistics

import pytest
import torch

import weft
from tests.graphs_for_tests import tiny_graph
from weft.core.errors import GraphError, SpecError
from weft.engine.page import render_sweep_report
from weft.graph.graph import Graph


def several(count: int = 3) -> Graph:
    return tiny_graph().random_splits(count, train=24, val=16)


def run(work, **options):
    return weft.run(work, **{"progress": False, "device": "cpu", **options})


def test_splits_train_in_one_stack_with_the_numbers_of_each_alone():
    graph = several()
    settings = {"hidden": 8, "epochs": 12, "dropout": 0.3, "lr": [0.01, 0.05]}
    together = run(weft.Sweep(graph, splits="all", seed=[0, 1], **settings))
    assert [plan.join for plan in together.plan] == ["stacked"]
    assert len(together) == 12
    for number in range(3):
        alone = run(weft.Sweep(graph.split(number), seed=[0, 1], **settings))
        for one in alone:
            member = together[one.name.replace(" seed", f" split={number} seed")]
            for column in one.history:
                mine, theirs = torch.tensor(member.history[column]), torch.tensor(one.history[column])
                assert torch.allclose(mine.float(), theirs.float(), atol=1e-4), (member.name, column)
            assert torch.equal(member.predict(nodes="test"), member.predict(graph.split(number), nodes="test"))


def test_splits_of_different_sizes_and_early_stops_do_not_mix():
    graph = tiny_graph()
    train = torch.zeros(60, 2, dtype=torch.bool)
    train[:10, 0], train[30:50, 1] = True, True
    val = torch.zeros(60, 2, dtype=torch.bool)
    val[10:30, 0], val[:20, 1] = True, True
    graph = graph.with_splits(train, val)
    assert graph.num_splits == 2
    settings = {"hidden": 8, "epochs": 40, "patience": 3, "lr": 0.05, "label_smoothing": [0.0, 0.2]}
    together = run(weft.Sweep(graph, split=[0, 1], **settings))
    for number in (0, 1):
        for one in run(weft.Sweep(graph.split(number), **settings)):
            member = together[f"{one.name} split={number}"]
            assert member.metrics["epochs_run"] == one.metrics["epochs_run"]
            assert member.metrics["val_loss"] == pytest.approx(one.metrics["val_loss"], abs=1e-4)


def test_the_mean_over_splits_is_in_result_table_and_report(tmp_path):
    result = run(weft.Sweep(several(), splits="all", hidden=8, epochs=6), out=tmp_path)
    (score,) = result.settings_table()
    values = [member.metrics["val_accuracy"] for member in result]
    assert score.mean == pytest.approx(statistics.fmean(values))
    assert score.deviation == pytest.approx(statistics.stdev(values))
    assert score.splits == 3
    assert "over 3 splits" in str(result.best_settings())
    assert "3 splits" in result._repr_html_()
    page = render_sweep_report(result)
    assert "standard deviation over splits" in page
    assert "same 16 nodes" not in page
    loaded = weft.read(tmp_path, graph=several())
    assert loaded.settings_table()[0].mean == score.mean
    assert torch.equal(loaded["split=2"].predict(nodes="test"), result["split=2"].predict(nodes="test"))


def test_a_task_with_all_splits_is_a_sweep_and_a_plan_has_its_members():
    task = weft.Task(graph=several(), split="all", hidden=8, epochs=3)
    assert [member.task.split for member in run(task)] == [0, 1, 2]
    assert len(weft.plan(task, machine="cpu").tasks) == 3


def test_sampled_training_on_each_split():
    graph = several(2)
    settings = {"hidden": 8, "epochs": 2, "mode": "sampled", "fanout": [3, 3], "batch": 8}
    together = run(weft.Sweep(graph, splits="all", **settings))
    for number in (0, 1):
        alone = run(weft.Task(graph=graph.split(number), **settings))
        assert together[f"split={number}"].history["val_loss"] == alone.history["val_loss"]


def test_a_module_of_the_users_own_on_several_splits():
    class Net(torch.nn.Module):
        def __init__(self, in_features, out_features):
            super().__init__()
            self.first = weft.nn.GCNConv(in_features, out_features)

        def forward(self, x, adj):
            return self.first(x, adj)

    graph = several(2)
    together = run(weft.Sweep(graph, model=Net, splits="all", epochs=4))
    for number in (0, 1):
        alone = run(weft.Task(graph=graph.split(number), model=Net, epochs=4))
        assert together[f"split={number}"].metrics["val_loss"] == pytest.approx(alone.metrics["val_loss"], abs=1e-5)


def test_splits_survive_saving_and_pyg(tmp_path):
    graph = several()
    graph.save(tmp_path / "graph")
    opened = weft.load(tmp_path / "graph", verify=True)
    assert opened.num_splits == opened.stats().num_splits == 3
    data = graph.to_pyg()
    assert data.train_mask.shape == (60, 3)
    back = Graph.from_pyg(data)
    one = Graph.from_pyg(data, split=1)
    assert one.num_splits == 1
    for number in range(3):
        for name in ("train", "val", "test"):
            expected = getattr(graph.split_rows(number), name)
            assert torch.equal(getattr(opened.split(number), name), expected)
            assert torch.equal(getattr(back.split(number), name), expected)
    assert torch.equal(one.val, graph.split(1).val)
    spec = tmp_path / "spec.toml"
    spec.write_text(f'graph = "{tmp_path / "graph"}"\nsplits = "all"\n[train]\nepochs = 2\n')
    assert len(run(weft.read(spec))) == 3


def test_splits_that_are_not_there_are_one_sentence():
    with pytest.raises(SpecError, match=r"split=3, but graph 'tiny' has 3 splits, 0\.\.2"):
        run(weft.Task(graph=several(), split=3))
    with pytest.raises(SpecError, match="split=1, but graph 'tiny' has 1 split, number 0"):
        run(weft.Task(graph=tiny_graph(), split=1))
    with pytest.raises(SpecError, match="must be the number of one of the graph's splits"):
        weft.Task(graph="demo", split=-1)
    with pytest.raises(SpecError, match="give one of the two"):
        weft.Sweep("demo", split=[0], splits="all")
    with pytest.raises(GraphError, match="different numbers of columns"):
        tiny_graph().with_splits(torch.ones(60, 2, dtype=torch.bool), torch.zeros(60, 3, dtype=torch.bool))
