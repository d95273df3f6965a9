"""The stochastic block model with a fixed number of edges inside and between blocks."""

from __future__ import annotations

from collections.abc import Sequence

import torch
from torch import Tensor

from weft.core.errors import GraphError
from weft.graph.generate.citation import dense_features, split_nodes
from weft.graph.generate.draws import Propose, Stream, below, distinct_keys, hash_, stream_key
from weft.graph.generate.wiring import offsets, symmetric_csr
from weft.graph.graph import Graph
from weft.graph.split_rules import SHARES, SplitRule
from weft.ops.csr.adjacency import Adjacency


def sbm(
    block_sizes: Sequence[int],
    p_in: float,
    p_out: float,
    *,
    num_features: int = 16,
    feature_signal: float = 1.5,
    seed: int = 0,
    split: SplitRule = SHARES,
    dtype: torch.dtype = torch.float32,
    device: torch.device | str = "cpu",
    name: str = "sbm",
) -> Graph:
    """An undirected graph of blocks: pairs inside a block are joined at the rate ``p_in``, others at ``p_out``.

    The number of edges inside each block and between blocks is the expected one, rounded, and the edges are
    uniform among the possible ones: so the counts are exact and the same for every seed. The class of a node
    is its block, nodes are numbered block after block, features are as in :func:`citation`. A seed gives the
    same graph on every device.
    """
    sizes = _checked(block_sizes, p_in, p_out)
    num_nodes, blocks = sum(sizes), torch.tensor(sizes, device=device)
    classes = torch.repeat_interleave(torch.arange(len(sizes), dtype=torch.int32, device=device), blocks)
    need = torch.tensor(_pair_counts(sizes, p_in, p_out), device=device)
    propose = _pair_proposer(offsets(blocks), classes, num_nodes, seed)

    def owner_of(keys: Tensor) -> Tensor:
        low, high = classes[keys // num_nodes], classes[keys % num_nodes]
        return torch.where(low == high, low, len(sizes))

    pairs = distinct_keys(need, offsets(need)[:-1], propose, owner_of)
    adj = Adjacency(*symmetric_csr(pairs, num_nodes), symmetric=True)
    x = None
    if num_features:
        x = dense_features(classes, num_features, len(sizes), signal=feature_signal, dtype=dtype, seed=seed)
    y = classes.to(torch.int64)
    return Graph(adj, x, y, *split_nodes(split, y, seed), None, name, num_classes=len(sizes))


def _checked(block_sizes: Sequence[int], p_in: float, p_out: float) -> list[int]:
    sizes = [int(size) for size in block_sizes]
    if not sizes or min(sizes) < 1:
        raise GraphError(f"block_sizes={sizes}: give at least one block, of at least 1 node each")
    for value, name in ((p_in, "p_in"), (p_out, "p_out")):
        if not 0.0 <= value <= 1.0:
            raise GraphError(f"{name}={value} must lie in 0..1: it is the probability of an edge")
    return sizes


def _pair_counts(sizes: Sequence[int], p_in: float, p_out: float) -> list[int]:
    """Edges inside each block, and last those between blocks."""
    inside = [size * (size - 1) // 2 for size in sizes]
    total = sum(sizes) * (sum(sizes) - 1) // 2
    return [*(round(p_in * pairs) for pairs in inside), round(p_out * (total - sum(inside)))]


def _pair_proposer(begins: Tensor, classes: Tensor, num_nodes: int, seed: int) -> Propose:
    """Pairs of a block (owner b) or of two blocks (the last owner), uniform; others are rejected."""
    num_blocks = begins.numel() - 1
    first = torch.cat([begins[:-1], begins.new_zeros(1)])
    width = torch.cat([begins.diff(), begins.new_full((1,), num_nodes)])

    def end(owners: Tensor, slots: Tensor, attempt: int, which: int) -> Tensor:
        bits = hash_(stream_key(seed, Stream.EDGE, attempt, which), slots)
        return below(bits, width[owners]).add_(first[owners])

    def propose(owners: Tensor, slots: Tensor, attempt: int) -> Tensor:
        one, other = (end(owners, slots.clone(), attempt, which) for which in (0, 1))
        across = owners == num_blocks
        fits = (one != other) & ((classes[one] != classes[other]) == across)
        low, high = torch.minimum(one, other), torch.maximum(one, other)
        return low.mul_(num_nodes).add_(high)[fits]

    return propose
