"""Predict with a trained model: on the graph it was trained on or another one, with its training's own treatment.

Shapes: N nodes, M requested nodes, C classes.
"""

from __future__ import annotations

import os
from typing import TYPE_CHECKING, Any

import torch
from torch import Tensor, nn

from weft.core.compatibility import objective_name
from weft.core.errors import GraphError, SpecError
from weft.core.task import Task
from weft.engine.base.device import choose_device
from weft.engine.base.graph_cache import HOST, find_graph
from weft.engine.base.memory_errors import clear_memory_errors
from weft.engine.base.model_errors import clear_model_errors
from weft.graph.catalog import names as catalog
from weft.graph.data.arrays import as_ids, as_vector
from weft.graph.data.graph import Graph
from weft.graph.data.splits import SPLITS
from weft.graph.data.validate import check_range
from weft.graph.data.verify import check_ids
from weft.runtime.user_modules.copying import copy_module

if TYPE_CHECKING:
    from weft.engine.results.result import Result

OBJECT = "<"  # how the description of a graph or model begins that was given as an object


def predicted_logits(
    result: Result, graph: Any, nodes: Any, device: str | torch.device | None, layerwise: bool | None
) -> Tensor:
    """What the model returns for ``nodes [M]``, ``[M, C]`` float32 on the CPU; see :meth:`Result.predict`."""
    from weft.runtime.inference.infer import infer_logits  # samplers, which a run without batches does not need

    if result.model is None:
        raise SpecError(f"task {result.name!r}: has no model to predict with; it {result.status}: {result.message}")
    found = graph_for(result, graph)
    check_ids(found)
    _check_fits(result, found)
    _check_cached(result.model, result, found)
    chosen = nodes_of(nodes, found)
    target = _device_of(result.model) if device is None else choose_device(device)
    model = _on_device(result.model, target)
    with clear_memory_errors([result.name], target), clear_model_errors([result.task]):
        return infer_logits(model, result.task, found, chosen, target, layerwise)


def classes_of(result: Result, logits: Tensor) -> Tensor:
    """Class numbers ``[M]``, 0/1 ``[M, C]`` if a node may have several labels, else what the model returns.

    With an objective of the user's own the metric tells: one of Weft's for classes takes the largest number as well.
    """
    kind = _objective(result)
    if kind == "multiclass" or (result.task.has_own("objective") and result.metrics.get("metric") == "accuracy"):
        return logits.argmax(1)
    return (logits > 0).long() if kind == "multilabel" else logits


def probabilities_of(result: Result, logits: Tensor) -> Tensor:
    """Probabilities ``[M, C]`` of classes, or of every label by itself."""
    kind = _objective(result)
    if kind not in ("multiclass", "multilabel"):
        raise SpecError(f"task {result.name!r}: objective={kind!r} has no probabilities; use predict or predict_logits")
    return logits.softmax(1) if kind == "multiclass" else logits.sigmoid()


def graph_for(result: Result, graph: Any) -> Graph:
    """The graph to predict on, with the split that the task was trained on, if it has several."""
    found, number = own_graph(result) if graph is None else _graph(graph), result.task.split
    return found.split(number) if isinstance(number, int) and number < found.num_splits else found


def own_graph(result: Result) -> Graph:
    """The graph that the task was trained on, found again by its name; refused if it is another one by now."""
    task = result.task
    if isinstance(task.graph, Graph):
        return task.graph
    if task.graph.startswith(OBJECT):
        raise SpecError(
            f"task {task.label!r}: was trained on a graph that was given as an object, {task.graph}; give graph="
        )
    found = find_graph(task, HOST)
    before, now = result.trained_on, found.stats().fingerprint()
    if before is not None and before.fingerprint().digest != now.digest:
        raise SpecError(
            f"task {task.label!r}: graph {task.graph!r} had {before.fingerprint().sizes} when it was trained on, and "
            f"has {now.sizes} now, or other degrees or splits; give it as graph= if that is meant"
        )
    return found


def _graph(graph: Any) -> Graph:
    if isinstance(graph, Graph):
        return graph
    if isinstance(graph, (str, os.PathLike)):
        return catalog.load(graph)
    raise SpecError(
        f"graph={type(graph).__name__}: must be a weft.Graph, a name or a path (see weft.Graph.from_pyg and from_edges)"
    )


def _check_fits(result: Result, graph: Graph) -> None:
    """A clear error unless the model can read the graph."""
    trained, task = result.trained_on, result.task
    if graph.x is None:
        raise GraphError(f"graph {graph.name!r} has no features; give x [nodes, features]")
    if trained is None:
        return
    if graph.num_features != trained.num_features:
        raise GraphError(
            f"graph {graph.name!r} has {graph.num_features} features per node, and task {task.label!r} was trained on "
            f"{trained.num_features}"
        )
    if task.traits is not None and task.traits.relational:
        _check_relations(task, graph, trained.num_relations)


def _check_cached(model: nn.Module, result: Result, graph: Graph) -> None:
    """A clear error if a layer of PyG keeps the edges of the graph that it was trained on, and this is another one."""
    trained = result.trained_on
    layers = [name for name, layer in model.named_modules() if _keeps_edges(layer)]
    if layers and trained is not None and trained.fingerprint().digest != graph.stats().fingerprint().digest:
        raise SpecError(
            f"task {result.name!r}: {layers[0]} has cached=True and keeps the edges of the graph that it was trained "
            f"on, which it would use for graph {graph.name!r} as well; train it with cached=False"
        )


def _keeps_edges(layer: nn.Module) -> bool:
    kept = (value for name, value in vars(layer).items() if name.startswith("_cached_"))
    return getattr(layer, "cached", False) is True and any(value is not None for value in kept)


def _check_relations(task: Task, graph: Graph, trained: int) -> None:
    if not 0 < graph.num_relations <= trained:
        raise GraphError(
            f"graph {graph.name!r} has {graph.num_relations} relations, and task {task.label!r} was trained on "
            f"{trained}"
        )


def nodes_of(nodes: Any, graph: Graph) -> Tensor:
    """Node ids ``[M]`` in the order given: ids, a mask ``[N]``, the name of a split, or None for all nodes."""
    if nodes is None:
        return torch.arange(graph.num_nodes)
    if isinstance(nodes, str):
        if nodes not in SPLITS:
            raise SpecError(f"nodes={nodes!r}: must be node ids, a mask, or one of {', '.join(SPLITS)}")
        found: Tensor = getattr(graph, nodes)
        return found.cpu()
    given = as_vector(nodes, "nodes").cpu()
    if given.dtype == torch.bool:
        if given.numel() != graph.num_nodes:
            raise GraphError(f"the mask nodes= has {given.numel()} entries but the graph has {graph.num_nodes} nodes")
        return given.nonzero().squeeze(1)
    ids = as_ids(given, "nodes").long()
    check_range(ids, graph.num_nodes, "nodes")
    return ids


def _objective(result: Result) -> str:
    trained = own_graph(result).stats() if result.trained_on is None else result.trained_on
    return objective_name(result.task, trained.multilabel, trained.regression)


def _device_of(model: nn.Module) -> torch.device:
    tensor = next(model.parameters(), None)
    return HOST if tensor is None else tensor.device


def _on_device(model: nn.Module, device: torch.device) -> nn.Module:
    """``model`` itself, or a copy of it on another device."""
    return model if _device_of(model) == device else copy_module(model)[0].to(device)
