"""SparseFeatures: a node feature matrix that is mostly zeros, stored sparse.

Shapes: N nodes, F features, Z stored values.
"""

from __future__ import annotations

from typing import Any

import torch
from torch import Tensor

from weft.core.errors import GraphError
from weft.graph.build import edge_keys, row_offsets, sort_keys
from weft.graph.check import (
    MAX_NODES,
    as_floats,
    as_ids,
    as_tensor,
    as_vector,
    check_ascending,
    check_finite,
    check_offsets,
    check_range,
    first_where,
    not_finite,
)
from weft.ops import spmm
from weft.ops.csr.adjacency import Adjacency, offset_dtype


class SparseFeatures:
    """Features ``[N, F]`` as a rectangular :class:`Adjacency`: rows are nodes, columns features.

    ``matrix.weight [Z]`` holds the values. ``features @ W`` is a sparse matrix product.
    """

    def __init__(self, matrix: Adjacency) -> None:
        self.matrix = matrix
        self.shape, self.device = (matrix.num_rows, matrix.num_cols), matrix.device

    @classmethod
    def from_csr(cls, indptr: Any, indices: Any, values: Any, shape: tuple[int, int]) -> SparseFeatures:
        """From CSR arrays ``[N+1]``, ``[Z]``, ``[Z]``; columns must ascend strictly within a row."""
        rows, cols = int(shape[0]), int(shape[1])
        offsets, ids = as_ids(indptr, "x_indptr"), as_ids(indices, "x_indices")
        stored = as_floats(as_vector(values, "x_data"), "x_data")
        if offsets.numel() != rows + 1 or stored.numel() != ids.numel():
            raise GraphError(
                f"x of shape {[rows, cols]}: x_indptr, x_indices, x_data have {offsets.numel()}, "
                f"{ids.numel()}, {stored.numel()} entries; expected {rows + 1} offsets and a value per index"
            )
        if cols > MAX_NODES:
            raise GraphError(f"x has {cols} features; at most 2^31 - 1 can be kept")
        check_csr(offsets, ids, cols)
        return cls(Adjacency(offsets.to(offset_dtype(ids.numel())), ids.to(torch.int32), cols, weight=stored))

    @classmethod
    def from_coo(cls, rows: Tensor, cols: Tensor, values: Tensor, shape: tuple[int, int]) -> SparseFeatures:
        """From triplets ``[Z]`` in any order; values with equal row and column are added."""
        keys, order = sort_keys(edge_keys(cols, rows, shape[1]), need_order=True)
        values = as_floats(values if order is None else values[order], "x")
        fresh = torch.ones_like(keys, dtype=torch.bool)
        fresh[1:] = keys[1:] != keys[:-1]
        if not bool(fresh.all()):
            slot = fresh.cumsum(0).sub_(1)
            keys = keys[fresh]
            values = values.new_zeros(keys.numel()).index_add_(0, slot, values)
        indptr = row_offsets(keys, shape[0], shape[1])
        return cls(Adjacency(indptr, keys.remainder_(shape[1]).to(torch.int32), shape[1], weight=values))

    @classmethod
    def from_scipy(cls, matrix: Any) -> SparseFeatures:
        """From any scipy sparse matrix or array."""
        coo = matrix.tocoo()
        rows, cols = as_ids(coo.row, "x rows"), as_ids(coo.col, "x columns")
        return cls.from_coo(rows, cols, as_vector(coo.data, "x"), (int(coo.shape[0]), int(coo.shape[1])))

    @classmethod
    def from_torch(cls, tensor: Tensor) -> SparseFeatures:
        """From a torch sparse tensor (COO, CSR, CSC) or the non-zeros of a dense one."""
        if tensor.layout == torch.strided:
            rows, cols = tensor.nonzero(as_tuple=True)
            return cls.from_coo(rows, cols, tensor[rows, cols], tuple(tensor.shape))
        coo = tensor.detach().to_sparse_coo().coalesce()
        rows, cols = coo.indices()
        return cls.from_coo(rows, cols, coo.values(), tuple(coo.shape))

    @classmethod
    def identity(cls, num_nodes: int, device: torch.device | str = "cpu") -> SparseFeatures:
        """One feature per node, its own: a first layer's weights are then learned embeddings of the nodes."""
        ids = torch.arange(num_nodes + 1, dtype=torch.int32, device=device)
        return cls(Adjacency(ids, ids[:-1], num_nodes, weight=torch.ones(num_nodes, device=device)))

    @property
    def nnz(self) -> int:
        """Number of stored values Z."""
        return self.matrix.num_edges

    @property
    def values(self) -> Tensor:
        """The stored values ``[Z]``, row by row."""
        return self.matrix.weight

    @property
    def dtype(self) -> torch.dtype:
        """Type of the values."""
        return self.values.dtype

    def __repr__(self) -> str:
        return f"SparseFeatures({self.shape[0]} x {self.shape[1]}, {self.nnz} values, {self.device})"

    def __matmul__(self, weight: Tensor) -> Tensor:
        """``x @ W``: ``W [..., F, H]`` -> ``[..., N, H]``, differentiable in W."""
        return spmm(self.matrix, weight)

    def to(self, device: torch.device | str) -> SparseFeatures:
        """The same features on another device."""
        moved = self.matrix.moved(device)
        return self if moved is self.matrix else SparseFeatures(moved)

    def to_dense(self) -> Tensor:
        """The matrix ``[N, F]`` with its zeros."""
        dense = torch.zeros(self.shape, dtype=self.dtype, device=self.device)
        dense[self.matrix.rows().long(), self.matrix.indices.long()] = self.values
        return dense


def check_csr(indptr: Tensor, indices: Tensor, cols: int) -> None:
    """Offsets that fit, feature ids in range and ascending within a row."""
    check_offsets(indptr, indices.numel(), "x_indptr")
    check_range(indices, cols, "x_indices", "feature ids")
    check_ascending(indptr, indices, "x_indices", strictly=True)


def as_features(x: Any) -> Tensor | SparseFeatures | None:
    """Dense ``[N, F]`` stays dense, sparse (scipy, torch) stays sparse; every value is finite."""
    if x is None:
        return None
    if isinstance(x, SparseFeatures):
        features: Tensor | SparseFeatures = x
    elif isinstance(x, Tensor) and x.layout != torch.strided:
        features = SparseFeatures.from_torch(x)
    elif hasattr(x, "tocoo"):
        features = SparseFeatures.from_scipy(x)
    else:
        features = as_floats(as_tensor(x, "x"), "x")
        if features.dim() != 2:
            raise GraphError(
                f"x has shape {list(features.shape)}; features are [nodes, features]; for a single feature give "
                "x[:, None]"
            )
        features = features.contiguous()
    if isinstance(features, Tensor):
        check_finite(features, "x")
        return features
    bad = first_where(features.values, lambda part: ~torch.isfinite(part))
    if bad is not None:
        row, col = int(features.matrix.rows()[bad]), int(features.matrix.indices[bad])
        raise not_finite(f"x[{row}, {col}]", features.values[bad])
    return features
