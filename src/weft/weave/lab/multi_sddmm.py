"""multi_sddmm: dot products along the edges of one graph for several sources at once, in one launch.

    out_s[t, e, h] = sum over d of a_s[t, i, h, d] * b_s[t, j, h, d]      for e = (j -> i)

Shapes: T tasks (any leading dimensions), N rows, M columns, E edges, H heads, D features of a head.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

from torch import Tensor

from weft.core.errors import InputError
from weft.ops.csr.adjacency import Adjacency
from weft.ops.csr.packed import PackedCSR, pack_csr, pack_csr_backward
from weft.ops.sparse.sddmm import sddmm_torch
from weft.weave.lab.autograd import differentiable
from weft.weave.together import OpCall


@dataclass(frozen=True)
class Ends:
    """What one source multiplies: ``a [..., N, heads*D]`` at destinations, ``b [..., M, heads*D]`` at sources."""

    a: Tensor
    b: Tensor
    heads: int = 1


def multi_sddmm_torch(csr: PackedCSR, sources: Sequence[Ends]) -> list[Tensor]:
    """Reference: one source after another."""
    return [sddmm_torch(source.a, source.b, source.heads, csr) for source in sources]


def multi_sddmm(adj: Adjacency, sources: Sequence[Ends]) -> list[Tensor]:
    """Dot products ``[..., E, heads_s]`` of every source, in CSR order; differentiable in both ends."""
    for source in sources:
        _check(adj, source)
    csr, back = pack_csr(adj, rows=True), pack_csr_backward(adj, rows=True)
    calls = [OpCall("sddmm", (source.a, source.b, source.heads, csr, back)) for source in sources]
    return [outputs[0] for outputs in differentiable(calls)]


def _check(adj: Adjacency, source: Ends) -> None:
    a, b, heads = source.a, source.b, source.heads
    if a.shape[-1] != b.shape[-1] or a.shape[-1] % heads:
        raise InputError(
            f"multi_sddmm: widths {a.shape[-1]} and {b.shape[-1]} must be equal and divisible by heads={heads}"
        )
    if a.shape[-2] != adj.num_rows or b.shape[-2] != adj.num_cols:
        raise InputError(
            f"multi_sddmm: a has {a.shape[-2]} rows and b {b.shape[-2]}; the adjacency is"
            f" {adj.num_rows} x {adj.num_cols}"
        )
