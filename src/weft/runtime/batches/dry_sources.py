"""Sources for dry runs: batches that have the sizes of a source's and no data.

A sampled step is captured on one batch padded to its capacity, which no batch exceeds; on a GPU that is what is
trained on. Its evaluation is that of the whole graph.
"""

from __future__ import annotations

import torch
from torch import Tensor

from weft.core.fanout import resolve
from weft.core.task import Task
from weft.flow.batch_size import capacity
from weft.flow.padded import PaddedAdjacency
from weft.graph.data.graph import Graph
from weft.ops.csr.adjacency import Adjacency
from weft.runtime.batches.source import Batch, FullGraph, Infer, MakeSource, SourceRequest


def dry_source_for(task: Task) -> MakeSource:
    """Where the batch of a dry run of ``task`` comes from."""
    return (lambda request: DrySampled(request, task)) if task.sampled else FullGraph


class DrySampled(FullGraph):
    """One batch of the largest size that sampling can give."""

    def __init__(self, request: SourceRequest, task: Task) -> None:
        super().__init__(request)
        graph = request.graph
        self._whole = self.batch
        train = max(graph.train.numel(), 1)
        fanouts = resolve(task.fanouts, graph.num_relations, graph.stats().relation_edges)
        size = capacity(fanouts, min(task.batch, train), graph.num_nodes, graph.num_edges)
        self.steps_per_epoch = -(-train // task.batch)
        blocks = tuple(
            _block(rows, columns, edges, graph)
            for rows, columns, edges in zip(size.rows, (*size.rows[1:], size.nodes), size.edges, strict=True)
        )[::-1]
        labels = graph.y.new_empty((size.rows[0], *graph.y.shape[1:]))
        rows = torch.arange(size.rows[0], device=graph.device)
        x = torch.empty(size.nodes, graph.num_features, dtype=request.x.dtype, device=graph.device)
        self.batch = Batch(x, blocks, labels, rows, torch.ones(1, device=graph.device))

    def logits(self, infer: Infer, layers: int | None) -> Tensor:
        """Of all nodes, on the whole graph."""
        return infer(self._whole)


def _block(rows: int, columns: int, edges: int, graph: Graph) -> Adjacency:
    device = graph.device
    indptr = torch.zeros(rows + 1, dtype=torch.int32, device=device)
    indices = torch.zeros(edges, dtype=torch.int32, device=device)
    full = torch.ones(columns, device=device), torch.ones(rows, device=device)
    block = PaddedAdjacency(indptr, indices, columns, full=full)
    if not graph.num_relations:
        return block
    return block.related(torch.zeros(edges, dtype=torch.int32, device=device), graph.num_relations)
