"""Add self loops: every node gets exactly one, in a CSR whose columns stay sorted.

Shapes: N rows, E edges.
"""

from __future__ import annotations

import torch
from torch import Tensor

CHUNK = 1 << 27  # edges per chunk, whose 8-byte positions are held at once


def has_loops(rows: Tensor, cols: Tensor) -> bool:
    """Whether any edge leads back to its source."""
    return any(bool((r == c).any()) for r, c in zip(rows.split(CHUNK), cols.split(CHUNK), strict=True))


def loop_weights(rows: Tensor, weight: Tensor, num_rows: int) -> Tensor:
    """The weight of every row's loop ``[N]``: 1 if it has none, that of the last if it has several.

    ``rows`` and ``weight``: of the loops that there are, by row. Only one of them is written, since on a GPU writes to
    one place end in any order.
    """
    last = torch.ones_like(rows, dtype=torch.bool)
    last[:-1] = rows[1:] != rows[:-1]
    chosen = last.nonzero().squeeze(1)
    return weight.new_ones(num_rows).index_copy(0, rows[chosen].long(), weight[chosen])


def insert_loops(
    indptr: Tensor, rows: Tensor, cols: Tensor, weight: Tensor | None
) -> tuple[Tensor, Tensor, Tensor | None]:
    """``(indptr, indices, weight)`` of a loop-free CSR with a loop of weight 1 in every row.

    Nothing is sorted: an edge moves up by the loops of the rows before it, and by its own row's loop if that comes
    first. A graph of 1.6 billion edges needs little more than its result.
    """
    num_rows = indptr.numel() - 1
    wide = indptr.long() + torch.arange(num_rows + 1, device=indptr.device)
    ids = torch.arange(num_rows, dtype=cols.dtype, device=cols.device)
    # Every slot that no edge takes is its row's loop, and holds the row's own id already.
    indices = torch.repeat_interleave(ids, wide.diff(), output_size=cols.numel() + num_rows)
    weights = None if weight is None else weight.new_ones(indices.numel())
    for first in range(0, cols.numel(), CHUNK):
        part = slice(first, first + CHUNK)
        place = torch.arange(first, first + cols[part].numel(), device=cols.device)
        place += rows[part]
        place += cols[part] > rows[part]
        indices[place] = cols[part]
        if weights is not None:
            weights[place] = weight[part]
    return wide, indices, weights


def replace_loops(
    rows: Tensor, cols: Tensor, weight: Tensor | None, num_rows: int, num_cols: int
) -> tuple[Tensor, Tensor, Tensor | None]:
    """The same for a graph that has loops: an existing one (the last of several) keeps its weight, others weigh 1."""
    is_loop = rows == cols
    keep, there = (~is_loop).nonzero().squeeze(1), is_loop.nonzero().squeeze(1)
    loops = torch.arange(num_rows, dtype=cols.dtype, device=cols.device)
    all_rows, all_cols = torch.cat([rows[keep], loops]), torch.cat([cols[keep], loops])
    order = torch.sort(all_rows.long() * num_cols + all_cols).indices
    indptr = torch.zeros(num_rows + 1, dtype=torch.int64, device=cols.device)
    torch.cumsum(torch.bincount(all_rows, minlength=num_rows), 0, out=indptr[1:])
    if weight is not None:
        weight = torch.cat([weight[keep], loop_weights(rows[there], weight[there], num_rows)])[order]
    return indptr, all_cols[order], weight


# ---- Sums of the values of a CSR's edges row by row, in an order that a device keeps: the same bits every time.
#
# ``index_add_`` on a GPU adds in the order in which threads arrive.


def row_sums(values: Tensor, indptr: Tensor) -> Tensor:
    """The sums ``[N]`` of ``values [E]``, of which ``indptr [N+1]`` says where rows begin; 0 for a row without."""
    if values.is_meta:
        return values.new_empty(indptr.numel() - 1)
    return torch.segment_reduce(values, "sum", offsets=indptr.long(), axis=0, initial=0)
