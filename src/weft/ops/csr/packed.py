"""How an adjacency crosses the border of a custom operator: as a flat list of tensors.

Custom operators take tensors, not objects, so that they can be traced under fake tensors and batched by
``vmap``. A *walk* is ``[indptr, indices, perm, rows, *work list]``; ``perm`` and ``rows`` are empty where
they are not known or not needed, the work list is there on a GPU only.
"""

from __future__ import annotations

from dataclasses import dataclass

import torch
from torch import Tensor

from weft.ops.csr.adjacency import Adjacency
from weft.ops.csr.worklist import WorkList, worklist, worklist_by_length
from weft.ops.launch.backend import on_gpu

HEADER = 4


@dataclass(frozen=True)
class PackedCSR:
    """A walk taken apart again inside an operator."""

    indptr: Tensor
    indices: Tensor
    perm: Tensor
    row_of_edge: Tensor
    work: WorkList | None

    @property
    def num_rows(self) -> int:
        """Number of destinations."""
        return self.indptr.numel() - 1

    @property
    def num_edges(self) -> int:
        """Number of edges."""
        return self.indices.numel()

    def rows(self) -> Tensor:
        """Destination of every edge ``[E]``, int64."""
        if self.row_of_edge.numel() == self.num_edges:
            return self.row_of_edge.long()
        ids = torch.arange(self.num_rows, device=self.indptr.device)
        return torch.repeat_interleave(ids, self.indptr.diff().long(), output_size=self.num_edges)


def pack_csr(adj: Adjacency, *, rows: bool = False, perm: bool = False) -> list[Tensor]:
    """The walk of ``adj``; ``rows`` asks for every edge's destination too, ``perm`` for a transpose's order."""
    empty = adj.indices.new_empty(0)
    order = adj.perm if perm else None
    header = [
        adj.indptr,
        adj.indices,
        empty if order is None else order,
        adj.rows() if rows else empty,
    ]
    return header + (worklist(adj).tensors() if on_gpu(adj.indices) else [])


def pack_csr_by_length(adj: Adjacency) -> list[Tensor]:
    """The walk of ``adj`` in the order of lengths even where clusters are known.

    For what adds up over all rows, piece by piece: with the order of pieces its last bits would change.
    """
    empty = adj.indices.new_empty(0)
    header = [adj.indptr, adj.indices, empty, empty]
    return header + (worklist_by_length(adj).tensors() if on_gpu(adj.indices) else [])


def unpack_csr(tensors: list[Tensor]) -> PackedCSR:
    """The inverse of :func:`pack`."""
    work = WorkList(*tensors[HEADER:]) if len(tensors) > HEADER else None
    return PackedCSR(*tensors[:HEADER], work)


def pack_csr_backward(adj: Adjacency, *, rows: bool = False, perm: bool = True) -> list[Tensor]:
    """The walk of the transpose where a gradient may be asked for, else nothing (and nothing is built)."""
    return pack_csr(adj.transposed(), rows=rows, perm=perm) if torch.is_grad_enabled() else []
