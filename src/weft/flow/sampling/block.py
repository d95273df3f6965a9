"""Block: the sampled edges of one hop as a rectangular CSR.

Rows are destinations, columns are sources, and the destinations are the first ``num_dst`` of the sources. Columns of a
row are in the order in which they were picked, not sorted.

Shapes: D destinations, M sources, P edges, N nodes of the graph.
"""

from __future__ import annotations

from dataclasses import dataclass, replace
from typing import Any

import torch
from torch import Tensor

from weft.ops.csr.adjacency import Adjacency
from weft.ops.csr.row_sums import row_sums
from weft.ops.csr.self_loops import loop_weights
from weft.ops.sampling.cpu import transpose_cpu


@dataclass(frozen=True)
class Block:
    """One hop of a batch.

    ``indptr [D+1]`` and ``indices [P]`` int32 (positions among the sources), ``num_src`` = M.
    ``edges [P]`` int64: where each edge is in the graph's CSR, or None. ``weight [P]`` and ``relation [P]``: those of
    the graph at these edges, or None; ``num_relations`` are those of the graph.

    ``gcn_scale [M]`` and ``degree [D]`` select how GCN normalises. Without them (the default) degrees count the sampled
    edges of the block and the added loop, as PyG's layers do on what ``NeighborLoader`` returns. With them,
    ``gcn_scale`` is ``D^-1/2`` of the full graph at the sources and ``degree`` the full in-degree of the destinations:
    each sampled edge is weighted by ``degree / picked``, which makes a row's sum an unbiased estimate of the full one.
    In both, an edge from a node to itself takes the place of the added loop, and keeps its weight.
    """

    indptr: Tensor
    indices: Tensor
    num_src: int
    edges: Tensor | None = None
    weight: Tensor | None = None
    relation: Tensor | None = None
    gcn_scale: Tensor | None = None
    degree: Tensor | None = None
    num_relations: int = 0

    @property
    def num_dst(self) -> int:
        """Number of destinations D."""
        return self.indptr.numel() - 1

    @property
    def num_edges(self) -> int:
        """Number of sampled edges P."""
        return self.indices.numel()

    def tensors(self) -> dict[str, Tensor]:
        """The arrays by name."""
        found = {name: getattr(self, name) for name in self.__dataclass_fields__}
        return {name: value for name, value in found.items() if isinstance(value, Tensor)}

    def to(self, device: torch.device | str, non_blocking: bool = False) -> Block:
        """The same block on another device."""
        return replace(self, **{name: t.to(device, non_blocking=non_blocking) for name, t in self.tensors().items()})

    def adjacency(self) -> Adjacency:
        """The block as layers take it: a new :class:`Adjacency` of D rows and M columns."""
        plain = BlockAdjacency(
            self.indptr,
            self.indices,
            self.num_src,
            weight=self.weight,
            full=None if self.gcn_scale is None else (self.gcn_scale, self.degree),
        )
        return plain if self.relation is None else plain.related(self.relation, self.num_relations)


class CountingSorted(Adjacency):
    """A matrix that serves one step: on the CPU its transpose is a counting sort, on a GPU torch's stable sort.

    Both give the same order.
    """

    def _counting_sort(self) -> tuple[Tensor, Tensor, Tensor]:
        return self.derived("counting sort", lambda: transpose_cpu(self.indptr, self.indices, self.num_cols))

    def _sort_by_source(self) -> Tensor:
        if self.device.type != "cpu":
            return super()._sort_by_source()
        return self._counting_sort()[2]

    def _transposed_arrays(self) -> tuple[Tensor, Tensor]:
        if self.device.type != "cpu":
            return super()._transposed_arrays()
        indptr, rows, _ = self._counting_sort()
        return indptr, rows


class BlockAdjacency(CountingSorted):
    """An adjacency whose rows are the first of its columns and whose rows are not sorted.

    ``full`` is ``(gcn_scale [M], degree [D])`` for GCN's normalisation by the full graph.
    """

    def __init__(self, *arrays: Any, full: tuple[Tensor, Tensor] | None = None, **factors: Any) -> None:
        super().__init__(*arrays, **factors)
        self._full = full

    def scaled(self, **factors: Tensor | None) -> Adjacency:
        """The same structure with other factors."""
        other = BlockAdjacency(self.indptr, self.indices, self.num_cols, perm=self.perm, full=self._full, **factors)
        other._structure, other.nodes = self.structure, self.nodes
        return other

    def _add_self_loops(self) -> Adjacency:
        """Every row begins with its loop: of weight 1, or of that of the loop that was sampled."""
        rows, cols, weight = self.rows(), self.indices, self.weight
        kept = rows != cols
        own = None if weight is None else weight.new_ones(self.num_rows)
        if not bool(kept.all()):
            if own is not None:
                own = loop_weights(rows[~kept], weight[~kept], self.num_rows)
            rows, cols, weight = rows[kept], cols[kept], None if weight is None else weight[kept]
        counts = torch.bincount(rows, minlength=self.num_rows) + 1
        indptr = torch.zeros(self.num_rows + 1, dtype=torch.int32, device=self.device)
        torch.cumsum(counts, 0, out=indptr[1:])
        ids = torch.arange(self.num_rows, dtype=cols.dtype, device=self.device)
        indices = torch.repeat_interleave(ids, counts, output_size=cols.numel() + self.num_rows)
        place = torch.arange(1, cols.numel() + 1, device=self.device) + rows
        indices[place] = cols
        weights = None
        if weight is not None and own is not None:
            weights = weight.new_empty(indices.numel()).index_copy_(0, place, weight)
            weights.index_copy_(0, indptr[:-1].long(), own)
        looped = BlockAdjacency(indptr, indices, self.num_cols, weight=weights, full=self._full)
        looped.nodes = self.nodes
        return looped

    def _normalise_gcn(self) -> Adjacency:
        looped = self.with_self_loops()
        if self._full is None:
            scale = _sampled_scale(looped)
            return looped.scaled(weight=looped.weight, row_scale=scale[: self.num_rows], col_scale=scale)
        scale, degree = self._full
        weight = _estimate_weights(looped, degree, self.degrees())
        return looped.scaled(weight=weight, row_scale=scale[: self.num_rows], col_scale=scale)


def _sampled_scale(looped: Adjacency) -> Tensor:
    """``D^-1/2 [M]`` where D counts the edges of the block and one loop per node."""
    degree = torch.ones(looped.num_cols, device=looped.device)
    if looped.weight is None:
        degree[: looped.num_rows] = looped.degrees().to(torch.float32)
    else:
        degree[: looped.num_rows] = row_sums(looped.weight.to(torch.float32), looped.indptr)
    scale = degree.rsqrt()
    return torch.where(torch.isinf(scale), torch.zeros_like(scale), scale)


def _estimate_weights(looped: Adjacency, degree: Tensor, picked: Tensor) -> Tensor:
    """Weights ``[P + D]``: sampled edges times full degree over picked, loops as they are."""
    rows = looped.rows().long()
    ratio = (degree.to(torch.float32) / picked.clamp(min=1))[rows]
    ratio = torch.where(rows == looped.indices, torch.ones_like(ratio), ratio)
    return ratio if looped.weight is None else ratio * looped.weight
