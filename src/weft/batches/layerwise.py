"""LayerWise: exact inference layer by layer in chunks of nodes, in bounded memory of the device.

A chunk reads all neighbours of its nodes; the activations between two layers lie in host memory (pinned where a GPU
reads them), in a temporary file where that is short, a row per node with all members side by side. Only what the splits
depend on is computed: a layer's nodes are those of the next and their neighbours.

Shapes: N nodes, K nodes of a layer, T members, H features of a layer.
"""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass
from typing import Protocol

import torch
from torch import Tensor

from weft.batches.features import FeatureStore
from weft.batches.placement import ACTIVATIONS, host_room
from weft.batches.sampler import NeighbourSampler
from weft.batches.source import Batch, Infer
from weft.graph.graph import Graph
from weft.graph.labels import SPLITS
from weft.ops.csr.adjacency import Adjacency

MOST_ROWS = 1 << 16  # nodes of a chunk
NEARLY_ALL = 0.9  # of the nodes: from there on a layer has all of them


@dataclass(frozen=True)
class LayerNodes:
    """The nodes ``ids [K]`` that a layer computes values of, and their ``position [N]`` int32 in it (-1: not there)."""

    ids: Tensor
    position: Tensor

    @classmethod
    def of(cls, mask: Tensor) -> LayerNodes:
        """Those that ``mask [N]`` has, all of them if it has nearly all."""
        if mask.float().mean() >= NEARLY_ALL:
            mask = torch.ones_like(mask)
        ids = mask.nonzero().squeeze(1).to(torch.int32)
        position = torch.full(mask.shape, -1, dtype=torch.int32, device=mask.device)
        position[ids.long()] = torch.arange(ids.numel(), dtype=torch.int32, device=mask.device)
        return cls(ids, position)


def infer_chunk(infer: Infer, chunk: Batch) -> Tensor:
    """``infer(chunk)``; what was derived from its block is let go at once, not when Python finds the cycle it is in."""
    values = infer(chunk)
    if isinstance(chunk.blocks, Adjacency):
        chunk.blocks._derived.clear()
    return values


class Rows(Protocol):
    """Features that are read by rows."""

    def read(self, ids: Tensor) -> Tensor:
        """The rows ``[M, F]`` of ``ids [M]``, where they are computed with."""


class LayerWise:
    """Inference on ``device`` over ``graph`` and features ``x [N, F]``, wherever these lie."""

    def __init__(self, graph: Graph, x: Tensor | Rows, device: torch.device, chunk_edges: int) -> None:
        self._store: Rows = FeatureStore(x, device) if isinstance(x, Tensor) else x
        self._graph, self._device = graph, device
        self._edges = chunk_edges
        self._sampler = NeighbourSampler(graph, [-1], degrees="full", device=graph.device)
        self._nodes: dict[int, LayerNodes] = {}  # by layers that follow
        self._rooms: dict[int, Tensor] = {}
        self.results = self._nodes_of(0)

    def _nodes_of(self, later: int) -> LayerNodes:
        """The nodes of the layer that ``later`` others follow."""
        if later in self._nodes:
            return self._nodes[later]
        graph = self._graph
        if later == 0:  # those of the splits
            mask = torch.zeros(graph.num_nodes, dtype=torch.bool, device=graph.device)
            for name in SPLITS:
                mask[getattr(graph, name).to(graph.device)] = True
        else:  # those of the next layer and their neighbours
            after = self._nodes_of(later - 1)
            mask = after.position >= 0
            for _, ids in self._chunks(after) if after.ids.numel() < graph.num_nodes else ():
                mask[self._sampler.sample(ids).input_nodes.long()] = True
        self._nodes[later] = LayerNodes.of(mask)
        return self._nodes[later]

    def _chunks(self, nodes: LayerNodes) -> Iterator[tuple[int, Tensor]]:
        """Parts of the nodes, of limited rows and edges, each with its first place."""
        ids, indptr = nodes.ids.long(), self._graph.adj.indptr
        edges = (indptr[ids + 1] - indptr[ids]).long().cumsum(0).cpu()
        most, first = max(1, min(MOST_ROWS, self._edges)), 0
        while first < ids.numel():
            before = int(edges[first - 1]) if first else 0
            last = int(torch.searchsorted(edges, before + self._edges, right=True))
            last = min(max(last, first + 1), first + most)
            yield first, nodes.ids[first:last]
            first = last

    def logits(self, infer: Infer, layers: int) -> Tensor:
        """Logits ``[T, K, C]`` of the nodes of :attr:`results`, on the device."""
        below: Tensor | None = None  # values of the layer before ``[K, T, H]`` in host memory, None for the features
        for layer in range(layers):
            nodes, out = self._nodes_of(layers - 1 - layer), None
            for first, ids in self._chunks(nodes):
                block = self._sampler.sample(ids)
                later = layers - 1 - layer
                if below is None:
                    x = self._store.read(block.input_nodes)
                else:
                    rows = self._nodes_of(later + 1).position[block.input_nodes.long()].to(self._device)
                    x = FeatureStore(below.flatten(1), self._device).read(rows)
                    x = x.unflatten(1, below.shape[1:]).movedim(1, 0)
                adjacency = block.to(self._device).blocks[0].adjacency()
                rows = torch.arange(block.seeds.numel(), device=self._device)
                y = self._graph.y[:0].to(self._device)
                chunk = Batch(x, adjacency, y, rows, torch.ones(1, device=self._device), layer=layer)
                values = infer_chunk(infer, chunk)
                if out is None:
                    shape, dtype = (nodes.ids.numel(), values.shape[0], values.shape[-1]), values.dtype
                    out = self._rooms.pop(layer, None)
                    if out is None or out.shape != shape or out.dtype != dtype:
                        out = None  # released before there is another
                        out = host_room(shape, dtype, self._device.type == "cuda", ACTIVATIONS)
                    self._rooms[layer] = out
                out[first : first + ids.numel()].copy_(values.movedim(0, 1))
            below = out
        return below.to(self._device).movedim(1, 0)

    def rows(self, ids: Tensor) -> Tensor:
        """Where the nodes ``ids`` are in what :meth:`logits` gives, on the device."""
        return self.results.position[ids.to(self.results.position.device)].long().to(self._device)

    def labels(self) -> Tensor:
        """Of the rows of :meth:`logits`."""
        return self._graph.y.to(self._device).index_select(0, self.results.ids.to(self._device).long())
