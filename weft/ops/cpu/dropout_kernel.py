"""Bias, activation and counter-based dropout on the CPU, a piece that fits the first cache at a time.

Shapes: B tasks with ``count`` elements each; G groups of rows that share a bias ``[G, F]``.
"""

from __future__ import annotations

import numpy as np

from weft.ops.cpu.exponential import expm1
from weft.ops.cpu.kernel import float32s, int64s, kernel, part, pointer
from weft.ops.cpu.simd import zero
from weft.ops.random_cpu import keep_bound, key_high, mix_key, random_bits

PIECE = 2048
LOW = np.int64(0xFFFFFFFF)


@part
def _copy(source, out, at, count):
    for k in range(at, at + count):
        out[k] = source[k]


@part
def _add_bias(x, out, at, count, bias, group, f, F):
    """``out = x + bias`` for ``count`` elements, the first of which is feature ``f`` of a row."""
    done = 0
    while done < count:
        run = min(F - f, count - done)
        for k in range(run):
            out[at + done + k] = x[at + done + k] + bias[group * F + f + k]
        done += run
        f = 0


@part
def _relu(out, at, count):
    for k in range(at, at + count):
        out[k] = zero(out) if out[k] < 0 else out[k]  # NaN is not below 0 and stays


@part
def _elu(out, at, count):
    for k in range(at, at + count):
        value = out[k]
        bent = expm1(value if value < 0 else zero(out))
        out[k] = bent if value < 0 else value


@part
def _mask(values, at, count, key, element, bound, scale):
    """Multiply ``count`` values by ``keep / (1 - rate)``; the first of them is ``element`` of its task."""
    low_key, high_key = np.uint32(key & np.uint64(0xFFFFFFFF)), key_high(key, element)
    low = np.uint32(element & LOW)
    for k in range(count):
        bits = random_bits(low_key, high_key, np.uint32(low + np.uint32(k)))
        values[at + k] *= scale if bits >= bound else np.float32(0.0)


@part
def _piece(at, last, count):
    """How many elements from ``at`` on are in one piece: one task, one run of 2^32 elements."""
    element = at % count
    return min(min(last - at, count - element), min(PIECE, (LOW + 1) - (element & LOW)))


@kernel
def forward_share(
    out_at, x_at, bias_at, rate_at, rate_step, clock_at, clock_step, site, B, count, G, F, act, has_bias, has_mask,
    like, share, shares,
):  # fmt: skip
    """Elements of one share of ``out [B, count]``; ``act`` is 0 (none), 1 (relu) or 2 (elu)."""
    out, x, bias = pointer(out_at, like), pointer(x_at, like), pointer(bias_at, like)
    rate, clock = float32s(rate_at), int64s(clock_at)
    total = B * count
    at, last = total * share // shares, total * (share + 1) // shares
    while at < last:
        size = _piece(at, last, count)
        if has_bias:
            in_group = total // G
            size = min(size, in_group - at % in_group)
            _add_bias(x, out, at, size, bias, at // in_group, at % F, F)
        else:
            _copy(x, out, at, size)
        if act == 1:
            _relu(out, at, size)
        elif act == 2:
            _elu(out, at, size)
        if has_mask:
            task = at // count
            key = mix_key(clock[task * clock_step], clock[task * clock_step + 1], site)
            bound, scale = keep_bound(rate[task * rate_step])
            _mask(out, at, size, key, at % count, bound, scale)
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
    result_at, grad_at, out_at, rate_at, rate_step, clock_at, clock_step, site, B, count, act, has_mask,
    like, share, shares,
):  # fmt: skip
    """Elements of one share of the gradient ``result [B, count]``, from the output that was saved."""
    result, grad, out = pointer(result_at, like), pointer(grad_at, like), pointer(out_at, like)
    rate, clock = float32s(rate_at), int64s(clock_at)
    at, last = B * count * share // shares, B * count * (share + 1) // shares
    while at < last:
        size = _piece(at, last, count)
        unscale = np.float32(1.0)
        _copy(grad, result, at, size)
        if has_mask:
            task = at // count
            key = mix_key(clock[task * clock_step], clock[task * clock_step + 1], site)
            bound, scale = keep_bound(rate[task * rate_step])
            unscale = np.float32(1.0) / scale if scale > 0 else np.float32(0.0)
            _mask(result, at, size, key, at % count, bound, scale)
        if act == 1:
            _relu_backward(result, out, at, size)
        elif act == 2:
            _elu_backward(result, out, at, size, unscale)
        at += size
