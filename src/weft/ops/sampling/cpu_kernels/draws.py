"""The draws of :mod:`weft.ops.sampling.draws` for numba kernels."""

from __future__ import annotations

import math

import numpy as np

from weft.ops.cpu.kernel import part
from weft.ops.random import torch_bits
from weft.ops.random.numba_bits import splitmix
from weft.ops.sampling import draws

_GOLDEN64 = np.uint64(torch_bits.GOLDEN64)
_LOW32 = np.uint64(torch_bits.LOW32)
_S11, _S32 = np.uint64(11), np.uint64(32)
_LOG_2, _SQRT_HALF, _TERMS = draws.LOG_2, draws.SQRT_HALF, draws.LOG_TERMS


@part
def hop_key(clock, hop):
    """Key of one hop, a uint64; ``clock`` points to (seed, epoch, batch)."""
    key = splitmix(np.uint64(clock[0]))
    key = splitmix(key + np.uint64(clock[1]))
    key = splitmix(key + np.uint64(clock[2]))
    return splitmix(key + np.uint64(hop))


@part
def node_stream(mixed_key, node):
    """The stream of a node; ``mixed_key`` is ``splitmix`` of the hop's key."""
    return splitmix(mixed_key ^ splitmix(np.uint64(node)))


@part
def draw_bits(stream, number):
    """64 random bits, a uint64."""
    return splitmix(stream + np.uint64(number) * _GOLDEN64)


@part
def draw_below(stream, number, bound):
    """An int64 in ``[0, bound)``; the bound is an int64 below 2^31."""
    bits, limit = draw_bits(stream, number), np.uint64(bound)
    high, low = bits >> _S32, bits & _LOW32
    return np.int64((high * limit + ((low * limit) >> _S32)) >> _S32)


@part
def draw_exponential(stream, number):
    """A float64 from the exponential distribution."""
    unit = (np.float64(draw_bits(stream, number) >> _S11) + 0.5) * 2.0**-53
    mantissa, exponent = math.frexp(unit)
    if mantissa < _SQRT_HALF:
        mantissa, exponent = mantissa * 2.0, exponent - 1
    s = (mantissa - 1.0) / (mantissa + 1.0)
    square, total = s * s, 1.0 / _TERMS
    for term in range(_TERMS - 2, 0, -2):
        total = total * square
        total = total + 1.0 / term
    series = s * total
    return -(np.float64(exponent) * _LOG_2 + series * 2.0)
