"""spmm on the CPU: a row is summed in registers, a block of features at a time.

A row's last features, fewer than a block, are covered by a block that overlaps the one before: every feature
is summed on its own, so writing some of them twice changes nothing and needs no masks.
Shapes: T tasks, N rows, M columns, E edges, F features. Rows of ``x`` are ``stride`` apart; ``width`` of their
numbers are summed.
"""

from __future__ import annotations

from typing import NamedTuple

import numpy as np

from weft.ops.cpu.kernel import first_row, int32s, kernel, part, pointer
from weft.ops.cpu.simd import fill, load, madd, mul, prefetch, store, zeros

LANES = 16
WIDE = 4 * LANES
AHEAD = 16  # edges between prefetching a row and using it


class Edges(NamedTuple):
    """The edges ``begin .. end`` of a row, and where the factors of an edge are.

    A step of 0 stands for one number shared by all.
    """

    indices: object
    weight: object
    weight_step: int
    scale: object
    scale_step: int
    begin: int
    end: int
    last: int


@part
def factor(edges, edge, col):
    """What multiplies the source's row on one edge."""
    return edges.weight[edge * edges.weight_step] * edges.scale[col * edges.scale_step]


@part
def _wide(x, base, stride, out, at, row_scale, edges):
    """Four vectors of one row of the output."""
    a, b, c, d = zeros(x, LANES), zeros(x, LANES), zeros(x, LANES), zeros(x, LANES)
    for edge in range(edges.begin, edges.end):
        col = np.int64(edges.indices[edge])
        soon = base + np.int64(edges.indices[min(edge + AHEAD, edges.last)]) * stride
        for line in range(0, WIDE, LANES):
            prefetch(x, soon + line)
        value = fill(a, factor(edges, edge, col))
        source = base + col * stride
        a = madd(a, load(x, source, LANES), value)
        b = madd(b, load(x, source + LANES, LANES), value)
        c = madd(c, load(x, source + 2 * LANES, LANES), value)
        d = madd(d, load(x, source + 3 * LANES, LANES), value)
    scale = fill(a, row_scale)
    store(out, at, mul(a, scale))
    store(out, at + LANES, mul(b, scale))
    store(out, at + 2 * LANES, mul(c, scale))
    store(out, at + 3 * LANES, mul(d, scale))


@part
def _single(x, base, stride, out, at, row_scale, edges):
    """One vector of one row of the output."""
    total = zeros(x, LANES)
    for edge in range(edges.begin, edges.end):
        col = np.int64(edges.indices[edge])
        total = madd(total, load(x, base + col * stride, LANES), fill(total, factor(edges, edge, col)))
    store(out, at, mul(total, fill(total, row_scale)))


def _make_pair(width: int):
    """``count`` features of one row, ``width <= count <= 2 * width``: two vectors, one from each end."""

    @part
    def pair(x, base, stride, out, at, row_scale, edges, count):
        a, b = zeros(x, width), zeros(x, width)
        for edge in range(edges.begin, edges.end):
            col = np.int64(edges.indices[edge])
            value = fill(a, factor(edges, edge, col))
            source = base + col * stride
            a = madd(a, load(x, source, width), value)
            b = madd(b, load(x, source + count - width, width), value)
        scale = fill(a, row_scale)
        store(out, at, mul(a, scale))
        store(out, at + count - width, mul(b, scale))

    return pair


_pair16, _pair8, _pair4 = _make_pair(LANES), _make_pair(8), _make_pair(4)
_pair2, _pair1 = _make_pair(2), _make_pair(1)


@part
def _narrow_row(x, base, stride, out, at, row_scale, edges, width):
    """One row of the output, narrower than a vector."""
    if width >= 8:
        _pair8(x, base, stride, out, at, row_scale, edges, width)
    elif width >= 4:
        _pair4(x, base, stride, out, at, row_scale, edges, width)
    elif width >= 2:
        _pair2(x, base, stride, out, at, row_scale, edges, width)
    else:
        _pair1(x, base, stride, out, at, row_scale, edges, width)


@part
def sum_row(x, base, stride, out, at, row_scale, edges, width):
    """One row of the output: ``width`` features of the sources' rows, each multiplied by its factor."""
    if width < LANES:
        _narrow_row(x, base, stride, out, at, row_scale, edges, width)
        return
    f = 0
    while f + WIDE <= width:
        _wide(x, base + f, stride, out, at + f, row_scale, edges)
        f += WIDE
    while f < width:
        f = min(f, width - LANES)
        count = min(width - f, 2 * LANES)
        if count == LANES:
            _single(x, base + f, stride, out, at + f, row_scale, edges)
        else:
            _pair16(x, base + f, stride, out, at + f, row_scale, edges, count)
        f += count


@kernel
def spmm_share(
    out_at, x_at, weight_at, weight_step, weight_stride, row_scale_at, row_scale_step, col_scale_at,
    col_scale_step, indptr_at, indices_at, T, N, M, E, F, like, like_offset, share, shares,
):  # fmt: skip
    """Rows ``share`` of ``shares``, of all tasks, of ``out [T, N, F]``.

    The weight of task t begins at ``t * weight_stride``.
    """
    out, x = pointer(out_at, like), pointer(x_at, like)
    row_scale, col_scale = pointer(row_scale_at, like), pointer(col_scale_at, like)
    indptr, indices = pointer(indptr_at, like_offset), int32s(indices_at)
    first, last = first_row(indptr, N, share, shares), first_row(indptr, N, share + 1, shares)
    for task in range(T):
        weight = pointer(weight_at + task * weight_stride * like.itemsize, like)
        for row in range(first, last):
            begin, end = np.int64(indptr[row]), np.int64(indptr[row + 1])
            edges = Edges(indices, weight, weight_step, col_scale, col_scale_step, begin, end, E - 1)
            scale = row_scale[row * row_scale_step]
            sum_row(x, task * M * F, F, out, (task * N + row) * F, scale, edges, F)
