"""Orders of nodes that may keep neighbours on one rank, and the graph in such an order.

A rank has a range of the nodes, so the order decides how many edges cross between ranks.
:mod:`weft.engine.plan` counts them. Which order helps depends on the graph: communities gain much,
graphs wired at random nothing.

Shapes: N nodes.
"""

from __future__ import annotations

import numpy as np
import torch
from torch import Tensor

from weft.core.errors import InputError
from weft.dist.partition import row_offsets
from weft.graph.graph import Graph
from weft.graph.labels import Split
from weft.graph.sparse_features import SparseFeatures
from weft.ops.csr.adjacency import Adjacency, offset_dtype


def order_nodes(adj: Adjacency, kind: str, ranks: int = 2) -> Tensor:
    """The nodes ``[N]`` in an order that may keep neighbours together: old ids at their new places.

    ``"degree"``: most in-edges first. ``"bfs"``: breadth first from the node with most neighbours, part by part.
    ``"rcm"``: reverse Cuthill-McKee. These two need scipy. ``"metis"``: the parts that METIS finds for ``ranks``, of
    about equally many edges, one after another; needs pymetis.
    """
    if kind == "given":
        return torch.arange(adj.num_rows)
    if kind == "degree":
        return torch.sort(adj.degrees().cpu(), descending=True, stable=True).indices
    if kind == "metis":
        try:
            import pymetis
        except ImportError:
            raise InputError("order='metis' needs pymetis: pip install pymetis, or use order='rcm'") from None
        rows, cols = adj.rows().long().cpu(), adj.indices.long().cpu()
        keys = torch.cat([rows * adj.num_rows + cols, cols * adj.num_rows + rows])  # METIS needs both directions
        keys = torch.unique(keys[torch.cat([rows != cols] * 2)])  # and no loops
        offsets = row_offsets(keys // adj.num_rows, adj.num_rows)
        structure = pymetis.CSRAdjacency(offsets.numpy(), (keys % adj.num_rows).numpy())
        _, part = pymetis.part_graph(ranks, structure, vweights=adj.degrees().cpu().clamp(min=1).numpy())
        return torch.sort(torch.tensor(part), stable=True).indices
    try:
        from scipy.sparse import csr_matrix
        from scipy.sparse.csgraph import breadth_first_order, connected_components, reverse_cuthill_mckee
    except ImportError:
        raise InputError(f"order={kind!r} needs scipy: pip install scipy, or use order='degree'") from None
    ones = np.ones(adj.num_edges, dtype=np.int8)
    shape = (adj.num_rows, adj.num_cols)
    matrix = csr_matrix((ones, adj.indices.cpu().numpy(), adj.indptr.cpu().numpy()), shape=shape)
    if kind == "rcm":
        return torch.from_numpy(reverse_cuthill_mckee(matrix, symmetric_mode=adj.symmetric).astype(np.int64))
    _, label = connected_components(matrix, directed=False)
    by_degree = np.argsort(-adj.degrees().cpu().numpy(), kind="stable")
    _, first = np.unique(label[by_degree], return_index=True)
    parts = [breadth_first_order(matrix, by_degree[at], directed=False)[0] for at in np.sort(first)]
    return torch.from_numpy(np.concatenate(parts).astype(np.int64))


def new_ids(order: Tensor) -> Tensor:
    """The new id of every node ``[N]``, given the old ids at their new places."""
    new_id = torch.empty_like(order)
    new_id[order] = torch.arange(order.numel())
    return new_id


def reordered_graph(graph: Graph, order: Tensor) -> Graph:
    """``graph`` on the host with its nodes renumbered: node ``order[i]`` becomes node i."""
    new_id = new_ids(order)
    several = [
        Split(*(new_id[ids].sort().values for ids in graph.split_rows(number))) for number in range(graph.num_splits)
    ]
    x = graph.x
    if isinstance(x, SparseFeatures):
        x = SparseFeatures.from_coo(new_id[x.matrix.rows().long()], x.matrix.indices.long(), x.values, x.shape)
    elif x is not None:
        x = x[order]
    y = None if graph.y is None else graph.y[order]
    adj = reordered(graph.adj, order)
    counts = {"num_classes": graph.num_classes, "num_relations": graph.num_relations, "numbers": graph.regression}
    more = several if len(several) > 1 else ()
    return Graph(adj, x, y, *several[0], relation=adj.relation, name=graph.name, several=more, **counts)


def reordered(adj: Adjacency, order: Tensor) -> Adjacency:
    """``adj`` with its nodes renumbered: node ``order[i]`` becomes node i; what its edges have goes with them."""
    new_id = new_ids(order)
    rows, cols = new_id[adj.rows().long()], new_id[adj.indices.long()]
    edge = torch.sort(rows * adj.num_cols + cols, stable=True).indices
    indptr = row_offsets(rows, adj.num_rows)
    weight = None if adj.weight is None else adj.weight[edge]
    renumbered = Adjacency(
        indptr.to(offset_dtype(cols.numel())), cols[edge].to(torch.int32), weight=weight, symmetric=adj.symmetric
    )
    renumbered = renumbered if adj.relation is None else renumbered.related(adj.relation[edge], adj.num_relations)
    return renumbered if adj.edge_attr is None else renumbered.attributed(adj.edge_attr[edge])
