"""Check users' edge arrays, sort them into CSR by destination, and count their relations.

Torch operators alone, the same on CPU and GPU. One int64 key per edge, ``dst * N + src``, carries the whole order:
sorting it sorts rows and columns at once, and row offsets are found in it by binary search.

Shapes: N nodes, E edges.
"""

from __future__ import annotations

from numbers import Integral
from typing import Any

import torch
from torch import Tensor

from weft.core.errors import GraphError
from weft.graph.check import (
    MAX_NODES,
    as_floats,
    as_ids,
    as_tensor,
    as_vector,
    check_ascending,
    check_finite,
    check_num_nodes,
    check_offsets,
    check_range,
    check_rows,
)
from weft.ops.csr.adjacency import Adjacency, offset_dtype


def in_order(values: Tensor | None, order: Tensor | None) -> Tensor | None:
    """Numbers per edge in another order; ``order=None`` keeps them as they are."""
    return values if values is None or order is None else values[order]


def edge_keys(src: Tensor, dst: Tensor, num_cols: int) -> Tensor:
    """``dst * num_cols + src`` ``[E]`` int64."""
    # A fresh tensor even when dst is int64 already: the caller changes it in place.
    return dst.to(torch.int64).mul(num_cols).add_(src)


def sort_keys(keys: Tensor, *, need_order: bool) -> tuple[Tensor, Tensor | None]:
    """Keys ascending, and where each came from (None: not requested, or they already ascended)."""
    if bool((keys[1:] >= keys[:-1]).all()):
        return keys, None
    ordered, order = torch.sort(keys, stable=need_order)
    return ordered, order if need_order else None


def row_offsets(keys: Tensor, num_rows: int, num_cols: int) -> Tensor:
    """``indptr [num_rows + 1]`` of sorted keys."""
    starts = torch.arange(num_rows + 1, dtype=torch.int64, device=keys.device).mul_(num_cols)
    return torch.searchsorted(keys, starts).to(offset_dtype(keys.numel()))


def undirected(
    src: Tensor, dst: Tensor, num_nodes: int, weight: Tensor | None, relation: Tensor | None, attr: Tensor | None = None
) -> tuple[Tensor, Tensor, Tensor | None, Tensor | None, Tensor | None]:
    """Every joined pair once in each direction, self loops once.

    All given edges between the same two nodes (and of the same relation, if there are relations) become one; its weight
    (and features) is the mean of theirs, so a list that already holds both directions keeps its weights.
    """
    low, high = torch.minimum(src, dst), torch.maximum(src, dst)
    pairs = edge_keys(low, high, num_nodes)
    del low, high
    if relation is not None:
        # Least significant key first; the second, stable sort keeps relations ascending within a pair.
        order = torch.sort(relation, stable=True).indices
        pairs, relation = pairs[order], relation[order]
        weight, attr = in_order(weight, order), in_order(attr, order)
    pairs, order = sort_keys(pairs, need_order=any(values is not None for values in (weight, relation, attr)))
    weight, relation, attr = (in_order(values, order) for values in (weight, relation, attr))
    fresh = torch.ones_like(pairs, dtype=torch.bool)
    fresh[1:] = pairs[1:] != pairs[:-1]
    if relation is not None:
        fresh[1:] |= relation[1:] != relation[:-1]
    first = fresh.nonzero().squeeze(1)
    if first.numel() < pairs.numel():  # merge runs of equal pairs and relations
        lengths = torch.cat([first[1:], first.new_tensor([pairs.numel()])]) - first
        weight, attr = (  # averages in float64, so that equal values stay equal
            values
            if values is None
            else torch.segment_reduce(values.double(), "mean", lengths=lengths, axis=0).to(values.dtype)
            for values in (weight, attr)
        )
        pairs, relation = pairs[first], None if relation is None else relation[first]
    high, low = pairs // num_nodes, pairs % num_nodes
    back = (high != low).nonzero().squeeze(1)
    src, dst = torch.cat([low, high[back]]), torch.cat([high, low[back]])
    both_ways = [None if values is None else torch.cat([values, values[back]]) for values in (weight, relation, attr)]
    return src, dst, *both_ways


def is_symmetric(adj: Adjacency) -> bool:
    """Whether the matrix equals its transpose, weights included.

    Exact. Most directed graphs are found out by their degrees; else a stable sort of the edges by source
    gives the transpose, to be compared with the original. (On 10 M edges and 2 cores this took 1.5 s, and
    looking up every edge's mirror image by binary search 4.3 s.)
    """
    if not torch.equal(torch.bincount(adj.indices, minlength=adj.num_cols), adj.degrees()):
        return False
    order = torch.sort(adj.indices, stable=True).indices
    if not torch.equal(adj.rows()[order], adj.indices):
        return False
    return adj.weight is None or torch.equal(adj.weight[order], adj.weight)


def adjacency_from_edges(
    src: Any, dst: Any, num_nodes: int | None, weight: Any, relation: Any, directed: bool, attr: Any
) -> tuple[Adjacency, Tensor | None]:
    """The adjacency of edges ``src[e] -> dst[e]`` in any order, and their relations in its order.

    ``weight`` and ``relation`` are ``[E]``, ``attr`` is ``[E, ...]``. ``directed=False`` joins every pair both ways
    exactly once: see :func:`undirected`.
    """
    src, dst = as_ids(src, "src"), as_ids(dst, "dst")
    if src.numel() != dst.numel():
        raise GraphError(f"src has {src.numel()} entries but dst has {dst.numel()}; give one of each per edge")
    if num_nodes is None:
        num_nodes = 1 + max((int(ids.max()) for ids in (src, dst) if ids.numel()), default=-1)
    check_num_nodes(num_nodes)
    num_nodes = int(num_nodes)
    check_range(src, num_nodes, "src")
    check_range(dst, num_nodes, "dst")
    weight, relation, attr = edge_values(weight, relation, attr, src)
    dst = dst.to(src.device)
    if not directed:
        src, dst, weight, relation, attr = undirected(src, dst, num_nodes, weight, relation, attr)
    keys = edge_keys(src, dst, num_nodes)
    del src, dst
    keys, order = sort_keys(keys, need_order=any(values is not None for values in (weight, relation, attr)))
    weight, relation, attr = (in_order(values, order) for values in (weight, relation, attr))
    indptr = row_offsets(keys, num_nodes, num_nodes)
    indices = keys.remainder_(num_nodes).to(torch.int32)
    del keys
    adj = Adjacency(indptr, indices, num_nodes, weight=weight, symmetric=not directed)
    adj.symmetric = adj.symmetric or is_symmetric(adj)
    return adj if attr is None else adj.attributed(attr), relation


def merged_words(src: Any, dst: Any, adj: Adjacency) -> str:
    """A note on parallel edges that ``directed=False`` merged; "" if every pair was given once, or both ways."""
    loops = int((adj.rows() == adj.indices).sum())
    edges, pairs = len(src), (adj.num_edges + loops) // 2
    if edges == pairs:
        return ""
    if edges == 2 * pairs - loops:  # both ways: every node then has as many edges from it as to it
        outward, inward = (torch.bincount(as_ids(ids, "ids").long()) for ids in (src, dst))
        if torch.equal(outward, inward.to(outward.device)):
            return ""
    return (
        f"{edges:,} given edges join {pairs:,} pairs of nodes: directed=False makes one edge each way of every pair, "
        "with the mean of the weights; directed=True keeps parallel edges"
    )


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
    weight, relation, attr = edge_values(weight, relation, attr, ids)
    adj = Adjacency(offsets.to(offset_dtype(ids.numel())), ids.to(torch.int32), weight=weight)
    adj.symmetric = is_symmetric(adj) if symmetric is None else symmetric
    return adj if attr is None else adj.attributed(attr), relation


def edge_values(weight: Any, relation: Any, attr: Any, ids: Tensor) -> tuple[Tensor | None, ...]:
    """Weights and relations ``[E]`` and features ``[E]`` or ``[E, D]`` checked, on the device of the edges."""
    if weight is not None:
        weight = as_floats(as_vector(weight, "edge_weight"), "edge_weight").to(ids.device)
        check_rows(weight.numel(), ids.numel(), "edge_weight", "edge")
        check_finite(weight, "edge_weight")
    if relation is not None:
        relation = as_ids(relation, "relation").to(ids.device)
        check_rows(relation.numel(), ids.numel(), "relation", "edge")
        check_range(relation, MAX_NODES, "relation", "relation numbers")
        relation = relation.to(torch.int32)
    if attr is not None:
        attr = as_floats(as_tensor(attr, "edge_attr"), "edge_attr").to(ids.device)
        if attr.dim() not in (1, 2):
            raise GraphError(
                f"edge_attr has shape {list(attr.shape)}; features of edges are [edges] or [edges, features]"
            )
        check_rows(attr.shape[0], ids.numel(), "edge_attr", "edge")
        check_finite(attr, "edge_attr")
    return weight, relation, attr


MOST_RELATIONS = 1 << 20  # more kinds of edges than that are a column of something else


def check_relations(relation: Tensor | None, num_relations: int | None) -> int:
    """R of checked relation numbers ``[E]``: as given, or the largest plus one; 0 without any."""
    if num_relations is not None and (isinstance(num_relations, bool) or not isinstance(num_relations, Integral)):
        raise GraphError(f"num_relations={num_relations!r} must be a whole number")
    if relation is None:
        if num_relations:
            raise GraphError(f"num_relations={num_relations} without relation; give the relation of every edge as well")
        return 0
    count = int(relation.max()) + 1 if relation.numel() else 0
    most = max(count, num_relations or 0)
    if most > MOST_RELATIONS:
        raise GraphError(f"{most:,} relations are more than {MOST_RELATIONS:,}; renumber them 0, 1, 2, ...")
    if num_relations is not None and count > num_relations:
        raise GraphError(f"relation {count - 1} must be below num_relations={num_relations}")
    return count if num_relations is None else int(num_relations)


def relation_counts(adj: Adjacency) -> tuple[tuple[int, ...], int]:
    """Edges of every relation, and pairs of a node and a relation that it has an in-edge of."""
    if adj.relation is None:
        return (), 0
    edges = tuple(torch.bincount(adj.relation, minlength=adj.num_relations).tolist())
    keys = torch.sort(adj.relation.long() * adj.num_rows + adj.rows()).values
    return edges, int((keys.diff() != 0).sum()) + 1 if keys.numel() else 0
