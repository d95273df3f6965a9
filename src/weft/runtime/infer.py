"""Logits of a trained model on a graph, as the evaluation of its training computes them.

Shapes: N nodes, M requested nodes, F features, C classes.
"""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import ExitStack, contextmanager, nullcontext
from dataclasses import replace

import torch
from torch import Tensor, nn

from weft.batches.layerwise import LayerWise
from weft.batches.source import Batch, Features
from weft.core.errors import ModelError
from weft.core.placement import EVALUATION_EDGES
from weft.core.task import Task
from weft.graph.graph import Graph
from weft.graph.sparse_features import SparseFeatures
from weft.ops.csr.adjacency import Adjacency
from weft.runtime.device.process import DTYPES, matmul_precision, same_draws, seeded
from weft.runtime.step.inputs import bind, cast_features, layers_of, row_normalised, takes_edges
from weft.runtime.step.losses import first_tensor
from weft.runtime.trained_inputs import FeatureRows, given_as_trained

WHOLE_BYTES = 1 << 32  # of a pass over the whole graph: beyond, a model that can is run layer by layer


def infer_logits(
    model: nn.Module, task: Task, graph: Graph, nodes: Tensor, device: torch.device, layerwise: bool | None = None
) -> Tensor:
    """Logits ``[M, C]`` float32 of ``nodes [M]`` on the CPU; ``model`` is on ``device``, the graph anywhere.

    ``layerwise``: one layer after the other in chunks of nodes, in bounded memory (None: if a pass over the whole graph
    would take more than :data:`WHOLE_BYTES`).
    """
    layers = layers_of(model)
    if layerwise is None:
        layerwise = layers is not None and whole_bytes(task, graph) > WHOLE_BYTES
    with ExitStack() as stack:
        stack.enter_context(torch.no_grad())
        stack.enter_context(same_draws(device) if task.traits is None else nullcontext())
        stack.enter_context(seeded(task.seed, device))
        stack.enter_context(matmul_precision(task.precision))
        stack.enter_context(_evaluating(model))
        stack.enter_context(_weights_in(model, DTYPES[task.precision]))
        stack.enter_context(given_as_trained(model))
        if layerwise and layers is not None:
            return _by_layers(model, task, graph, nodes, device, layers)
        return _at_once(model, task, graph, nodes, device)


def whole_bytes(task: Task, graph: Graph) -> int:
    """About what a pass over the whole graph holds at once: features, two activations, and the edges."""
    features = 0 if isinstance(graph.x, SparseFeatures) else graph.num_features
    return 4 * graph.num_nodes * (features + 2 * max(task.hidden, graph.num_classes)) + 8 * graph.num_edges


def _at_once(model: nn.Module, task: Task, graph: Graph, nodes: Tensor, device: torch.device) -> Tensor:
    """One pass over the whole graph."""
    adj, dtype = graph.adj.to(device), DTYPES[task.precision]
    x = row_normalised(graph.x.to(device)) if task.feature_norm == "row" else graph.x.to(device)
    x = cast_features(x, dtype)
    try:
        logits = _call(model, _dense(x) if takes_edges(model) else x, adj)
    except torch.OutOfMemoryError:
        raise
    except Exception:
        if task.traits is not None or not isinstance(x, SparseFeatures) or takes_edges(model):
            raise
        logits = _call(model, x.to_dense(), adj)  # as its training found out
    output, logits = logits, first_tensor(logits)  # there may be an auxiliary loss beside them
    if logits is None or logits.shape[:1] != (graph.num_nodes,):
        what = f"shape {list(logits.shape)}" if isinstance(logits, Tensor) else type(output).__name__
        raise ModelError(f"task {task.label!r}: model {task.model_name} returned {what}, not a row per node")
    return logits.index_select(0, nodes.to(device)).float().cpu()


def _dense(x: Features) -> Tensor:
    return x if isinstance(x, Tensor) else x.to_dense()


def _call(model: nn.Module, x: Features, adj: Adjacency) -> Tensor:
    device = adj.device
    none = torch.zeros(0, dtype=torch.int64, device=device)
    return bind(model)(Batch(x, adj, none, none, torch.ones(1, device=device)))


def _by_layers(model: nn.Module, task: Task, graph: Graph, nodes: Tensor, device: torch.device, layers: int) -> Tensor:
    """Layer by layer, only what ``nodes`` depend on."""
    wanted = nodes.to(graph.device).unique()
    y = torch.zeros(1, dtype=torch.int64, device=graph.device).expand(graph.num_nodes)  # nothing reads them
    about = {"relation": graph.relation, "num_classes": 1, "num_relations": graph.num_relations}
    part = Graph(graph.adj, graph.x, y, test=wanted, **about)
    rows = FeatureRows(graph.x, task.feature_norm, DTYPES[task.precision], device)
    passes = LayerWise(part, rows, device, EVALUATION_EDGES)
    run = bind(model)
    logits = passes.logits(lambda batch: run(_of_one(batch))[None], layers)[0]
    return logits.index_select(0, passes.rows(nodes.to(graph.device))).float().cpu()


def _of_one(batch: Batch) -> Batch:
    """The batch of one member: from the second layer on features have a leading dimension per member."""
    return replace(batch, x=batch.x[0]) if batch.layer else batch


@contextmanager
def _evaluating(model: nn.Module) -> Iterator[None]:
    """``model`` in evaluation mode, and afterwards every part of it as it was."""
    modes = [(module, module.training) for module in model.modules()]
    model.eval()
    try:
        yield
    finally:
        for module, training in modes:
            module.training = training


@contextmanager
def _weights_in(model: nn.Module, dtype: torch.dtype) -> Iterator[None]:
    """The trained parameters in ``dtype`` inside: the type that a step computes with."""
    trained = [p for p in model.parameters() if p.requires_grad and p.is_floating_point() and p.dtype != dtype]
    kept = [parameter.data for parameter in trained]
    for parameter in trained:
        parameter.data = parameter.data.to(dtype)
    try:
        yield
    finally:
        for parameter, data in zip(trained, kept, strict=True):
            parameter.data = data
