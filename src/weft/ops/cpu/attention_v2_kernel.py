"""GATv2's attention on the CPU, forward: coefficients of a block of rows in a scratch array, then sums.

Shapes: T tasks, N rows, M columns, E edges, H heads, D features of a head.
"""

from __future__ import annotations

import math

import numpy as np

from weft.ops.cpu.coefficients import drop, sum_heads, task_mask
from weft.ops.cpu.kernel import first_row, int32s, kernel, part, pointer, shift, widest_row
from weft.ops.cpu.simd import add, fill, lane_sum, load, mul, where_positive, zero
from weft.ops.cpu.softmax_kernel import BLOCK, block_end, exponentials, head_sums, scale_heads, subtract_largest


def _make_score(width: int):
    """``<att, leaky_relu(left + right)>`` over ``width`` features."""

    @part
    def score(left, at_left, right, at_right, att, at_att, slope):
        argument = add(load(left, at_left, width), load(right, at_right, width))
        bent = where_positive(argument, argument, mul(argument, fill(argument, slope)))
        return lane_sum(mul(bent, load(att, at_att, width)))

    return score


_score16, _score8, _score4, _score1 = _make_score(16), _make_score(8), _make_score(4), _make_score(1)


@part
def edge_score(left, at_left, right, at_right, att, at_att, D, slope):
    """The score of one edge and head, always added in the same order."""
    total, d = zero(left), 0
    while d + 16 <= D:
        total += _score16(left, at_left + d, right, at_right + d, att, at_att + d, slope)
        d += 16
    if d + 8 <= D:
        total += _score8(left, at_left + d, right, at_right + d, att, at_att + d, slope)
        d += 8
    if d + 4 <= D:
        total += _score4(left, at_left + d, right, at_right + d, att, at_att + d, slope)
        d += 4
    while d < D:
        total += _score1(left, at_left + d, right, at_right + d, att, at_att + d, slope)
        d += 1
    return total


@part
def _scores(source, target, att, indices, begin, end, H, D, slope, values):
    """Scores of the edges into one row."""
    for k in range(end - begin):
        col = np.int64(indices[begin + k])
        for head in range(H):
            values[k * H + head] = edge_score(source, (col * H + head) * D, target, head * D, att, head * D, D, slope)


@part
def _normalise(values, degree, H, factor, one, log_sum):
    """Divide the exponentials of one row by their sums; ``log_sum [H]`` holds the maxima before."""
    head_sums(values, degree, H, factor)
    for head in range(H):
        log_sum[head] += math.log(factor[head])
        factor[head] = one / factor[head]
    scale_heads(values, degree, H, factor)


@kernel
def forward_share(
    out_at, log_sum_at, source_at, target_at, att_at, att_stride, indptr_at, indices_at,
    rate_at, rate_step, clock_at, clock_step, site, has_mask, slope, T, N, M, E, H, D,
    like, like_offset, share, shares,
):  # fmt: skip
    """The rows of one share: ``out [T, N, H, D]`` and ``log_sum [T, N, H]``."""
    out, log_sum = pointer(out_at, like), pointer(log_sum_at, like)
    source, target, att = pointer(source_at, like), pointer(target_at, like), pointer(att_at, like)
    indptr, indices = pointer(indptr_at, like_offset), int32s(indices_at)
    first, last = first_row(indptr, N, share, shares), first_row(indptr, N, share + 1, shares)
    most = max(BLOCK, widest_row(indptr, first, last))
    scratch = np.ones(1 + H + most * H, like.dtype)
    one = pointer(scratch.ctypes.data, like)
    factor, values = shift(one, 1), shift(one, 1 + H)
    for task in range(T):
        mask = task_mask(rate_at, rate_step, clock_at, clock_step, site, has_mask, task)
        vector, sources = shift(att, task * att_stride), shift(source, task * M * H * D)
        row = first
        while row < last:
            after = block_end(indptr, row, last, most)
            start, count = np.int64(indptr[row]), (np.int64(indptr[after]) - np.int64(indptr[row])) * H
            for i in range(row, after):
                begin, end, at = np.int64(indptr[i]), np.int64(indptr[i + 1]), (task * N + i) * H
                here = (begin - start) * H
                _scores(
                    sources, shift(target, at * D), vector, indices, begin, end, H, D, like.dtype.type(slope),
                    shift(values, here),
                )  # fmt: skip
                scores = shift(values, here)
                subtract_largest(scores, scores, end - begin, H, shift(log_sum, at), like.dtype.type(-np.inf))
            exponentials(values, 0, count)
            for i in range(row, after):
                degree = np.int64(indptr[i + 1]) - np.int64(indptr[i])
                here = (np.int64(indptr[i]) - start) * H
                _normalise(shift(values, here), degree, H, factor, one[0], shift(log_sum, (task * N + i) * H))
            if has_mask:
                drop(values, 0, count // H, H, mask, start)
            for i in range(row, after):
                begin, end, at = np.int64(indptr[i]), np.int64(indptr[i + 1]), (task * N + i) * H * D
                here = shift(values, (begin - start) * H)
                sum_heads(source, task * M * H * D, out, at, H, D, here, indices, begin, end, E - 1, one)
            row = after
    return scratch.size  # a last use: the pointers into the array do not keep it alive
