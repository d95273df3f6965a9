"""Say what a model does not read of a graph's edges, and refuse what it cannot do with them."""

from __future__ import annotations

import torch
from torch import nn

from weft.core.errors import SpecError
from weft.core.task import Task
from weft.graph.data.graph import Graph
from weft.ops.csr.adjacency import Adjacency
from weft.runtime.user_modules.call_style import call_style, parameters_of


def unread_edges(task: Task, model: nn.Module, graph: Graph) -> list[str]:
    """Remarks on weights and features of edges that the graph has and the model does not read."""
    notes = []
    reads_weight = reads_edges(task, model, "edge_weight")
    if graph.edge_weight is not None and reads_weight is False:
        notes.append(f"{task.model_name} does not read the edge weights of graph {graph.name!r}")
    same = graph.edge_attr is not None and graph.edge_attr.numel() == graph.num_edges and graph.edge_weight is not None
    if graph.edge_attr is not None and reads_edges(task, model, "edge_attr") is False and not (same and reads_weight):
        notes.append(f"{task.model_name} does not read the edge features of graph {graph.name!r}")
    return notes


def reads_edges(task: Task, model: nn.Module, name: str) -> bool | None:
    """Whether the model reads ``edge_weight`` or ``edge_attr``; None if nothing says so."""
    if task.traits is not None:
        return task.traits.weighted if name == "edge_weight" else False
    return name in parameters_of(model) if call_style(model) == "edges" else None


def given_of_edges(task: Task, model: nn.Module, adj: Adjacency) -> tuple[str, ...]:
    """What the model is given per edge, of what the edges have."""
    had = {"edge_weight": adj.weight, "edge_type": adj.relation, "edge_attr": adj.edge_attr}
    if task.traits is not None:
        return ()
    style, wanted = call_style(model), parameters_of(model)
    return tuple(
        name
        for name, value in had.items()
        if value is not None
        and (style == "data" or (style == "edges" and name in wanted) or (style, name) == ("transposed", "edge_weight"))
    )


def check_edges(task: Task, graph: Graph) -> None:
    """A :class:`SpecError` for a model that cannot divide by what the edges weigh: GCN, by roots of degrees."""
    weight = graph.edge_weight
    if task.model != "gcn" or weight is None or weight.is_meta or not bool((weight < 0).any()):
        return
    rows, loops = graph.adj.rows().long(), graph.adj.rows() == graph.adj.indices
    degree = torch.ones(graph.num_nodes, dtype=weight.dtype, device=weight.device)
    degree[rows[loops]] = 0.0
    degree.index_add_(0, rows, weight)
    if bool((degree < 0).any()):
        node = int((degree < 0).nonzero()[0])
        raise SpecError(
            f"task {task.label!r}: the weights of the edges into node {node} of graph {graph.name!r} sum to "
            f"{float(degree[node]):.4g} with its self loop; GCN divides by the square root of that: use weights that "
            "are not negative, or another model"
        )
