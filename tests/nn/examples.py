"""Small graphs with the corners that matter: self loops, isolated nodes, one direction only, no edges."""

from __future__ import annotations

from dataclasses import dataclass

import torch
from torch import Tensor

from weft.ops import Adjacency

NODES, RELATIONS = 13, 3


@dataclass(frozen=True)
class Example:
    """The same graph for PyG (``edge_index``, ``edge_weight``) and for us (``adj``)."""

    edge_index: Tensor
    adj: Adjacency
    edge_weight: Tensor | None = None


def example(src: Tensor, dst: Tensor, weight: Tensor | None = None, symmetric: bool = False) -> Example:
    order = torch.argsort(dst * NODES + src)
    src, dst = src[order], dst[order]
    weight = None if weight is None else weight[order]
    indptr = torch.zeros(NODES + 1, dtype=torch.int32)
    indptr[1:] = torch.bincount(dst, minlength=NODES).cumsum(0)
    adj = Adjacency(indptr, src.to(torch.int32), weight=weight, symmetric=symmetric)
    adj = adj.related(torch.arange(src.numel(), dtype=torch.int32) % RELATIONS, RELATIONS)
    return Example(torch.stack([src, dst]), adj, weight)


def directed_edges() -> tuple[Tensor, Tensor]:
    """Distinct edges; 3 and 5 have self loops, 11 has no edge in, 12 no edge at all."""
    generator = torch.Generator().manual_seed(1)
    key = torch.randperm(11 * 12, generator=generator)[:40]
    dst, src = key // 12, key % 12
    loops = torch.tensor([3, 5])
    src, dst = torch.cat([src, loops]), torch.cat([dst, loops])
    key = torch.unique(dst * NODES + src)
    return key % NODES, key // NODES


def make_example(name: str) -> Example:
    src, dst = directed_edges()
    if name == "empty":
        return example(src[:0], dst[:0])
    if name == "weighted":
        generator = torch.Generator().manual_seed(2)
        return example(src, dst, torch.rand(src.numel(), generator=generator) + 0.1)
    if name == "symmetric":
        key = torch.unique(torch.cat([dst * NODES + src, src * NODES + dst]))
        return example(key % NODES, key // NODES, symmetric=True)
    return example(src, dst)
