"""spmm_max on the CPU.

Shapes: T tasks, N rows, M columns, E edges, F features.
"""

from __future__ import annotations

import numpy as np

from weft.ops.cpu.kernel import first_row, int32s, kernel, part, pointer
from weft.ops.cpu.simd import zero

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
