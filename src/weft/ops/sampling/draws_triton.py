"""The draws of :mod:`weft.ops.sampling.draws` in Triton."""

from __future__ import annotations

from weft.ops.launch.triton_lang import tl, triton
from weft.ops.random.triton_bits import splitmix


@triton.jit
def hop_key(clock, hop):
    """Key of one hop, a uint64; ``clock`` points to (seed, epoch, batch)."""
    key = splitmix(tl.load(clock).to(tl.uint64, bitcast=True))
    key = splitmix(key + tl.load(clock + 1).to(tl.uint64, bitcast=True))
    key = splitmix(key + tl.load(clock + 2).to(tl.uint64, bitcast=True))
    return splitmix(key + hop)


@triton.jit
def node_streams(key, nodes):
    """The stream of each node, uint64."""
    return splitmix(splitmix(key) ^ splitmix(nodes.to(tl.int64).to(tl.uint64, bitcast=True)))


@triton.jit
def draw_below(streams, number, bound):
    """Draw ``number`` of each stream: int32 in ``[0, bound)``; ``number`` is not negative."""
    bits = splitmix(streams + number.to(tl.uint64) * 0x9E3779B97F4A7C15)
    limit = bound.to(tl.uint64)
    return (((bits >> 32) * limit + (((bits & 0xFFFFFFFF) * limit) >> 32)) >> 32).to(tl.int32)
