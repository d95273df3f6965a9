"""Logits of a trained model on a graph, as the evaluation of its training computes them; and how a result calls it.

A training may divide features by their sums (``feature_norm="row"``) and makes sparse ones dense for modules that take
tensors. A module that is handed back does the same when it is called, so that ``model(graph.x, graph.adj)`` is what was
trained. Dividing by sums twice changes nothing but rounding.

Shapes: N nodes, M requested nodes, F features, C classes, Z stored values.
"""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import ExitStack, contextmanager
from copy import copy
from dataclasses import dataclass, field, replace
from typing import Any

import torch
from torch import Tensor, nn

from weft.batches.features import FeatureStore
from weft.batches.source import Batch, Features
from weft.core.errors import ModelError
from weft.core.placement import EVALUATION_EDGES
from weft.core.task import Task
from weft.graph.graph import Graph
from weft.graph.sparse_features import SparseFeatures
from weft.ops.csr.adjacency import Adjacency, offset_dtype
from weft.runtime.device.process import DTYPES, matmul_precision, seeded
from weft.runtime.step.inputs import bind, edge_arguments, layers_of, takes_edges, treated
from weft.runtime.step.losses import first_tensor

WHOLE_BYTES = 1 << 32  # of a pass over the whole graph: beyond, a model that can is run layer by layer


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
        return treated(x, self.norm, x.dtype, self.dense)


def treat_inputs(model: nn.Module, task: Task, dense: bool) -> nn.Module:
    """``model`` with a hook for what it was trained on, if that is not just what a graph holds."""
    edges = task.traits is None and takes_edges(model)
    if task.feature_norm is not None or dense or edges:
        model.register_forward_pre_hook(TrainedInputs(task.feature_norm, dense or edges, edges), with_kwargs=True)
    return model


def infer_logits(
    model: nn.Module, task: Task, graph: Graph, nodes: Tensor, device: torch.device, layerwise: bool | None = None
) -> Tensor:
    """Logits ``[M, C]`` float32 of ``nodes [M]`` on the CPU; ``model`` is on ``device``, the graph anywhere.

    ``layerwise``: one layer after the other in chunks of nodes, in bounded memory (None: if a pass over the whole graph
    would take more than :data:`WHOLE_BYTES`).
    """
    layers, dtype = layers_of(model), DTYPES[task.precision]
    if layerwise is None and layers is not None:
        # About what a pass over the whole graph holds at once: features, two activations, and the edges.
        features = 0 if isinstance(graph.x, SparseFeatures) else graph.num_features
        row = features + 2 * max(task.hidden, graph.num_classes)
        layerwise = 4 * graph.num_nodes * row + 8 * graph.num_edges > WHOLE_BYTES
    with ExitStack() as stack:
        stack.enter_context(torch.no_grad())
        stack.enter_context(seeded(task.seed, device))
        stack.enter_context(matmul_precision(task.precision))
        stack.enter_context(_as_evaluated(model, dtype))
        if layerwise and layers is not None:
            return _by_layers(model, task, graph, nodes, device, layers)
        adj = graph.adj.to(device)
        x = treated(graph.x.to(device), task.feature_norm, dtype, dense=takes_edges(model))
        none = torch.zeros(0, dtype=torch.int64, device=device)
        batch = Batch(x, adj, none, none, torch.ones(1, device=device))
        try:
            output = bind(model)(batch)
        except torch.OutOfMemoryError:
            raise
        except Exception:
            if task.traits is not None or isinstance(x, Tensor):
                raise
            output = bind(model)(replace(batch, x=x.to_dense()))  # as its training found out
    logits = first_tensor(output)  # there may be an auxiliary loss as well
    if logits is None or logits.shape[:1] != (graph.num_nodes,):
        what = f"shape {list(logits.shape)}" if isinstance(logits, Tensor) else type(output).__name__
        raise ModelError(f"task {task.label!r}: model {task.model_name} returned {what}, not a row per node")
    return logits.index_select(0, nodes.to(device)).float().cpu()


def _by_layers(model: nn.Module, task: Task, graph: Graph, nodes: Tensor, device: torch.device, layers: int) -> Tensor:
    """Layer by layer, only what ``nodes`` depend on."""
    from weft.batches.layerwise import LayerWise  # samplers, which a run without batches does not need

    run = bind(model)

    def infer(batch: Batch) -> Tensor:
        """One member: from the second layer on features have a leading dimension per member."""
        return run(replace(batch, x=batch.x[0]) if batch.layer else batch)[None]

    y = torch.zeros(1, dtype=torch.int64, device=graph.device).expand(graph.num_nodes)  # nothing reads them
    relations = {"relation": graph.relation, "num_relations": graph.num_relations}
    part = Graph(graph.adj, graph.x, y, test=nodes.to(graph.device).unique(), num_classes=1, **relations)
    rows = FeatureRows(graph.x, task.feature_norm, DTYPES[task.precision], device)
    passes = LayerWise(part, rows, device, EVALUATION_EDGES)
    logits = passes.logits(infer, layers)[0]
    return logits.index_select(0, passes.rows(nodes.to(graph.device))).float().cpu()


@contextmanager
def _as_evaluated(model: nn.Module, dtype: torch.dtype) -> Iterator[None]:
    """``model`` as an evaluation calls it, with features that are treated already; restored afterwards.

    It is in evaluation mode, and the trained parameters are in ``dtype``, the type that a step computes with.
    """
    modes = [(module, module.training) for module in model.modules()]
    cast = [p for p in model.parameters() if p.requires_grad and p.is_floating_point() and p.dtype != dtype]
    weights = [parameter.data for parameter in cast]
    hooks = [hook for hook in model._forward_pre_hooks.values() if isinstance(hook, TrainedInputs)]
    try:
        model.eval()
        for parameter in cast:
            parameter.data = parameter.data.to(dtype)
        for hook in hooks:
            hook.active = False
        yield
    finally:
        for hook in hooks:
            hook.active = True
        for parameter, data in zip(cast, weights, strict=True):
            parameter.data = data
        for module, training in modes:
            module.training = training


class FeatureRows:
    """Rows of ``x [N, F]`` as a training treats them, without treating all of them at once.

    They are on ``device``, divided by their sums if ``norm="row"``, dense, in ``dtype``.
    """

    def __init__(self, x: Features, norm: str | None, dtype: torch.dtype, device: torch.device) -> None:
        self._x, self._norm, self._dtype, self._device = x, norm, dtype, device
        self._store = FeatureStore(x, device) if isinstance(x, Tensor) else None

    def read(self, ids: Tensor) -> Tensor:
        """The rows ``[M, F]`` of ``ids [M]``."""
        rows = sparse_rows(self._x, ids) if self._store is None else self._store.read(ids)
        return treated(rows, self._norm, self._dtype, dense=True).to(self._device)


def sparse_rows(x: SparseFeatures, ids: Tensor) -> SparseFeatures:
    """The rows ``ids [M]`` of ``x [N, F]``, each as it is stored."""
    matrix = x.matrix
    ids = ids.to(matrix.device).long()
    begin, count = matrix.indptr[ids].long(), (matrix.indptr[ids + 1] - matrix.indptr[ids]).long()
    ends = count.cumsum(0)
    indptr = torch.cat([ends.new_zeros(1), ends])
    stored = torch.arange(int(ends[-1]) if ids.numel() else 0, device=matrix.device)
    stored += torch.repeat_interleave(begin - indptr[:-1], count)
    offsets = indptr.to(offset_dtype(stored.numel()))
    return SparseFeatures(Adjacency(offsets, matrix.indices[stored], matrix.num_cols, weight=x.values[stored]))
