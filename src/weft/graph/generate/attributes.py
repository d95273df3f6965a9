"""Generate node features that are partly informative of the class.

Dense: a random centre per class plus noise. Sparse: a bag of words, some of them of the class's topic.
Noise is a sum of uniform integers, not a logarithm or a cosine, so that every device rounds alike.

Shapes: N nodes, F features, C classes.
"""

from __future__ import annotations

import torch
from torch import Tensor

from weft.core.errors import GraphError
from weft.graph.data.sparse_features import SparseFeatures
from weft.graph.generate.counter import Stream, below, coin_side, hash_range, stream_key
from weft.graph.generate.popularity import Popularity
from weft.graph.generate.wiring import directed_csr, planted_draw
from weft.ops.csr.adjacency import Adjacency

CHUNK_VALUES = {"cpu": 2**20, "cuda": 2**26}  # a cache-sized block on a CPU, few launches on a GPU
NOISE_MEAN = 4 * (2**16 - 1) // 2
NOISE_SCALE = (3.0 / (2.0**32 - 1.0)) ** 0.5  # one over the deviation of a sum of four 16-bit integers


def dense_features(
    classes: Tensor, num_features: int, num_classes: int, *, signal: float, dtype: torch.dtype, seed: int
) -> Tensor:
    """``x [N, F]``: the class's centre plus noise of deviation 1.

    ``signal`` is the distance between two centres in deviations (2 leaves 16 % error between two classes),
    whatever F is. Written in row chunks: the temporaries do not grow with N.
    """
    device, num_nodes = classes.device, classes.numel()
    centres = class_centres(num_classes, num_features, signal, seed, device)
    x = torch.empty(num_nodes, num_features, dtype=dtype, device=device)
    rows = max(1, CHUNK_VALUES.get(device.type, 2**20) // max(1, num_features))
    for begin in range(0, num_nodes, rows):
        part = classes[begin : begin + rows]
        noise = bell_noise(begin * num_features, part.numel() * num_features, seed, device)
        # Two separate kernels: a fused multiply-add would round differently from device to device.
        x[begin : begin + rows] = noise.view(-1, num_features).add_(centres.index_select(0, part))
    return x


def class_centres(num_classes: int, num_features: int, signal: float, seed: int, device: torch.device | str) -> Tensor:
    """``[C, F]`` float32 of plus and minus one value; two centres differ in half of the places."""
    bits = hash_range(stream_key(seed, Stream.CENTRE), 0, num_classes * num_features, device)
    signs = (bits & 1).mul_(2).sub_(1).to(torch.float32).view(num_classes, num_features)
    return signs.mul_(signal / (2.0 * max(1, num_features)) ** 0.5)


def bell_noise(first: int, count: int, seed: int, device: torch.device | str) -> Tensor:
    """``[count]`` float32, mean 0, deviation 1, bell-shaped within 3.5 deviations."""
    bits = hash_range(stream_key(seed, Stream.NOISE), first, first + count, device)
    total = bits & 0xFFFF
    for shift in (16, 32, 48):
        total.add_((bits >> shift).bitwise_and_(0xFFFF))
    return total.sub_(NOISE_MEAN).to(torch.float32).mul_(NOISE_SCALE)


def bag_of_words(
    classes: Tensor,
    num_features: int,
    num_classes: int,
    *,
    density: float,
    signal: float,
    dtype: torch.dtype,
    seed: int,
) -> SparseFeatures:
    """``x [N, F]`` of ones and zeros: ``density * F`` words per node on average, between half and one and a half.

    Word j belongs to topic ``j % C`` and a topic's words are Zipf distributed. A share ``signal`` of a node's
    words is of its class's topic, the rest of any topic: 0 is uninformative, 1 fully informative.
    """
    if not 0.0 < density <= 0.5:
        raise GraphError(f"density={density} must lie in (0, 0.5]; leave it out for dense features")
    device = classes.device
    counts = _word_counts(classes.numel(), num_features, density, seed, device)
    words = torch.arange(num_features, dtype=torch.int64, device=device)
    popularity = Popularity.of(10**6 // (words // num_classes + 4), words % num_classes, num_classes)
    own_topic = signal + (1.0 - signal) / num_classes
    sides = torch.full((num_classes,), coin_side(own_topic), dtype=torch.int64, device=device)
    draw = planted_draw(classes, popularity, sides, num_features, seed, Stream.WORD)
    indptr, indices = directed_csr(counts, num_features, draw, loops=True)
    values = torch.ones(indices.numel(), dtype=dtype, device=device)
    return SparseFeatures(Adjacency(indptr, indices, num_features, weight=values))


def _word_counts(num_nodes: int, num_features: int, density: float, seed: int, device: torch.device | str) -> Tensor:
    mean = max(1, round(density * num_features))
    bits = hash_range(stream_key(seed, Stream.WORD_COUNT), 0, num_nodes, device)
    low, high = (mean + 1) // 2, mean + mean // 2
    return below(bits, high - low + 1).add_(low).clamp_(max=num_features).to(torch.int32)
