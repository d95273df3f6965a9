"""From a list of edges to CSR by destination, in torch operators alone: the same on CPU and GPU.

One int64 key per edge, ``dst * N + src``, carries the whole order: sorting it sorts rows and columns at
once, row offsets are found in it by binary search, and the symmetry of the graph is read off it.
"""

from __future__ import annotations

import torch
from torch import Tensor

from weft.graph.validate import blocks
from weft.ops.adjacency import Adjacency, offset_dtype

SEARCH_BLOCK = 2**20


def csr_from_edges(
    src: Tensor,
    dst: Tensor,
    num_nodes: int,
    weight: Tensor | None = None,
    relation: Tensor | None = None,
    *,
    directed: bool = True,
) -> tuple[Adjacency, Tensor | None]:
    """The adjacency of the edges ``src[e] -> dst[e]``, and their relations in its order.

    ``src``, ``dst``, ``weight``, ``relation`` are ``[E]`` and already checked. ``directed=False`` joins every
    pair both ways exactly once: see :func:`undirected`.
    """
    if not directed:
        src, dst, weight, relation = undirected(src, dst, num_nodes, weight, relation)
    keys = edge_keys(src, dst, num_nodes)
    del src, dst
    keys, order = sort_keys(keys, need_order=weight is not None or relation is not None)
    if order is not None:
        weight = None if weight is None else weight[order]
        relation = None if relation is None else relation[order]
    symmetric = is_symmetric(keys, num_nodes, weight) if directed else True
    indptr = row_offsets(keys, num_nodes, num_nodes)
    indices = keys.remainder_(num_nodes).to(torch.int32)
    return Adjacency(indptr, indices, num_nodes, weight=weight, symmetric=symmetric), relation


def edge_keys(src: Tensor, dst: Tensor, num_cols: int) -> Tensor:
    """``dst * num_cols + src`` ``[E]`` int64."""
    # A fresh tensor even when dst is int64 already: the caller changes it in place.
    return dst.to(torch.int64).mul(num_cols).add_(src)


def sort_keys(keys: Tensor, *, need_order: bool) -> tuple[Tensor, Tensor | None]:
    """Keys ascending, and where each came from (None: not asked for, or they already ascended)."""
    if bool((keys[1:] >= keys[:-1]).all()):
        return keys, None
    ordered, order = torch.sort(keys, stable=need_order)
    return ordered, order if need_order else None


def row_offsets(keys: Tensor, num_rows: int, num_cols: int) -> Tensor:
    """``indptr [num_rows + 1]`` of sorted keys."""
    starts = torch.arange(num_rows + 1, dtype=torch.int64, device=keys.device).mul_(num_cols)
    return torch.searchsorted(keys, starts).to(offset_dtype(keys.numel()))


def csr_keys(adj: Adjacency) -> Tensor:
    """The sorted edge keys of a CSR."""
    return edge_keys(adj.indices, adj.rows(), adj.num_cols)


def undirected(
    src: Tensor, dst: Tensor, num_nodes: int, weight: Tensor | None, relation: Tensor | None
) -> tuple[Tensor, Tensor, Tensor | None, Tensor | None]:
    """Every joined pair once in each direction, self loops once.

    All given edges between the same two nodes (and of the same relation, where there are relations) become
    one; its weight is the mean of theirs, so a list that already holds both directions keeps its weights.
    """
    low, high = torch.minimum(src, dst), torch.maximum(src, dst)
    pairs = edge_keys(low, high, num_nodes)
    del low, high
    if relation is not None:
        # Least significant key first; the second, stable sort keeps relations ascending within a pair.
        order = torch.sort(relation, stable=True).indices
        pairs, relation = pairs[order], relation[order]
        weight = None if weight is None else weight[order]
    pairs, order = sort_keys(pairs, need_order=weight is not None or relation is not None)
    if order is not None:
        weight = None if weight is None else weight[order]
        relation = None if relation is None else relation[order]
    pairs, weight, relation = _merge_equal(pairs, weight, relation)
    high, low = pairs // num_nodes, pairs % num_nodes
    back = (high != low).nonzero().squeeze(1)
    src, dst = torch.cat([low, high[back]]), torch.cat([high, low[back]])
    weight = None if weight is None else torch.cat([weight, weight[back]])
    relation = None if relation is None else torch.cat([relation, relation[back]])
    return src, dst, weight, relation


def _merge_equal(
    pairs: Tensor, weight: Tensor | None, relation: Tensor | None
) -> tuple[Tensor, Tensor | None, Tensor | None]:
    """Runs of equal (pair, relation) merged; weights averaged in float64, so that equal ones stay equal."""
    fresh = torch.ones_like(pairs, dtype=torch.bool)
    fresh[1:] = pairs[1:] != pairs[:-1]
    if relation is not None:
        fresh[1:] |= relation[1:] != relation[:-1]
    first = fresh.nonzero().squeeze(1)
    if first.numel() == pairs.numel():
        return pairs, weight, relation
    if weight is not None:
        ends = torch.cat([first[1:], first.new_tensor([pairs.numel()])])
        weight = torch.segment_reduce(weight.double(), "mean", lengths=ends - first).to(weight.dtype)
    return pairs[first], weight, None if relation is None else relation[first]


def is_symmetric(keys: Tensor, num_nodes: int, weight: Tensor | None = None) -> bool:
    """Whether the square matrix with these sorted keys equals its transpose, weights included.

    Exact: as many edges below the diagonal as above it, and every one above has its mirror image, equally
    often and of the same weight. A directed graph is found out in the first block. Parallel edges with
    weights count as not symmetric, which costs a transpose and is never wrong.
    """
    parallel = bool((keys[1:] == keys[:-1]).any())
    if parallel and weight is not None:
        return False
    balance = 0
    for part in blocks(keys.numel(), SEARCH_BLOCK):
        dst, src = keys[part] // num_nodes, keys[part] % num_nodes
        balance += int((src > dst).sum()) - int((src < dst).sum())
        above = (src > dst).nonzero().squeeze(1)
        mirrored = edge_keys(dst[above], src[above], num_nodes)
        if not _mirrored(keys, above + part.start, mirrored, weight, parallel):
            return False
    return balance == 0


def _mirrored(keys: Tensor, edges: Tensor, mirrored: Tensor, weight: Tensor | None, parallel: bool) -> bool:
    """Whether each listed edge has its mirror image among the keys."""
    if edges.numel() == 0:
        return True
    found = torch.searchsorted(keys, mirrored)
    at = found.clamp(max=keys.numel() - 1)
    if not bool((keys[at] == mirrored).all()):
        return False
    if weight is not None:
        return bool((weight[at] == weight[edges]).all())
    if not parallel:
        return True
    images = torch.searchsorted(keys, mirrored, right=True) - found
    own = keys[edges]
    twins = torch.searchsorted(keys, own, right=True) - torch.searchsorted(keys, own)
    return bool((images == twins).all())
