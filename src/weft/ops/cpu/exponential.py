"""exp and expm1 that the compiler can inline and vectorise; the C library's are calls, one element each.

float32 uses the classic reduction ``e^x = 2^n e^r`` with ``|r| <= ln(2) / 2`` and a polynomial (relative error
below 2e-7); float64 calls the C library. Arguments above 88 are cut there: every caller passes a difference
to a maximum or a negative number. NaN passes, minus infinity gives 0 (or -1).
"""

from __future__ import annotations

import math

import numpy as np
from llvmlite import ir
from numba import types
from numba.extending import intrinsic, overload, register_jitable

_LOG2_E = np.float32(1.44269504088896341)
_LN2_HIGH = np.float32(0.693359375)
_LN2_LOW = np.float32(-2.12194440e-4)
_ROUND = np.float32(12582912.0)  # 1.5 * 2^23: adding it leaves the nearest integer in the low bits
_LOWEST, _HIGHEST = np.float32(-87.3), np.float32(88.0)
_ZERO, _ONE = np.float32(0.0), np.float32(1.0)
_C6, _C5, _C4 = np.float32(1.9875691500e-4), np.float32(1.3981999507e-3), np.float32(8.3334519073e-3)
_C3, _C2, _C1 = np.float32(4.1665795894e-2), np.float32(1.6666665459e-1), np.float32(5.0000001201e-1)


@intrinsic
def _power_of_two(typing, rounded):
    """``2^n`` where ``rounded = n + _ROUND``: the low bits of ``rounded`` moved into the exponent."""

    def generate(context, builder, signature, arguments):
        word = ir.IntType(32)
        bits = builder.shl(builder.bitcast(arguments[0], word), ir.Constant(word, 23))
        return builder.bitcast(builder.add(bits, ir.Constant(word, 0x3F800000)), ir.FloatType())

    return types.float32(types.float32), generate


@register_jitable
def _reduce(x):
    """``(2^n, e^r - 1)`` of x, limited to where ``2^n`` is an ordinary number."""
    x = _LOWEST if x < _LOWEST else (_HIGHEST if x > _HIGHEST else x)
    rounded = x * _LOG2_E + _ROUND
    n = rounded - _ROUND
    r = (x - n * _LN2_HIGH) - n * _LN2_LOW
    poly = ((((_C6 * r + _C5) * r + _C4) * r + _C3) * r + _C2) * r + _C1
    return _power_of_two(rounded), poly * (r * r) + r


@register_jitable
def _exp32(x):
    power, rest = _reduce(x)
    return _ZERO if x < _LOWEST else power + power * rest


@register_jitable
def _expm1_32(x):
    power, rest = _reduce(x)
    return power * rest + (power - _ONE)


def exp(x):
    """``e^x`` inside a kernel."""
    return math.exp(x)


def expm1(x):
    """``e^x - 1`` inside a kernel, accurate near 0."""
    return math.expm1(x)


@overload(exp)
def _exp(x):
    return (lambda x: _exp32(x)) if x == types.float32 else (lambda x: math.exp(x))


@overload(expm1)
def _expm1(x):
    return (lambda x: _expm1_32(x)) if x == types.float32 else (lambda x: math.expm1(x))
