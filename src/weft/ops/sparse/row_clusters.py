"""Cluster nodes, so that rows which gather the same rows of x are processed one after another.

Ordered by length alone, neighbouring rows share no sources: by the time a source is read again it has left the cache.
In trials on an H200 the same kernel took, by cluster, 0.72 of its time on the products shape at F = 64 and 0.67 at
F = 256, and on the arxiv shape 0.91 for 16 tasks and 0.93 for 4. If all rows of x stay in the cache (one task on the
arxiv shape, pubmed) nothing is gained.

The seeds are hubs. A few products with ``S = D^-1/2 (A + I) D^-1/2`` spread each over its surroundings, and a node
belongs to the seed that reaches it best; then, twice, to the cluster that most of its neighbours are in. Both are
measured against what the seed or cluster reaches in all, so that a large one does not take everything. Clusters are
numbered along a chain in which neighbours have many edges in common.

Seeds go through the products in blocks of 16, so that there are never more than two arrays ``[N, 16]``, and one kernel
serves all products. Nothing depends on the order of atomics: a graph has the same clusters in every run.

Shapes: N nodes, E edges, K clusters.
"""

from __future__ import annotations

from collections.abc import Iterable, Iterator

import torch
from torch import Tensor

from weft.ops.csr.adjacency import Adjacency
from weft.ops.sparse.spmm import spmm

SEEDS = 128
BLOCK = 16  # seeds in one product
ROUNDS = 3  # products that spread a seed
REFINED = 2  # rounds in which nodes join the cluster of most of their neighbours
COUNTED_ROWS = 1 << 20  # rows whose edges are counted at once


def order_rows(adj: Adjacency) -> None:
    """Find the clusters of a square matrix, once: later work lists of all its forms are ordered by them.

    Forms are the matrix with loops, normalised, transposed, whether they exist already or are built later.
    """
    if adj.indices.is_meta or "clusters" in adj.nodes:
        return
    cluster = clusters(adj).cpu()
    if adj.indices.is_cuda:
        torch.cuda.empty_cache()  # before the result is allocated, or it would fragment the memory that is released
    adj.nodes["clusters"] = cluster.to(adj.device)


# Derived forms that do not depend on the order of rows.
ORDERLESS = ("degrees", "rows", "inverse_degrees", "by source", "transposed arrays")


def ordered_rows(adj: Adjacency) -> Adjacency:
    """The same square matrix with its rows in the order of clusters; ``adj`` itself keeps the order it has.

    It shares every array and is kept as a form of ``adj``, so that clusters are found once.
    """

    def build() -> Adjacency:
        factors = {"weight": adj.weight, "row_scale": adj.row_scale, "col_scale": adj.col_scale}
        other = Adjacency(adj.indptr, adj.indices, adj.num_cols, symmetric=adj.symmetric, perm=adj.perm, **factors)
        derived = adj.structure._derived
        other._derived = {key: derived[key] for key in ORDERLESS if key in derived}
        other.nodes = {name: value for name, value in adj.nodes.items() if name != "clusters"}
        other.relation, other.num_relations, other.edge_attr = adj.relation, adj.num_relations, adj.edge_attr
        order_rows(other)
        return other

    return adj.derived("ordered rows", build)


@torch.no_grad()
def clusters(adj: Adjacency) -> Tensor:
    """The cluster of every node ``[N]`` int32, below 128, by the structure of the square matrix ``adj`` alone."""
    if adj.num_rows != adj.num_cols:
        raise ValueError(f"clusters are of square matrices, not of {adj.num_rows} x {adj.num_cols}")
    if adj.num_edges == 0:
        return torch.zeros(adj.num_rows, dtype=torch.int32, device=adj.device)
    count = min(SEEDS, adj.num_rows)
    degrees = adj.indptr.diff()
    scale = (degrees + 1).float().rsqrt()
    near = Adjacency(adj.indptr, adj.indices, row_scale=scale, col_scale=scale)  # its own cache of derived forms
    hubs = torch.sort(degrees, descending=True, stable=True).indices[:count]
    cluster = _best_column(_reached(near, hubs), adj)
    for _ in range(REFINED):
        cluster = _best_column(_neighbours(near, cluster, count), adj)
    order = chain(_edges_between(near, cluster, count).tolist())
    return torch.tensor(order, dtype=torch.int32, device=adj.device)[cluster]


def chain(edges: list[list[float]]) -> list[int]:
    """The place of every cluster in a chain, by the edges between them ``[K][K]``.

    It starts with the largest; next comes the one that has most of its edges with the last.
    """
    size = [max(sum(row), 1.0) for row in edges]
    position = [0] * len(edges)
    remaining = set(range(len(edges)))
    last = max(remaining, key=lambda cluster: (size[cluster], -cluster))
    for at in range(len(edges)):
        position[last] = at
        remaining.discard(last)
        shared = edges[last]
        last = max(remaining, key=lambda cluster: (shared[cluster] / size[cluster], -cluster), default=last)
    return position


def _best_column(blocks: Iterable[Tensor], adj: Adjacency) -> Tensor:
    """The column of all ``blocks [N, 16]`` in which a row has most, relative to the column's sum: ``[N]`` int64."""
    best = torch.zeros(adj.num_rows, device=adj.device)
    chosen = torch.zeros(adj.num_rows, dtype=torch.int64, device=adj.device)
    for block, x in enumerate(blocks):
        x /= x.sum(0, dtype=torch.float64).clamp(min=1e-30).float()
        value, column = x.max(1)
        better = value > best  # the first of equal ones
        best, chosen = torch.where(better, value, best), torch.where(better, column + block * BLOCK, chosen)
        del x
    return chosen


def _reached(near: Adjacency, hubs: Tensor) -> Iterator[Tensor]:
    """How strongly a few products carry each of ``hubs [K]`` to every node, a block ``[N, 16]`` at a time."""
    columns = torch.arange(BLOCK, device=near.device)
    for seeds in hubs.split(BLOCK):
        x = torch.zeros(near.num_rows, BLOCK, device=near.device)
        x[seeds, columns[: seeds.numel()]] = 1.0
        for _ in range(ROUNDS):
            x = _product(near, x)
        yield x


def _neighbours(near: Adjacency, cluster: Tensor, count: int) -> Iterator[Tensor]:
    """The weight of every node's neighbours in each of ``count`` clusters, a block ``[N, 16]`` at a time."""
    for first in range(0, count, BLOCK):
        yield _product(near, _inside(cluster, first))


def _product(near: Adjacency, x: Tensor) -> Tensor:
    """``S @ x``; the loops are not stored."""
    out = spmm(near, x)
    return out.addcmul_(x, (near.row_scale * near.col_scale)[:, None])


def _inside(cluster: Tensor, first: int) -> Tensor:
    """Whether a node is in the clusters ``first .. first + 15``: ``[N, 16]`` of 0 and 1."""
    ids = torch.arange(first, first + BLOCK, device=cluster.device)
    return (cluster[:, None] == ids).float()


def _edges_between(near: Adjacency, cluster: Tensor, count: int) -> Tensor:
    """Edges into cluster a from cluster b ``[K, K]`` float64: integers, so that sums are exact in any order."""
    ones = torch.ones_like(near.row_scale)
    plain = near.scaled(row_scale=ones, col_scale=ones)  # factors of 1: the same kernel as for all other products
    tables = []
    for first in range(0, count, BLOCK):
        table = torch.zeros(count, BLOCK, dtype=torch.float64, device=cluster.device)
        from_here = spmm(plain, _inside(cluster, first))
        for rows, clusters_of in zip(from_here.split(COUNTED_ROWS), cluster.split(COUNTED_ROWS), strict=True):
            table.index_add_(0, clusters_of, rows.double())
        tables.append(table)
    return torch.cat(tables, 1)[:, :count]
