"""Let a trained module be called with a graph's own features: it treats them as its training did.

A training may divide features by their sums (``feature_norm="row"``) and makes sparse ones dense for modules that take
tensors. A module that is handed back does the same when it is called, so that ``model(graph.x, graph.adj)`` is what was
trained. Dividing by sums twice changes nothing but rounding.
"""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager
from copy import copy
from dataclasses import dataclass, field
from typing import Any

import torch
from torch import Tensor, nn

from weft.batches.features import FeatureStore
from weft.batches.source import Features
from weft.core.task import Task
from weft.graph.sparse_features import SparseFeatures
from weft.ops.csr.adjacency import Adjacency, offset_dtype
from weft.runtime.step.inputs import cast_features, edge_arguments, row_normalised, takes_edges


@dataclass
class TrainedInputs:
    """A hook before ``forward``: ``norm`` divides the features, ``dense`` fills in their zeros.

    ``edges``: an :class:`Adjacency` becomes the ``edge_index`` that the module takes.
    """

    norm: str | None
    dense: bool
    edges: bool
    active: bool = field(default=True, compare=False)

    def __call__(self, model: nn.Module, args: tuple[Any, ...], kwargs: dict[str, Any]) -> Any:
        if not self.active:
            return None
        if args:
            args = (self._features(args[0]), *args[1:])
        elif "x" in kwargs:
            kwargs = {**kwargs, "x": self._features(kwargs["x"])}
        if self.edges and len(args) > 1 and isinstance(args[1], Adjacency):
            kwargs = {**edge_arguments(model, args[1]), **kwargs}
            args = (args[0], *args[2:])
        return args, kwargs

    def converted(self, dense: bool) -> TrainedInputs:
        """The hook of the same model with layers of another library; ``dense``: they take dense features only."""
        return TrainedInputs(self.norm, dense, edges=False)

    def _features(self, x: Any) -> Any:
        if hasattr(x, "edge_index") and hasattr(x, "x"):  # a Data of PyG
            x = copy(x)
            x.x = self._features(x.x)
            return x
        if not isinstance(x, (Tensor, SparseFeatures)):
            return x
        x = row_normalised(x) if self.norm == "row" else x
        return x.to_dense() if self.dense and isinstance(x, SparseFeatures) else x


def treat_inputs(model: nn.Module, task: Task, dense: bool) -> nn.Module:
    """``model`` with a hook for what it was trained on, if that is not just what a graph holds."""
    edges = task.traits is None and takes_edges(model)
    if task.feature_norm is not None or dense or edges:
        model.register_forward_pre_hook(TrainedInputs(task.feature_norm, dense or edges, edges), with_kwargs=True)
    return model


@contextmanager
def given_as_trained(model: nn.Module) -> Iterator[None]:
    """Inside, ``model`` is called with features that are treated already."""
    hooks = [hook for hook in model._forward_pre_hooks.values() if isinstance(hook, TrainedInputs)]
    for hook in hooks:
        hook.active = False
    try:
        yield
    finally:
        for hook in hooks:
            hook.active = True


# ---- FeatureRows: read rows of features as a training treats them, without treating all of them at once.
#
# Shapes: N nodes, F features, M ids, Z stored values.


class FeatureRows:
    """Rows of ``x [N, F]`` on ``device``, divided by their sums if ``norm="row"``, dense, in ``dtype``."""

    def __init__(self, x: Features, norm: str | None, dtype: torch.dtype, device: torch.device) -> None:
        self._x, self._norm, self._dtype, self._device = x, norm, dtype, device
        self._store = FeatureStore(x, device) if isinstance(x, Tensor) else None

    def read(self, ids: Tensor) -> Tensor:
        """The rows ``[M, F]`` of ``ids [M]``."""
        rows = self._raw(ids)
        rows = cast_features(row_normalised(rows) if self._norm == "row" else rows, self._dtype)
        return (rows if isinstance(rows, Tensor) else rows.to_dense()).to(self._device)

    def _raw(self, ids: Tensor) -> Features:
        return sparse_rows(self._x, ids) if self._store is None else self._store.read(ids)


def sparse_rows(x: SparseFeatures, ids: Tensor) -> SparseFeatures:
    """The rows ``ids [M]`` of ``x [N, F]``, each as it is stored."""
    matrix = x.matrix
    ids = ids.to(matrix.device).long()
    begin, count = matrix.indptr[ids].long(), (matrix.indptr[ids + 1] - matrix.indptr[ids]).long()
    ends = count.cumsum(0)
    indptr = torch.cat([ends.new_zeros(1), ends])
    places = torch.arange(int(ends[-1]) if ids.numel() else 0, device=matrix.device)
    places += torch.repeat_interleave(begin - indptr[:-1], count)
    picked = matrix.indices[places], x.values[places]
    return SparseFeatures(
        Adjacency(indptr.to(offset_dtype(places.numel())), picked[0], matrix.num_cols, weight=picked[1])
    )
