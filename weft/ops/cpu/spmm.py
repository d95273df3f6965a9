"""spmm on the CPU: a row is summed in registers, a block of features at a time.

A row's last features, fewer than a block, are covered by a block that overlaps the one before: every feature
is summed on its own, so writing some of them twice changes nothing and needs no masks.
Shapes: T tasks, N rows, M columns, E edges, F features.
"""

from __future__ import annotations

import numpy as np

from weft.ops.cpu.kernel import first_row, kernel, part, view
from weft.ops.cpu.simd import fill, load, madd, mul, prefetch, store, zeros

LANES = 16
WIDE = 4 * LANES
AHEAD = 16  # edges between asking for a row and using it


@part
def _wide(x, out, weight, weight_step, scale, scale_step, indices, begin, end, base, at, F, row_scale):
    """Four vectors of one row of the output."""
    a, b, c, d = zeros(x, LANES), zeros(x, LANES), zeros(x, LANES), zeros(x, LANES)
    last = np.int64(indices.size) - 1
    for edge in range(begin, end):
        col = np.int64(indices[edge])
        soon = base + np.int64(indices[min(edge + AHEAD, last)]) * F
        for line in range(0, WIDE, LANES):
            prefetch(x, soon + line)
        value = fill(a, weight[edge * weight_step] * scale[col * scale_step])
        source = base + col * F
        a = madd(a, load(x, source, LANES), value)
        b = madd(b, load(x, source + LANES, LANES), value)
        c = madd(c, load(x, source + 2 * LANES, LANES), value)
        d = madd(d, load(x, source + 3 * LANES, LANES), value)
    factor = fill(a, row_scale)
    store(out, at, mul(a, factor))
    store(out, at + LANES, mul(b, factor))
    store(out, at + 2 * LANES, mul(c, factor))
    store(out, at + 3 * LANES, mul(d, factor))


@part
def _single(x, out, weight, weight_step, scale, scale_step, indices, begin, end, base, at, F, row_scale):
    """One vector of one row of the output."""
    total = zeros(x, LANES)
    for edge in range(begin, end):
        col = np.int64(indices[edge])
        value = fill(total, weight[edge * weight_step] * scale[col * scale_step])
        total = madd(total, load(x, base + col * F, LANES), value)
    store(out, at, mul(total, fill(total, row_scale)))


def _make_pair(width: int):
    """The whole row where ``width <= F < 2 * width``: two vectors, one from each end."""

    @part
    def pair(x, out, weight, weight_step, scale, scale_step, indices, begin, end, base, at, F, row_scale):
        a, b = zeros(x, width), zeros(x, width)
        for edge in range(begin, end):
            col = np.int64(indices[edge])
            value = fill(a, weight[edge * weight_step] * scale[col * scale_step])
            source = base + col * F
            a = madd(a, load(x, source, width), value)
            b = madd(b, load(x, source + F - width, width), value)
        store(out, at, mul(a, fill(a, row_scale)))
        store(out, at + F - width, mul(b, fill(b, row_scale)))

    return pair


_pair8, _pair4, _pair2, _pair1 = _make_pair(8), _make_pair(4), _make_pair(2), _make_pair(1)


@part
def _row(x, out, weight, weight_step, scale, scale_step, indices, begin, end, base, at, F, row_scale):
    """One row of the output, at least a vector wide."""
    f = 0
    while f + WIDE <= F:
        _wide(
            x, out, weight, weight_step, scale, scale_step, indices, begin, end, base + f, at + f, F, row_scale
        )  # fmt: skip
        f += WIDE
    while f < F:
        g = min(f, F - LANES)
        _single(
            x, out, weight, weight_step, scale, scale_step, indices, begin, end, base + g, at + g, F, row_scale
        )  # fmt: skip
        f += LANES


@kernel
def spmm_share(
    out_at, x_at, weight_at, weight_step, weight_stride, row_scale_at, row_scale_step, col_scale_at,
    col_scale_step, indptr_at, indices_at, T, N, M, E, F, like, like_offset, share, shares,
):  # fmt: skip
    """Rows ``share`` of ``shares``, of all tasks, of ``out [T, N, F]``.

    Factor e of an array is at ``e * step``: a step of 0 stands for one number for all. The weight of task t
    begins at ``t * weight_stride``.
    """
    out, x = view(out_at, T * N * F, like), view(x_at, T * M * F, like)
    row_scale, scale = view(row_scale_at, N, like), view(col_scale_at, M, like)
    indptr = view(indptr_at, N + 1, like_offset)
    indices = view(indices_at, E, np.empty(0, np.int32))
    first, last = first_row(indptr, N, share, shares), first_row(indptr, N, share + 1, shares)
    for task in range(T):
        weight = view(weight_at + task * weight_stride * like.itemsize, E, like)
        for row in range(first, last):
            begin, end = np.int64(indptr[row]), np.int64(indptr[row + 1])
            args = (
                x, out, weight, weight_step, scale, col_scale_step, indices, begin, end,
                task * M * F, (task * N + row) * F, F, row_scale[row * row_scale_step],
            )  # fmt: skip
            if F >= LANES:
                _row(*args)
            elif F >= 8:
                _pair8(*args)
            elif F >= 4:
                _pair4(*args)
            elif F >= 2:
                _pair2(*args)
            else:
                _pair1(*args)
