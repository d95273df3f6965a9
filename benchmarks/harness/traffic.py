"""Bytes that an SpMM moves, counted two ways, to set a time against the memory's bandwidth.

*Compulsory*: every input read once, every output written once; what an infinite cache would leave.
*Gathered*: a row of x read for every edge; what no cache at all would cost.

Shapes: A is N x M with E entries, x [M, F], out [N, F]; ``factors`` is bytes of weights or scales.
"""

from __future__ import annotations

from weft.ops.csr.adjacency import Adjacency

FLOAT = 4


def structure_bytes(adj: Adjacency) -> int:
    """Row offsets and column ids."""
    return adj.indptr.numel() * adj.indptr.element_size() + adj.num_edges * adj.indices.element_size()


def compulsory_bytes(adj: Adjacency, num_features: int, factors: int) -> int:
    """Structure, factors, x once, out once."""
    dense = (adj.num_rows + adj.num_cols) * num_features * FLOAT
    return structure_bytes(adj) + factors + dense


def gathered_bytes(adj: Adjacency, num_features: int, factors: int) -> int:
    """Structure, factors, a row of x per edge, out once."""
    dense = (adj.num_edges + adj.num_rows) * num_features * FLOAT
    return structure_bytes(adj) + factors + dense
