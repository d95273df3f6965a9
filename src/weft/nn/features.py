"""The inputs of a first layer: dense features, sparse ones, or sparse ones after dropout.

Shapes: N nodes, F features, O outputs, Z stored values.
"""

from __future__ import annotations

from dataclasses import dataclass

import torch
from torch import Tensor

from weft import ops
from weft.core.errors import InputError
from weft.graph.data.sparse_features import SparseFeatures
from weft.ops import Adjacency


@dataclass(frozen=True)
class DroppedFeatures:
    """Sparse features with other values ``[Z]`` at the same places."""

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
    place = matrix.rows().long() * matrix.num_cols + matrix.indices.long()
    zeros = x.values.new_zeros(matrix.num_rows * matrix.num_cols)
    return zeros.index_add(0, place, x.values).unflatten(0, x.shape)


def check_features(layer: str, x: Features, in_features: int) -> None:
    """An :class:`InputError` unless ``x`` has the width that the layer was built for."""
    if not isinstance(x, Features):
        raise InputError(f"{layer}: x is {type(x).__name__}; expected a tensor [N, F] or sparse features")
    if x.shape[-1] != in_features:
        raise InputError(f"{layer}: x has {x.shape[-1]} features, the layer was built for in_features={in_features}")
