"""Random bits from counters, in int64 arithmetic: the same on every device and for every chunking.

The bits of element ``i`` are a SplitMix64 hash of (seed, stream, i). Integer arithmetic wraps alike on CPU
and GPU, so whatever is decided by comparing or reducing these bits as integers is equal on both.
"""

from __future__ import annotations

from enum import IntEnum

import torch
from torch import Tensor

from weft.ops.random.torch_bits import signed64

GOLDEN = 0x9E3779B97F4A7C15
MIX_A = 0xBF58476D1CE4E5B9
MIX_B = 0x94D049BB133111EB
COIN_BITS = 16
COIN_SIDES = 1 << COIN_BITS


class Stream(IntEnum):
    """What a hash is for: no two uses of one seed may share bits."""

    DEGREE = 1
    OUT_DEGREE = 2
    LABEL = 3
    LABEL_NOISE = 4
    EDGE = 5
    CENTRE = 6
    NOISE = 7
    WORD_COUNT = 8
    WORD = 9
    RELATION = 10
    SPLIT = 11
    TASK_RATE = 12
    TASK = 13
    SCRAMBLE = 14


def _mix_int(value: int) -> int:
    value = (value + GOLDEN) & 0xFFFFFFFFFFFFFFFF
    value = ((value ^ (value >> 30)) * MIX_A) & 0xFFFFFFFFFFFFFFFF
    value = ((value ^ (value >> 27)) * MIX_B) & 0xFFFFFFFFFFFFFFFF
    return value ^ (value >> 31)


def stream_key(seed: int, *stream: int) -> int:
    """The int64 key of a stream of bits: the seed and the stream's numbers, mixed."""
    key = _mix_int(seed & 0xFFFFFFFFFFFFFFFF)
    for number in stream:
        key = _mix_int(key ^ _mix_int(number))
    return signed64(key)


def _xor_shift_(bits: Tensor, shift: int) -> Tensor:
    return bits.bitwise_xor_((bits >> shift).bitwise_and_((1 << (64 - shift)) - 1))


def hash_(key: int, counters: Tensor) -> Tensor:
    """64 random bits for each int64 counter, **in its place** (a chunk's temporaries bound the memory)."""
    counters.mul_(signed64(GOLDEN)).add_(key)
    _xor_shift_(counters, 30).mul_(signed64(MIX_A))
    _xor_shift_(counters, 27).mul_(signed64(MIX_B))
    return _xor_shift_(counters, 31)


def hash_range(key: int, start: int, stop: int, device: torch.device | str) -> Tensor:
    """64 random bits for each of the counters ``start .. stop - 1``."""
    return hash_(key, torch.arange(start, stop, dtype=torch.int64, device=device))


def coin(bits: Tensor) -> Tensor:
    """An integer in ``[0, COIN_SIDES)`` from the low bits of a hash."""
    return bits & (COIN_SIDES - 1)


def coin_side(probability: float) -> int:
    """``coin(bits) < coin_side(p)`` is true with probability p (to 1 in 65,536)."""
    return round(min(max(probability, 0.0), 1.0) * COIN_SIDES)


def below(bits: Tensor, bound: Tensor | int) -> Tensor:
    """An integer in ``[0, bound)`` from the bits that :func:`coin` leaves; bounds up to 2^31 are unbiased
    to 1 in 65,536."""
    return torch.remainder((bits >> COIN_BITS) & ((1 << (64 - COIN_BITS)) - 1), bound)


def permutation(seed: int, stream: int, count: int, device: torch.device | str) -> Tensor:
    """A random permutation ``[count]`` int64 of ``0 .. count - 1``."""
    return torch.sort(hash_range(stream_key(seed, stream), 0, count, device), stable=True).indices


def spread_counts(counts: Tensor, seed: int, stream: int) -> Tensor:
    """Value ``v`` at ``counts[v]`` randomly chosen places: ``[sum(counts)]`` int32, exact for every seed."""
    device = counts.device
    total = int(counts.sum())
    values = torch.arange(counts.numel(), dtype=torch.int32, device=device)
    ranked = torch.repeat_interleave(values, counts, output_size=total)
    placed = torch.empty_like(ranked)
    placed[permutation(seed, stream, total, device)] = ranked
    return placed
