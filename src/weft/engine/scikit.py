"""Estimators in scikit-learn's style over the nodes of one graph: samples are node ids, the graph is a parameter."""

from __future__ import annotations

from typing import Any, Self

import numpy as np
import torch

from weft.core.errors import SpecError
from weft.core.task import Task, reject_unknown
from weft.engine.result import Result, nodes_of
from weft.engine.run import run
from weft.graph.catalog import names as catalog
from weft.graph.graph import Graph

OF_ESTIMATOR = ("graph", "model", "device")  # parameters that are no settings of a task


class NodeEstimator:
    """What :class:`WeftClassifier` and :class:`WeftRegressor` share; ``result_`` is the Result of the last fit."""

    kind: str
    missing: float  # the label of nodes without one
    result_: Result

    def __init__(self, graph: Any = None, model: Any = "gcn", *, device: str = "auto", **settings: Any) -> None:
        self.graph, self.model, self.device, self.settings = graph, model, device, settings

    def get_params(self, deep: bool = True) -> dict[str, Any]:
        """The parameters by name; ``deep`` changes nothing."""
        return {**{name: getattr(self, name) for name in OF_ESTIMATOR}, **self.settings}

    def set_params(self, **params: Any) -> Self:
        """Change parameters; a :class:`weft.SpecError` for a name that no task has."""
        settings = {name: value for name, value in params.items() if name not in OF_ESTIMATOR}
        reject_unknown(settings, type(self).__name__)
        vars(self).update({name: value for name, value in params.items() if name in OF_ESTIMATOR})
        self.settings = {**self.settings, **settings}
        return self

    def __sklearn_clone__(self) -> Self:
        return type(self)(**self.get_params())  # shares the graph, of which a deep copy would be of no use

    def __sklearn_tags__(self) -> Any:
        from sklearn.utils import ClassifierTags, RegressorTags, Tags, TargetTags

        tags = (
            {"classifier_tags": ClassifierTags()} if self.kind == "classifier" else {"regressor_tags": RegressorTags()}
        )
        return Tags(estimator_type=self.kind, target_tags=TargetTags(required=True), **tags)

    def _samples(self, X: Any, y: Any = None) -> tuple[Graph, torch.Tensor, Any]:
        """The graph, the node ids ``[n]`` in ``X [n]`` or ``[n, 1]``, and ``y``, or the graph's own labels of them."""
        if self.graph is None:
            name = type(self).__name__
            raise SpecError(f"{name}: graph=None must be a graph, a name or a path: weft.{name}(graph, ...)")
        graph = self.graph if isinstance(self.graph, Graph) else catalog.load(self.graph)
        ids = np.asarray(X)
        if ids.dtype.kind not in "iu" or ids.size != len(ids):
            raise SpecError(f"X has shape {list(ids.shape)} of {ids.dtype}; samples are node ids [n] of the graph")
        nodes = nodes_of(ids.reshape(-1).astype(np.int64), graph)
        return graph, nodes, graph.y[nodes].numpy() if y is None and graph.y is not None else np.asarray(y)

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

    ``graph``: a :class:`weft.Graph`, a name or a path. ``model`` and all others: settings of :class:`weft.Task`;
    ``device``: as of :func:`weft.run`. Samples ``X [n]`` are node ids, labels ``y [n]`` of any type; without ``y`` the
    graph's own. It trains on the whole graph (or sampled batches of it) with the loss of the samples alone, to the last
    epoch. ``cross_val_score``, ``GridSearchCV`` and ``clone`` take it; a clone shares the graph.
    """

    kind, missing = "classifier", -1
    classes_: np.ndarray

    def fit(self, X: Any, y: Any = None) -> Self:
        """Train on the nodes ``X`` with the labels ``y``."""
        graph, ids, labels = self._samples(X, y)
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
        graph, ids, numbers = self._samples(X, y)
        return self._train(graph, ids, numbers.astype(np.float32))

    def predict(self, X: Any) -> np.ndarray:
        """Numbers ``[n]`` or ``[n, D]`` for the nodes ``X``."""
        predicted = self._predicted("predict", X)
        return predicted[:, 0] if predicted.shape[1] == 1 else predicted

    def score(self, X: Any, y: Any) -> float:
        """R2, the mean over columns."""
        truth = np.asarray(y, dtype=np.float64)
        error, spread = (truth - self.predict(X)) ** 2, (truth - truth.mean(0)) ** 2
        return float(np.mean(1.0 - error.sum(0) / spread.sum(0)))
