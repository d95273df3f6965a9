"""Packed CSRs with work lists whose thresholds are so small that a tiny graph has light rows, heavy rows and hubs."""

from __future__ import annotations

from dataclasses import replace

import torch
from torch import Tensor

from tests.graphs_for_tests import from_pairs
from weft.ops import Adjacency
from weft.ops.csr.packed import PackedCSR, pack_csr, unpack_csr
from weft.ops.csr.worklist import build_worklist

LIGHT, CHUNK = 2, 4
MARGIN = 4096  # numbers of NaN on either side of an input
SIZES = {torch.float32: 1e-5, torch.float64: 1e-10, torch.bfloat16: 4e-2, torch.float16: 5e-3}


def small(num_rows: int = 11, num_cols: int = 9) -> Adjacency:
    """Row 2 is joined to every column, column 5 to every row but the first, which has no edge at all."""
    random = torch.Generator().manual_seed(1)
    there = torch.rand(num_rows, num_cols, generator=random) < 0.2
    there[2] = True
    there[:, 5] = True
    there[0] = False
    return from_pairs(*there.nonzero(as_tuple=True), num_rows, num_cols)


def both_csr(adj: Adjacency) -> tuple[PackedCSR, PackedCSR]:
    """``adj`` and its transpose, packed, each with its work list."""
    return _with_work(adj), _with_work(adj.transposed())


def _with_work(adj: Adjacency) -> PackedCSR:
    csr = unpack_csr(pack_csr(adj, rows=True, perm=True))
    return replace(csr, work=build_worklist(csr.indptr, LIGHT, CHUNK))


def numbers(*shape: int, dtype: torch.dtype = torch.float32, seed: int = 0) -> Tensor:
    """Random numbers with NaN in memory before and behind them: a kernel that reads out of bounds shows it."""
    return surrounded(torch.randn(*shape, generator=torch.Generator().manual_seed(seed), dtype=torch.float64).to(dtype))


def surrounded(values: Tensor) -> Tensor:
    """The same values inside of a larger buffer of NaN, at an aligned place."""
    whole = torch.full((values.numel() + 2 * MARGIN,), torch.nan, dtype=values.dtype)
    inside = whole[MARGIN : MARGIN + values.numel()].view(values.shape)
    return inside.copy_(values)


def assert_same(actual, expected, dtype: torch.dtype) -> None:
    """Equal shapes and types, values within the tolerance of the type."""
    actual, expected = ((value,) if isinstance(value, Tensor) else value for value in (actual, expected))
    for mine, theirs in zip(actual, expected, strict=True):
        assert mine.dtype == theirs.dtype
        torch.testing.assert_close(mine, theirs, rtol=SIZES[dtype], atol=SIZES[dtype], equal_nan=True)
