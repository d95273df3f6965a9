"""Estimators for scikit-learn: samples are nodes."""

from __future__ import annotations

import numpy as np
import pytest

import weft
from tests.graphs_for_tests import tiny_graph
from weft.core.errors import SpecError

SETTINGS = {"hidden": 8, "epochs": 20, "lr": 0.05, "device": "cpu"}


def words(graph):
    return np.array(["red", "green", "blue"])[graph.y.numpy()]


def test_it_trains_on_the_samples_alone_as_a_run_does():
    graph, ids = tiny_graph(), np.arange(0, 40)
    model = weft.WeftClassifier(graph, "gcn", **SETTINGS).fit(ids, words(graph)[ids])
    assert list(model.classes_) == ["blue", "green", "red"]
    chances = model.predict_proba(np.arange(60))
    assert chances.shape == (60, 3)
    assert np.allclose(chances.sum(1), 1, atol=1e-5)
    assert list(model.predict([3, 50])) == list(model.classes_[chances.argmax(1)][[3, 50]])
    again = graph.with_splits(train=ids)
    result = weft.run(weft.Task(again, hidden=8, epochs=20, lr=0.05), device="cpu", progress=False)
    straight = model.classes_[[2, 1, 0]]  # classes 0, 1, 2 are red, green, blue
    assert np.mean(straight[result.predict().numpy()] == model.predict(np.arange(60))) > 0.9
    assert model.score(ids, words(graph)[ids]) > 0.8
    own = weft.WeftClassifier(graph, **SETTINGS).fit(ids)
    assert own.classes_.tolist() == [0, 1, 2]


def test_numbers_are_predicted_in_their_shape():
    graph, ids = tiny_graph(), np.arange(50)
    truth = graph.x[:, 0].numpy()
    model = weft.WeftRegressor(graph, "sage", **SETTINGS).fit(ids, truth[ids])
    assert model.predict(ids).shape == (50,)
    assert 0.3 < model.score(ids, truth[ids]) <= 1
    both = weft.WeftRegressor(graph, "sage", **SETTINGS).fit(ids, np.stack([truth, -truth], 1)[ids])
    assert both.predict([1, 2, 3]).shape == (3, 2)
    whole = weft.WeftRegressor(graph, "sage", **SETTINGS).fit(ids, np.round(truth)[ids])  # whole numbers, no classes
    assert whole.result_.metrics["metric"] == "r2"


def test_parameters_are_settings_and_clones_share_the_graph():
    sklearn = pytest.importorskip("sklearn.base")
    graph = tiny_graph()
    model = weft.WeftClassifier(graph, "sage", hidden=16).set_params(lr=0.5, model="gcn")
    assert model.get_params() == {"graph": graph, "model": "gcn", "device": "auto", "hidden": 16, "lr": 0.5}
    copy = sklearn.clone(model)
    assert copy.get_params() == model.get_params()
    assert copy.get_params()["graph"] is graph
    assert sklearn.is_classifier(model)
    assert sklearn.is_regressor(weft.WeftRegressor(graph))


def test_cross_validation_and_search_over_settings():
    selection = pytest.importorskip("sklearn.model_selection")
    graph, ids = tiny_graph(), np.arange(60)
    model = weft.WeftClassifier(graph, **{**SETTINGS, "epochs": 5})
    scores = selection.cross_val_score(model, ids, words(graph), cv=3)
    assert scores.shape == (3,)
    assert selection.cross_val_score(model, ids, words(graph), cv=3, scoring="f1_macro").shape == (3,)
    search = selection.GridSearchCV(model, {"hidden": [4, 8]}, cv=2).fit(ids, words(graph))
    assert search.best_params_["hidden"] in (4, 8)
    assert search.predict([1]).shape == (1,)
    folds = selection.cross_val_score(weft.WeftRegressor(graph, epochs=3), ids, graph.x[:, 0].numpy(), cv=3)
    assert folds.shape == (3,)


def test_a_search_over_names_of_pyg_and_arguments_of_its_models():
    pyg, selection = pytest.importorskip("torch_geometric.nn"), pytest.importorskip("sklearn.model_selection")
    graph, ids = tiny_graph(), np.arange(60)
    model = weft.WeftClassifier(graph.to_pyg(), pyg.GCN, hidden=4, num_layers=2, epochs=2, device="cpu")
    grid = {"hidden_channels": [6], "jk": ["cat"], "learning_rate": [0.1]}
    best = selection.GridSearchCV(model, grid, cv=2, error_score="raise").fit(ids, words(graph)).best_estimator_
    assert (best.result_.task.hidden, best.result_.task.model_args) == (6, {"jk": "cat"})
    assert "hidden=6" in repr(best)
    assert "hidden_channels" not in best.get_params()


def test_a_score_of_equal_numbers_is_as_of_scikit_learn():
    metrics = pytest.importorskip("sklearn.metrics")
    graph, ids = tiny_graph(), np.arange(20)
    model = weft.WeftRegressor(graph, epochs=2, device="cpu").fit(ids, graph.x[:20, 0].numpy())
    for truth in (np.ones(20), graph.x[:20, 0].numpy(), model.predict(ids)):
        assert model.score(ids, truth) == pytest.approx(metrics.r2_score(truth, model.predict(ids)))


def test_mistakes():
    graph = tiny_graph()
    model = weft.WeftClassifier(graph, **SETTINGS)
    for call, told in [
        (lambda: weft.WeftClassifier().fit([0], ["a"]), "graph=None must be a graph"),
        (lambda: model.predict([0]), "is not fitted yet"),
        (lambda: model.fit(np.zeros((5, 2)), np.zeros(5)), "samples are node ids"),
        (lambda: model.fit([1, 1], [0, 1]), "1 different nodes in 2 samples"),
        (lambda: model.set_params(num_hidden=3), "unknown setting 'num_hidden'; did you mean 'hidden'"),
        (lambda: weft.WeftClassifier(graph, num_hidden=3), "unknown setting 'num_hidden'; did you mean 'hidden'"),
        (lambda: model.fit([0, 1, 2], np.eye(3)), r"y has shape \[3, 3\] of float64; a classifier takes finite \[n\]$"),
        (lambda: model.fit([0, 1], [0.0, np.nan]), "a classifier takes finite"),
        (
            lambda: weft.WeftRegressor(graph).fit([0, 1], ["a", "b"]),
            "of <U1; a regressor takes finite",
        ),
        (lambda: weft.WeftRegressor(graph).fit([0, 1], [0.0, np.nan]), "a regressor takes finite"),
        (lambda: weft.WeftClassifier(weft.Graph(graph.adj, graph.x)).fit([0, 1]), r"y has shape \[\] of object"),
    ]:
        with pytest.raises(SpecError, match=told):
            call()
