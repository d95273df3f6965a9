"""The counter-based bits in plain Python integers: what torch, numba and Triton must all reproduce."""

from __future__ import annotations

import torch
from torch import Tensor

MASK64, MASK32 = (1 << 64) - 1, (1 << 32) - 1


def splitmix(value: int) -> int:
    value = (value + 0x9E3779B97F4A7C15) & MASK64
    value = ((value ^ (value >> 30)) * 0xBF58476D1CE4E5B9) & MASK64
    value = ((value ^ (value >> 27)) * 0x94D049BB133111EB) & MASK64
    return value ^ (value >> 31)


def finalise(value: int) -> int:
    value ^= value >> 16
    value = (value * 0x7FEB352D) & MASK32
    value ^= value >> 15
    value = (value * 0x846CA68B) & MASK32
    return value ^ (value >> 16)


def key_of(seed: int, step: int, site: int) -> int:
    return splitmix((splitmix((splitmix(seed & MASK64) + step) & MASK64) + site) & MASK64)


def bits_of(seed: int, step: int, site: int, element: int) -> int:
    """32 random bits."""
    key = key_of(seed, step, site)
    mixed = finalise((element & MASK32) ^ (key & MASK32))
    return finalise((mixed + (key >> 32) + (element >> 32) * 0x9E3779B9) & MASK32)


def row_mask_of(clock: Tensor, site: int, shape: tuple[int, ...], rate: float, parts: int = 1) -> Tensor:
    """``keep / (1 - rate)`` of one task's ``shape``, float64: the element is column * 2^32 + row."""
    seed, step = clock.tolist()
    bound, columns = int(rate * 2.0**32), max(shape[-1] // parts, 1)
    count = torch.Size(shape).numel()
    elements = [(k % columns) * 2**32 + k // columns for k in range(count)]
    kept = [bits_of(seed, step, site, element) >= bound for element in elements]
    return torch.tensor(kept, dtype=torch.float64).reshape(shape) / (1.0 - rate)
