"""Batches of PyG's ``NeighborLoader`` as subgraphs. PyG is not imported: a batch is known by its attributes.

Shapes: M nodes of a batch, S seeds, P edges.
"""

from __future__ import annotations

from typing import Any

import torch
from torch import Tensor

from weft.core.errors import InputError
from weft.flow.sampling.batch import Subgraph


def from_pyg(batch: Any) -> Subgraph:
    """The local subgraph of a PyG batch.

    It has ``n_id [M]`` (the graph's node ids, seeds first), ``edge_index [2, P]`` (places in ``n_id``) and
    ``batch_size`` (or ``input_id [S]``); ``edge_weight [P]``, ``edge_type [P]``, ``edge_attr [P, ...]``, ``x [M, F]``
    and ``y [M]`` are taken over if it has them.
    """
    if hasattr(batch, "node_types"):
        raise InputError(
            "a batch of HeteroData has several kinds of nodes; convert the data with to_homogeneous() first"
        )
    nodes, edges = _tensor(batch, "n_id"), _tensor(batch, "edge_index")
    if nodes.dim() != 1 or edges.dim() != 2 or edges.shape[0] != 2:
        raise InputError(
            f"n_id must be [nodes] and edge_index [2, edges], not {list(nodes.shape)} and {list(edges.shape)}"
        )
    _check_places(edges, nodes.numel())
    given = {"weight": _per(batch, "edge_weight", edges.shape[1], "edge")}
    attr = _per(batch, "edge_attr", edges.shape[1], "edge")
    given["edge_attr"] = None if attr is None else attr.to(torch.float32)
    relation = _per(batch, "edge_type", edges.shape[1], "edge")
    given["relation"] = None if relation is None else relation.to(torch.int32)
    given |= {name: _per(batch, name, nodes.numel(), "node") for name in ("x", "y")}
    return Subgraph(edges.long(), nodes.to(torch.int32), _count_seeds(batch, nodes.numel()), **given)


def _tensor(batch: Any, name: str) -> Tensor:
    found = getattr(batch, name, None)
    if not isinstance(found, Tensor) or found.is_floating_point():
        what = "is missing" if found is None else f"is {type(found).__name__}, not a tensor of integers"
        raise InputError(
            f"{name} of a {type(batch).__name__} {what}; batches of PyG's NeighborLoader have n_id and edge_index"
        )
    return found


def _check_places(edges: Tensor, count: int) -> None:
    if edges.numel() == 0:
        return
    low, high = (int(end) for end in torch.aminmax(edges))
    if low < 0 or high >= count:
        raise InputError(f"edge_index has {low if low < 0 else high}, which is no place in n_id of {count} nodes")


def _per(batch: Any, name: str, count: int, what: str) -> Tensor | None:
    found = getattr(batch, name, None)
    if found is not None and (not isinstance(found, Tensor) or found.shape[0] != count):
        size = list(found.shape) if isinstance(found, Tensor) else type(found).__name__
        raise InputError(f"{name} of the batch is {size}; it must have one row per {what}, {count}")
    return found


def _count_seeds(batch: Any, nodes: int) -> int:
    count = getattr(batch, "batch_size", None)
    if count is None and isinstance(ids := getattr(batch, "input_id", None), Tensor):
        count = ids.numel()
    if not isinstance(count, int) or not 1 <= count <= nodes:
        raise InputError(f"batch_size={count!r} must say how many of the {nodes} nodes in n_id are seeds")
    return count
