"""mean_heads: the mean of a layer's heads and its bias, in one pass.

    out[n, :] = 1 / H * sum over h of x[n, h, :] + bias

Backward, all heads of a row get the same gradient: one row seen H times, which the attention's backward reads once.

Shapes: T tasks, N rows, H heads, D features of a head.
"""

from __future__ import annotations

from torch import Tensor

from weft.core.errors import InputError
from weft.ops.dense.bias_act_dropout import column_sum
from weft.ops.launch.backend import accumulate_dtype, batch_tasks, by_device, custom_op
from weft.ops.launch.triton_lang import flatten_tasks, per_task_stride, tl, triton, triton_acc

BLOCK = 1024


def mean_heads_torch(x: Tensor, bias: Tensor | None) -> Tensor:
    """Reference."""
    acc = accumulate_dtype(x.dtype)
    out = x.sum(-2, dtype=acc) * (1.0 / x.shape[-2])
    if bias is not None:
        out = out + bias.to(acc).unsqueeze(-2)
    return out.to(x.dtype)


@triton.jit
def _mean_heads_kernel(
    x, bias, out, count, N, stride_bias,
    H: tl.constexpr, D: tl.constexpr, HAS_BIAS: tl.constexpr, ACC: tl.constexpr, BLOCK: tl.constexpr,
):  # fmt: skip
    task = tl.program_id(1).to(tl.int64)
    element = tl.program_id(0).to(tl.int64) * BLOCK + tl.arange(0, BLOCK)
    inside = element < count
    d = element % D
    first = x + task * N * (H * D) + (element // D) * (H * D) + d
    total = tl.zeros([BLOCK], ACC)
    for head in tl.static_range(H):
        total += tl.load(first + head * D, mask=inside, other=0.0).to(ACC)
    total *= 1.0 / H
    if HAS_BIAS:
        total += tl.load(bias + task * stride_bias + d, mask=inside, other=0.0).to(ACC)
    tl.store(out + task * N * D + element, total.to(out.dtype.element_ty), mask=inside)


def mean_heads_triton(x: Tensor, bias: Tensor | None) -> Tensor:
    """Launch over ``x [..., N, H, D]``."""
    N, H, D = x.shape[-3:]
    out = x.new_empty(*x.shape[:-3], N, D)
    if out.numel():
        x_TNHD = flatten_tasks(x, 3)
        tasks = x_TNHD.shape[0]
        _mean_heads_kernel[(-(-N * D // BLOCK), tasks)](
            x_TNHD, x_TNHD if bias is None else bias.contiguous(), out, N * D, N, per_task_stride(bias, tasks, D),
            H=H, D=D, HAS_BIAS=bias is not None, ACC=triton_acc(x.dtype), BLOCK=BLOCK, num_warps=4,
        )  # fmt: skip
    return out


_serve = by_device(mean_heads_triton, mean_heads_torch)
_op = custom_op("weft::mean_heads", "(Tensor x, Tensor? bias) -> Tensor")(_serve)


def _setup(ctx, inputs, output):
    x, bias = inputs
    ctx.heads, ctx.bias_dims = x.shape[-2], 0 if bias is None else bias.dim()


def _backward(ctx, grad):
    grad_x = grad_bias = None
    if ctx.needs_input_grad[0]:
        rows = (grad * (1.0 / ctx.heads)).unsqueeze(-2)
        grad_x = rows.expand(*rows.shape[:-2], ctx.heads, rows.shape[-1])
    if ctx.bias_dims and ctx.needs_input_grad[1]:
        grad_bias = column_sum(grad.flatten(ctx.bias_dims - 1, -2))
    return grad_x, grad_bias


_op.register_autograd(_backward, setup_context=_setup)
_op.register_fake(lambda x, bias: x.new_empty(*x.shape[:-2], x.shape[-1]))
batch_tasks(_op)


def mean_heads(x: Tensor, bias: Tensor | None = None) -> Tensor:
    """The mean of ``x [..., N, H, D]`` over its heads plus ``bias``, ``[D]`` or one per task, to ``[..., N, D]``."""
    if bias is not None and tuple(bias.shape) not in ((x.shape[-1],), (*x.shape[:-3], x.shape[-1])):
        takes = f"x {list(x.shape)} takes [{x.shape[-1]}], or one for each task"
        raise InputError(f"mean_heads: bias has shape {list(bias.shape)}; {takes}")
    return _op(x, bias)
