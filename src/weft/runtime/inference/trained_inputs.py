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

from torch import Tensor, nn

from weft.core.task import Task
from weft.graph.data.sparse_features import SparseFeatures
from weft.ops.csr.adjacency import Adjacency
from weft.runtime.step.inputs import edge_arguments, row_normalised, takes_edges


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
