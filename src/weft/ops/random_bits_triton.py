"""The counter-based bits of ``random_bits.py`` in Triton."""

from __future__ import annotations

from weft.ops.launch.triton_lang import tl, triton


@triton.jit
def splitmix(value):
    """One round of SplitMix64 on a uint64."""
    value += 0x9E3779B97F4A7C15
    value = (value ^ (value >> 30)) * 0xBF58476D1CE4E5B9
    value = (value ^ (value >> 27)) * 0x94D049BB133111EB
    return value ^ (value >> 31)


@triton.jit
def _finalise32(value):
    value ^= value >> 16
    value *= 0x7FEB352D
    value ^= value >> 15
    value *= 0x846CA68B
    return value ^ (value >> 16)


@triton.jit
def mix_key(clock, site):
    """64-bit key of the (seed, step) pair at ``clock``."""
    seed = tl.load(clock).to(tl.uint64, bitcast=True)
    step = tl.load(clock + 1).to(tl.uint64, bitcast=True)
    return splitmix(splitmix(splitmix(seed) + step) + site)


@triton.jit
def drop_key(clock, rate, task, site, stride_clock, stride_rate, DROP: tl.constexpr):
    """``(key, rate)`` of a task; zeros without dropout."""
    key = tl.full([], 0, tl.uint64)
    fraction = tl.full([], 0.0, tl.float32)
    if DROP:
        key = mix_key(clock + task * stride_clock, site)
        fraction = tl.load(rate + task * stride_rate).to(tl.float32)
    return key, fraction


@triton.jit
def mask_row(key, row):
    """What all columns of a mask's row have in common, uint32: the first round of the finaliser."""
    row = row.to(tl.int64)
    low = (row & 0xFFFFFFFF).to(tl.uint32)
    high = (row >> 32).to(tl.uint32)
    return _finalise32(low ^ (key & 0xFFFFFFFF).to(tl.uint32)) + (key >> 32).to(tl.uint32) + high * 0x9E3779B9


@triton.jit
def random_bits(row_key, column):
    """32 random bits for the columns of rows; ``row_key`` is :func:`mask_row` of theirs."""
    return _finalise32(row_key + column.to(tl.uint32) * 0x9E3779B9)


@triton.jit
def keep_scale(row_key, rate, column):
    """``1 / (1 - rate)`` where an element is kept, 0 where it is dropped; ``row_key`` is :func:`mask_row` of its
    row."""
    # A rate of 1 would need the bound 2^32.
    scale = tl.where(rate < 1.0, tl.div_rn(1.0, 1.0 - rate), 0.0)
    return tl.where(random_bits(row_key, column) >= (rate * 4294967296.0).to(tl.int64).to(tl.uint32), scale, 0.0)
