"""How kernels read their share of a work list (``worklist.py``): a heavy piece, or a tile of light rows."""

from __future__ import annotations

from weft.ops.lang import tl, triton


@triton.jit
def heavy_piece(piece, start, length):
    """``(first edge, edges)`` of a heavy piece."""
    return tl.load(start + piece).to(tl.int64), tl.load(length + piece)


@triton.jit
def heavy_owner(piece, row, hub_row, hub_of_partial, num_partial):
    """The row of a heavy piece; a chunk of a hub answers with the hub's."""
    owner = tl.load(row + piece).to(tl.int64)
    if piece < num_partial:
        owner = tl.load(hub_row + tl.load(hub_of_partial + piece)).to(tl.int64)
    return owner


@triton.jit
def light_rows(item, start, length, row, num_light):
    """``(first edge, edges, row, valid)`` of the light rows ``item [L]``."""
    valid = item < num_light
    first = tl.load(start + item, mask=valid, other=0).to(tl.int64)
    edges = tl.load(length + item, mask=valid, other=0)
    return first, edges, tl.load(row + item, mask=valid, other=0).to(tl.int64), valid
