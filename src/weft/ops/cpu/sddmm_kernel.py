"""sddmm on the CPU, and the dot product that the attention kernels share.

Shapes: T tasks, N rows, M columns, E edges, H heads, D features of a head.
"""

from __future__ import annotations

import numpy as np

from weft.ops.cpu.kernel import first_row, int32s, kernel, part, pointer, shift
from weft.ops.cpu.simd import half_sums, lane_sum, load, madd, mul, zero, zeros


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
