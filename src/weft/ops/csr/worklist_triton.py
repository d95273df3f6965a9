"""Device functions that read a work list (``worklist.py``): a heavy item, or a tile of light rows."""

from __future__ import annotations

from weft.ops.launch.triton_lang import tl, triton


@triton.jit
def heavy_piece(piece, start, length):
    """``(first edge, edges)`` of a heavy item."""
    return tl.load(start + piece).to(tl.int64), tl.load(length + piece)


@triton.jit
def heavy_owner(piece, row, hub_row, hub_of_partial, num_partial):
    """The row of a heavy item; for a chunk, that of its hub."""
    owner = tl.load(row + piece).to(tl.int64)
    if piece < num_partial:
        owner = tl.load(hub_row + tl.load(hub_of_partial + piece)).to(tl.int64)
    return owner


@triton.jit
def heavy_row_span(piece, start, length, hub_ptr, hub_of_partial, num_partial):
    """``(first edge, edges)`` of the whole row that a heavy item belongs to; for a chunk, of its whole hub."""
    first = tl.load(start + piece).to(tl.int64)
    edges = tl.load(length + piece)
    if piece < num_partial:
        hub = tl.load(hub_of_partial + piece)
        final = tl.load(hub_ptr + hub + 1) - 1
        first = tl.load(start + tl.load(hub_ptr + hub)).to(tl.int64)
        edges = (tl.load(start + final).to(tl.int64) - first).to(tl.int32) + tl.load(length + final)
    return first, edges


@triton.jit
def light_rows(item, start, length, row, num_light):
    """``(first edge, edges, row, valid)`` of the light rows ``item [L]``."""
    valid = item < num_light
    first = tl.load(start + item, mask=valid, other=0).to(tl.int64)
    edges = tl.load(length + item, mask=valid, other=0)
    return first, edges, tl.load(row + item, mask=valid, other=0).to(tl.int64), valid
