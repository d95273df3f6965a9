"""The counter-based bits of :mod:`weft.ops.random_bits` for numba kernels; tests compare the bits."""

from __future__ import annotations

import numpy as np
from numba import njit

from weft.ops import random_bits as random

_GOLDEN64 = np.uint64(random.GOLDEN64)
_MIX64_A = np.uint64(random.MIX64_A)
_MIX64_B = np.uint64(random.MIX64_B)
_GOLDEN32 = np.uint32(random.GOLDEN32)
_MIX32_A = np.uint32(random.MIX32_A)
_MIX32_B = np.uint32(random.MIX32_B)
_LOW32 = np.uint64(0xFFFFFFFF)
_S15, _S16 = np.uint32(15), np.uint32(16)
_S27, _S30, _S31, _S32 = np.uint64(27), np.uint64(30), np.uint64(31), np.uint64(32)


@njit(nogil=True)
def splitmix(value):
    """One round of SplitMix64 on a uint64."""
    value = value + _GOLDEN64
    value = (value ^ (value >> _S30)) * _MIX64_A
    value = (value ^ (value >> _S27)) * _MIX64_B
    return value ^ (value >> _S31)


@njit(nogil=True)
def finalise32(value):
    """The 32-bit finaliser on a uint32."""
    value = np.uint32(value ^ (value >> _S16))
    value = np.uint32(value * _MIX32_A)
    value = np.uint32(value ^ (value >> _S15))
    value = np.uint32(value * _MIX32_B)
    return np.uint32(value ^ (value >> _S16))


@njit(nogil=True)
def mix_key(seed, step, site):
    """The key of (seed, step) at a site, a uint64."""
    return splitmix(splitmix(splitmix(np.uint64(seed)) + np.uint64(step)) + np.uint64(site))


@njit(nogil=True)
def mask_row(key, row):
    """What all columns of a mask's row have in common, a uint32: the first round of the finaliser."""
    return mask_row_of(np.uint32(key & _LOW32), key_high(key, row), np.uint32(np.uint64(row) & _LOW32))


@njit(nogil=True)
def key_high(key, row):
    """The part of :func:`mask_row` that is the same for all rows with equal upper 32 bits."""
    return np.uint32(np.uint32(key >> _S32) + np.uint32(np.uint64(row) >> _S32) * _GOLDEN32)


@njit(nogil=True)
def mask_row_of(low_key, high_key, low_row):
    """:func:`mask_row` of the lower key, :func:`key_high` and the row's lower 32 bits; vector loops stay in 32 bits."""
    return np.uint32(finalise32(np.uint32(low_row ^ low_key)) + high_key)


@njit(nogil=True)
def column_term(column):
    """What a column adds to its row's :func:`mask_row` before the second round, a uint32."""
    return np.uint32(np.uint32(column) * _GOLDEN32)


@njit(nogil=True)
def random_bits(row_key, term):
    """32 random bits (uint32) of a row's :func:`mask_row` and a column's :func:`column_term`."""
    return finalise32(np.uint32(row_key + term))


@njit(nogil=True)
def keep_bound(rate):
    """``(bound, scale)`` of a float32 rate: an element is kept where its bits reach ``bound`` (uint32).

    A rate of 1 would need the bound 2^32; there everything is kept and multiplied by a scale of 0 instead.
    """
    threshold = np.float32(rate) * np.float32(4294967296.0)
    if threshold >= np.float32(4294967296.0):
        return np.uint32(0), np.float32(0.0)
    scale = np.float32(1.0) / (np.float32(1.0) - np.float32(rate))
    if threshold < np.float32(0.0):
        return np.uint32(0), scale
    return np.uint32(np.int64(threshold)), scale
