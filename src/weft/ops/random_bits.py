"""Counter-based randomness: (seed, step, site, element) gives the bits, on every device alike.

Nothing is drawn from a stream, so a dropout mask or an initial weight does not depend on the other members of the
group, on the order of evaluation, or on the device. A backward pass recomputes a mask, which takes 0 bytes between the
passes, and a resumed run needs only its step number. A 64-bit key is mixed from the seed, the step and the site (three
rounds of SplitMix64); each element then passes twice through a 32-bit finaliser: its lower half in the first round, its
upper half in the second. The element of a mask is its row below and its column above, so that a kernel makes the first
round once for a whole row.

The same arithmetic is implemented three times: here in torch, in ``random_bits_triton.py`` and in
``cpu/random_bits.py``. Tests check that the three give equal bits.
"""

from __future__ import annotations

from collections.abc import Sequence

import torch
from torch import Tensor

LOW32 = 0xFFFFFFFF
GOLDEN64 = 0x9E3779B97F4A7C15
MIX64_A = 0xBF58476D1CE4E5B9
MIX64_B = 0x94D049BB133111EB
GOLDEN32 = 0x9E3779B9
MIX32_A = 0x7FEB352D
MIX32_B = 0x846CA68B
COLUMN_SHIFT = 32  # the element of a mask is column * 2^32 + row
AT_ONCE = 1 << 16  # numbers: what they are made of stays in a core's cache, 0.03 s for 1.5 million instead of 0.26
INIT_STEP = -1  # training steps count from 0, so initial weights never share bits with a mask


def signed64(value: int) -> int:
    """The two's-complement int64 with the bits of ``value``: torch has no unsigned 64-bit arithmetic."""
    value &= (1 << 64) - 1
    return value - (1 << 64) if value >> 63 else value


def shift_right(value: Tensor, bits: int) -> Tensor:
    """An unsigned right shift of int64 numbers."""
    return (value >> bits) & ((1 << (64 - bits)) - 1)


def splitmix(value: Tensor) -> Tensor:
    """One round of SplitMix64 on int64 numbers read as unsigned."""
    value = value + signed64(GOLDEN64)
    value = (value ^ shift_right(value, 30)) * signed64(MIX64_A)
    value = (value ^ shift_right(value, 27)) * signed64(MIX64_B)
    return value ^ shift_right(value, 31)


def splitmix_int(value: int) -> int:
    """The same on a Python integer, 0 to 2^64 - 1."""
    value = (value + GOLDEN64) % (1 << 64)
    value = (value ^ value >> 30) * MIX64_A % (1 << 64)
    value = (value ^ value >> 27) * MIX64_B % (1 << 64)
    return value ^ value >> 31


def _finalise32(value: Tensor) -> Tensor:
    value = value ^ (value >> 16)
    value = (value * MIX32_A) & LOW32
    value = value ^ (value >> 15)
    value = (value * MIX32_B) & LOW32
    return value ^ (value >> 16)


def mix_key(clock: Tensor, site: int) -> Tensor:
    """Key ``[...]`` int64 of a clock ``[..., 2]`` = (seed, step) at a site."""
    return splitmix(splitmix(splitmix(clock[..., 0]) + clock[..., 1]) + site)


def random_bits(key: Tensor, elements: Tensor) -> Tensor:
    """32 random bits for each element as int64 in [0, 2^32). ``key`` broadcasts against ``elements``."""
    low, high = elements & LOW32, shift_right(elements, 32)
    mixed = _finalise32(low ^ (key & LOW32))
    return _finalise32((mixed + shift_right(key, 32) + high * GOLDEN32) & LOW32)


def row_elements(rows: int, columns: int, device: torch.device | str = "cpu", first: int = 0) -> Tensor:
    """Elements ``[rows, columns]`` of a mask: column * 2^32 + row, rows counted from ``first``.

    A row's elements do not depend on its width, so that columns may be added (a model padded to its neighbours'
    width) without moving the mask of those that were there.
    """
    column = torch.arange(columns, dtype=torch.int64, device=device) << COLUMN_SHIFT
    return torch.arange(first, first + rows, dtype=torch.int64, device=device)[:, None] + column


def keep_mask_rows(rate: Tensor, clock: Tensor, site: int, rows: int, columns: int, first: int = 0) -> Tensor:
    """Dropout mask ``[..., rows, columns]``: an element is kept where its bits reach ``rate * 2^32``.

    See :func:`row_elements` for which element stands where.
    """
    elements = row_elements(rows, columns, clock.device, first)
    bits = random_bits(mix_key(clock, site)[..., None, None], elements)
    return bits >= threshold(rate)[..., None, None]


def threshold(rate: Tensor) -> Tensor:
    """``rate * 2^32`` as int64; the scaling by a power of two is exact in float32."""
    return (rate.to(torch.float32) * 4294967296.0).to(torch.int64)


def uniform(seed: int, stream: int, shape: Sequence[int], device: torch.device | str = "cpu") -> Tensor:
    """Floats in [0, 1) with 24 random bits each; ``stream`` keeps the uses of one seed apart.

    They are the bits of :func:`random_bits` in 32-bit arithmetic, which a CPU does on twice as many numbers at once.
    """
    numbers = torch.empty(tuple(shape), dtype=torch.float32, device=device)
    key = 0
    for term in (seed, INIT_STEP, stream):  # mix_key of Python's numbers: of tensors it takes 0.1 ms
        key = splitmix_int((key + term) % (1 << 64))
    at_once = AT_ONCE if numbers.device.type == "cpu" else 1 << 31
    for position, part in enumerate(numbers.view(-1).split(at_once)):
        first = position * at_once
        bits = torch.arange(part.numel(), device=device).to(torch.int32)
        bits = _finalise(bits.add_(signed32(first)).bitwise_xor_(signed32(key)))
        bits = _finalise(bits.add_(signed32((key >> 32) + (first >> 32) * GOLDEN32)))
        torch.mul((bits >> 8).bitwise_and_((1 << 24) - 1), 2.0**-24, out=part)
    return numbers


def _finalise(value: Tensor) -> Tensor:
    """:func:`_finalise32` of int32 numbers, in place."""
    for shift, factor in ((16, MIX32_A), (15, MIX32_B)):
        value.bitwise_xor_((value >> shift).bitwise_and_((1 << (32 - shift)) - 1)).mul_(signed32(factor))
    return value.bitwise_xor_((value >> 16).bitwise_and_((1 << 16) - 1))


def signed32(value: int) -> int:
    """The two's-complement int32 with the lower 32 bits of ``value``."""
    return (value + (1 << 31)) % (1 << 32) - (1 << 31)
