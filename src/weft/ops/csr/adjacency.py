"""Adjacency: the sparse matrix in CSR that every sparse operator takes.

Rows are destinations, columns are sources. As a matrix its entry for edge e = (j -> i) is
``row_scale[i] * weight[e] * col_scale[j]``, each factor 1 if it is None. Keeping the scales apart
from the edges makes GCN's normalisation cost 8 bytes per node instead of 4 bytes per edge: one structure serves all
normalisations, and a symmetric graph shares its arrays with its transpose.

Shapes: N rows, M columns, E edges.
"""

from __future__ import annotations

from collections.abc import Callable
from copy import copy
from functools import wraps
from typing import Any, TypeVar

import torch
from torch import Tensor

from weft.core.errors import InputError

CHUNK = 1 << 27  # edges per chunk, whose 8-byte positions are held at once


def loop_weights(rows: Tensor, weight: Tensor, num_rows: int) -> Tensor:
    """The weight of every row's loop ``[N]``: 1 if it has none, that of the last if it has several.

    ``rows`` and ``weight``: of the loops that there are, by row. Only one of them is written, since on a GPU writes to
    one element end in any order.
    """
    last = torch.ones_like(rows, dtype=torch.bool)
    last[:-1] = rows[1:] != rows[:-1]
    chosen = last.nonzero().squeeze(1)
    return weight.new_ones(num_rows).index_copy(0, rows[chosen].long(), weight[chosen])


def insert_loops(
    indptr: Tensor, rows: Tensor, cols: Tensor, weight: Tensor | None
) -> tuple[Tensor, Tensor, Tensor | None]:
    """``(indptr, indices, weight)`` of a loop-free CSR with a loop of weight 1 in every row.

    Nothing is sorted: an edge moves up by the loops of the rows before it, and by its own row's loop if that comes
    first. A graph of 1.6 billion edges needs little more than its result.
    """
    num_rows = indptr.numel() - 1
    wide = indptr.long() + torch.arange(num_rows + 1, device=indptr.device)
    ids = torch.arange(num_rows, dtype=cols.dtype, device=cols.device)
    # Every slot that no edge takes is its row's loop, and holds the row's own id already.
    indices = torch.repeat_interleave(ids, wide.diff(), output_size=cols.numel() + num_rows)
    weights = None if weight is None else weight.new_ones(indices.numel())
    for first in range(0, cols.numel(), CHUNK):
        part = slice(first, first + CHUNK)
        position = torch.arange(first, first + cols[part].numel(), device=cols.device)
        position += rows[part]
        position += cols[part] > rows[part]
        indices[position] = cols[part]
        if weights is not None:
            weights[position] = weight[part]
    return wide, indices, weights


def row_sums(values: Tensor, indptr: Tensor) -> Tensor:
    """The sums ``[N]`` of ``values [E]``, of which ``indptr [N+1]`` says where rows begin; 0 for a row without.

    In an order that a device keeps: ``index_add_`` on a GPU adds in the order in which threads arrive.
    """
    if values.is_meta:
        return values.new_empty(indptr.numel() - 1)
    return torch.segment_reduce(values, "sum", offsets=indptr.long(), axis=0, initial=0)


INT32_LIMIT = 2**31
SMALL = 1 << 18  # edges up to which forms for a GPU are derived on the host: it takes less than to load the kernels


def offset_dtype(num_edges: int) -> torch.dtype:
    """32-bit row offsets while they can hold every edge, 64-bit from 2^31 edges on."""
    return torch.int64 if num_edges >= INT32_LIMIT else torch.int32


class Adjacency:
    """A sparse matrix in CSR by destination, with a cache of derived matrices.

    ``indptr [N+1]``, ``indices [E]`` int32, ``weight [E]``, ``row_scale [N]``, ``col_scale [M]``.
    ``symmetric`` says that the *structure and the weights* equal their transpose.
    ``perm [E]`` is set on a transpose only: where each of its edges stands in the original order.

    A rectangular matrix is a block: its rows are the first N of its M columns (destinations come first among the
    sources). ``source_scale [M]`` is GCN's ``D^-1/2`` of every source there: a block does not know their degrees.
    ``first_edge``: where its edges begin among those of the matrix that it is some rows of.
    ``relation [E]`` int32 numbers the relation of every edge, below ``num_relations``; see :meth:`related`.
    ``edge_attr [E, ...]``: features of the edges, for modules that take them; see :meth:`attributed`.
    """

    first_edge = 0
    spans_ranks = False  # whether other ranks hold the rest of its rows
    relation: Tensor | None = None
    num_relations = 0
    edge_attr: Tensor | None = None
    on_host: Adjacency | None = None  # the same matrix, from which forms are derived in its place
    structure_on_host: Adjacency | None = None  # the same rows and columns, whatever the weights

    def __init__(
        self,
        indptr: Tensor,
        indices: Tensor,
        num_cols: int | None = None,
        *,
        weight: Tensor | None = None,
        row_scale: Tensor | None = None,
        col_scale: Tensor | None = None,
        symmetric: bool = False,
        perm: Tensor | Callable[[], Tensor] | None = None,
        source_scale: Tensor | None = None,
    ) -> None:
        self.source_scale = source_scale
        self.indptr = indptr
        self.indices = indices
        self.num_cols = indptr.numel() - 1 if num_cols is None else num_cols
        self.weight = weight
        self.row_scale = row_scale
        self.col_scale = col_scale
        self.symmetric = symmetric
        self._perm = perm
        self._structure: Adjacency | None = None
        self._derived: dict[Any, Any] = {}
        self.nodes: dict[str, Tensor] = {}  # facts about the nodes, one dictionary for all forms of a matrix

    @property
    def num_rows(self) -> int:
        """Number of destinations N."""
        return self.indptr.numel() - 1

    @property
    def num_edges(self) -> int:
        """Number of stored entries E."""
        return self.indices.numel()

    @property
    def device(self) -> torch.device:
        """Where the arrays live."""
        return self.indices.device

    @property
    def perm(self) -> Tensor | None:
        """On a transpose: where each edge stands in the original order ``[E]``; computed on first use."""
        if callable(self._perm) and not isinstance(self._perm, Tensor):
            self._perm = self._perm()
        return self._perm

    def __repr__(self) -> str:
        return f"Adjacency({self.num_rows} x {self.num_cols}, {self.num_edges} edges, {self.device})"

    def without_derived(self) -> Adjacency:
        """The same matrix, of which nothing has been derived yet."""
        other = copy(self)
        other._derived = {}
        if self._structure is not None:
            other._structure = self._structure.without_derived()
        return other

    def derived(self, key: Any, build: Callable[[], Any]) -> Any:
        """The result of ``build()``, built once and cached under ``key``."""
        if key not in self._derived:
            self._derived[key] = build()
        return self._derived[key]

    def own_worklist(self) -> Any:
        """The work list of a matrix that knows it without looking at its arrays; None: it is built from them."""
        return None

    def to(self, device: torch.device | str) -> Adjacency:
        """The same matrix on another device (derived matrices are rebuilt there on demand)."""
        if torch.device(device) == self.device:
            return self
        values = {name: getattr(self, name) for name in ("weight", "row_scale", "col_scale", "perm", "source_scale")}
        moved = {name: None if value is None else value.to(device) for name, value in values.items()}
        there = Adjacency(
            self.indptr.to(device), self.indices.to(device), self.num_cols, symmetric=self.symmetric, **moved
        )
        there = there if self.relation is None else there.related(self.relation.to(device), self.num_relations)
        return there if self.edge_attr is None else there.attributed(self.edge_attr.to(device))

    def moved(self, device: torch.device | str) -> Adjacency:
        """As :meth:`to`, for a matrix whose arrays never change; a small one stays on the host, to derive forms from.

        A process that uses some twenty operators of torch for the first time waits 0.2 s for a GPU to load them.
        """
        there = self.to(device)
        if there.device.type == "cuda" and self.device.type == "cpu" and self.num_edges <= SMALL:
            there.on_host = there.structure_on_host = self
        return there

    def scaled(
        self,
        *,
        weight: Tensor | None = None,
        row_scale: Tensor | None = None,
        col_scale: Tensor | None = None,
    ) -> Adjacency:
        """The same structure, sharing every structural array, with other factors."""
        other = Adjacency(
            self.indptr,
            self.indices,
            self.num_cols,
            weight=weight,
            row_scale=row_scale,
            col_scale=col_scale,
            symmetric=self.symmetric and weight is self.weight,
            perm=self.perm,
            source_scale=self.source_scale,
        )
        other._structure, other.nodes = self.structure, self.nodes
        return other

    def related(self, relation: Tensor, num_relations: int) -> Adjacency:
        """The same matrix whose edges have these relations ``[E]``; forms derived from it do not keep them."""
        other = copy(self)
        other._structure, other._derived = self.structure, {}
        other.relation, other.num_relations = relation, num_relations
        return other

    def attributed(self, edge_attr: Tensor) -> Adjacency:
        """The same matrix whose edges have these features ``[E, ...]``; forms derived from it do not keep them."""
        other = copy(self)
        other._structure, other._derived = self.structure, {}
        other.edge_attr = edge_attr
        return other

    @property
    def structure(self) -> Adjacency:
        """The adjacency that caches what depends on the structure alone (rows, degrees, work lists)."""
        return self._structure or self

    def degrees(self) -> Tensor:
        """In-degree of every row ``[N]`` int64."""
        return self.structure.derived("degrees", lambda: self.indptr.diff().long())

    def rows(self) -> Tensor:
        """Destination of every edge ``[E]`` int32."""

        def build() -> Tensor:
            if self.structure.structure_on_host is not None:
                return self.structure.structure_on_host.rows().to(self.device)
            ids = torch.arange(self.num_rows, dtype=torch.int32, device=self.device)
            return torch.repeat_interleave(ids, self.degrees(), output_size=self.num_edges)

        return self.structure.derived("rows", build)

    def inverse_degrees(self) -> Tensor:
        """``1 / max(degree, 1)`` ``[N]`` float32."""
        return self.structure.derived(
            "inverse_degrees", lambda: self.degrees().clamp(min=1).to(torch.float32).reciprocal()
        )

    def transposed(self) -> Adjacency:
        """The transpose, built once; it shares the index arrays when the structure is symmetric."""
        return self.derived("transposed", self._transpose)

    def _transpose(self) -> Adjacency:
        base = self.structure
        factors = {"row_scale": self.col_scale, "col_scale": self.row_scale}
        if self.symmetric:
            back = Adjacency(
                self.indptr, self.indices, weight=self.weight, symmetric=True, perm=base._sort_by_source, **factors
            )
            back._structure, back.nodes = base, self.nodes
            return back
        perm = base._sort_by_source()
        indptr, indices = base.derived("transposed arrays", base._transposed_arrays)
        weight = None if self.weight is None else self.weight[perm]
        back = Adjacency(indptr, indices, self.num_rows, weight=weight, perm=perm, **factors)
        back.nodes = self.nodes
        if base.structure_on_host is not None:
            back.structure_on_host = base.structure_on_host.transposed().structure
        back._structure = base.derived("transposed structure", lambda: back)
        return back

    def _sort_by_source(self) -> Tensor:
        """The edges in the order of the transpose ``[E]``."""

        def build() -> Tensor:
            if self.structure_on_host is not None:
                return self.structure_on_host._sort_by_source().to(self.device)
            # A stable sort keeps destinations ascending inside each row of the transpose.
            return torch.sort(self.indices, stable=True).indices.to(offset_dtype(self.num_edges))

        return self.derived("by source", build)

    def _transposed_arrays(self) -> tuple[Tensor, Tensor]:
        """``(indptr [M+1], indices [E])`` of the transpose."""
        if self.structure_on_host is not None:
            host = self.structure_on_host
            indptr, indices = host.derived("transposed arrays", host._transposed_arrays)
            return indptr.to(self.device), indices.to(self.device)
        counts = torch.bincount(self.indices, minlength=self.num_cols)
        indptr = torch.zeros(self.num_cols + 1, dtype=torch.int64, device=self.device)
        torch.cumsum(counts, 0, out=indptr[1:])
        indices = self.rows()[self._sort_by_source()]
        return indptr.to(offset_dtype(self.num_edges)), indices

    def with_self_loops(self) -> Adjacency:
        """Every node with exactly one self loop: an existing one keeps its weight, added ones weigh 1."""
        return self.derived("self loops", self._add_self_loops)

    def _add_self_loops(self) -> Adjacency:
        if self.on_host is not None:
            looped = self.on_host.with_self_loops().moved(self.device)
            looped.nodes = self.nodes
            return looped
        indptr, indices, weight = self._loop_arrays()
        looped = Adjacency(indptr, indices, self.num_cols, weight=weight, symmetric=self.symmetric)
        looped.nodes = self.nodes
        return looped

    def _loop_arrays(self) -> tuple[Tensor, Tensor, Tensor | None]:
        """``(indptr, indices, weight)`` of the CSR with one loop per row, its columns sorted."""
        rows, cols, weight = self.rows(), self.indices, self.weight
        if any(bool((r == c).any()) for r, c in zip(rows.split(CHUNK), cols.split(CHUNK), strict=True)):
            is_loop = rows == cols
            plain, looped = (~is_loop).nonzero().squeeze(1), is_loop.nonzero().squeeze(1)
            loops = torch.arange(self.num_rows, dtype=cols.dtype, device=cols.device)
            all_rows, all_cols = torch.cat([rows[plain], loops]), torch.cat([cols[plain], loops])
            order = torch.sort(all_rows.long() * self.num_cols + all_cols).indices
            indptr = torch.zeros(self.num_rows + 1, dtype=torch.int64, device=cols.device)
            torch.cumsum(torch.bincount(all_rows, minlength=self.num_rows), 0, out=indptr[1:])
            if weight is not None:
                loop_weight = loop_weights(rows[looped], weight[looped], self.num_rows)
                weight = torch.cat([weight[plain], loop_weight])[order]
            indices = all_cols[order]
        else:
            indptr, indices, weight = insert_loops(self.indptr, rows, cols, weight)
        return indptr.to(offset_dtype(indices.numel())), indices, weight

    def gcn(self) -> Adjacency:
        """GCN's ``D^-1/2 (A + I) D^-1/2``, D counting weighted in-edges as PyG does."""
        return self.derived("gcn", self._normalise_gcn)

    def _normalise_gcn(self) -> Adjacency:
        looped = self.with_self_loops()
        if self.num_rows != self.num_cols:
            if self.source_scale is None:
                raise InputError(
                    f"gcn: a block of {self.num_rows} rows and {self.num_cols} columns does not know the degrees of "
                    "its sources; give it source_scale [columns], D^-1/2 of each"
                )
            scale = self.source_scale
            return looped.scaled(weight=looped.weight, row_scale=scale[: self.num_rows], col_scale=scale)
        # Every row has a loop: without weights no degree is 0.
        scale = looped.degrees().to(torch.float32).rsqrt() if looped.weight is None else looped.inverse_root_degrees()
        return looped.scaled(weight=looped.weight, row_scale=scale, col_scale=scale)

    def summed_weights(self) -> Tensor:
        """The sum of the weights of every row ``[N]``."""
        assert self.weight is not None
        if self.on_host is not None:
            return self.on_host.summed_weights().to(self.device)
        return row_sums(self.weight, self.indptr)

    def inverse_root_degrees(self) -> Tensor:
        """``D^-1/2`` of the rows ``[N]``, by weight if edges have one; 0 for a row without."""
        degree = self.degrees().to(torch.float32) if self.weight is None else self.summed_weights()
        scale = degree.rsqrt()
        return torch.where(torch.isinf(scale), torch.zeros_like(scale), scale)

    def mean(self) -> Adjacency:
        """The mean over rows: the unweighted row sum divided by the degree."""
        return self.derived("mean", lambda: self.scaled(weight=self.weight, row_scale=self.inverse_degrees()))


Result = TypeVar("Result")


def supplied_by_adjacency(operator: Callable[..., Result]) -> Callable[..., Result]:
    """``operator(adj, ...)``, or the method of that name on the class of ``adj`` if it has one.

    A shard that reads remote rows, or a matrix with its own kernels, is such a class.
    """
    name = operator.__name__

    @wraps(operator)
    def call(adj: Adjacency, *args: Any, **options: Any) -> Result:
        return getattr(type(adj), name, operator)(adj, *args, **options)

    return call
