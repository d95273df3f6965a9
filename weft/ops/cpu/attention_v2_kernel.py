"""GATv2's attention on the CPU, forward: scores in a scratch row, then summed like spmm.

Shapes: T tasks, N rows, M columns, E edges, H heads, D features of a head.
"""

from __future__ import annotations

import math

import numpy as np

from weft.ops.cpu.attention_kernel import mask_at, sum_heads, task_mask
from weft.ops.cpu.kernel import first_row, int32s, kernel, part, pointer, shift, widest_row
from weft.ops.cpu.simd import add, fill, lane_sum, load, mul, where_positive, zero
from weft.ops.cpu.softmax_kernel import exponentials, head_sum


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
    scratch = np.ones(1 + H + widest_row(indptr, first, last) * H, like.dtype)
    one = pointer(scratch.ctypes.data, like)
    largest, values = shift(one, 1), shift(one, 1 + H)
    for task in range(T):
        mask = task_mask(rate_at, rate_step, clock_at, clock_step, site, has_mask, task)
        for row in range(first, last):
            begin, end = np.int64(indptr[row]), np.int64(indptr[row + 1])
            at, degree = (task * N + row) * H, end - begin
            for k in range(degree):
                col = np.int64(indices[begin + k])
                for head in range(H):
                    values[k * H + head] = edge_score(
                        source, ((task * M + col) * H + head) * D, target, (at + head) * D,
                        att, task * att_stride + head * D, D, like.dtype.type(slope),
                    )  # fmt: skip
            exponentials(values, 0, values, 0, degree, H, largest)
            for head in range(H):
                total = head_sum(values, 0, degree, H, head)
                log_sum[at + head] = largest[head] + math.log(total)
                for k in range(degree):
                    values[k * H + head] /= total
            if has_mask:
                for k in range(degree * H):
                    values[k] *= mask_at(mask, begin * H + k)
            sum_heads(source, task * M * H * D, out, at * D, H, D, values, indices, begin, end, E - 1, one)
    return scratch.size  # a last use: the pointers into the array do not keep it alive
