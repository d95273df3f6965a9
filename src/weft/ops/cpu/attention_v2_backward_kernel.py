"""GATv2's attention on the CPU, backward.

The pass over the rows keeps two numbers for each edge and head, the change of its score and its coefficient, so
the pass over the transpose need not work out scores again. Nothing of size E x D is kept.
Shapes: T tasks, N rows, M columns, E edges, H heads, D features of a head.
"""

from __future__ import annotations

from typing import NamedTuple

import numpy as np

from weft.ops.cpu.attention_v2_kernel import edge_score
from weft.ops.cpu.coefficients import drop, task_mask
from weft.ops.cpu.kernel import first_row, int32s, kernel, part, pointer, shift
from weft.ops.cpu.sddmm_kernel import dots
from weft.ops.cpu.simd import add, fill, load, madd, mul, store, where_positive, zeros
from weft.ops.cpu.softmax_kernel import exponentials


class Change(NamedTuple):
    """The edges ``begin .. end`` of a row (of the transpose), with ``d_score`` and ``kept`` at ``edge * step``."""

    indices: object
    d_score: object
    kept: object
    step: int
    begin: int
    end: int


def _make_target_block(width: int):
    """``width`` features of a destination's gradient, and its part of the gradient of ``att``."""

    @part
    def block(grad_target, at, grad_att, source, base, stride, target, att, at_att, edges, slope, one):
        here = load(target, at, width)
        total, total_att = zeros(source, width), zeros(source, width)
        high, low = fill(here, one), fill(here, slope)
        for edge in range(edges.begin, edges.end):
            argument = add(load(source, base + np.int64(edges.indices[edge]) * stride, width), here)
            change = fill(here, edges.d_score[edge * edges.step])
            bent = mul(change, where_positive(argument, high, low))
            total = add(total, bent)
            total_att = madd(total_att, bent, argument)
        store(grad_target, at, mul(total, load(att, at_att, width)))
        store(grad_att, at_att, add(load(grad_att, at_att, width), total_att))

    return block


def _make_source_block(width: int):
    """``width`` features of a source's gradient; its edges are numbered through ``perm``."""

    @part
    def block(grad_source, at, grad, target, base, stride, source, att, at_att, edges, perm, slope, one):
        here = load(source, at, width)
        total, total_grad = zeros(source, width), zeros(source, width)
        high, low = fill(here, one), fill(here, slope)
        for position in range(edges.begin, edges.end):
            edge = np.int64(perm[position]) * edges.step
            there = base + np.int64(edges.indices[position]) * stride
            argument = add(load(target, there, width), here)
            change = fill(here, edges.d_score[edge])
            total = madd(total, change, where_positive(argument, high, low))
            total_grad = madd(total_grad, load(grad, there, width), fill(here, edges.kept[edge]))
        store(grad_source, at, madd(total_grad, total, load(att, at_att, width)))

    return block


_target16, _target8 = _make_target_block(16), _make_target_block(8)
_target4, _target1 = _make_target_block(4), _make_target_block(1)
_source16, _source8 = _make_source_block(16), _make_source_block(8)
_source4, _source1 = _make_source_block(4), _make_source_block(1)


@part
def _target_row(grad_target, at, grad_att, source, base, stride, target, att, at_att, edges, slope, one, D):
    """All features of one destination and head, in blocks that do not overlap (``grad_att`` is added to)."""
    d = 0
    while d < D:
        args = (grad_target, at + d, grad_att, source, base + d, stride, target, att, at_att + d, edges, slope, one)
        if d + 16 <= D:
            _target16(*args)
            d += 16
        elif d + 8 <= D:
            _target8(*args)
            d += 8
        elif d + 4 <= D:
            _target4(*args)
            d += 4
        else:
            _target1(*args)
            d += 1


@part
def _source_row(grad_source, at, grad, target, base, stride, source, att, at_att, edges, perm, slope, one, D):
    """All features of one source and head."""
    d = 0
    while d < D:
        args = (
            grad_source, at + d, grad, target, base + d, stride, source, att, at_att + d, edges, perm, slope, one,
        )  # fmt: skip
        if d + 16 <= D:
            _source16(*args)
            d += 16
        elif d + 8 <= D:
            _source8(*args)
            d += 8
        elif d + 4 <= D:
            _source4(*args)
            d += 4
        else:
            _source1(*args)
            d += 1


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
                    grad_target, (at + head) * D, shift(grad_att, task * H * D), source,
                    (task * M * H + head) * D, H * D, target, vector, head * D, edges, bend, one, D,
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
                    grad_source, at, grad, target, (task * N * H + head) * D, H * D, source,
                    shift(att, task * att_stride), head * D, edges, perm, bend, one, D,
                )  # fmt: skip
