"""edge_softmax on the CPU, and the softmax of one row that the attention kernels share.

Shapes: T tasks, N rows, E edges, H heads.
"""

from __future__ import annotations

import numpy as np

from weft.ops.cpu.exponential import exp
from weft.ops.cpu.kernel import first_row, kernel, part, pointer, shift
from weft.ops.cpu.simd import add, fill, larger, load, madd, mul, store, subtract, zero, zeros

BLOCK = 2048  # edges worked on at once by the attention kernels: their scores stay in the nearest caches


def _make_subtract_largest(width: int):
    @part
    def subtract_block(scores, out, degree, H, largest, lowest):
        top = fill(zeros(scores, width), lowest)
        for position in range(0, degree * H, H):
            top = larger(top, load(scores, position, width))
        store(largest, 0, top)
        for position in range(0, degree * H, H):
            store(out, position, subtract(load(scores, position, width), top))

    return subtract_block


def _make_sum(width: int):
    @part
    def sum_block(values, degree, H, totals):
        total = zeros(values, width)
        for position in range(0, degree * H, H):
            total = add(total, load(values, position, width))
        store(totals, 0, total)

    return sum_block


def _make_dot(width: int):
    @part
    def dot_block(values, others, degree, H, totals):
        total = zeros(values, width)
        for position in range(0, degree * H, H):
            total = madd(total, load(values, position, width), load(others, position, width))
        store(totals, 0, total)

    return dot_block


def _make_scale(width: int):
    @part
    def scale_block(values, degree, H, factor):
        scale = load(factor, 0, width)
        for position in range(0, degree * H, H):
            store(values, position, mul(load(values, position, width), scale))

    return scale_block


_subtract8, _subtract4, _subtract1 = (_make_subtract_largest(width) for width in (8, 4, 1))
_sum8, _sum4, _sum1 = (_make_sum(width) for width in (8, 4, 1))
_dot8, _dot4, _dot1 = (_make_dot(width) for width in (8, 4, 1))
_scale8, _scale4, _scale1 = (_make_scale(width) for width in (8, 4, 1))


@part
def heads_at_once(head, H):
    """How many heads the next block takes: eight, four, or one."""
    return 8 if head + 8 <= H else (4 if head + 4 <= H else 1)


@part
def subtract_largest(scores, out, degree, H, largest, lowest):
    """``out = scores - maximum of the head`` for ``degree`` edges of a row; ``largest [H]`` gets the maxima.

    ``lowest`` is minus infinity in the type of the scores.
    """
    head = 0
    while head < H:
        count = heads_at_once(head, H)
        if count == 8:
            _subtract8(shift(scores, head), shift(out, head), degree, H, shift(largest, head), lowest)
        elif count == 4:
            _subtract4(shift(scores, head), shift(out, head), degree, H, shift(largest, head), lowest)
        else:
            _subtract1(shift(scores, head), shift(out, head), degree, H, shift(largest, head), lowest)
        head += count


@part
def head_sums(values, degree, H, totals):
    """Sums over the edges of a row, in order, head by head, into ``totals [H]``."""
    head = 0
    while head < H:
        count = heads_at_once(head, H)
        if count == 8:
            _sum8(shift(values, head), degree, H, shift(totals, head))
        elif count == 4:
            _sum4(shift(values, head), degree, H, shift(totals, head))
        else:
            _sum1(shift(values, head), degree, H, shift(totals, head))
        head += count


@part
def head_dots(values, others, degree, H, totals):
    """Sums of products over the edges of a row, in order, head by head, into ``totals [H]``."""
    head = 0
    while head < H:
        count = heads_at_once(head, H)
        if count == 8:
            _dot8(shift(values, head), shift(others, head), degree, H, shift(totals, head))
        elif count == 4:
            _dot4(shift(values, head), shift(others, head), degree, H, shift(totals, head))
        else:
            _dot1(shift(values, head), shift(others, head), degree, H, shift(totals, head))
        head += count


@part
def scale_heads(values, degree, H, factor):
    """``values *= factor [H]`` for the edges of a row."""
    head = 0
    while head < H:
        count = heads_at_once(head, H)
        if count == 8:
            _scale8(shift(values, head), degree, H, shift(factor, head))
        elif count == 4:
            _scale4(shift(values, head), degree, H, shift(factor, head))
        else:
            _scale1(shift(values, head), degree, H, shift(factor, head))
        head += count


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
            subtract_largest(shift(scores, at), shift(out, at), degree, H, largest, lowest)
        exponentials(out, (task * E + np.int64(indptr[first])) * H, (task * E + np.int64(indptr[last])) * H)
        for row in range(first, last):
            degree = np.int64(indptr[row + 1]) - np.int64(indptr[row])
            here = shift(out, (task * E + np.int64(indptr[row])) * H)
            head_sums(here, degree, H, factor)
            for head in range(H):
                factor[head] = like.dtype.type(1) / factor[head]
            scale_heads(here, degree, H, factor)
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
