"""Dropout of attention coefficients on the CPU, and sums of rows weighted by them.

Coefficients are ``values [k, h]``, edge after edge, heads side by side.
Shapes: E edges, H heads, D features of a head.
"""

from __future__ import annotations

from typing import NamedTuple

import numpy as np

from weft.ops.cpu.kernel import float32s, int64s, part, shift
from weft.ops.cpu.simd import load, madd, spread_pair, store, zeros
from weft.ops.cpu.spmm_kernel import Edges, sum_row
from weft.ops.random.numba_bits import column_term, keep_bound, key_high, mask_row, mask_row_of, mix_key, random_bits

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
