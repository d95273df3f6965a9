"""Scale the sizes recorded in a real step on a small graph to those of a large one.

The small graph's numbers of nodes, edges and split nodes are distinct primes, so that a tensor's dimension tells what
it counts: every dimension that is a sum of few of them is replaced by the same sum of the large graph's numbers.

Shapes: N nodes, E edges.
"""

from __future__ import annotations

from dataclasses import dataclass, replace
from itertools import product
from math import prod
from typing import Any

import torch
from torch import Tensor

from weft.capture.observer import Observer, Seen
from weft.core.graph_stats import GraphStats
from weft.graph.graph import Graph

NODES, EDGES = 1009, 7919  # primes: no width of a layer is likely to be one of them, or a sum of them
TRAIN, VAL, TEST = 307, 151, 211
MAX_TERMS = 3  # node or edge counts summed in one dimension: PyG appends a self loop per node, and edges both ways


@dataclass(frozen=True)
class Sizes:
    """The large graph, and what each dimension of the small one stands for."""

    stats: GraphStats
    table: tuple[tuple[int, int], ...]

    @classmethod
    def for_graph(cls, stats: GraphStats) -> Sizes:
        """Sums of nodes and edges, the splits, and the splits together; an offset array has one more than rows."""
        large: dict[int, int] = {}
        for nodes, edges, one in product(range(MAX_TERMS + 1), range(MAX_TERMS + 1), (0, 1)):
            if nodes or edges:
                small = nodes * NODES + edges * EDGES + one
                large.setdefault(small, nodes * stats.num_nodes + edges * stats.num_edges + one)
        splits = ((TRAIN, stats.num_train), (VAL, stats.num_val), (TEST, stats.num_test))
        large |= dict(splits)
        large[TRAIN + VAL + TEST] = stats.num_train + stats.num_val + stats.num_test
        return cls(stats, tuple(large.items()))

    @property
    def note(self) -> str:
        """The note that a Program carries."""
        return (
            f"scaled from one real step on a random graph of {NODES} nodes and {EDGES} edges: "
            "the model reads sizes from its data, so it has no dry run"
        )

    def shape(self, shape: tuple[int, ...]) -> tuple[int, ...]:
        """A shape of the small run as it would be in the large one."""
        table = dict(self.table)
        return tuple(table.get(size, size) for size in shape)


def small_graph(sizes: Sizes) -> Graph:
    """A random graph without self loops of :data:`NODES` and :data:`EDGES`, with the features of the large one."""
    stats = sizes.stats
    draw = torch.Generator().manual_seed(0)
    # Distinct pairs (i, j), j != i, as numbers below N (N - 1): none is drawn twice.
    pairs = torch.randperm(NODES * (NODES - 1), generator=draw)[:EDGES]
    dst, skip = pairs // (NODES - 1), pairs % (NODES - 1)
    src = skip + (skip >= dst)
    rows = torch.randperm(NODES, generator=draw)
    if stats.multilabel:
        y = torch.randint(2, (NODES, stats.num_classes), generator=draw)
    elif stats.regression:
        y = torch.rand(NODES, stats.num_classes, generator=draw)
    else:
        y = torch.arange(NODES) % stats.num_classes
    splits = rows[:TRAIN], rows[TRAIN : TRAIN + VAL], rows[TRAIN + VAL : TRAIN + VAL + TEST]
    kept = (split if size else None for split, size in zip(splits, (1, stats.num_val, stats.num_test), strict=True))
    return Graph.from_edges(
        src,
        dst,
        NODES,
        torch.rand(NODES, stats.num_features, generator=draw).to(getattr(torch, stats.feature_dtype)),
        y,
        *kept,
        edge_weight=torch.rand(EDGES, generator=draw) + 0.5 if stats.weighted else None,
        relation=torch.arange(EDGES) % stats.num_relations if stats.num_relations else None,
        edge_attr=_edge_attr(stats, draw),
        name=stats.name,
        num_classes=stats.num_classes,
        num_relations=stats.num_relations or None,
    )


def _edge_attr(stats: GraphStats, draw: torch.Generator) -> Tensor | None:
    if stats.edge_features is None:
        return None
    shape = (EDGES, stats.edge_features) if stats.edge_features else (EDGES,)
    return torch.rand(shape, generator=draw)


def rescale(observer: Observer, sizes: Sizes) -> None:
    """Give every storage and every tensor that was seen the size it would have on the large graph."""
    for storage in observer.storages:
        shape = sizes.shape(storage.shape)
        storage.bytes = storage.bytes * prod(shape) // max(prod(storage.shape), 1)
        storage.shape = shape
    for call in observer.calls:
        call.args, call.outs = _rescaled(call.args, sizes), _rescaled(call.outs, sizes)
        call.kwargs = {key: _rescaled(value, sizes) for key, value in call.kwargs.items()}


def _rescaled(tree: Any, sizes: Sizes) -> Any:
    if isinstance(tree, Seen):
        return replace(tree, shape=sizes.shape(tree.shape))
    if type(tree) in (list, tuple):
        return type(tree)(_rescaled(part, sizes) for part in tree)
    return tree
