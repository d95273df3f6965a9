"""Graphs with relations for samplers: empty (node, relation) rows, short ones and a hub."""

from __future__ import annotations

import torch

from weft.ops.csr.adjacency import Adjacency
from weft.ops.sampling.reference import RelationRows

NODES, RELATIONS = 30, 3


def related_csr(seed: int = 0, edges: int = 260) -> Adjacency:
    """30 nodes; node 0 has 100 in-edges, nodes from 25 on have none; relation 2 is rare."""
    draw = torch.Generator().manual_seed(seed)
    dst = torch.randint(0, 25, (edges,), generator=draw)
    dst[:100] = 0
    src = torch.randint(0, NODES, (edges,), generator=draw)
    relation = torch.where(torch.rand(edges, generator=draw) < 0.1, 2, torch.arange(edges) % 2)
    order = torch.argsort(dst * NODES + src, stable=True)
    indptr = torch.zeros(NODES + 1, dtype=torch.int32)
    indptr[1:] = torch.bincount(dst, minlength=NODES).cumsum(0)
    return Adjacency(indptr, src[order].int()).related(relation[order].int(), RELATIONS)


def rows_of(adj: Adjacency) -> RelationRows:
    return RelationRows.of(adj, adj.relation, adj.num_relations)
