"""spmm on the CPU: a row is summed in registers, a block of features at a time.

A row's last features, fewer than a block, are covered by a block that overlaps the one before: every feature
is summed on its own, so writing some of them twice changes nothing and needs no masks.
Shapes: T tasks, N rows, M columns, E edges, F features. Rows of ``x`` are ``stride`` apart; ``width`` of their
numbers are summed.
"""

from __future__ import annotations

from typing import NamedTuple

import numpy as np

from weft.ops.cpu.kernel import first_row, int32s, kernel, part, pointer, shift
from weft.ops.cpu.simd import (
    add,
    exp,
    fill,
    half_sums,
    lane_sum,
    larger,
    load,
    madd,
    mul,
    prefetch,
    store,
    subtract,
    zero,
    zeros,
)

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


# ---- spmm_max on the CPU

BLOCK = 16  # features of a piece of the backward pass: one cache line of float32


@part
def _join(x, source, out, winner, at, F, weight, edge):
    """Let one edge compete for every feature of a row: larger wins, the first NaN wins for good."""
    for f in range(F):
        value = x[source + f] * weight
        best = out[at + f]
        wins = (value > best) or (value != value and best == best) or winner[at + f] < 0
        out[at + f] = value if wins else best
        winner[at + f] = edge if wins else winner[at + f]


@kernel
def spmm_max_share(
    out_at, winner_at, x_at, weight_at, weight_step, indptr_at, indices_at, T, N, M, F,
    like, like_offset, share, shares,
):  # fmt: skip
    """The rows of one share of ``out [T, N, F]`` and ``winner [T, N, F]``."""
    out, x, weight = pointer(out_at, like), pointer(x_at, like), pointer(weight_at, like)
    winner, indptr = pointer(winner_at, like_offset), pointer(indptr_at, like_offset)
    indices = int32s(indices_at)
    first, last = first_row(indptr, N, share, shares), first_row(indptr, N, share + 1, shares)
    for task in range(T):
        for row in range(first, last):
            at = (task * N + row) * F
            for f in range(F):
                out[at + f] = zero(out)
                winner[at + f] = -1
            for edge in range(np.int64(indptr[row]), np.int64(indptr[row + 1])):
                source = (task * M + np.int64(indices[edge])) * F
                _join(x, source, out, winner, at, F, weight[edge * weight_step], edge)


@kernel
def spmm_max_backward_share(
    result_at, grad_at, winner_at, weight_at, weight_step, indices_at, T, N, M, F,
    like, like_offset, share, shares,
):  # fmt: skip
    """Send gradients to the winners, into ``result [T, M, F]``, which holds zeros.

    A piece is a block of features of one task, so that no two shares write to the same place.
    """
    result, grad, weight = pointer(result_at, like), pointer(grad_at, like), pointer(weight_at, like)
    winner, indices = pointer(winner_at, like_offset), int32s(indices_at)
    blocks = (F + BLOCK - 1) // BLOCK
    for piece in range(T * blocks * share // shares, T * blocks * (share + 1) // shares):
        task, low = piece // blocks, piece % blocks * BLOCK
        for row in range(N):
            at = (task * N + row) * F
            for f in range(low, min(low + BLOCK, F)):
                edge = np.int64(winner[at + f])
                if edge >= 0:
                    col = np.int64(indices[edge])
                    result[(task * M + col) * F + f] += grad[at + f] * weight[edge * weight_step]


# ---- sddmm on the CPU, and the dot product that the attention kernels share


@part
def dot(a, at_a, b, at_b, count):
    """``sum of a[at_a + d] * b[at_b + d]`` for d below ``count``, always added in the same order."""
    total, d = zero(a), 0
    if count >= 16:
        wide = zeros(a, 16)
        while d + 16 <= count:
            wide = madd(wide, load(a, at_a + d, 16), load(b, at_b + d, 16))
            d += 16
        total = lane_sum(wide)
    if d + 8 <= count:
        total += lane_sum(madd(zeros(a, 8), load(a, at_a + d, 8), load(b, at_b + d, 8)))
        d += 8
    if d + 4 <= count:
        total += lane_sum(madd(zeros(a, 4), load(a, at_a + d, 4), load(b, at_b + d, 4)))
        d += 4
    while d < count:
        total += a[at_a + d] * b[at_b + d]
        d += 1
    return total


@part
def dots(a, at_a, b, at_b, H, D, out):
    """The dot products of all heads of one edge, into ``out [H]``; heads of eight go two at a time."""
    if D == 8 and H % 2 == 0:
        for head in range(0, H, 2):
            product = mul(load(a, at_a + head * 8, 16), load(b, at_b + head * 8, 16))
            out[head], out[head + 1] = half_sums(product)
    else:
        for head in range(H):
            out[head] = dot(a, at_a + head * D, b, at_b + head * D, D)


@kernel
def sddmm_share(out_at, a_at, b_at, indptr_at, indices_at, T, N, M, E, H, D, like, like_offset, share, shares):
    """Edges into the rows of one share: ``out [T, E, H]`` from ``a [T, N, H*D]`` and ``b [T, M, H*D]``."""
    out, a, b = pointer(out_at, like), pointer(a_at, like), pointer(b_at, like)
    indptr, indices = pointer(indptr_at, like_offset), int32s(indices_at)
    first, last = first_row(indptr, N, share, shares), first_row(indptr, N, share + 1, shares)
    for task in range(T):
        for row in range(first, last):
            for edge in range(np.int64(indptr[row]), np.int64(indptr[row + 1])):
                left, right = (task * N + row) * H * D, (task * M + np.int64(indices[edge])) * H * D
                dots(a, left, b, right, H, D, shift(out, (task * E + edge) * H))


# ---- edge_softmax on the CPU, and the softmax of one row that the attention kernels share

SOFTMAX_BLOCK = 2048  # edges worked on at once by the attention kernels: their scores stay in the nearest caches


def in_blocks(make, widths=(8, 4, 1)):
    """A kernel ``f(at, count, ...)`` that covers heads or features ``at .. count`` in blocks, the widest ones first.

    ``make(width)`` gives the kernel ``block(at, count, ...)`` of the ``width`` of them from ``at`` on.
    """
    width, block = widths[0], make(widths[0])
    if len(widths) == 1:

        @part
        def rest(at, count, *args):
            pass
    else:
        rest = in_blocks(make, widths[1:])

    @part
    def call(at, count, *args):
        while at + width <= count:
            block(at, count, *args)
            at += width
        rest(at, count, *args)

    return call


@in_blocks
def subtract_largest(width: int):
    """``out = scores - maximum of the head`` for ``degree`` edges of a row; ``largest [H]`` gets the maxima.

    ``lowest`` is minus infinity in the type of the scores.
    """

    @part
    def block(head, H, scores, out, degree, largest, lowest):
        top = fill(zeros(scores, width), lowest)
        for position in range(head, head + degree * H, H):
            top = larger(top, load(scores, position, width))
        store(largest, head, top)
        for position in range(head, head + degree * H, H):
            store(out, position, subtract(load(scores, position, width), top))

    return block


@in_blocks
def head_sums(width: int):
    """Sums over the edges of a row, in order, head by head, into ``totals [H]``."""

    @part
    def block(head, H, values, degree, totals):
        total = zeros(values, width)
        for position in range(head, head + degree * H, H):
            total = add(total, load(values, position, width))
        store(totals, head, total)

    return block


@in_blocks
def head_dots(width: int):
    """Sums of products over the edges of a row, in order, head by head, into ``totals [H]``."""

    @part
    def block(head, H, values, others, degree, totals):
        total = zeros(values, width)
        for position in range(head, head + degree * H, H):
            total = madd(total, load(values, position, width), load(others, position, width))
        store(totals, head, total)

    return block


@in_blocks
def scale_heads(width: int):
    """``values *= factor [H]`` for the edges of a row."""

    @part
    def block(head, H, values, degree, factor):
        scale = load(factor, head, width)
        for position in range(head, head + degree * H, H):
            store(values, position, mul(load(values, position, width), scale))

    return block


@part
def exponentials(values, begin, end):
    """``values = exp(values)`` from ``begin`` to ``end``: over many rows at once, so that it runs on vectors."""
    for position in range(begin, end):
        values[position] = exp(values[position])


@part
def block_end(indptr, row, last, most):
    """The row after the last one that fits a block of ``most`` edges which begins with ``row``."""
    end = row + 1
    while end < last and np.int64(indptr[end + 1]) - np.int64(indptr[row]) <= most:
        end += 1
    return end


@kernel
def softmax_share(out_at, scores_at, indptr_at, T, N, E, H, like, like_offset, share, shares):
    """The rows of one share: ``out [T, E, H]`` from ``scores [T, E, H]``."""
    out, scores, indptr = pointer(out_at, like), pointer(scores_at, like), pointer(indptr_at, like_offset)
    first, last = first_row(indptr, N, share, shares), first_row(indptr, N, share + 1, shares)
    heads = np.empty(2 * H, like.dtype)
    largest = pointer(heads.ctypes.data, like)
    factor = pointer(heads.ctypes.data + H * like.itemsize, like)
    lowest = like.dtype.type(-np.inf)
    for task in range(T):
        for row in range(first, last):
            degree = np.int64(indptr[row + 1]) - np.int64(indptr[row])
            at = (task * E + np.int64(indptr[row])) * H
            subtract_largest(0, H, shift(scores, at), shift(out, at), degree, largest, lowest)
        exponentials(out, (task * E + np.int64(indptr[first])) * H, (task * E + np.int64(indptr[last])) * H)
        for row in range(first, last):
            degree = np.int64(indptr[row + 1]) - np.int64(indptr[row])
            here = shift(out, (task * E + np.int64(indptr[row])) * H)
            head_sums(0, H, here, degree, factor)
            for head in range(H):
                factor[head] = like.dtype.type(1) / factor[head]
            scale_heads(0, H, here, degree, factor)
    return heads.size  # a last use: the pointers into the array do not keep it alive


@kernel
def softmax_backward_share(result_at, grad_at, out_at, indptr_at, T, N, E, H, like, like_offset, share, shares):
    """The rows of one share: ``result = out * (grad - sum over the row of out * grad)``."""
    result, grad, out = pointer(result_at, like), pointer(grad_at, like), pointer(out_at, like)
    indptr = pointer(indptr_at, like_offset)
    first, last = first_row(indptr, N, share, shares), first_row(indptr, N, share + 1, shares)
    heads = np.empty(H, like.dtype)
    total = pointer(heads.ctypes.data, like)
    for task in range(T):
        for row in range(first, last):
            begin, end = (task * E + np.int64(indptr[row])) * H, (task * E + np.int64(indptr[row + 1])) * H
            for head in range(H):
                total[head] = zero(out)
            for position in range(begin, end, H):
                for head in range(H):
                    total[head] += out[position + head] * grad[position + head]
            for position in range(begin, end, H):
                for head in range(H):
                    result[position + head] = out[position + head] * (grad[position + head] - total[head])
    return heads.size  # a last use: the pointer into the array does not keep it alive
