"""FeatureRows: read rows of features as a training treats them, without treating all of them at once.

Shapes: N nodes, F features, M ids, Z stored values.
"""

from __future__ import annotations

import torch
from torch import Tensor

from weft.flow.features.feature_store import FeatureStore
from weft.graph.data.sparse_features import SparseFeatures
from weft.ops.csr.adjacency import Adjacency, offset_dtype
from weft.runtime.batches.source import Features
from weft.runtime.step.inputs import cast_features, row_normalised


class FeatureRows:
    """Rows of ``x [N, F]`` on ``device``, divided by their sums if ``norm="row"``, dense, in ``dtype``."""

    def __init__(self, x: Features, norm: str | None, dtype: torch.dtype, device: torch.device) -> None:
        self._x, self._norm, self._dtype, self._device = x, norm, dtype, device
        self._store = FeatureStore(x, device) if isinstance(x, Tensor) else None

    def read(self, ids: Tensor) -> Tensor:
        """The rows ``[M, F]`` of ``ids [M]``."""
        rows = self._raw(ids)
        rows = cast_features(row_normalised(rows) if self._norm == "row" else rows, self._dtype)
        return (rows if isinstance(rows, Tensor) else rows.to_dense()).to(self._device)

    def _raw(self, ids: Tensor) -> Features:
        return sparse_rows(self._x, ids) if self._store is None else self._store.read(ids)


def sparse_rows(x: SparseFeatures, ids: Tensor) -> SparseFeatures:
    """The rows ``ids [M]`` of ``x [N, F]``, each as it is stored."""
    matrix = x.matrix
    ids = ids.to(matrix.device).long()
    begin, count = matrix.indptr[ids].long(), (matrix.indptr[ids + 1] - matrix.indptr[ids]).long()
    ends = count.cumsum(0)
    indptr = torch.cat([ends.new_zeros(1), ends])
    places = torch.arange(int(ends[-1]) if ids.numel() else 0, device=matrix.device)
    places += torch.repeat_interleave(begin - indptr[:-1], count)
    picked = matrix.indices[places], x.values[places]
    return SparseFeatures(
        Adjacency(indptr.to(offset_dtype(places.numel())), picked[0], matrix.num_cols, weight=picked[1])
    )
