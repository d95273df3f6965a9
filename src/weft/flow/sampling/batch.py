"""What a sampler returns: a batch of blocks, or the local subgraph of a batch.

Shapes: S seeds, M nodes of the batch, P edges, F features.
"""

from __future__ import annotations

from dataclasses import dataclass, replace
from typing import Any

import torch
from torch import Tensor

from weft.flow.sampling.block import Block


@dataclass(frozen=True)
class MiniBatch:
    """The blocks of one batch, the outermost hop first, so that layer i uses ``blocks[i]``.

    ``input_nodes [M]`` int32 are the sources of ``blocks[0]`` and begin with ``seeds [S]``, in their order.
    ``x [M, F]`` are the input nodes' features and ``y [S]`` the seeds' labels, once a stage has fetched them.
    """

    blocks: tuple[Block, ...]
    input_nodes: Tensor
    seeds: Tensor
    epoch: int = 0
    batch: int = 0
    x: Tensor | None = None
    y: Tensor | None = None

    def with_data(self, x: Tensor | None = None, y: Tensor | None = None) -> MiniBatch:
        """The same batch with features and labels."""
        return replace(self, x=x, y=y)

    def tensors(self) -> list[Tensor]:
        """Every array of the batch."""
        own = [self.input_nodes, self.seeds, self.x, self.y]
        return [t for t in own if t is not None] + [t for block in self.blocks for t in block.tensors().values()]

    def to(self, device: torch.device | str, non_blocking: bool = False) -> MiniBatch:
        """The same batch on another device."""
        return _moved(self, ("input_nodes", "seeds", "x", "y"), device, non_blocking, blocks=tuple(
            block.to(device, non_blocking) for block in self.blocks
        ))  # fmt: skip


@dataclass(frozen=True)
class Subgraph:
    """The sampled edges of a batch as one local edge list, as PyG's ``NeighborLoader`` gives it.

    ``edge_index [2, P]`` int64 holds sources above destinations as positions in ``nodes [M]`` int32, which begin with
    the ``num_seeds`` seeds. ``edges [P]`` int64: where each edge is in the graph's CSR, or None. ``weight [P]``,
    ``relation [P]`` and ``edge_attr [P, ...]``: those of the graph at these edges, or None.
    """

    edge_index: Tensor
    nodes: Tensor
    num_seeds: int
    edges: Tensor | None = None
    weight: Tensor | None = None
    relation: Tensor | None = None
    epoch: int = 0
    batch: int = 0
    x: Tensor | None = None
    y: Tensor | None = None
    num_relations: int = 0
    edge_attr: Tensor | None = None

    @property
    def input_nodes(self) -> Tensor:
        """The nodes whose features are needed: all of them."""
        return self.nodes

    @property
    def seeds(self) -> Tensor:
        """The seeds ``[S]``."""
        return self.nodes[: self.num_seeds]

    def with_data(self, x: Tensor | None = None, y: Tensor | None = None) -> Subgraph:
        """The same subgraph with features ``[M, F]`` and labels."""
        return replace(self, x=x, y=y)

    def tensors(self) -> list[Tensor]:
        """Every array of the subgraph."""
        return [value for name in self.__dataclass_fields__ if isinstance(value := getattr(self, name), Tensor)]

    def to(self, device: torch.device | str, non_blocking: bool = False) -> Subgraph:
        """The same subgraph on another device."""
        names = ("edge_index", "nodes", "edges", "weight", "relation", "edge_attr", "x", "y")
        return _moved(self, names, device, non_blocking)


def _moved(batch: Any, names: tuple[str, ...], device: torch.device | str, non_blocking: bool, **more: Any) -> Any:
    held = {name: getattr(batch, name) for name in names}
    moved = {name: t.to(device, non_blocking=non_blocking) for name, t in held.items() if t is not None}
    return replace(batch, **moved, **more)
