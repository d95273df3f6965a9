"""GATv2's attention on the CPU, forward: coefficients of a block of rows in a scratch array, then sums.

Shapes: T tasks, N rows, M columns, E edges, H heads, D features of a head.
"""

from __future__ import annotations

import math
from typing import NamedTuple

import numpy as np

from weft.ops.cpu.attention import drop, sum_heads, task_mask
from weft.ops.cpu.edges import (
    SOFTMAX_BLOCK,
    block_end,
    dots,
    exponentials,
    head_sums,
    in_blocks,
    scale_heads,
    subtract_largest,
)
from weft.ops.cpu.kernel import first_row, int32s, kernel, part, pointer, shift, widest_row
from weft.ops.cpu.simd import add, fill, lane_sum, load, madd, mul, store, where_positive, zero, zeros


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
    head_sums(0, H, values, degree, factor)
    for head in range(H):
        log_sum[head] += math.log(factor[head])
        factor[head] = one / factor[head]
    scale_heads(0, H, values, degree, factor)


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
    most = max(SOFTMAX_BLOCK, widest_row(indptr, first, last))
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
                subtract_largest(0, H, scores, scores, end - begin, shift(log_sum, at), like.dtype.type(-np.inf))
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


# ---- GATv2's attention on the CPU, backward
#
# The pass over the rows keeps two numbers for each edge and head, the change of its score and its coefficient, so the
# pass over the transpose need not work out scores again. Nothing of size E x D is kept. Forward and backward are 9.5
# times as fast as torch's reference on cora. The reference adds in another order: with it, the last bits of weights
# would change.


class Change(NamedTuple):
    """The edges ``begin .. end`` of a row (of the transpose), with ``d_score`` and ``kept`` at ``edge * step``."""

    indices: object
    d_score: object
    kept: object
    step: int
    begin: int
    end: int


FEATURES = (16, 8, 4, 1)  # of a block


def _make_target_block(width: int):
    """``width`` features of a destination's gradient, and its part of the gradient of ``att``, which is added to."""

    @part
    def block(d, D, grad_target, at, grad_att, source, base, stride, target, att, at_att, edges, slope, one):
        here = load(target, at + d, width)
        total, total_att = zeros(source, width), zeros(source, width)
        high, low = fill(here, one), fill(here, slope)
        for edge in range(edges.begin, edges.end):
            argument = add(load(source, base + d + np.int64(edges.indices[edge]) * stride, width), here)
            change = fill(here, edges.d_score[edge * edges.step])
            bent = mul(change, where_positive(argument, high, low))
            total = add(total, bent)
            total_att = madd(total_att, bent, argument)
        store(grad_target, at + d, mul(total, load(att, at_att + d, width)))
        store(grad_att, at_att + d, add(load(grad_att, at_att + d, width), total_att))

    return block


def _make_source_block(width: int):
    """``width`` features of a source's gradient; its edges are numbered through ``perm``."""

    @part
    def block(d, D, grad_source, at, grad, target, base, stride, source, att, at_att, edges, perm, slope, one):
        here = load(source, at + d, width)
        total, total_grad = zeros(source, width), zeros(source, width)
        high, low = fill(here, one), fill(here, slope)
        for position in range(edges.begin, edges.end):
            edge = np.int64(perm[position]) * edges.step
            there = base + d + np.int64(edges.indices[position]) * stride
            argument = add(load(target, there, width), here)
            change = fill(here, edges.d_score[edge])
            total = madd(total, change, where_positive(argument, high, low))
            total_grad = madd(total_grad, load(grad, there, width), fill(here, edges.kept[edge]))
        store(grad_source, at + d, madd(total_grad, total, load(att, at_att + d, width)))

    return block


_target_row, _source_row = in_blocks(_make_target_block, FEATURES), in_blocks(_make_source_block, FEATURES)


@kernel
def target_share(
    grad_target_at, partial_att_at, d_score_at, kept_at, grad_at, source_at, target_at, att_at, att_stride,
    delta_at, log_sum_at, indptr_at, indices_at, rate_at, rate_step, clock_at, clock_step, site, has_mask,
    slope, T, N, M, E, H, D, like, like_offset, share, shares,
):  # fmt: skip
    """The rows of one share: ``grad_target [T, N, H, D]``, ``d_score, kept [T, E, H]`` and the share's own part
    of the gradient of ``att``, ``partial_att [shares, T, H, D]``, which holds zeros."""
    grad_target, grad = pointer(grad_target_at, like), pointer(grad_at, like)
    grad_att = pointer(partial_att_at + share * T * H * D * like.itemsize, like)
    source, target, att = pointer(source_at, like), pointer(target_at, like), pointer(att_at, like)
    delta, log_sum = pointer(delta_at, like), pointer(log_sum_at, like)
    indptr, indices = pointer(indptr_at, like_offset), int32s(indices_at)
    first, last = first_row(indptr, N, share, shares), first_row(indptr, N, share + 1, shares)
    bend, one = like.dtype.type(slope), like.dtype.type(1)
    scratch = np.empty(H, like.dtype)
    products = pointer(scratch.ctypes.data, like)
    for task in range(T):
        mask = task_mask(rate_at, rate_step, clock_at, clock_step, site, has_mask, task)
        d_score = pointer(d_score_at + task * E * H * like.itemsize, like)
        kept = pointer(kept_at + task * E * H * like.itemsize, like)
        vector = shift(att, task * att_stride)
        for row in range(first, last):
            begin, end = np.int64(indptr[row]), np.int64(indptr[row + 1])
            at = (task * N + row) * H
            for edge in range(begin, end):
                there = (task * M + np.int64(indices[edge])) * H * D
                for head in range(H):
                    d_score[edge * H + head] = (
                        edge_score(source, there + head * D, target, (at + head) * D, vector, head * D, D, bend)
                        - log_sum[at + head]
                    )
            exponentials(d_score, begin * H, end * H)
            for k in range(begin * H, end * H):
                kept[k] = d_score[k]
            if has_mask:
                drop(kept, begin * H, end - begin, H, mask, begin)
            for edge in range(begin, end):
                there = (task * M + np.int64(indices[edge])) * H * D
                dots(grad, at * D, source, there, H, D, products)
                for head in range(H):
                    k = edge * H + head
                    d_score[k] = kept[k] * products[head] - d_score[k] * delta[at + head]
            for head in range(H):
                edges = Change(indices, shift(d_score, head), shift(kept, head), H, begin, end)
                _target_row(
                    0, D, grad_target, (at + head) * D, shift(grad_att, task * H * D), source,
                    (task * M * H + head) * D, H * D, target, vector, head * D, edges, bend, one,
                )  # fmt: skip
    return scratch.size  # a last use: the pointer into the array does not keep it alive


@kernel
def source_share(
    grad_source_at, d_score_at, kept_at, grad_at, source_at, target_at, att_at, att_stride,
    indptr_at, indices_at, perm_at, slope, T, N, M, E, H, D, like, like_offset, share, shares,
):  # fmt: skip
    """The sources of one share: ``grad_source [T, M, H, D]``, over the transpose."""
    grad_source, grad = pointer(grad_source_at, like), pointer(grad_at, like)
    source, target, att = pointer(source_at, like), pointer(target_at, like), pointer(att_at, like)
    indptr, indices, perm = pointer(indptr_at, like_offset), int32s(indices_at), pointer(perm_at, like_offset)
    first, last = first_row(indptr, M, share, shares), first_row(indptr, M, share + 1, shares)
    bend, one = like.dtype.type(slope), like.dtype.type(1)
    for task in range(T):
        d_score = pointer(d_score_at + task * E * H * like.itemsize, like)
        kept = pointer(kept_at + task * E * H * like.itemsize, like)
        for col in range(first, last):
            begin, end = np.int64(indptr[col]), np.int64(indptr[col + 1])
            for head in range(H):
                at = ((task * M + col) * H + head) * D
                edges = Change(indices, shift(d_score, head), shift(kept, head), H, begin, end)
                _source_row(
                    0, D, grad_source, at, grad, target, (task * N * H + head) * D, H * D, source,
                    shift(att, task * att_stride), head * D, edges, perm, bend, one,
                )  # fmt: skip
