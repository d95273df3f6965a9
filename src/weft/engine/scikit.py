"""Estimators in scikit-learn's style over the nodes of one graph: samples are node ids, the graph is a parameter."""

from __future__ import annotations

from typing import Any, Self

import numpy as np
import torch

from weft.core.errors import SpecError
from weft.core.task import Task, with_model_args, with_own_names
from weft.core.wording import brief
from weft.engine.result import Result, nodes_of
from weft.engine.run import run
from weft.graph.catalog import names as catalog
from weft.graph.graph import Graph, as_graph

OF_ESTIMATOR = ("graph", "model", "device")  # parameters that are no settings of a task


class NodeEstimator:
    """What :class:`WeftClassifier` and :class:`WeftRegressor` share; ``result_`` is the Result of the last fit."""

    kind: str
    missing: float  # the label of nodes without one
    result_: Result

    def __init__(self, graph: Any = None, model: Any = "gcn", *, device: str = "auto", **settings: Any) -> None:
        self.settings: dict[str, Any] = {}
        self.set_params(graph=graph, model=model, device=device, **settings)

    def __repr__(self) -> str:
        return f"{type(self).__name__}({', '.join(f'{name}={brief(v)}' for name, v in self.get_params().items())})"

    def get_params(self, deep: bool = True) -> dict[str, Any]:
        """The parameters by name; ``deep`` changes nothing."""
        return {**{name: getattr(self, name) for name in OF_ESTIMATOR}, **self.settings}

    def set_params(self, **params: Any) -> Self:
        """Change parameters; a :class:`weft.SpecError` for a name that neither a task nor the model has."""
        vars(self).update({name: value for name, value in params.items() if name in OF_ESTIMATOR})
        settings = {name: value for name, value in params.items() if name not in OF_ESTIMATOR}
        with_model_args(settings, [self.model], type(self).__name__)  # checks the names
        self.settings = {**self.settings, **with_own_names(settings, type(self).__name__)}
        return self

    def __sklearn_clone__(self) -> Self:
        return type(self)(**self.get_params())  # shares the graph, of which a deep copy would be of no use

    def __sklearn_tags__(self) -> Any:
        from sklearn.utils import ClassifierTags, RegressorTags, Tags, TargetTags

        tags = (
            {"classifier_tags": ClassifierTags()} if self.kind == "classifier" else {"regressor_tags": RegressorTags()}
        )
        return Tags(estimator_type=self.kind, target_tags=TargetTags(required=True), **tags)

    def _samples(self, X: Any) -> tuple[Graph, torch.Tensor]:
        """The graph, and the node ids ``[n]`` in ``X [n]`` or ``[n, 1]``."""
        if self.graph is None:
            name = type(self).__name__
            raise SpecError(f"{name}: graph=None must be a graph, a name or a path: weft.{name}(graph, ...)")
        graph, ids = as_graph(self.graph) or catalog.load(self.graph), np.asarray(X)
        if ids.dtype.kind not in "iu" or ids.size != len(ids):
            raise SpecError(f"X has shape {list(ids.shape)} of {ids.dtype}; samples are node ids [n] of the graph")
        return graph, nodes_of(ids.reshape(-1).astype(np.int64), graph)

    def _labelled(self, X: Any, y: Any) -> tuple[Graph, torch.Tensor, np.ndarray]:
        """The graph, the node ids in ``X``, and ``y``, or the graph's own labels of them."""
        graph, nodes = self._samples(X)
        labels = np.asarray(graph.y[nodes] if y is None and graph.y is not None else y)
        kinds, shape = ("iufb", "[n] or [n, D]") if self.kind == "regressor" else ("iufbUSO", "[n]")
        wrong = labels.dtype.kind not in kinds or not 1 <= labels.ndim <= 2 - (self.kind == "classifier")
        if wrong or (labels.dtype.kind == "f" and not np.isfinite(labels).all()):
            raise SpecError(f"y has shape {list(labels.shape)} of {labels.dtype}; a {self.kind} takes finite {shape}")
        return graph, nodes, labels

    def _train(self, graph: Graph, ids: torch.Tensor, labels: np.ndarray) -> Self:
        """Train on the nodes ``ids`` with ``labels [n]`` or ``[n, D]``; other nodes have none."""
        if len(labels) != len(ids) or len(ids.unique()) != len(ids):
            raise SpecError(f"X has {len(ids.unique())} different nodes in {len(ids)} samples, y {len(labels)} labels")
        values = torch.from_numpy(labels)
        y = values.new_full((graph.num_nodes, *values.shape[1:]), self.missing)
        y[ids] = values
        numbers, train = self.kind == "regressor", ids.sort().values
        labelled = Graph(graph.adj, graph.x, y, train, relation=graph.relation, name=graph.name, numbers=numbers)
        task = Task(graph=labelled, model=self.model, **self.settings)
        self.result_ = run(task, device=self.device, progress=False)
        return self

    def _predicted(self, method: str, X: Any) -> np.ndarray:
        """What ``method`` of the result says of the nodes ``X``."""
        if not hasattr(self, "result_"):
            raise SpecError(f"{type(self).__name__} is not fitted yet; call fit(X, y) first")
        values: np.ndarray = getattr(self.result_, method)(nodes=self._samples(X)[1]).numpy()
        return values


class WeftClassifier(NodeEstimator):
    """A classifier of nodes for scikit-learn: ``WeftClassifier(graph, hidden=32).fit(ids, labels).predict(ids)``.

    ``graph``: a :class:`weft.Graph`, a ``Data`` of PyG, a name or a path. ``model`` and all others: settings of
    :class:`weft.Task` and arguments of the model; ``device``: as of :func:`weft.run`. Samples ``X [n]`` are node ids,
    labels ``y [n]`` of any type; without ``y`` the graph's own. It trains on the whole graph (or sampled batches of it)
    with the loss of the samples alone, to the last epoch. ``cross_val_score``, ``GridSearchCV`` and ``clone`` take it;
    a clone shares the graph.
    """

    kind, missing = "classifier", -1
    classes_: np.ndarray

    def fit(self, X: Any, y: Any = None) -> Self:
        """Train on the nodes ``X`` with the labels ``y``."""
        graph, ids, labels = self._labelled(X, y)
        self.classes_, codes = np.unique(labels, return_inverse=True)
        return self._train(graph, ids, codes.astype(np.int64))

    def predict(self, X: Any) -> np.ndarray:
        """Labels ``[n]`` of the nodes ``X``."""
        codes = self._predicted("predict", X)
        return self.classes_[codes]

    def predict_proba(self, X: Any) -> np.ndarray:
        """Probabilities ``[n, C]`` of the nodes ``X``, in the order of ``classes_``."""
        return self._predicted("predict_proba", X)

    def score(self, X: Any, y: Any) -> float:
        """Accuracy."""
        return float(np.mean(self.predict(X) == np.asarray(y)))


class WeftRegressor(NodeEstimator):
    """A regressor of nodes for scikit-learn, as :class:`WeftClassifier`; ``y [n]`` or ``[n, D]`` are numbers."""

    kind, missing = "regressor", float("nan")

    def fit(self, X: Any, y: Any = None) -> Self:
        """Train on the nodes ``X`` with the numbers ``y``."""
        graph, ids, numbers = self._labelled(X, y)
        return self._train(graph, ids, numbers.astype(np.float32))

    def predict(self, X: Any) -> np.ndarray:
        """Numbers ``[n]`` or ``[n, D]`` for the nodes ``X``."""
        predicted = self._predicted("predict", X)
        return predicted[:, 0] if predicted.shape[1] == 1 else predicted

    def score(self, X: Any, y: Any) -> float:
        """R2, the mean over columns."""
        truth = np.asarray(y, dtype=np.float64)
        error, spread = (truth - self.predict(X)) ** 2, (truth - truth.mean(0)) ** 2
        error, spread = error.sum(0), spread.sum(0)
        return float(np.mean(np.where(spread > 0, 1.0 - error / np.where(spread > 0, spread, 1.0), error == 0)))
