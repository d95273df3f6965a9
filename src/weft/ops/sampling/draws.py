"""Random draws of the samplers: (seed, epoch, batch, hop, node) names a stream, and a stream has draws 0, 1, 2, ...

A stream is SplitMix64 started at a 64-bit hash of those five numbers, so a node's draws do not depend on the rest of
its batch, on threads, on workers or on the device. The clock is an int64 tensor
``[3] = (seed, epoch, batch)``: a kernel that reads it from memory can be replayed for the next batch.

A draw below ``bound`` is the upper half of a 64 x 32 bit product. Its probabilities differ from ``1 / bound`` by less
than 2^-64, and it needs no rejection. Bounds are degrees, so they stay below 2^31.

The same arithmetic is in ``cpu_kernels/draws.py`` for numba and in ``draws_triton.py`` for Triton; tests compare bits.
"""

from __future__ import annotations

import torch
from torch import Tensor

from weft.ops.random.torch_bits import GOLDEN64, LOW32, shift_right, signed64, splitmix

LOG_2 = 0.6931471805599453
SQRT_HALF = 0.7071067811865476
LOG_TERMS = 21  # of the series of atanh, up to s^21: relative error below 1e-15


def make_clock(seed: int, epoch: int, batch: int, device: torch.device | str = "cpu") -> Tensor:
    """The clock ``[3]`` int64 of one batch."""
    return torch.tensor([signed64(seed), signed64(epoch), signed64(batch)], dtype=torch.int64, device=device)


def epoch_clocks(seed: int, epoch: int, batches: int, device: torch.device | str = "cpu") -> Tensor:
    """The clocks ``[batches, 3]`` int64 of an epoch; the device writes them itself, nothing is copied there."""
    batch = torch.arange(batches, dtype=torch.int64, device=device)
    return torch.stack([torch.full_like(batch, signed64(number)) for number in (seed, epoch)] + [batch], dim=1)


def hop_key(clock: Tensor, hop: int) -> Tensor:
    """Key ``[]`` int64 of one hop of one batch."""
    key = splitmix(clock[0])
    for number in (clock[1], clock[2], hop):
        key = splitmix(key + number)
    return key


def node_streams(key: Tensor, nodes: Tensor) -> Tensor:
    """The stream ``[S]`` int64 of each node ``[S]``."""
    return splitmix(splitmix(key) ^ splitmix(nodes.long()))


def draw_bits(streams: Tensor, number: int | Tensor) -> Tensor:
    """64 random bits of draw ``number`` of each stream, as int64."""
    step = signed64(number * GOLDEN64) if isinstance(number, int) else number * signed64(GOLDEN64)
    return splitmix(streams + step)


def draw_below(streams: Tensor, number: int | Tensor, bound: Tensor) -> Tensor:
    """Draw ``number`` of each stream: int64 in ``[0, bound)``, all equally likely; 0 where the bound is 0."""
    bits, bound = draw_bits(streams, number), bound.long()
    high, low = shift_right(bits, 32), bits & LOW32
    return (high * bound + ((low * bound) >> 32)) >> 32


def draw_exponential(streams: Tensor, number: Tensor) -> Tensor:
    """Draw ``number`` of each stream from the exponential distribution, float64.

    The logarithm is a series of single additions and multiplications, so every device rounds it alike.
    """
    unit = (shift_right(draw_bits(streams, number), 11).to(torch.float64) + 0.5) * 2.0**-53
    mantissa, exponent = torch.frexp(unit)
    small = mantissa < SQRT_HALF
    mantissa = torch.where(small, mantissa * 2.0, mantissa)
    exponent = torch.where(small, exponent - 1, exponent).to(torch.float64)
    s = (mantissa - 1.0) / (mantissa + 1.0)
    square, total = s * s, torch.full_like(s, 1.0 / LOG_TERMS)
    for term in range(LOG_TERMS - 2, 0, -2):
        total = total * square
        total = total + 1.0 / term
    series = s * total
    return -(exponent * LOG_2 + series * 2.0)
