"""GAT's attention on the CPU: a row's coefficients are worked out in a scratch row, then summed like spmm.

Shapes: T tasks, N rows, M columns, E edges, H heads, D features of a head.
"""

from __future__ import annotations

import math
from typing import NamedTuple

import numpy as np

from weft.ops.cpu.exponential import exp
from weft.ops.cpu.kernel import first_row, float32s, int32s, int64s, kernel, part, pointer, shift, widest_row
from weft.ops.cpu.sddmm_kernel import dot
from weft.ops.cpu.simd import zero
from weft.ops.cpu.softmax_kernel import exponentials, head_sum
from weft.ops.cpu.spmm_kernel import Edges, sum_row
from weft.ops.random_cpu import keep_bound, key_high, mix_key, random_bits

LOW = np.int64(0xFFFFFFFF)


class Mask(NamedTuple):
    """Dropout of the coefficients of one task; without dropout the bound is 0 and the scale 1."""

    key: int
    bound: int
    scale: float


@part
def task_mask(rate_at, rate_step, clock_at, clock_step, site, has_mask, task):
    """The dropout of one task."""
    if not has_mask:
        return Mask(np.uint64(0), np.uint32(0), np.float32(1.0))
    rate, clock = float32s(rate_at), int64s(clock_at)
    bound, scale = keep_bound(rate[task * rate_step])
    return Mask(mix_key(clock[task * clock_step], clock[task * clock_step + 1], site), bound, scale)


@part
def mask_at(mask, element):
    """``keep / (1 - rate)`` of one element (edge * heads + head)."""
    low_key = np.uint32(mask.key & np.uint64(0xFFFFFFFF))
    bits = random_bits(low_key, key_high(mask.key, element), np.uint32(element & LOW))
    return mask.scale if bits >= mask.bound else np.float32(0.0)


@part
def sum_heads(x, base, out, at, H, D, values, indices, begin, end, last, one):
    """``out[h, :] = sum over the edges of values[k, h] * x[indices[begin + k], h, :]`` for every head."""
    for head in range(H):
        weight = shift(values, head - begin * H)
        edges = Edges(indices, weight, H, one, 0, begin, end, last)
        sum_row(x, base + head * D, H * D, out, at + head * D, one[0], edges, D)


@part
def normalise(values, positive, degree, H, largest, factor, one, alpha_plus, log_sum, at):
    """Divide exponentials by their sum, head by head; ``positive`` (0 or 1) becomes ``positive * alpha``."""
    for head in range(H):
        total = head_sum(values, 0, degree, H, head)
        log_sum[at + head] = largest[head] + math.log(total)
        factor[head] = one[0] / total
    for position in range(0, degree * H, H):
        for head in range(H):
            values[position + head] *= factor[head]
    for position in range(degree * H):
        positive[position] *= values[position]
    for head in range(H):
        alpha_plus[at + head] = head_sum(positive, 0, degree, H, head)


@part
def _scores(source, target, indices, begin, degree, H, slope, values, positive):
    """Scores of the edges into one row, and 1 where the argument of the leaky ReLU is positive."""
    for k in range(degree):
        col = np.int64(indices[begin + k])
        for head in range(H):
            argument = source[col * H + head] + target[head]
            values[k * H + head] = argument if argument > 0 else argument * slope
            positive[k * H + head] = argument > 0


@kernel
def forward_share(
    out_at, plus_at, alpha_plus_at, log_sum_at, x_at, source_at, target_at, indptr_at, indices_at,
    rate_at, rate_step, clock_at, clock_step, site, has_mask, slope, T, N, M, E, H, D,
    like, like_offset, share, shares,
):  # fmt: skip
    """The rows of one share: ``out, out_plus [T, N, H, D]`` and ``alpha_plus, log_sum [T, N, H]``."""
    out, plus, x = pointer(out_at, like), pointer(plus_at, like), pointer(x_at, like)
    alpha_plus, log_sum = pointer(alpha_plus_at, like), pointer(log_sum_at, like)
    indptr, indices = pointer(indptr_at, like_offset), int32s(indices_at)
    first, last = first_row(indptr, N, share, shares), first_row(indptr, N, share + 1, shares)
    widest = widest_row(indptr, first, last)
    scratch = np.ones(1 + 2 * H + 2 * widest * H, like.dtype)
    one = pointer(scratch.ctypes.data, like)
    factor, largest, values = shift(one, 1), shift(one, 1 + H), shift(one, 1 + 2 * H)
    positive = shift(values, widest * H)
    for task in range(T):
        mask = task_mask(rate_at, rate_step, clock_at, clock_step, site, has_mask, task)
        source = pointer(source_at + task * M * H * like.itemsize, like)
        for row in range(first, last):
            begin, end = np.int64(indptr[row]), np.int64(indptr[row + 1])
            at, degree = (task * N + row) * H, end - begin
            target = pointer(target_at + at * like.itemsize, like)
            _scores(source, target, indices, begin, degree, H, like.dtype.type(slope), values, positive)
            exponentials(values, 0, values, 0, degree, H, largest)
            normalise(values, positive, degree, H, largest, factor, one, alpha_plus, log_sum, at)
            if has_mask:
                for k in range(degree * H):
                    keep = mask_at(mask, begin * H + k)
                    values[k] *= keep
                    positive[k] *= keep
            sum_heads(x, task * M * H * D, out, at * D, H, D, values, indices, begin, end, E - 1, one)
            sum_heads(x, task * M * H * D, plus, at * D, H, D, positive, indices, begin, end, E - 1, one)
    return scratch.size  # a last use: the pointers into the array do not keep it alive


@part
def _back_exponents(source, target, log_sum, indices, begin, degree, H, slope, one, values, sign):
    """Logarithms of the coefficients of one source's out-edges, and what its leaky ReLU multiplies by."""
    for k in range(degree):
        row = np.int64(indices[begin + k])
        for head in range(H):
            argument = source[head] + target[row * H + head]
            bend = one[0] if argument > 0 else slope
            values[k * H + head] = argument * bend - log_sum[row * H + head]
            sign[k * H + head] = bend


@kernel
def backward_share(
    grad_x_at, grad_source_at, grad_at, x_at, source_at, target_at, delta_at, log_sum_at,
    indptr_at, indices_at, perm_at, rate_at, rate_step, clock_at, clock_step, site, has_mask, slope,
    T, N, M, E, H, D, like, like_offset, share, shares,
):  # fmt: skip
    """The sources of one share: ``grad_x [T, M, H, D]`` and ``grad_source [T, M, H]``, over the transpose."""
    grad_x, grad_source = pointer(grad_x_at, like), pointer(grad_source_at, like)
    grad, x = pointer(grad_at, like), pointer(x_at, like)
    indptr, indices, perm = pointer(indptr_at, like_offset), int32s(indices_at), pointer(perm_at, like_offset)
    first, last = first_row(indptr, M, share, shares), first_row(indptr, M, share + 1, shares)
    widest = widest_row(indptr, first, last)
    scratch = np.ones(1 + 2 * widest * H, like.dtype)
    one = pointer(scratch.ctypes.data, like)
    values, sign = shift(one, 1), shift(one, 1 + widest * H)
    for task in range(T):
        mask = task_mask(rate_at, rate_step, clock_at, clock_step, site, has_mask, task)
        target = pointer(target_at + task * N * H * like.itemsize, like)
        delta = pointer(delta_at + task * N * H * like.itemsize, like)
        log_sum = pointer(log_sum_at + task * N * H * like.itemsize, like)
        for col in range(first, last):
            begin, end = np.int64(indptr[col]), np.int64(indptr[col + 1])
            at, degree = (task * M + col) * H, end - begin
            source = pointer(source_at + at * like.itemsize, like)
            _back_exponents(
                source, target, log_sum, indices, begin, degree, H, like.dtype.type(slope), one, values, sign
            )
            for k in range(degree * H):
                values[k] = exp(values[k])
            for head in range(H):
                grad_source[at + head] = zero(grad)
            for k in range(degree):
                row, edge = np.int64(indices[begin + k]), np.int64(perm[begin + k])
                for head in range(H):
                    alpha = values[k * H + head]
                    kept = alpha * mask_at(mask, edge * H + head) if has_mask else alpha
                    product = dot(grad, ((task * N + row) * H + head) * D, x, (at + head) * D, D)
                    d_score = kept * product - alpha * delta[row * H + head]
                    grad_source[at + head] += d_score * sign[k * H + head]
                    values[k * H + head] = kept
            sum_heads(grad, task * N * H * D, grad_x, at * D, H, D, values, indices, begin, end, E - 1, one)
    return scratch.size  # a last use: the pointers into the array do not keep it alive
