"""Plant classes, observe some of them, and choose the nodes to train and test on.

Shapes: N nodes, C classes (or, for several labels per node, C binary tasks).
"""

from __future__ import annotations

import numpy as np
import torch
from torch import Tensor

from weft.core.errors import GraphError
from weft.graph.data.split_rules import PER_CLASS, PLANETOID, PLANETOID_TEST, PLANETOID_VAL, Split
from weft.graph.generate.counter import (
    COIN_SIDES,
    Stream,
    below,
    coin,
    coin_side,
    hash_range,
    permutation,
    spread_counts,
    stream_key,
)

ROW_BLOCK = 2**20


def planted_classes(num_nodes: int, num_classes: int, *, skew: float, seed: int, device: torch.device | str) -> Tensor:
    """Class of every node ``[N]`` int32; class c has a share in proportion to ``(c + 1) ^ -skew``, exactly."""
    if not 1 <= num_classes <= num_nodes:
        raise GraphError(f"num_classes={num_classes} must lie in 1..{num_nodes}, the number of nodes")
    shares = np.arange(1, num_classes + 1, dtype=np.float64) ** -skew
    ends = np.rint(np.cumsum(shares) / shares.sum() * (num_nodes - num_classes)).astype(np.int64)
    counts = np.diff(ends, prepend=0) + 1
    return spread_counts(torch.from_numpy(counts).to(device), seed, Stream.LABEL)


def observed_labels(classes: Tensor, num_classes: int, noise: float, seed: int) -> Tensor:
    """Labels ``[N]`` int64: the planted class, or with probability ``noise`` a random other one."""
    labels = classes.to(torch.int64)
    if noise <= 0.0 or num_classes < 2:
        return labels
    bits = hash_range(stream_key(seed, Stream.LABEL_NOISE), 0, labels.numel(), labels.device)
    other = below(bits, num_classes - 1).add_(labels).add_(1).remainder_(num_classes)
    return torch.where(coin(bits) < coin_side(noise), other, labels)


def observed_tasks(classes: Tensor, num_tasks: int, seed: int) -> Tensor:
    """Labels ``[N, C]`` float32 in {0, 1}: every class says yes to every task at a rate of its own."""
    device, num_classes = classes.device, int(classes.max()) + 1
    rates = hash_range(stream_key(seed, Stream.TASK_RATE), 0, num_classes * num_tasks, device)
    # Squared, so that most tasks are rare in most classes, as protein functions are.
    sides = (coin(rates).pow_(2) // COIN_SIDES).view(num_classes, num_tasks)
    labels = torch.empty(classes.numel(), num_tasks, dtype=torch.float32, device=device)
    for begin in range(0, classes.numel(), ROW_BLOCK):
        rows = classes[begin : begin + ROW_BLOCK]
        first, count = begin * num_tasks, rows.numel() * num_tasks
        bits = hash_range(stream_key(seed, Stream.TASK), first, first + count, device)
        labels[begin : begin + ROW_BLOCK] = coin(bits).view(-1, num_tasks) < sides.index_select(0, rows)
    return labels


def same_class_rate(homophily: float, num_classes: int, noise: float) -> float:
    """How often an edge must stay in its planted class for a share ``homophily`` of equal *labels*."""
    if not 0.0 <= homophily <= 1.0:
        raise GraphError(f"homophily={homophily} must lie in 0..1: the share of edges inside one class")
    if num_classes < 2:
        return 1.0
    others = num_classes - 1
    inside = (1 - noise) ** 2 + noise**2 / others
    across = 2 * (1 - noise) * noise / others + noise**2 * (num_classes - 2) / others**2
    rate = (homophily - across) / (inside - across)
    if rate > 1.0:
        raise GraphError(
            f"homophily={homophily} cannot be reached with label_noise={noise}: at most {inside:.3f}; lower one of them"
        )
    return max(rate, 0.0)


def split_nodes(split: Split, labels: Tensor, seed: int) -> tuple[Tensor, Tensor, Tensor]:
    """Train, validation and test ids, sorted int64.

    ``split`` is "planetoid" (20 per class, 500, 1,000; fewer in graphs too small for that), three shares
    (floats) or three numbers of nodes (ints).
    """
    order = permutation(seed, Stream.SPLIT, labels.shape[0], labels.device)
    if split == PLANETOID:
        return _planetoid(order, labels)
    if isinstance(split, str) or len(split) != 3:
        raise GraphError(f"split={split!r}: give 'planetoid', three shares or three numbers of nodes")
    return _cut(order, split_sizes(split, labels.shape[0]))


def split_sizes(split: tuple[float, float, float], num_nodes: int) -> list[int]:
    """Nodes in train, val and test for three shares (floats) or three numbers of nodes (ints)."""
    sizes = [part if isinstance(part, int) else int(part * num_nodes + 1e-6) for part in split]
    if min(sizes) < 0 or sum(sizes) > num_nodes:
        raise GraphError(f"split={split} needs {sum(sizes)} of {num_nodes} nodes; lower it")
    if not any(isinstance(part, int) for part in split) and abs(sum(split) - 1.0) < 1e-9:
        sizes[2] = num_nodes - sizes[0] - sizes[1]
    return sizes


def _planetoid(order: Tensor, labels: Tensor) -> tuple[Tensor, Tensor, Tensor]:
    num_nodes, num_classes = labels.numel(), int(labels.max()) + 1
    per_class = max(1, min(PER_CLASS, num_nodes // (4 * num_classes)))
    by_class = order[torch.sort(labels[order], stable=True).indices]
    counts = torch.bincount(labels, minlength=num_classes)
    rank = torch.arange(num_nodes, device=labels.device) - (torch.cumsum(counts, 0) - counts)[labels[by_class]]
    train = by_class[rank < per_class]
    taken = torch.zeros(num_nodes, dtype=torch.bool, device=labels.device)
    taken[train] = True
    rest = order[~taken[order]]
    val = min(PLANETOID_VAL, rest.numel() // 3)
    test = min(PLANETOID_TEST, rest.numel() - val)
    return (train.sort().values, *_cut(rest, [val, test]))


def _cut(order: Tensor, sizes: list[int]) -> tuple[Tensor, ...]:
    parts = torch.split(order[: sum(sizes)], sizes)
    return tuple(part.sort().values for part in parts)
