"""Adjacencies for the operator tests: ordinary ones and awkward ones."""

from __future__ import annotations

from itertools import pairwise

import torch
from hypothesis import strategies as st
from torch import Tensor

from weft.ops import Adjacency


def from_pairs(rows: Tensor, cols: Tensor, num_rows: int, num_cols: int, **factors: Tensor | None) -> Adjacency:
    """The adjacency of the distinct pairs (destination, source)."""
    keys = torch.unique(rows.long() * num_cols + cols.long())
    indptr = torch.zeros(num_rows + 1, dtype=torch.int32)
    indptr[1:] = torch.bincount(keys // max(num_cols, 1), minlength=num_rows).cumsum(0)
    return Adjacency(indptr, (keys % max(num_cols, 1)).to(torch.int32), num_cols, **factors)


def mixed(seed: int = 0, num_rows: int = 24, num_cols: int = 19) -> Adjacency:
    """Rectangular, a third full; row 3 is joined to every column, the first and the middle row to none."""
    random = torch.Generator().manual_seed(seed)
    there = torch.rand(num_rows, num_cols, generator=random) < 0.3
    there[3] = True
    there[[0, num_rows // 2]] = False
    return from_pairs(*there.nonzero(as_tuple=True), num_rows, num_cols)


def empty() -> Adjacency:
    """Nodes without a single edge."""
    none = torch.zeros(0, dtype=torch.int64)
    return from_pairs(none, none, 5, 5)


def no_rows() -> Adjacency:
    """Not even a row."""
    none = torch.zeros(0, dtype=torch.int64)
    return from_pairs(none, none, 0, 4)


def loops() -> Adjacency:
    """Every node joined to itself alone."""
    return from_pairs(torch.arange(6), torch.arange(6), 6, 6)


def star() -> Adjacency:
    """Node 0 hears from all, all others from node 0 alone."""
    others = torch.arange(1, 33)
    hub = torch.zeros_like(others)
    return from_pairs(torch.cat([hub, others]), torch.cat([others, hub]), 33, 33)


def isolated() -> Adjacency:
    """Two edges among ten nodes, one of them from the first node and one into the last."""
    return from_pairs(torch.tensor([4, 9]), torch.tensor([0, 4]), 10, 10)


def wide_offsets() -> Adjacency:
    """The offsets of a graph of more than 2^31 edges."""
    adj = mixed()
    return Adjacency(adj.indptr.long(), adj.indices, adj.num_cols)


GRAPHS = {
    "mixed": mixed,
    "empty": empty,
    "no rows": no_rows,
    "loops": loops,
    "star": star,
    "isolated": isolated,
    "wide offsets": wide_offsets,
}


@st.composite
def adjacencies(draw: st.DrawFn) -> Adjacency:
    """Any small adjacency."""
    num_rows, num_cols = draw(st.integers(1, 9)), draw(st.integers(1, 9))
    cells = st.integers(0, num_rows * num_cols - 1)
    chosen = torch.tensor(sorted(draw(st.sets(cells, max_size=40))), dtype=torch.int64)
    return from_pairs(chosen // num_cols, chosen % num_cols, num_rows, num_cols)


def neighbourhoods(adj: Adjacency) -> list[tuple[int, slice, Tensor]]:
    """``(row, its edges, their sources)`` of every row: the way the plain formulas of the tests visit a graph."""
    ends = adj.indptr.tolist()
    spans = [slice(a, b) for a, b in pairwise(ends)]
    return [(row, span, adj.indices[span].long()) for row, span in enumerate(spans)]
