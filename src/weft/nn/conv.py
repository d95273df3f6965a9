"""Base classes of graph convolutions, and the forms of the adjacency that layers aggregate over."""

from __future__ import annotations

from dataclasses import replace

import torch
from torch import Tensor

from weft import ops
from weft.core.errors import InputError, SpecError
from weft.nn.checks import check_count
from weft.nn.epilogue import Dropout, Ending, Epilogue
from weft.nn.features import Features, check_features, transform_own
from weft.nn.initial import Initial, Parametrised, glorot
from weft.ops import Adjacency
from weft.ops.csr.adjacency import offset_dtype, supplied_by_adjacency


class Conv(Parametrised):
    """``y = epilogue(propagate(x, A) + R x, b)``; R x only with ``residual=True``; ``y = ... + b`` plainly.

    Shapes: ``x [N, in_features]``, ``R [out_features, in_features]``, ``b`` and the result's rows
    ``[out_features]``. ``R`` is learned in every layer, as in PyG's attention layers.

    A subclass declares its weights and writes :meth:`propagate`; one whose aggregation of the input is the
    same in every step also writes :meth:`aggregate`.
    """

    def __init__(self, in_features: int, out_features: int) -> None:
        super().__init__()
        self.in_features = check_count("in_features", in_features)
        self.out_features = check_count("out_features", out_features)

    def declare_ends(self, bias: Initial | None, residual: bool) -> None:
        """Register the residual's weight and the bias, after a subclass's own weights."""
        shape = (self.out_features, self.in_features)
        self.declare("weight_residual", shape, glorot(*shape) if residual else None)
        self.declare("bias", (self.out_features,), bias)

    def forward(
        self, x: Features, adj: Adjacency, *, first: Tensor | None = None, epilogue: Epilogue | None = None
    ) -> Tensor:
        """``x [N, in_features]`` over the plain adjacency to ``[N, out_features]``.

        ``first`` is :meth:`aggregate` of the same ``x`` and ``adj``, if it was computed before.
        ``epilogue`` takes the result and the bias, so that norm, activation and dropout need no extra pass.
        """
        check_features(type(self).__name__, x, self.in_features)
        residual = None if self.weight_residual is None else transform_own(x, self.weight_residual, adj)
        return self.propagate(x, adj, first, Ending(self.bias, epilogue, residual))

    def propagate(self, x: Features, adj: Adjacency, first: Tensor | None, ending: Ending) -> Tensor:
        """The convolution, finished by ``ending``, ``[N, out_features]``."""
        raise NotImplementedError

    def aggregate(self, x: Tensor, adj: Adjacency) -> Tensor | None:
        """This layer's aggregation of a constant dense ``x``, or None if it depends on weights."""
        return None

    def extra_repr(self) -> str:
        """The widths."""
        return f"{self.in_features}, {self.out_features}"


def aggregates_first(in_features: int, out_features: int, constant_input: bool) -> bool:
    """Whether ``(A X) W`` costs less than ``A (X W)``: they are equal, and the narrower side is cheaper.

    Equal widths aggregate first, since the epilogue can be fused into a product. If the input needs no
    gradient, ``(A X) W`` has no backward aggregation, so its side counts as half as wide.
    """
    return in_features <= (2 * out_features if constant_input else out_features)


class AttentionConv(Conv):
    """A convolution with several heads. ``out_features`` is the width of the result in either case:

    ``concat=True`` puts the heads side by side, each ``out_features / heads`` wide; ``concat=False`` averages
    heads that are ``out_features`` wide each. Shapes: H heads, D features of a head.
    """

    def __init__(
        self, in_features: int, out_features: int, heads: int, concat: bool, slope: float, dropout: float
    ) -> None:
        super().__init__(in_features, out_features)
        self.heads, self.concat, self.slope = check_count("heads", heads), concat, float(slope)
        if concat and out_features % heads:
            raise SpecError(
                f"{type(self).__name__}: out_features={out_features} must be a multiple of heads={heads}, "
                "since the heads stand side by side"
            )
        self.head_features = out_features // heads if concat else out_features
        self.dropout = Dropout(dropout)

    def split(self, x: Tensor) -> Tensor:
        """``[..., N, H D]`` to ``[..., N, H, D]``."""
        return x.unflatten(-1, (self.heads, self.head_features))

    def finish(self, x: Tensor, ending: Ending) -> Tensor:
        """``[..., N, H, D]`` to ``[..., N, out_features]``: join the heads, then apply ``ending``."""
        if self.concat or self.heads == 1:
            return ending.apply(x.flatten(-2), parts=self.heads if self.concat else 1)
        if ending.epilogue is not None:
            return ending.apply(ops.mean_heads(x))
        return replace(ending, bias=None).apply(ops.mean_heads(x, ending.bias))

    def extra_repr(self) -> str:
        """The widths and the heads."""
        return f"{super().extra_repr()}, heads={self.heads}, concat={self.concat}"


def without_weights(adj: Adjacency) -> Adjacency:
    """The structure without edge weights: SAGE, GIN and the attention layers ignore them."""
    return adj if adj.weight is None else adj.derived("without_weights", adj.scaled)


def with_identity(adj: Adjacency) -> Adjacency:
    """``A + I`` without weights: every row gains one entry, also a row that has a self loop already."""
    with_identity_of = getattr(adj, "with_identity", None)  # without a search for its loops
    if with_identity_of is not None:
        return with_identity_of()
    return adj.derived("plus identity", lambda: plus_identity(without_weights(adj)))


@supplied_by_adjacency
def plus_identity(adj: Adjacency) -> Adjacency:
    """``A + I`` of an adjacency without weights."""
    rows, cols = adj.rows(), adj.indices
    if not bool((rows == cols).any()):
        return adj.with_self_loops()  # the same matrix, shared with the layers that add self loops
    ids = torch.arange(adj.num_rows + 1, dtype=cols.dtype, device=adj.device)
    rows, cols = torch.cat([rows, ids[:-1]]), torch.cat([cols, ids[:-1]])
    order = torch.sort(rows.long() * adj.num_cols + cols).indices
    indptr = (adj.indptr.long() + ids).to(offset_dtype(cols.numel()))
    more = Adjacency(indptr, cols[order], adj.num_cols, symmetric=adj.symmetric)
    more.nodes = adj.nodes
    return more


@supplied_by_adjacency
def relation_of_edges(adj: Adjacency) -> Adjacency:
    """``[E x R]``: one entry per edge, at its relation: 1 divided by the edges of that relation into its node."""
    if adj.relation is None:
        raise InputError("this layer needs the relation of every edge; give the graph relation=, one number per edge")
    key = adj.relation.long() * adj.num_rows + adj.rows()
    ordered, order = torch.sort(key)
    low, high = (torch.searchsorted(ordered, ordered, right=side) for side in (False, True))
    scale = torch.empty(key.numel(), device=adj.device).index_copy_(0, order, (high - low).float().reciprocal())
    each = torch.arange(key.numel() + 1, device=adj.device).to(offset_dtype(key.numel()))
    return Adjacency(each, adj.relation, adj.num_relations, row_scale=scale)
