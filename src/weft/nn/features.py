"""The inputs of a first layer: dense features, sparse ones, or sparse ones after dropout.

Shapes: N nodes, F features, O outputs, Z stored values.
"""

from __future__ import annotations

from dataclasses import dataclass

import torch
from torch import Tensor

from weft import ops
from weft.core.errors import InputError
from weft.graph.sparse_features import SparseFeatures
from weft.ops import Adjacency
from weft.ops.dense.linear import needs_gradient


@dataclass(frozen=True)
class DroppedFeatures:
    """Sparse features with other values ``[Z]`` for the same entries."""

    matrix: Adjacency
    values: Tensor

    @property
    def shape(self) -> tuple[int, int]:
        """``(N, F)``."""
        return self.matrix.num_rows, self.matrix.num_cols

    @property
    def device(self) -> torch.device:
        """Where the values live."""
        return self.values.device


Features = Tensor | SparseFeatures | DroppedFeatures


def transform(x: Features, weight: Tensor, bias: Tensor | None = None) -> Tensor:
    """``x W^T + b``: ``x [..., N, F]`` dense or sparse, ``weight [O, F]``, to ``[..., N, O]``."""
    if isinstance(x, Tensor):
        return ops.linear(x, weight, bias)
    values = x.values if isinstance(x, DroppedFeatures) else None
    return ops.bias_act_dropout(ops.spmm(x.matrix, weight.transpose(-2, -1), weight=values), bias)


def own_rows(x: Tensor, adj: Adjacency) -> Tensor:
    """The rows of ``x [..., M, F]`` that are destinations too: all of them, or the first N of a block."""
    return x if adj.num_rows == adj.num_cols else x.narrow(-2, 0, adj.num_rows)


class _OwnRows(torch.autograd.Function):
    """``(x[:rows], x)``: the gradient of the own rows is added to theirs in that of all rows, and to nothing else."""

    generate_vmap_rule = True

    @staticmethod
    def forward(x: Tensor, rows: int) -> tuple[Tensor, Tensor]:
        return x.narrow(-2, 0, rows).clone(), x.view_as(x)

    @staticmethod
    def setup_context(ctx, inputs, output) -> None:
        ctx.rows = inputs[1]

    @staticmethod
    def backward(ctx, grad_own: Tensor, grad: Tensor) -> tuple[Tensor, None]:
        grad = grad.clone() if torch.is_grad_enabled() else grad  # for a second derivative
        grad.narrow(-2, 0, ctx.rows).add_(grad_own)
        return grad, None


def keep_own_rows(x: Tensor, rows: int) -> tuple[Tensor, Tensor]:
    """``(x[..., :rows, :], x)`` for two uses; the gradient of the second must not share memory, as that of a product.

    With a slice alone, the backward pass would fill a second gradient of the size of ``x`` with zeros and add it.
    """
    if not needs_gradient(x):
        return x.narrow(-2, 0, rows), x
    return _OwnRows.apply(x, rows)


def transform_own(x: Features, weight: Tensor, adj: Adjacency, bias: Tensor | None = None) -> Tensor:
    """``x W^T + b`` of the destinations alone, ``[..., N, O]``."""
    if isinstance(x, Tensor):
        return transform(own_rows(x, adj), weight, bias)
    return own_rows(transform(x, weight, bias), adj)


def as_dense(x: Features) -> Tensor:
    """``x`` with its zeros, for aggregators that do not commute with a linear map."""
    if isinstance(x, Tensor):
        return x
    matrix = x.matrix
    position = matrix.rows().long() * matrix.num_cols + matrix.indices.long()
    zeros = x.values.new_zeros(matrix.num_rows * matrix.num_cols)
    return zeros.index_add(0, position, x.values).unflatten(0, x.shape)


def check_features(layer: str, x: Features, in_features: int) -> None:
    """An :class:`InputError` unless ``x`` has the width that the layer was built for."""
    if not isinstance(x, Features):
        raise InputError(f"{layer}: x is {type(x).__name__}; expected a tensor [N, F] or sparse features")
    if x.shape[-1] != in_features:
        raise InputError(f"{layer}: x has {x.shape[-1]} features, the layer was built for in_features={in_features}")
