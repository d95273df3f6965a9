"""The local subgraph of a batch as a matrix; on a CPU every sort of its edges is a counting sort.

Shapes: M nodes of a batch, P edges.
"""

from __future__ import annotations

import torch
from torch import Tensor

from weft.flow.sampling.batch import Subgraph
from weft.flow.sampling.block import CountingSorted
from weft.ops.csr.adjacency import Adjacency
from weft.ops.sampling.cpu import transpose_cpu


class LocalAdjacency(CountingSorted):
    """A square matrix over the nodes of a batch."""

    def _add_self_loops(self) -> Adjacency:
        looped = super()._add_self_loops()
        again = LocalAdjacency(looped.indptr, looped.indices, looped.num_cols, weight=looped.weight)
        again.nodes = looped.nodes
        return again


def local_adjacency(local: Subgraph) -> Adjacency:
    """The sampled edges as a square matrix over ``nodes``, rows in their order, columns of a row ascending."""
    src, dst = local.edge_index
    indptr, order = _by_rows(src, dst, local.nodes.numel())
    weight = None if local.weight is None else local.weight[order]
    adj = LocalAdjacency(indptr, src[order].to(torch.int32), local.nodes.numel(), weight=weight)
    adj = adj if local.relation is None else adj.related(local.relation[order], local.num_relations)
    return adj if local.edge_attr is None else adj.attributed(local.edge_attr[order])


def _by_rows(src: Tensor, dst: Tensor, count: int) -> tuple[Tensor, Tensor]:
    """``(indptr [M+1], order [P])``: a stable sort of the edges by their destinations, then by their sources."""
    if dst.device.type == "cpu":
        _, order = _by_counting(src, count)
        indptr, again = _by_counting(dst[order], count)
        return indptr, order[again]
    indptr = torch.zeros(count + 1, dtype=torch.int32, device=dst.device)
    torch.cumsum(torch.bincount(dst, minlength=count), 0, out=indptr[1:])
    return indptr, torch.sort(dst * count + src, stable=True).indices


def _by_counting(ids: Tensor, count: int) -> tuple[Tensor, Tensor]:
    """``(indptr [M+1], order [P])``: every edge is a row of one entry, and their transpose has equal ids together."""
    alone = torch.arange(ids.numel() + 1, dtype=torch.int32)
    indptr, order, _ = transpose_cpu(alone, ids.to(torch.int32), count)
    return indptr, order.long()
