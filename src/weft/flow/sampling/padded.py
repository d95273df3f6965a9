"""PaddedAdjacency: a sampled block padded to its capacity, built without reading a size back.

Everything that a training step derives from it (work lists, transposes, self loops, GCN's factors) has a shape that
depends on the capacity alone and is made on the device, so that sampling and training can be captured together as one
CUDA graph. Rows beyond the existing ones have no edges; entries beyond ``indptr[-1]`` are never read.

Shapes: N rows, M columns, P entries, all of them capacities.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import torch
from torch import Tensor

from weft.ops.csr.adjacency import Adjacency
from weft.ops.csr.relation_slots import RelationSlots, as_matrices, slot_arrays
from weft.ops.csr.worklist import WorkList

Full = tuple[Tensor, Tensor] | Callable[[], tuple[Tensor, Tensor]]


class PaddedAdjacency(Adjacency):
    """``indptr [N+1]``, ``indices [P]`` int32; the destinations are the first N of the M sources.

    ``full``: ``(gcn_scale [M], degree [N])`` of the whole graph for GCN, or a function that gives them when they are
    needed. Assumes that no edge is a self loop.
    """

    def __init__(self, *arrays: Any, full: Full | None = None, **factors: Any) -> None:
        super().__init__(*arrays, **factors)
        self._full = full
        self._derived["worklist"] = _all_light(self.indptr)

    def scaled(self, **factors: Tensor | None) -> Adjacency:
        """The same structure with other factors."""
        other = PaddedAdjacency.__new__(PaddedAdjacency)
        Adjacency.__init__(other, self.indptr, self.indices, self.num_cols, perm=self.perm, **factors)
        other._full, other._structure, other.nodes = self._full, self.structure, self.nodes
        return other

    def rows(self) -> Tensor:
        """Destination of every entry ``[P]`` int32; N - 1 for those beyond the last."""

        def build() -> Tensor:
            places = torch.arange(self.num_edges, device=self.device, dtype=self.indptr.dtype)
            found = torch.searchsorted(self.indptr[1:].contiguous(), places, right=True)
            return found.clamp_(max=self.num_rows - 1).to(torch.int32)

        return self.structure.derived("rows", build)

    def _transpose(self) -> Adjacency:
        base = self.structure
        indptr, indices, perm = base.derived("transposed arrays", base._transposed_padded)
        factors = {"row_scale": self.col_scale, "col_scale": self.row_scale}
        weight = None if self.weight is None else self.weight.index_select(-1, perm)
        back = PaddedAdjacency(indptr, indices, self.num_rows, weight=weight, perm=perm.to(torch.int32), **factors)
        back._structure = base.derived("transposed structure", lambda: back)
        return back

    def _transposed_padded(self) -> tuple[Tensor, Tensor, Tensor]:
        places = torch.arange(self.num_edges, device=self.device)
        column = torch.where(places < self.indptr[-1], self.indices.long(), self.num_cols)
        column, perm = torch.sort(column, stable=True)
        starts = torch.arange(self.num_cols + 1, device=self.device)
        indptr = torch.searchsorted(column, starts).to(torch.int32)
        return indptr, self.rows().index_select(0, perm), perm

    def _add_self_loops(self) -> Adjacency:
        """Every row begins with its loop."""
        count, rows = self.num_rows, self.rows().long()
        indptr = self.indptr + torch.arange(count + 1, dtype=self.indptr.dtype, device=self.device)
        places = torch.arange(self.num_edges, device=self.device) + rows + 1
        indices = self.indices.new_zeros(self.num_edges + count)
        indices.index_copy_(0, places, self.indices)
        loops = torch.arange(count, dtype=self.indices.dtype, device=self.device)
        indices.index_copy_(0, indptr[:-1].long(), loops)
        weight = None
        if self.weight is not None:
            weight = self.weight.new_ones(self.num_edges + count).index_copy_(0, places, self.weight)
        return PaddedAdjacency(indptr, indices, self.num_cols, weight=weight, full=self._full)

    def make_relation_slots(self) -> RelationSlots:
        """Slots for as many (relation, node) pairs as there can be."""
        pairs = max(min(self.num_edges, self.num_rows * self.num_relations), 1)
        return as_matrices(slot_arrays(self, pairs, self.indptr[-1:]), self, PaddedAdjacency)

    def with_identity(self) -> Adjacency:
        """``A + I`` without weights."""
        return self.scaled().with_self_loops()

    def _normalise_gcn(self) -> Adjacency:
        assert self._full is not None, "GCN's factors are those of the whole graph"
        looped, (scale, degree) = self.with_self_loops(), self._full() if callable(self._full) else self._full
        rows = looped.rows().long()
        ratio = degree.to(torch.float32) / self.degrees().clamp(min=1)
        weight = torch.where(rows == looped.indices, 1.0, ratio.index_select(0, rows))
        if looped.weight is not None:
            weight = weight * looped.weight
        return looped.scaled(weight=weight, row_scale=scale[: self.num_rows], col_scale=scale)


def _all_light(indptr: Tensor) -> WorkList:
    """Every row as a light piece, in order: fan-outs bound the rows, and sorting them would need their sizes."""
    count = indptr.numel() - 1
    none = torch.empty(0, dtype=torch.int32, device=indptr.device)
    rows = torch.arange(count, dtype=torch.int32, device=indptr.device)
    return WorkList(
        heavy_start=none.to(indptr.dtype),
        heavy_len=none,
        heavy_row=none,
        light_start=indptr[:-1].contiguous(),
        light_len=indptr.diff().to(torch.int32),
        light_row=rows,
        hub_row=none,
        hub_ptr=torch.zeros(1, dtype=torch.int32, device=indptr.device),
        hub_of_partial=none,
    )
