"""GAT's attention on the CPU: coefficients of a block of rows in a scratch array, then sums like spmm's.

Shapes: T tasks, N rows, M columns, E edges, H heads, D features of a head.
"""

from __future__ import annotations

import math
from typing import NamedTuple

import numpy as np

from weft.ops.cpu.edges import (
    SOFTMAX_BLOCK,
    Edges,
    block_end,
    dots,
    exponentials,
    head_dots,
    head_sums,
    in_blocks,
    scale_heads,
    subtract_largest,
    sum_row,
)
from weft.ops.cpu.kernel import first_row, float32s, int32s, int64s, kernel, part, pointer, shift, widest_row
from weft.ops.cpu.random_bits import column_term, keep_bound, key_high, mask_row, mask_row_of, mix_key, random_bits
from weft.ops.cpu.simd import add, fill, load, madd, mul, spread_pair, store, subtract, where_positive, zero, zeros

# ---- Dropout of attention coefficients on the CPU, and sums of rows weighted by them
#
# Coefficients are ``values [k, h]``, edge after edge, heads side by side.

LOW = np.uint64(0xFFFFFFFF)


class Mask(NamedTuple):
    """The dropout of one task."""

    key: int
    bound: int
    scale: float


@part
def task_mask(rate_at, rate_step, clock_at, clock_step, site, has_mask, task):
    """The dropout of one task; without dropout one that keeps everything."""
    if not has_mask:
        return Mask(np.uint64(0), np.uint32(0), np.float32(1.0))
    rate, clock = float32s(rate_at), int64s(clock_at)
    bound, scale = keep_bound(rate[task * rate_step])
    return Mask(mix_key(clock[task * clock_step], clock[task * clock_step + 1], site), bound, scale)


@part
def drop(values, at, edges, H, mask, first):
    """Multiply the values of ``edges`` edges from ``first`` on by ``keep / (1 - rate)``; an edge is a mask's row."""
    in_one_half = (first >> 32) == ((first + edges) >> 32)
    if edges > 1 and in_one_half and (H == 1 or H == 2 or H == 4):  # too few for a vector loop over an edge's heads
        low_key, high_key, low = np.uint32(mask.key & LOW), key_high(mask.key, first), np.uint32(np.uint64(first) & LOW)
        shift_by = np.uint32(H >> 1)  # 0, 1, 2
        for k in range(edges * H):
            row = np.uint32(low + (np.uint32(k) >> shift_by))
            bits = random_bits(mask_row_of(low_key, high_key, row), column_term(k & (H - 1)))
            values[at + k] *= mask.scale if bits >= mask.bound else np.float32(0.0)
        return
    for k in range(edges):
        row_key = mask_row(mask.key, first + k)
        for head in range(H):
            bits = random_bits(row_key, column_term(head))
            values[at + k * H + head] *= mask.scale if bits >= mask.bound else np.float32(0.0)


@part
def _sum_heads_of_eight(x, base, out, at, H, values, indices, begin, end):
    """Four heads of eight features at a time."""
    for head in range(0, H, 4):
        a, b = zeros(x, 16), zeros(x, 16)
        for edge in range(begin, end):
            source = base + (np.int64(indices[edge]) * H + head) * 8
            here = (edge - begin) * H + head
            a = madd(a, load(x, source, 16), spread_pair(values, here))
            b = madd(b, load(x, source + 16, 16), spread_pair(values, here + 2))
        store(out, at + head * 8, a)
        store(out, at + head * 8 + 16, b)


@part
def sum_heads(x, base, out, at, H, D, values, indices, begin, end, last, one):
    """``out[h, :] = sum over the edges of values[k, h] * x[indices[begin + k], h, :]`` for every head."""
    if D == 8 and H % 4 == 0:
        _sum_heads_of_eight(x, base, out, at, H, values, indices, begin, end)
        return
    for head in range(H):
        weight = shift(values, head - begin * H)
        edges = Edges(indices, weight, H, one, 0, begin, end, last)
        sum_row(x, base + head * D, H * D, out, at + head * D, one[0], edges, D)


@in_blocks
def _scores(width: int):
    """Scores of the edges into one row, and 1 where the argument of the leaky ReLU is positive."""

    @part
    def block(head, H, source, target, indices, begin, end, slope, one, values, positive):
        here = load(target, head, width)
        low, yes, no = fill(here, slope), fill(here, one), zeros(source, width)
        for k in range(end - begin):
            argument = add(load(source, np.int64(indices[begin + k]) * H + head, width), here)
            store(values, k * H + head, where_positive(argument, argument, mul(argument, low)))
            store(positive, k * H + head, where_positive(argument, yes, no))

    return block


@part
def _normalise(values, positive, degree, H, factor, one, log_sum, alpha_plus):
    """Divide the exponentials of one row by their sums; ``log_sum [H]`` holds the maxima before."""
    head_sums(0, H, values, degree, factor)
    for head in range(H):
        log_sum[head] += math.log(factor[head])
        factor[head] = one / factor[head]
    scale_heads(0, H, values, degree, factor)
    head_dots(0, H, values, positive, degree, alpha_plus)


@kernel
def forward_share(
    out_at, plus_at, alpha_plus_at, log_sum_at, x_at, source_at, target_at, indptr_at, indices_at,
    rate_at, rate_step, clock_at, clock_step, site, has_mask, slope, T, N, M, E, H, D,
    like, like_offset, share, shares,
):  # fmt: skip
    """The rows of one share: ``out, out_plus [T, N, H, D]`` and ``alpha_plus, log_sum [T, N, H]``."""
    out, plus, x = pointer(out_at, like), pointer(plus_at, like), pointer(x_at, like)
    alpha_plus, log_sum = pointer(alpha_plus_at, like), pointer(log_sum_at, like)
    targets, indptr, indices = pointer(target_at, like), pointer(indptr_at, like_offset), int32s(indices_at)
    first, last = first_row(indptr, N, share, shares), first_row(indptr, N, share + 1, shares)
    most = max(SOFTMAX_BLOCK, widest_row(indptr, first, last))
    scratch = np.ones(1 + H + 2 * most * H, like.dtype)
    one = pointer(scratch.ctypes.data, like)
    factor, values, positive = shift(one, 1), shift(one, 1 + H), shift(one, 1 + H + most * H)
    bend, lowest = like.dtype.type(slope), like.dtype.type(-np.inf)
    for task in range(T):
        mask = task_mask(rate_at, rate_step, clock_at, clock_step, site, has_mask, task)
        source = pointer(source_at + task * M * H * like.itemsize, like)
        row = first
        while row < last:
            after = block_end(indptr, row, last, most)
            start, count = np.int64(indptr[row]), (np.int64(indptr[after]) - np.int64(indptr[row])) * H
            for i in range(row, after):
                begin, end = np.int64(indptr[i]), np.int64(indptr[i + 1])
                at, here = (task * N + i) * H, (begin - start) * H
                scores = shift(values, here)
                _scores(
                    0, H, source, shift(targets, at), indices, begin, end, bend, one[0], scores, shift(positive, here)
                )
                subtract_largest(0, H, scores, scores, end - begin, shift(log_sum, at), lowest)
            exponentials(values, 0, count)
            for i in range(row, after):
                at, here = (task * N + i) * H, (np.int64(indptr[i]) - start) * H
                degree = np.int64(indptr[i + 1]) - np.int64(indptr[i])
                _normalise(
                    shift(values, here), shift(positive, here), degree, H, factor, one[0], shift(log_sum, at),
                    shift(alpha_plus, at),
                )  # fmt: skip
            if has_mask:
                drop(values, 0, count // H, H, mask, start)
            for k in range(count):
                positive[k] *= values[k]
            for i in range(row, after):
                begin, end = np.int64(indptr[i]), np.int64(indptr[i + 1])
                at, here, base = (task * N + i) * H * D, (begin - start) * H, task * M * H * D
                sum_heads(x, base, out, at, H, D, shift(values, here), indices, begin, end, E - 1, one)
                sum_heads(x, base, plus, at, H, D, shift(positive, here), indices, begin, end, E - 1, one)
            row = after
    return scratch.size  # a last use: the pointers into the array do not keep it alive


@in_blocks
def _back_exponents(width: int):
    """Logarithms of the coefficients of one source's out-edges, and what its leaky ReLU multiplies by."""

    @part
    def block(head, H, source, target, log_sum, indices, begin, end, slope, one, values, bend):
        here = load(source, head, width)
        low, high = fill(here, slope), fill(here, one)
        for k in range(end - begin):
            row = np.int64(indices[begin + k]) * H + head
            argument = add(load(target, row, width), here)
            factor = where_positive(argument, high, low)
            store(values, k * H + head, subtract(mul(argument, factor), load(log_sum, row, width)))
            store(bend, k * H + head, factor)

    return block


@in_blocks
def _score_gradients(width: int):
    """One edge: add its part to ``grad_source [H]`` and leave the coefficients that were kept in ``values``."""

    @part
    def block(head, H, values, bend, keeps, products, delta, grad_source):
        alpha = load(values, head, width)
        kept = mul(alpha, load(keeps, head, width))
        change = subtract(mul(kept, load(products, head, width)), mul(alpha, load(delta, head, width)))
        store(grad_source, head, madd(load(grad_source, head, width), change, load(bend, head, width)))
        store(values, head, kept)

    return block


@kernel
def backward_share(
    grad_x_at, grad_source_at, grad_at, x_at, source_at, target_at, delta_at, log_sum_at,
    indptr_at, indices_at, perm_at, rate_at, rate_step, clock_at, clock_step, site, has_mask, slope,
    T, N, M, E, H, D, like, like_offset, share, shares,
):  # fmt: skip
    """The sources of one share: ``grad_x [T, M, H, D]`` and ``grad_source [T, M, H]``, over the transpose."""
    grad_x, grad_source = pointer(grad_x_at, like), pointer(grad_source_at, like)
    grad, x, sources = pointer(grad_at, like), pointer(x_at, like), pointer(source_at, like)
    indptr, indices, perm = pointer(indptr_at, like_offset), int32s(indices_at), pointer(perm_at, like_offset)
    first, last = first_row(indptr, M, share, shares), first_row(indptr, M, share + 1, shares)
    most = max(SOFTMAX_BLOCK, widest_row(indptr, first, last))
    scratch = np.ones(1 + 2 * H + 2 * most * H, like.dtype)
    one = pointer(scratch.ctypes.data, like)
    keeps, products, values = shift(one, 1), shift(one, 1 + H), shift(one, 1 + 2 * H)
    bend, low = shift(values, most * H), like.dtype.type(slope)
    for task in range(T):
        mask = task_mask(rate_at, rate_step, clock_at, clock_step, site, has_mask, task)
        target = pointer(target_at + task * N * H * like.itemsize, like)
        delta = pointer(delta_at + task * N * H * like.itemsize, like)
        log_sum = pointer(log_sum_at + task * N * H * like.itemsize, like)
        col = first
        while col < last:
            after = block_end(indptr, col, last, most)
            start, count = np.int64(indptr[col]), (np.int64(indptr[after]) - np.int64(indptr[col])) * H
            for j in range(col, after):
                begin, end, at = np.int64(indptr[j]), np.int64(indptr[j + 1]), (task * M + j) * H
                here = (begin - start) * H
                _back_exponents(
                    0, H, shift(sources, at), target, log_sum, indices, begin, end, low, one[0],
                    shift(values, here), shift(bend, here),
                )  # fmt: skip
            exponentials(values, 0, count)
            for j in range(col, after):
                begin, end, at = np.int64(indptr[j]), np.int64(indptr[j + 1]), (task * M + j) * H
                for head in range(H):
                    grad_source[at + head] = zero(grad)
                for position in range(begin, end):
                    row, here = np.int64(indices[position]), (position - start) * H
                    if has_mask:
                        for head in range(H):
                            keeps[head] = one[0]
                        drop(keeps, 0, 1, H, mask, np.int64(perm[position]))
                    dots(grad, (task * N + row) * H * D, x, at * D, H, D, products)
                    _score_gradients(
                        0, H, shift(values, here), shift(bend, here), keeps, products, shift(delta, row * H),
                        shift(grad_source, at),
                    )  # fmt: skip
                sum_heads(
                    grad, task * N * H * D, grad_x, at * D, H, D, shift(values, (begin - start) * H), indices,
                    begin, end, E - 1, one,
                )  # fmt: skip
            col = after
    return scratch.size  # a last use: the pointers into the array do not keep it alive
