"""Sums of the values of a CSR's edges row by row, in an order that a device keeps: the same bits every time.

``index_add_`` on a GPU adds in the order in which threads arrive.
"""

from __future__ import annotations

import torch
from torch import Tensor


def row_sums(values: Tensor, indptr: Tensor) -> Tensor:
    """The sums ``[N]`` of ``values [E]``, of which ``indptr [N+1]`` says where rows begin; 0 for a row without."""
    if values.is_meta:
        return values.new_empty(indptr.numel() - 1)
    return torch.segment_reduce(values, "sum", offsets=indptr.long(), axis=0, initial=0)
