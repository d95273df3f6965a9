"""RGCNConv (Schlichtkrull et al., 2018)."""

from __future__ import annotations

import torch
from torch import Tensor

from weft import ops
from weft.core.errors import SpecError
from weft.nn.checks import check_count
from weft.nn.conv import Conv, relation_of_edges, without_weights
from weft.nn.epilogue import Ending
from weft.nn.features import Features, as_dense, own_rows, transform, transform_own
from weft.nn.initial import ZEROS, glorot
from weft.ops import Adjacency
from weft.ops.csr.relation_slots import RelationSlots, chunk_matmul, relation_slots


class RGCNConv(Conv):
    """``y_i = W_s x_i + sum over r of mean(x_j for j -> i of relation r) W_r + b``.

    - plain: a matrix per relation, ``weight [R, in, out]``;
    - ``bases=B``: ``W_r = sum over b of coefficients[r, b] weight[b]``, with ``weight [B, in, out]`` and
      ``coefficients [R, B]``;
    - ``blocks=B``: ``W_r`` is block-diagonal, ``weight [R, B, in / B, out / B]``.

    A relation without edges into a node adds nothing there; edge weights are ignored. Shapes: ``x [N, in_features]``,
    ``W_s`` (weight_self) ``[out, in]``, ``b [out]``, ``y [N, out_features]``.
    """

    def __init__(
        self,
        in_features: int,
        out_features: int,
        num_relations: int,
        bases: int | None = None,
        blocks: int | None = None,
        bias: bool = True,
        residual: bool = False,
    ) -> None:
        super().__init__(in_features, out_features)
        self.num_relations = check_count("num_relations", num_relations)
        check_decomposition(bases, blocks)
        self.bases, self.blocks = bases, blocks
        shape = (num_relations if bases is None else bases, in_features, out_features)
        if blocks is not None:
            if in_features % blocks or out_features % blocks:
                raise SpecError(
                    f"RGCNConv: blocks={blocks} must divide in_features={in_features} and out_features={out_features}"
                )
            shape = (num_relations, blocks, in_features // blocks, out_features // blocks)
        self.declare("weight", shape, glorot(*shape[-2:]))
        mixing = (num_relations, bases or 1)
        self.declare("coefficients", mixing, None if bases is None else glorot(*mixing))
        self.declare("weight_self", (out_features, in_features), glorot(in_features, out_features))
        self.declare_ends(ZEROS if bias else None, residual)

    def propagate(self, x: Features, adj: Adjacency, first: Tensor | None, ending: Ending) -> Tensor:
        """Means per (relation, node), their products with the relations' matrices, and the sums per node."""
        if adj.relation is not None and adj.num_relations != self.num_relations:
            raise SpecError(
                f"RGCNConv: the graph has {adj.num_relations} relations, the layer was built for {self.num_relations}"
            )
        if first is None and not isinstance(x, Tensor) and self.bases is not None:
            # The same sum with the bases applied first: sparse features never become dense, whatever their width.
            # ``sum over b of A_b (X V_b)``, where an edge of relation r weighs ``coefficients[r, b]`` divided by the
            # number of such edges into its node.
            rows = transform(x, self.weight.movedim(-1, -2).flatten(0, 1)).unflatten(-1, (self.bases, -1))
            relations = adj.derived("relation of edges", lambda: relation_of_edges(adj))
            weight = ops.spmm(relations, self.coefficients).movedim(-1, -2)
            neighbours = ops.spmm(without_weights(adj), rows.movedim(-2, -3), weight=weight).sum(-3)
            return ending.apply(neighbours, transform_own(x, self.weight_self, adj))
        means = self.aggregate(as_dense(x), adj) if first is None else first
        slots = relation_slots(adj)
        neighbours = ops.spmm(slots.collect, self._products(means, slots))
        if not isinstance(x, Tensor):
            return ending.apply(neighbours, transform_own(x, self.weight_self, adj))
        return ending.linear(own_rows(x, adj), self.weight_self, neighbours)

    def aggregate(self, x: Tensor, adj: Adjacency) -> Tensor:
        """Means of ``x`` over the neighbours of every (relation, node), ``[S, in_features]``; zeros between them."""
        return ops.spmm(relation_slots(adj).means.mean(), x)

    def _products(self, means: Tensor, slots: RelationSlots) -> Tensor:
        """``means [S, in]`` times the matrix of each row's relation, ``[S, out]``."""
        chunks, parts = slots.matrices.num_rows, self.blocks or 1
        flat = self.weight.flatten(1)  # the matrix of every relation [R, in * out], or its blocks
        flat = flat if self.coefficients is None else torch.matmul(self.coefficients, flat)
        part = (parts, self.in_features // parts, self.out_features // parts)
        matrices = ops.spmm(slots.matrices, flat).unflatten(-1, part)
        if parts == 1:
            return chunk_matmul(means, matrices.squeeze(-3))
        rows = means.unflatten(-2, (chunks, -1)).unflatten(-1, (parts, -1)).movedim(-2, -3)
        out = chunk_matmul(rows.flatten(-4, -2), matrices.flatten(-4, -3))
        return out.unflatten(-2, (chunks, parts, -1)).movedim(-3, -2).flatten(-2).flatten(-3, -2)

    def extra_repr(self) -> str:
        """The widths, the relations and their decomposition."""
        split = f", bases={self.bases}" if self.bases else f", blocks={self.blocks}" if self.blocks else ""
        return f"{super().extra_repr()}, num_relations={self.num_relations}{split}"


def check_decomposition(bases: int | None, blocks: int | None) -> None:
    """A :class:`SpecError` unless at most one of them is given, as a count."""
    for name, value in (("bases", bases), ("blocks", blocks)):
        if value is not None:
            check_count(name, value)
    if bases is not None and blocks is not None:
        raise SpecError(f"bases={bases} and blocks={blocks} are two ways to share weights; give one of them")
