"""Check users' edge arrays and turn them into an adjacency.

Shapes: N nodes, E edges.
"""

from __future__ import annotations

from typing import Any

import torch
from torch import Tensor

from weft.core.errors import GraphError
from weft.graph.data.arrays import as_floats, as_ids, as_tensor, as_vector
from weft.graph.data.csr_from_edges import csr_from_edges, is_symmetric
from weft.graph.data.validate import (
    MAX_NODES,
    check_ascending,
    check_finite,
    check_num_nodes,
    check_offsets,
    check_range,
    check_rows,
)
from weft.ops.csr.adjacency import Adjacency, offset_dtype


def adjacency_from_edges(
    src: Any, dst: Any, num_nodes: int | None, weight: Any, relation: Any, directed: bool, attr: Any = None
) -> tuple[Adjacency, Tensor | None]:
    """The adjacency of edges ``src[e] -> dst[e]`` in any order, and their relations in its order."""
    src, dst = as_ids(src, "src"), as_ids(dst, "dst")
    if src.numel() != dst.numel():
        raise GraphError(f"src has {src.numel()} entries but dst has {dst.numel()}; give one of each per edge")
    if num_nodes is None:
        num_nodes = 1 + max((int(ids.max()) for ids in (src, dst) if ids.numel()), default=-1)
    check_num_nodes(num_nodes)
    num_nodes = int(num_nodes)
    check_range(src, num_nodes, "src")
    check_range(dst, num_nodes, "dst")
    weight, relation = edge_values(weight, relation, src)
    attr = edge_features(attr, src)
    return csr_from_edges(src, dst.to(src.device), num_nodes, weight, relation, directed=directed, attr=attr)


def merged_words(src: Any, dst: Any, adj: Adjacency) -> str:
    """What to say of parallel edges that ``directed=False`` merged; "" if every pair was given once, or both ways."""
    loops = int((adj.rows() == adj.indices).sum())
    given, pairs = len(src), (adj.num_edges + loops) // 2
    if given == pairs or (given == 2 * pairs - loops and _as_many_out_as_in(src, dst)):
        return ""
    return (
        f"{given:,} given edges join {pairs:,} pairs of nodes: directed=False makes one edge each way of every pair, "
        "with the mean of the weights; directed=True keeps parallel edges"
    )


def _as_many_out_as_in(src: Any, dst: Any) -> bool:
    """Whether every node has as many edges from it as to it, as it has if all are given both ways."""
    outward, inward = (torch.bincount(as_ids(ids, "ids").long()) for ids in (src, dst))
    return torch.equal(outward, inward.to(outward.device))


def adjacency_from_csr(
    indptr: Any, indices: Any, weight: Any, relation: Any, symmetric: bool | None, attr: Any = None
) -> tuple[Adjacency, Tensor | None]:
    """The adjacency of CSR arrays, scanned but neither sorted nor, when they are int32, copied."""
    ids = as_ids(indices, "indices")
    offsets = as_ids(indptr, "indptr").to(ids.device)
    check_offsets(offsets, ids.numel())
    check_num_nodes(offsets.numel() - 1)
    check_range(ids, offsets.numel() - 1, "indices")
    check_ascending(offsets, ids)
    weight, relation = edge_values(weight, relation, ids)
    adj = Adjacency(offsets.to(offset_dtype(ids.numel())), ids.to(torch.int32), weight=weight)
    adj.symmetric = is_symmetric(adj) if symmetric is None else symmetric
    attr = edge_features(attr, ids)
    return adj if attr is None else adj.attributed(attr), relation


def edge_features(attr: Any, ids: Tensor) -> Tensor | None:
    """Features of edges ``[E]`` or ``[E, D]`` checked, on the device of the edges."""
    if attr is None:
        return None
    attr = as_floats(as_tensor(attr, "edge_attr"), "edge_attr").to(ids.device)
    if attr.dim() not in (1, 2):
        raise GraphError(f"edge_attr has shape {list(attr.shape)}; features of edges are [edges] or [edges, features]")
    check_rows(attr.shape[0], ids.numel(), "edge_attr", "edge")
    check_finite(attr, "edge_attr")
    return attr


def edge_values(weight: Any, relation: Any, ids: Tensor) -> tuple[Tensor | None, Tensor | None]:
    """Weights and relations ``[E]`` checked, on the device of the edges."""
    if weight is not None:
        weight = as_floats(as_vector(weight, "edge_weight"), "edge_weight").to(ids.device)
        check_rows(weight.numel(), ids.numel(), "edge_weight", "edge")
        check_finite(weight, "edge_weight")
    if relation is not None:
        relation = as_ids(relation, "relation").to(ids.device)
        check_rows(relation.numel(), ids.numel(), "relation", "edge")
        check_range(relation, MAX_NODES, "relation", "relation numbers")
        relation = relation.to(torch.int32)
    return weight, relation
