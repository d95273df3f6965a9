"""Sources for dry runs: batches that have the sizes of a source's and no data.

A sampled step is captured on one batch padded to its capacity, which no batch exceeds; on a GPU that is what is
trained on. On a CPU batches have their own sizes, and the one captured is as large as hardly any. Its evaluation is
that of the whole graph, or one chunk of every layer of the largest size.

Shapes: T members, M columns of a chunk, H features of a layer.
"""

from __future__ import annotations

import torch
from torch import Tensor

from weft.batches.block import PaddedAdjacency
from weft.batches.layerwise import MOST_ROWS, infer_chunk
from weft.batches.sampler import BatchSize, capacity
from weft.batches.source import Batch, FullGraph, Infer, MakeSource, SourceRequest
from weft.core.batch_sizes import large_batch
from weft.core.placement import DataPlacement
from weft.core.plan import Plan
from weft.core.settings import resolve
from weft.core.task import Task
from weft.graph.labels import SPLITS
from weft.ops.csr.adjacency import Adjacency


def dry_source_for(task: Task, plan: Plan | None = None) -> MakeSource:
    """Where the batch of a dry run of ``task`` comes from."""
    placement = None if plan is None else plan.places
    gpu = plan is not None and plan.device == "cuda"
    return (lambda request: DrySampled(request, task, placement, gpu)) if task.sampled else FullGraph


class DrySampled(FullGraph):
    """One batch of the largest size that sampling can give, and what sampling keeps."""

    def __init__(
        self, request: SourceRequest, task: Task, placement: DataPlacement | None = None, gpu: bool = False
    ) -> None:
        super().__init__(request)
        graph, device = request.graph, request.graph.device
        self._request, self._placement, self._device = request, placement, device
        train = max(graph.train.numel(), 1)
        self.steps_per_epoch = -(-train // task.batch)
        fanouts = resolve(task.fanouts, graph.num_relations, graph.stats().relation_edges)
        self._gpu, seeds = gpu, min(task.batch, train)
        self._size = capacity(fanouts, seeds, graph.num_nodes, graph.num_edges)
        if not gpu:  # the smaller of both, number by number
            size, large = self._size, large_batch(graph.stats(), task.fanouts, seeds)
            rows, edges = (tuple(map(min, *pair)) for pair in ((size.rows, large.rows), (size.edges, large.edges)))
            self._size = BatchSize(rows, edges, min(size.nodes, large.nodes))
        self._whole, self._layers = self.batch, placement is not None and placement.evaluation == "layers"
        # Batches gather dense rows: sparse features are kept with their zeros.
        self._dense = None if isinstance(request.x, Tensor) else self._empty(graph.num_nodes, graph.num_features)
        x, blocks = self._batch()
        labelled = self._size.nodes if request.subgraph else self._size.rows[0]
        labels = graph.y.new_zeros((labelled, *graph.y.shape[1:]))  # zeros: a step on a CPU reads them
        rows = torch.arange(self._size.rows[0], device=device)
        self.batch = Batch(x, blocks, labels, rows, torch.ones(1, device=device))
        self._waiting = self._batch() if gpu and placement is not None and placement.overlap else None
        self._sampling: list[Tensor] = []
        if gpu:  # the table of local ids; for evaluation by layers, where their nodes are; for GCN, all degrees
            nodes = graph.num_nodes
            kinds = [torch.int32] * (1 + (task.layers if self._layers else 0))
            kinds += [torch.float32, torch.int64] if task.traits is not None and task.model == "gcn" else []
            self._sampling = [self._empty(nodes, dtype=dtype) for dtype in kinds]

    def _empty(self, *shape: int, dtype: torch.dtype | None = None) -> Tensor:
        return torch.empty(shape, dtype=dtype or self._request.x.dtype, device=self._device)

    def _batch(self) -> tuple[Tensor, Adjacency | tuple[Adjacency, ...]]:
        size, graph = self._size, self._request.graph
        if self._request.subgraph:  # one local graph: every node is sampled for once, after the hop that found it
            block = self._block(size.nodes, size.nodes, size.new_edges)
            adj, of_edges = graph.adj, self._request.of_edges
            if "edge_weight" in of_edges and adj.weight is not None:
                block.weight = adj.weight.new_ones(block.num_edges)
            if "edge_attr" in of_edges and adj.edge_attr is not None:
                block = block.attributed(adj.edge_attr.new_zeros((block.num_edges, *adj.edge_attr.shape[1:])))
            return self._empty(size.nodes, graph.num_features), block
        shapes = zip(size.rows, (*size.rows[1:], size.nodes), size.edges, strict=True)
        blocks = tuple(self._block(rows, columns, edges) for rows, columns, edges in shapes)
        return self._empty(size.nodes, graph.num_features), blocks[::-1]

    def _block(self, rows: int, columns: int, edges: int) -> Adjacency:
        graph, device = self._request.graph, self._device
        indptr = torch.zeros(rows + 1, dtype=torch.int32, device=device)
        indices = torch.zeros(edges, dtype=torch.int32, device=device)
        full = torch.ones(columns, device=device), torch.ones(rows, device=device)
        block = PaddedAdjacency(indptr, indices, columns, full=lambda: full)
        if not graph.num_relations:
            return block
        return block.related(torch.zeros(edges, dtype=torch.int32, device=device), graph.num_relations)

    def held(self) -> list[tuple[str, Tensor]]:
        """What is kept for all steps, by kind."""
        held: list[tuple[str, Tensor]] = []
        batches = [("batch", self.batch.x, self.batch.blocks)]
        batches += [("queue", *self._waiting)] if self._waiting is not None else []
        for kind, x, blocks in batches:
            held.append((kind, x))
            for block in blocks if isinstance(blocks, tuple) else (blocks,):
                held += [(kind, block.indptr), (kind, block.indices)]
        held += [("input", self._dense)] if self._dense is not None else []
        return held + [("sampling", tensor) for tensor in self._sampling]

    # ---- evaluation ----------------------------------------------------------------------------------

    def logits(self, infer: Infer, layers: int | None) -> Tensor:
        """Of all nodes on the whole graph, or layer by layer a chunk and then room for all results."""
        if not self._layers or layers is None:
            return infer(self._on_device())
        values = infer_chunk(infer, self._chunk(0, None))
        for layer in range(1, layers):
            values = infer_chunk(infer, self._chunk(layer, values))
        return values.new_empty(values.shape[0], self.rows("all").numel(), values.shape[-1])

    def _on_device(self) -> Batch:
        """The whole graph; what lies elsewhere comes to the device for it."""
        graph, whole = self._request.graph, self._whole
        there = not self._gpu or self._placement is None or self._placement.on_device
        if there or self._device.type != "meta":
            return whole
        x = self._empty(graph.num_nodes, graph.num_features) if isinstance(whole.x, Tensor) else whole.x
        adj = graph.adj
        if self._placement.topology != "gpu":
            adj = self._block(graph.num_nodes, graph.num_nodes, graph.num_edges)
        return Batch(x, adj, whole.y, whole.rows, whole.share)

    def _chunk(self, layer: int, below: Tensor | None) -> Batch:
        """The largest chunk of a layer."""
        graph, edges = self._request.graph, self._placement.chunk_edges
        edges = min(max(edges, graph.stats().max_degree), graph.num_edges)
        rows = min(MOST_ROWS, self._placement.chunk_edges, graph.num_nodes)
        columns = min(graph.num_nodes, rows + edges)
        width = (columns, graph.num_features) if below is None else (below.shape[0], columns, below.shape[-1])
        block = self._block(rows, columns, edges)
        here = torch.arange(rows, device=self._device)
        labels = self._request.graph.y[:0]
        return Batch(self._empty(*width), block, labels, here, torch.ones(1, device=self._device), layer=layer)

    def rows(self, split: str) -> Tensor:
        """Of a split; ``"all"``: of what :meth:`logits` gives, layer by layer."""
        if split != "all":
            return super().rows(split)
        return torch.empty(sum(super(DrySampled, self).rows(name).numel() for name in SPLITS), device=self._device)

    def labels(self) -> Tensor:
        """Of all nodes, or of those of the splits."""
        y = super().labels()
        return y.new_empty((self.rows("all").numel(), *y.shape[1:])) if self._layers else y
