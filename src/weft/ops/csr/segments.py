"""Reductions of per-edge values over the in-edges of a row, in plain torch.

Shapes: E edges, N rows, H heads. Values are ``[..., E, H]``; results are ``[..., N, H]``.
"""

from __future__ import annotations

import torch
from torch import Tensor

from weft.ops.csr.packed import PackedCSR


def segment_sum(values: Tensor, csr: PackedCSR) -> Tensor:
    """Sum over the in-edges of every row; empty rows give 0."""
    out = values.new_zeros(*values.shape[:-2], csr.num_rows, values.shape[-1])
    return out.index_add(-2, csr.rows(), values)


def segment_max(values: Tensor, csr: PackedCSR) -> Tensor:
    """Maximum over the in-edges of every row; empty rows give -inf."""
    out = values.new_full((*values.shape[:-2], csr.num_rows, values.shape[-1]), -torch.inf)
    return scatter_extreme(out, csr.rows(), values, "amax")


def scatter_extreme(out: Tensor, rows: Tensor, values: Tensor, reduce: str) -> Tensor:
    """``out [..., N, H]`` joined with ``values [..., E, H]`` at their rows by ``"amax"`` or ``"amin"``."""
    return out.scatter_reduce(-2, rows[:, None].expand(values.shape), values, reduce)


def segment_softmax(scores: Tensor, csr: PackedCSR) -> Tensor:
    """Softmax over the in-edges of every row, ``[..., E, H]``."""
    rows = csr.rows()
    shifted = (scores - segment_max(scores, csr).index_select(-2, rows)).exp()
    return shifted / segment_sum(shifted, csr).index_select(-2, rows)


def segment_log_sum_exp(scores: Tensor, csr: PackedCSR) -> Tensor:
    """Log of the softmax's denominator for every row ``[..., N, H]``; -inf for empty rows."""
    top = segment_max(scores, csr)
    top = torch.where(torch.isinf(top), 0.0, top)
    return top + segment_sum((scores - top.index_select(-2, csr.rows())).exp(), csr).log()
