"""Triton kernel of ``sddmm.py``."""

from __future__ import annotations

from torch import Tensor

from weft.ops.csr.packed import PackedCSR
from weft.ops.launch.backend import next_power_of_2
from weft.ops.launch.triton_lang import tl, triton, triton_acc


@triton.jit
def _sddmm_kernel(
    a, b, rows, indices, out, num_edges, N, M, heads: tl.constexpr, D: tl.constexpr,
    ACC: tl.constexpr, BE: tl.constexpr, BD: tl.constexpr,
):  # fmt: skip
    """One tile of edges and one head: edges of a row stand together, so ``a`` comes from the L1."""
    head = tl.program_id(1)
    task = tl.program_id(2).to(tl.int64)
    edge = tl.program_id(0).to(tl.int64) * BE + tl.arange(0, BE)
    inside = edge < num_edges
    row = tl.load(rows + edge, mask=inside, other=0).to(tl.int64)
    col = tl.load(indices + edge, mask=inside, other=0).to(tl.int64)
    a += task * N * (heads * D) + head * D
    b += task * M * (heads * D) + head * D
    total = tl.zeros([BE, BD], ACC)
    for first in range(0, D, BD):
        d = first + tl.arange(0, BD)
        mask = inside[:, None] & (d < D)[None, :]
        left = tl.load(a + row[:, None] * (heads * D) + d[None, :], mask=mask, other=0.0).to(ACC)
        right = tl.load(b + col[:, None] * (heads * D) + d[None, :], mask=mask, other=0.0).to(ACC)
        total += left * right
    dots = tl.sum(total, 1)
    tl.store(out + (task * num_edges + edge) * heads + head, dots.to(out.dtype.element_ty), mask=inside)


def sddmm_triton(a: Tensor, b: Tensor, heads: int, csr: PackedCSR) -> Tensor:
    """Launch over ``a [..., N, H*D]`` and ``b [..., M, H*D]``."""
    lead, width = a.shape[:-2], a.shape[-1]
    a_TNF = a.reshape(lead.numel(), *a.shape[-2:]).contiguous()
    b_TMF = b.reshape(lead.numel(), *b.shape[-2:]).contiguous()
    tasks = a_TNF.shape[0]
    out = a.new_empty(tasks, csr.num_edges, heads)
    if out.numel():
        D = width // heads
        block_d = min(next_power_of_2(D), 128)
        block_e = max(16, 2048 // block_d)
        rows = csr.row_of_edge if csr.row_of_edge.numel() else csr.rows()
        _sddmm_kernel[(-(-csr.num_edges // block_e), heads, tasks)](
            a_TNF, b_TMF, rows, csr.indices, out, csr.num_edges, a_TNF.shape[1], b_TMF.shape[1],
            heads=heads, D=D, ACC=triton_acc(a.dtype), BE=block_e, BD=block_d, num_warps=4,
        )  # fmt: skip
    return out.reshape(*lead, csr.num_edges, heads)
