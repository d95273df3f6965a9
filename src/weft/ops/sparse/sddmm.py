"""sddmm: a dot product for every edge, of a row at its destination and a row at its source.

    out[t, e, h] = sum over d of a[t, i, h, d] * b[t, j, h, d]      for e = (j -> i)

Shapes: T tasks, N rows, M columns, E edges, H heads, D features of a head.
"""

from __future__ import annotations

import torch
from torch import Tensor

from weft.core.errors import InputError
from weft.ops import cpu
from weft.ops.csr.adjacency import Adjacency, supplied_by_adjacency
from weft.ops.csr.packed import PackedCSR, pack_csr, pack_csr_backward, unpack_csr
from weft.ops.launch.backend import accumulate_dtype, batch_tasks, custom_op, next_power_of_2, use_triton
from weft.ops.launch.triton_lang import tl, triton, triton_acc

# ---- Triton kernel


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


def sddmm_torch(a: Tensor, b: Tensor, heads: int, csr: PackedCSR) -> Tensor:
    """Reference: gather both ends of every edge, multiply, sum."""
    acc = accumulate_dtype(a.dtype)
    at_destination = a.index_select(-2, csr.rows()).to(acc)
    at_source = b.index_select(-2, csr.indices.long()).to(acc)
    return (at_destination * at_source).unflatten(-1, (heads, -1)).sum(-1).to(a.dtype)


@custom_op("weft::sddmm", "(Tensor a, Tensor b, int heads, Tensor[] csr, Tensor[] back) -> Tensor")
def edge_dot(a, b, heads, csr, back):
    """The operator under :func:`sddmm`, on packed CSRs."""
    serve = sddmm_triton if use_triton(a) else cpu.sddmm if cpu.serves(a, b) else sddmm_torch
    return serve(a, b, heads, unpack_csr(csr))


def _sddmm_setup(ctx, inputs, output):
    a, b, ctx.heads, ctx.csr, ctx.back = inputs
    ctx.save_for_backward(a, b)


def _sddmm_backward(ctx, grad):
    """d a = weighted spmm of b over the in-edges, d b = weighted spmm of a over the out-edges, head by head."""
    a, b = ctx.saved_tensors
    csr, back = ctx.csr, ctx.back
    grad_a = grad_b = None
    if ctx.needs_input_grad[0]:
        grad_a = _per_head_spmm(b, grad, ctx.heads, csr, back)
    if ctx.needs_input_grad[1]:
        grad_back = grad.index_select(-2, unpack_csr(back).perm)
        grad_b = _per_head_spmm(a, grad_back, ctx.heads, back, csr)
    return grad_a, grad_b, None, [None] * len(csr), [None] * len(back)


def _per_head_spmm(x: Tensor, weight: Tensor, heads: int, csr: list[Tensor], back: list[Tensor]) -> Tensor:
    """spmm of ``x [..., M, H*D]`` with one weight per head ``[..., E, H]``: heads become tasks."""
    x_heads = x.unflatten(-1, (heads, -1)).movedim(-2, 0)
    out = torch.ops.weft.spmm(x_heads, weight.movedim(-1, 0), None, None, csr, back, None)
    return out.movedim(0, -2).flatten(-2)


edge_dot.register_fake(lambda a, b, heads, csr, back: a.new_empty(*a.shape[:-2], csr[1].shape[0], heads))
edge_dot.register_autograd(_sddmm_backward, setup_context=_sddmm_setup)
batch_tasks(edge_dot)


@supplied_by_adjacency
def sddmm(adj: Adjacency, a: Tensor, b: Tensor, heads: int = 1) -> Tensor:
    """Dot products ``[..., E, heads]`` of ``a [..., N, heads*D]`` at each edge's destination and
    ``b [..., M, heads*D]`` at its source, in CSR order. Differentiable in both."""
    if a.shape[-1] != b.shape[-1] or a.shape[-1] % heads:
        raise InputError(f"sddmm: widths {a.shape[-1]} and {b.shape[-1]} must be equal and divisible by heads={heads}")
    if a.shape[-2] != adj.num_rows or b.shape[-2] != adj.num_cols:
        raise InputError(
            f"sddmm: a has {a.shape[-2]} rows and b {b.shape[-2]}; the adjacency is {adj.num_rows} x {adj.num_cols}"
        )
    return edge_dot(a, b, heads, pack_csr(adj, rows=True), pack_csr_backward(adj, rows=True))
