"""Forms of the adjacency that layers aggregate over, each built once and kept on the plain one."""

from __future__ import annotations

import torch

from weft.core.errors import InputError
from weft.ops import Adjacency
from weft.ops.csr.adjacency import offset_dtype, supplied_by_adjacency


def without_weights(adj: Adjacency) -> Adjacency:
    """The structure without edge weights: SAGE, GIN and the attention layers ignore them."""
    return adj if adj.weight is None else adj.derived("without_weights", adj.scaled)


def with_identity(adj: Adjacency) -> Adjacency:
    """``A + I`` without weights: every row gains one entry, also a row that has a self loop already."""
    own = getattr(adj, "with_identity", None)  # without a search for its loops
    if own is not None:
        return own()
    return adj.derived("plus identity", lambda: plus_identity(without_weights(adj)))


@supplied_by_adjacency
def plus_identity(adj: Adjacency) -> Adjacency:
    """``A + I`` of an adjacency without weights."""
    rows, cols = adj.rows(), adj.indices
    if not bool((rows == cols).any()):
        return adj.with_self_loops()  # the same matrix, shared with the layers that add self loops
    ids = torch.arange(adj.num_rows + 1, dtype=cols.dtype, device=adj.device)
    rows, cols = torch.cat([rows, ids[:-1]]), torch.cat([cols, ids[:-1]])
    order = torch.sort(rows.long() * adj.num_cols + cols).indices
    indptr = (adj.indptr.long() + ids).to(offset_dtype(cols.numel()))
    more = Adjacency(indptr, cols[order], adj.num_cols, symmetric=adj.symmetric)
    more.nodes = adj.nodes
    return more


def relation_of_edges(adj: Adjacency) -> Adjacency:
    """``[E x R]``: one entry per edge, at its relation: 1 divided by the edges of that relation into its node."""
    return adj.derived("relation of edges", lambda: make_relation_of_edges(adj))


@supplied_by_adjacency
def make_relation_of_edges(adj: Adjacency) -> Adjacency:
    """Of an adjacency with data."""
    return relation_entries(adj)


def relation_entries(adj: Adjacency) -> Adjacency:
    """The matrix of :func:`relation_of_edges`."""
    if adj.relation is None:
        raise InputError("this layer needs the relation of every edge; give the graph relation=, one number per edge")
    key = adj.relation.long() * adj.num_rows + adj.rows()
    ordered, order = torch.sort(key)
    low, high = (torch.searchsorted(ordered, ordered, right=side) for side in (False, True))
    scale = torch.empty(key.numel(), device=adj.device).index_copy_(0, order, (high - low).float().reciprocal())
    each = torch.arange(key.numel() + 1, device=adj.device).to(offset_dtype(key.numel()))
    return Adjacency(each, adj.relation, adj.num_relations, row_scale=scale)
