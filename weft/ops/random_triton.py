"""The arithmetic of ``random.py`` in Triton; see there for what the bits mean."""

from __future__ import annotations

from weft.ops.lang import tl, triton


@triton.jit
def _splitmix(value):
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
    return _splitmix(_splitmix(_splitmix(seed) + step) + site)


@triton.jit
def random_bits(key, element):
    """32 random bits for every element (int64)."""
    low = (element & 0xFFFFFFFF).to(tl.uint32)
    high = (element >> 32).to(tl.uint32)
    mixed = _finalise32(low ^ (key & 0xFFFFFFFF).to(tl.uint32))
    return _finalise32(mixed + (key >> 32).to(tl.uint32) + high * 0x9E3779B9)


@triton.jit
def row_element(row, column):
    """Element of a mask over rows, int64; the shift is ``ROW_SHIFT`` of ``random.py``."""
    return (row.to(tl.int64) << 20) + column


@triton.jit
def keep_scale(key, rate, element):
    """``1 / (1 - rate)`` where the element is kept, 0 where it is dropped."""
    bits = random_bits(key, element).to(tl.int64)
    kept = bits >= (rate * 4294967296.0).to(tl.int64)
    return tl.where(kept, tl.div_rn(1.0, 1.0 - rate), 0.0)
