"""Small relational graphs with the corners that matter: parallel edges, empty relations, isolated nodes, one hub."""

from __future__ import annotations

import torch
from torch import Tensor

import weft

NODES, RELATIONS, FEATURES, CLASSES = 23, 5, 6, 4


def edges(seed: int = 0, count: int = 90) -> tuple[Tensor, Tensor, Tensor]:
    """``(src, dst, relation)``: node 0 is a hub, 21 has no edge in, 22 no edge at all; relation 3 is rare."""
    draw = torch.Generator().manual_seed(seed)
    src = torch.randint(0, NODES - 1, (count,), generator=draw)
    dst = torch.randint(0, NODES - 2, (count,), generator=draw)
    dst[: count // 4] = 0
    relation = torch.randint(0, 3, (count,), generator=draw)
    relation[0], relation[1], relation[2] = 3, 4, 4
    src[5:8], dst[5:8], relation[5:8] = 1, 2, 1  # the same edge three times
    src[8], dst[8] = 7, 7  # a self loop
    return src, dst, relation


def relational(seed: int = 0, num_relations: int | None = None, **fields) -> weft.Graph:
    """A graph with features, labels and splits."""
    src, dst, relation = edges(seed)
    draw = torch.Generator().manual_seed(seed + 1)
    about = {
        "x": torch.randn(NODES, FEATURES, generator=draw),
        "y": torch.randint(0, CLASSES, (NODES,), generator=draw),
        "train": torch.arange(0, 12),
        "val": torch.arange(12, 17),
        "test": torch.arange(17, NODES),
    }
    about |= fields
    return weft.Graph.from_edges(
        src, dst, NODES, relation=relation, num_relations=num_relations, num_classes=CLASSES, name="toy", **about
    )
