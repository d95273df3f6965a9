"""Pack an adjacency into a flat list of tensors, as custom operators take it.

Custom operators take tensors, not objects, so that they can be traced under fake tensors and batched by
``vmap``. A packed CSR (``csr`` in operator schemas, ``back`` for the transpose) is
``[indptr, indices, perm, rows, *work list]``; ``perm`` and ``rows`` are empty if they are not known or not
needed, and only a GPU has a work list.
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
    """A packed CSR, unpacked inside an operator."""

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


def pack_csr(adj: Adjacency, *, rows: bool = False, perm: bool = False, by_length: bool = False) -> list[Tensor]:
    """``adj`` as a packed CSR; ``rows`` adds every edge's destination, ``perm`` a transpose's order of edges.

    ``by_length``: rows by length even if clusters are known. For sums over all rows, item by item: with another order
    of items their last bits would change.
    """
    empty = adj.indices.new_empty(0)
    order = adj.perm if perm else None
    header = [
        adj.indptr,
        adj.indices,
        empty if order is None else order,
        adj.rows() if rows else empty,
    ]
    if not on_gpu(adj.indices):
        return header
    return header + (worklist_by_length(adj) if by_length else worklist(adj)).tensors()


def unpack_csr(tensors: list[Tensor]) -> PackedCSR:
    """The inverse of :func:`pack_csr`."""
    work = WorkList(*tensors[HEADER:]) if len(tensors) > HEADER else None
    return PackedCSR(*tensors[:HEADER], work)


def pack_csr_backward(adj: Adjacency, *, rows: bool = False, perm: bool = True) -> list[Tensor]:
    """The transpose packed, if a gradient may be needed; else an empty list, and no transpose is built."""
    return pack_csr(adj.transposed(), rows=rows, perm=perm) if torch.is_grad_enabled() else []


# ---- Reductions of per-edge values over the in-edges of a row, in plain torch
#
# Shapes: E edges, N rows, H heads. Values are ``[..., E, H]``; results are ``[..., N, H]``.


def segment_sum(values: Tensor, csr: PackedCSR) -> Tensor:
    """Sum over the in-edges of every row; empty rows give 0."""
    out = values.new_zeros(*values.shape[:-2], csr.num_rows, values.shape[-1])
    return out.index_add(-2, csr.rows(), values)


def segment_max(values: Tensor, csr: PackedCSR) -> Tensor:
    """Maximum over the in-edges of every row; empty rows give -inf."""
    out = values.new_full((*values.shape[:-2], csr.num_rows, values.shape[-1]), -torch.inf)
    return scatter_extreme(out, csr.rows(), values, "amax")


def scatter_extreme(out: Tensor, rows: Tensor, values: Tensor, reduce: str) -> Tensor:
    """``out [..., N, H]`` joined with ``values [..., E, H]`` at their rows by ``"amax"`` or ``"amin"``."""
    return out.scatter_reduce(-2, rows[:, None].expand(values.shape), values, reduce)


def segment_softmax(scores: Tensor, csr: PackedCSR) -> Tensor:
    """Softmax over the in-edges of every row, ``[..., E, H]``."""
    rows = csr.rows()
    shifted = (scores - segment_max(scores, csr).index_select(-2, rows)).exp()
    return shifted / segment_sum(shifted, csr).index_select(-2, rows)


def segment_log_sum_exp(scores: Tensor, csr: PackedCSR) -> Tensor:
    """Log of the softmax's denominator for every row ``[..., N, H]``; -inf for empty rows."""
    top = segment_max(scores, csr)
    top = torch.where(torch.isinf(top), 0.0, top)
    return top + segment_sum((scores - top.index_select(-2, csr.rows())).exp(), csr).log()
