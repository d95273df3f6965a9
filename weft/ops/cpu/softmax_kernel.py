"""edge_softmax on the CPU, and the softmax of one row that the attention kernels share.

Shapes: T tasks, N rows, E edges, H heads.
"""

from __future__ import annotations

import numpy as np

from weft.ops.cpu.exponential import exp
from weft.ops.cpu.kernel import first_row, kernel, part, pointer
from weft.ops.cpu.simd import zero


@part
def exponentials(scores, at, out, at_out, degree, H, largest):
    """``out = exp(scores - maximum of the head)`` for ``degree`` edges; ``largest [H]`` gets the maxima."""
    for head in range(H):
        largest[head] = -np.inf
    for position in range(0, degree * H, H):
        for head in range(H):
            score = scores[at + position + head]
            largest[head] = score if score > largest[head] else largest[head]
    for position in range(0, degree * H, H):
        for head in range(H):
            out[at_out + position + head] = scores[at + position + head] - largest[head]
    for position in range(at_out, at_out + degree * H):
        out[position] = exp(out[position])


@part
def head_sum(values, at, degree, H, head):
    """Sum over the edges of a row for one head, in order."""
    total = zero(values)
    for position in range(head, degree * H, H):
        total += values[at + position]
    return total


@kernel
def softmax_share(out_at, scores_at, indptr_at, T, N, E, H, like, like_offset, share, shares):
    """The rows of one share: ``out [T, E, H]`` from ``scores [T, E, H]``."""
    out, scores, indptr = pointer(out_at, like), pointer(scores_at, like), pointer(indptr_at, like_offset)
    first, last = first_row(indptr, N, share, shares), first_row(indptr, N, share + 1, shares)
    heads = np.empty(2 * H, like.dtype)
    largest = pointer(heads.ctypes.data, like)
    factor = pointer(heads.ctypes.data + H * like.itemsize, like)
    for task in range(T):
        for row in range(first, last):
            degree = np.int64(indptr[row + 1]) - np.int64(indptr[row])
            at = (task * E + np.int64(indptr[row])) * H
            exponentials(scores, at, out, at, degree, H, largest)
            for head in range(H):
                factor[head] = like.dtype.type(1) / head_sum(out, at, degree, H, head)
            for position in range(0, degree * H, H):
                for head in range(H):
                    out[at + position + head] *= factor[head]
    return heads.size  # a last use: the pointers into the array do not keep it alive


@kernel
def softmax_backward_share(result_at, grad_at, out_at, indptr_at, T, N, E, H, like, like_offset, share, shares):
    """The rows of one share: ``result = out * (grad - sum over the row of out * grad)``."""
    result, grad, out = pointer(result_at, like), pointer(grad_at, like), pointer(out_at, like)
    indptr = pointer(indptr_at, like_offset)
    first, last = first_row(indptr, N, share, shares), first_row(indptr, N, share + 1, shares)
    for task in range(T):
        for row in range(first, last):
            degree = np.int64(indptr[row + 1]) - np.int64(indptr[row])
            at = (task * E + np.int64(indptr[row])) * H
            for head in range(H):
                total = zero(out)
                for position in range(at + head, at + degree * H, H):
                    total += out[position] * grad[position]
                for position in range(at + head, at + degree * H, H):
                    result[position] = out[position] * (grad[position] - total)
