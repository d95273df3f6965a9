"""Bias, activation and counter-based dropout on the CPU, in blocks that fit the L1 cache.

Shapes: B tasks with ``count`` elements each; G groups of rows that share a bias ``[G, F]``; W columns of a mask's
rows.
"""

from __future__ import annotations

import numpy as np

from weft.ops.cpu.kernel import float32s, int64s, kernel, part, pointer
from weft.ops.cpu.random_bits import column_term, keep_bound, key_high, mask_row, mask_row_of, mix_key, random_bits
from weft.ops.cpu.simd import expm1, zero

PIECE = 2048
LOW = np.uint64(0xFFFFFFFF)
WIDE = 32  # columns from which a row is worth a loop of its own


@part
def _copy(source, start, out, at, count):
    for k in range(count):
        out[at + k] = source[start + k]


@part
def _add_bias(x, start, out, at, count, bias, group, f, F):
    """``out[at:] = x[start:] + bias`` for ``count`` elements, the first of which is feature ``f`` of a row."""
    done = 0
    while done < count:
        run = min(F - f, count - done)
        for k in range(run):
            out[at + done + k] = x[start + done + k] + bias[group * F + f + k]
        done += run
        f = 0


@part
def _relu(out, at, count):
    for k in range(at, at + count):
        out[k] = zero(out) if out[k] < 0 else out[k]  # NaN is not below 0 and stays


# Part of one pass with bias and dropout, 0.8 to 1.5 times as fast as torch's. Torch's exponential has other last bits:
# with it, the numbers of a training would change.
@part
def _elu(out, at, count):
    for k in range(at, at + count):
        value = out[k]
        bent = expm1(value if value < 0 else zero(out))
        out[k] = bent if value < 0 else value


@part
def _terms(W, most):
    """Rows ``[0, :]``, counted from the first, and columns' terms ``[1, :]`` of a piece of ``most`` values at most.

    Tables, because rows of 7 or 16 values are too short for a vector loop over each of them.
    """
    terms = np.empty((2, max(1, min(most, PIECE) if W < WIDE else 1)), np.uint32)
    row, column = 0, 0
    for k in range(terms.shape[1]):
        terms[0, k], terms[1, k] = np.uint32(row), column_term(column)
        column += 1
        if column == W:
            row, column = row + 1, 0
    return terms


@part
def _mask(values, at, count, key, place, W, terms, bound, scale):
    """Multiply ``count`` values by ``keep / (1 - rate)``; the first of them stands at ``place`` of its task."""
    row, column = place // W, place % W
    if W < WIDE:  # a piece has whole rows
        rows, columns = terms[0], terms[1]
        low_key, high_key, low_row = np.uint32(key & LOW), key_high(key, row), np.uint32(np.uint64(row) & LOW)
        for k in range(count):
            bits = random_bits(mask_row_of(low_key, high_key, np.uint32(low_row + rows[k])), columns[k])
            values[at + k] *= scale if bits >= bound else np.float32(0.0)
        return
    done = 0
    while done < count:
        run, row_key = min(W - column, count - done), mask_row(key, row)
        for k in range(run):
            bits = random_bits(row_key, column_term(column + k))
            values[at + done + k] *= scale if bits >= bound else np.float32(0.0)
        row, column, done = row + 1, 0, done + run


@part
def _share(total, W, share, shares):
    """``(first, last)`` of one share: whole rows where a piece holds some, since pieces begin with a row."""
    unit = W if W <= PIECE else 1
    units = total // unit
    return units * share // shares * unit, units * (share + 1) // shares * unit


@part
def _piece(at, last, count, W):
    """How many values from ``at`` on are in one piece: of one task, and whole rows where a piece holds some."""
    size = min(last - at, count - at % count)
    return min(size, PIECE if W > PIECE else PIECE // W * W)


@kernel
def forward_share(
    out_at, x_at, x_total, bias_at, rate_at, rate_step, clock_at, clock_step, site, B, count, W, G, F, act,
    has_bias, has_mask, like, share, shares,
):  # fmt: skip
    """Elements of one share of ``out [B, count]``; ``act`` is 0 (none), 1 (relu) or 2 (elu).

    ``x`` has ``x_total`` elements: all of them, or one task's that all tasks share.
    """
    out, x, bias = pointer(out_at, like), pointer(x_at, like), pointer(bias_at, like)
    rate, clock = float32s(rate_at), int64s(clock_at)
    total = B * count
    at, last = _share(total, W, share, shares)
    terms = _terms(W, last - at if has_mask else 0)
    while at < last:
        size = _piece(at, last, count, W)
        if has_bias:
            in_group = total // G
            size = min(size, in_group - at % in_group)
            _add_bias(x, at % x_total, out, at, size, bias, at // in_group, at % F, F)
        else:
            _copy(x, at % x_total, out, at, size)
        if act == 1:
            _relu(out, at, size)
        elif act == 2:
            _elu(out, at, size)
        if has_mask:
            task = at // count
            key = mix_key(clock[task * clock_step], clock[task * clock_step + 1], site)
            bound, scale = keep_bound(rate[task * rate_step])
            _mask(out, at, size, key, at % count, W, terms, bound, scale)
        at += size


@part
def _relu_backward(result, out, at, count):
    for k in range(at, at + count):
        result[k] = result[k] if out[k] > 0 else zero(result)


@part
def _elu_backward(result, out, at, count, unscale):
    """``unscale`` takes the dropout's factor out of the saved output again."""
    for k in range(at, at + count):
        bent = result[k] * (out[k] * unscale) + result[k]
        result[k] = result[k] if out[k] > 0 else bent


@kernel
def backward_share(
    result_at, grad_at, out_at, rate_at, rate_step, clock_at, clock_step, site, B, count, W, act, has_mask,
    like, share, shares,
):  # fmt: skip
    """Elements of one share of the gradient ``result [B, count]``, from the output that was saved."""
    result, grad, out = pointer(result_at, like), pointer(grad_at, like), pointer(out_at, like)
    rate, clock = float32s(rate_at), int64s(clock_at)
    at, last = _share(B * count, W, share, shares)
    terms = _terms(W, last - at if has_mask else 0)
    while at < last:
        size = _piece(at, last, count, W)
        unscale = np.float32(1.0)
        _copy(grad, at, result, at, size)
        if has_mask:
            task = at // count
            key = mix_key(clock[task * clock_step], clock[task * clock_step + 1], site)
            bound, scale = keep_bound(rate[task * rate_step])
            unscale = np.float32(1.0) / scale if scale > 0 else np.float32(0.0)
            _mask(result, at, size, key, at % count, W, terms, bound, scale)
        if act == 1:
            _relu_backward(result, out, at, size)
        elif act == 2:
            _elu_backward(result, out, at, size, unscale)
        at += size
