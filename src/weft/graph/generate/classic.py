"""Two classic generators: R-MAT, skewed and without communities, and the stochastic block model."""

from __future__ import annotations

from collections.abc import Sequence

import torch
from torch import Tensor

from weft.core.errors import GraphError
from weft.graph.generate.citation import dense_features, split_nodes
from weft.graph.generate.draws import (
    COIN_BITS,
    COIN_SIDES,
    Stream,
    below,
    coin_side,
    distinct_keys,
    hash_,
    permutation,
    sort_values,
    stream_key,
)
from weft.graph.generate.wiring import keys_csr, offsets, symmetric_csr
from weft.graph.graph import Graph
from weft.graph.split_rules import SHARES
from weft.ops.csr.adjacency import Adjacency

RECURSIVE_ROUNDS = 16  # after these, the few places still missing are filled uniformly
LEVELS_PER_HASH = 64 // COIN_BITS
SIGNAL = 1.5  # distance of two class centres in noise deviations


def rmat(
    num_nodes: int,
    num_edges: int,
    *,
    a: float = 0.57,
    b: float = 0.19,
    c: float = 0.19,
    num_features: int = 16,
    num_classes: int = 8,
    directed: bool = False,
    seed: int = 0,
    device: torch.device | str = "cpu",
) -> Graph:
    """A graph whose edges fall into the quadrants of the matrix with probabilities a, b, c, 1 - a - b - c.

    ``num_edges`` counts stored entries, exactly (an odd number loses one in an undirected graph); there are
    no self loops and no repeated edges. Nodes are numbered at random, so that hubs are not all at the beginning.
    A node's class is the stretch of the matrix it fell into before that. A seed gives the
    same graph on every device.
    """
    if num_nodes < 2:
        raise GraphError(f"num_nodes={num_nodes} must be at least 2")
    if not 1 <= num_classes <= num_nodes:
        raise GraphError(f"num_classes={num_classes} must lie in 1..{num_nodes}, the number of nodes")
    if min(a, b, c) < 0.0 or a + b + c > 1.0:
        raise GraphError(f"a, b, c = {(a, b, c)}: probabilities of three quadrants, with a sum of at most 1")
    room = num_nodes * (num_nodes - 1)
    if not 0 <= num_edges <= room // 2:
        raise GraphError(
            f"num_edges={num_edges} must lie in 0..{room // 2}, half of the places between {num_nodes} nodes"
        )

    def keys_of(rows: Tensor, cols: Tensor) -> Tensor:
        if not directed:
            rows, cols = torch.minimum(rows, cols), torch.maximum(rows, cols)
        return rows.mul_(num_nodes).add_(cols)

    def propose(owners: Tensor, slots: Tensor, attempt: int) -> Tensor:
        if attempt < RECURSIVE_ROUNDS:
            rows, cols = _recurse(slots, (num_nodes - 1).bit_length(), (a, b, c), seed, attempt)
        else:
            bits = (hash_(stream_key(seed, Stream.EDGE, attempt, which), slots.clone()) for which in (0, 1))
            rows, cols = (below(part, num_nodes) for part in bits)
        fits = (rows < num_nodes) & (cols < num_nodes) & (rows != cols)
        return keys_of(rows, cols)[fits]

    need = torch.tensor([num_edges if directed else num_edges // 2], device=device)
    keys = distinct_keys(need, torch.zeros_like(need), propose, torch.zeros_like)
    number = permutation(seed, Stream.SCRAMBLE, num_nodes, device)
    keys = sort_values(keys_of(number[keys // num_nodes], number[keys % num_nodes]))
    indptr, indices = keys_csr(keys, num_nodes) if directed else symmetric_csr(keys, num_nodes)
    classes = torch.empty(num_nodes, dtype=torch.int32, device=device)
    classes[number] = (torch.arange(num_nodes, device=device) * num_classes // num_nodes).to(torch.int32)
    return _with_features(Adjacency(indptr, indices, symmetric=not directed), classes, num_features, seed, "rmat")


def _with_features(adj: Adjacency, classes: Tensor, num_features: int, seed: int, name: str) -> Graph:
    """The graph of ``adj`` with these classes, features that hint at them, and a split."""
    x, y, count = None, classes.to(torch.int64), int(classes.max()) + 1
    if num_features:
        x = dense_features(classes, num_features, count, signal=SIGNAL, dtype=torch.float32, seed=seed)
    return Graph(adj, x, y, *split_nodes(SHARES, y, seed), None, name, num_classes=count)


def _recurse(
    slots: Tensor, levels: int, quadrants: tuple[float, float, float], seed: int, attempt: int
) -> tuple[Tensor, Tensor]:
    """A row and a column per slot: one bit of each per level, from one 16-bit coin."""
    a, b, c = quadrants
    upper_left, upper, lower_left = coin_side(a), coin_side(a + b), coin_side(a + b + c)
    rows, cols = torch.zeros_like(slots), torch.zeros_like(slots)
    bits = slots
    for level in range(levels):
        if level % LEVELS_PER_HASH == 0:
            bits = hash_(stream_key(seed, Stream.EDGE, attempt, level), slots.clone())
        side = (bits >> (COIN_BITS * (level % LEVELS_PER_HASH))) & (COIN_SIDES - 1)
        lower = side >= upper
        right = ((side >= upper_left) & ~lower) | (side >= lower_left)
        rows.mul_(2).add_(lower)
        cols.mul_(2).add_(right)
    return rows, cols


def sbm(
    block_sizes: Sequence[int],
    p_in: float,
    p_out: float,
    *,
    num_features: int = 16,
    seed: int = 0,
    device: torch.device | str = "cpu",
) -> Graph:
    """An undirected graph of blocks: pairs inside a block are joined at the rate ``p_in``, others at ``p_out``.

    The number of edges inside each block and between blocks is the expected one, rounded, and the edges are
    uniform among the possible ones: so the counts are exact and the same for every seed. The class of a node
    is its block, nodes are numbered block after block, features are as in :func:`citation`. A seed gives the
    same graph on every device.
    """
    sizes = [int(size) for size in block_sizes]
    if not sizes or min(sizes) < 1:
        raise GraphError(f"block_sizes={sizes}: give at least one block, of at least 1 node each")
    for value, argument in ((p_in, "p_in"), (p_out, "p_out")):
        if not 0.0 <= value <= 1.0:
            raise GraphError(f"{argument}={value} must lie in 0..1: it is the probability of an edge")
    num_nodes, blocks = sum(sizes), torch.tensor(sizes, device=device)
    classes = torch.repeat_interleave(torch.arange(len(sizes), dtype=torch.int32, device=device), blocks)
    # Edges inside each block (owner b), and last those between blocks (owner len(sizes)).
    inside = [size * (size - 1) // 2 for size in sizes]
    across = num_nodes * (num_nodes - 1) // 2 - sum(inside)
    need = torch.tensor([*(round(p_in * pairs) for pairs in inside), round(p_out * across)], device=device)
    begins = offsets(blocks)
    first = torch.cat([begins[:-1], begins.new_zeros(1)])
    width = torch.cat([begins.diff(), begins.new_full((1,), num_nodes)])

    def end(owners: Tensor, slots: Tensor, attempt: int, which: int) -> Tensor:
        bits = hash_(stream_key(seed, Stream.EDGE, attempt, which), slots)
        return below(bits, width[owners]).add_(first[owners])

    def propose(owners: Tensor, slots: Tensor, attempt: int) -> Tensor:
        left, right = (end(owners, slots.clone(), attempt, which) for which in (0, 1))
        fits = (left != right) & ((classes[left] != classes[right]) == (owners == len(sizes)))
        low, high = torch.minimum(left, right), torch.maximum(left, right)
        return low.mul_(num_nodes).add_(high)[fits]

    def owner_of(keys: Tensor) -> Tensor:
        low, high = classes[keys // num_nodes], classes[keys % num_nodes]
        return torch.where(low == high, low, len(sizes))

    pairs = distinct_keys(need, offsets(need)[:-1], propose, owner_of)
    adj = Adjacency(*symmetric_csr(pairs, num_nodes), symmetric=True)
    return _with_features(adj, classes, num_features, seed, "sbm")
