"""linear: a dense layer over many rows, with a weight gradient that fills the GPU.

    out[t, n, o] = sum over i of x[t, n, i] * weight[t, o, i] + bias[t, o]

The weight gradient ``grad^T x`` is a product with a huge inner dimension (N rows) and a tiny result. Batched
GEMM libraries give it one tile per task (measured 2.2 of 3.5 ms per task on an H200, arxiv shape); here it is a
split-K product: rows are split over the whole device and the partial results added in a fixed order.

Shapes: T tasks, N rows, I inputs, O outputs.
"""

from __future__ import annotations

from collections.abc import Sequence

import torch
from torch import Tensor

from weft.core.errors import InputError
from weft.ops.dense.bias_act_dropout import (
    bias_act_dropout,
    bias_act_dropout_backward_torch,
    bias_act_dropout_torch,
    bias_act_dropout_triton,
    epilogue_gradients,
)
from weft.ops.dense.linear_triton import (
    choose_backward_launch,
    linear_backward_triton,
    linear_triton,
    term_bytes,
    weight_grad_triton,
)
from weft.ops.launch.backend import (
    batch_tasks,
    custom_op,
    lead_task,
    limits_of,
    on_gpu,
    rate_and_clock,
    task_rows,
    use_triton,
)
from weft.ops.launch.triton_lang import common_lead


def weight_grad_torch(grad: Tensor, x: Tensor) -> Tensor:
    """Reference: ``grad^T x``, ``[..., O, I]``."""
    return grad.transpose(-2, -1) @ x


@custom_op("weft::weight_grad", "(Tensor grad, Tensor x) -> Tensor")
def weight_grad(grad, x):
    """``grad [..., N, O]`` and ``x [..., N, I]`` (or ``[N, I]`` for all tasks) to ``[..., O, I]``."""
    if use_triton(x):
        return weight_grad_triton(grad, x)
    return weight_grad_torch(grad, x).contiguous()


weight_grad.register_fake(lambda grad, x: x.new_empty(*grad.shape[:-2], grad.shape[-1], x.shape[-1]))
batch_tasks(weight_grad, rows=(1, 0))


def linear_torch(x, weight, bias, add, act, rate, clock, site) -> Tensor:
    """Reference: ``dropout(act(x W^T + bias + add))``."""
    out = x @ weight.transpose(-2, -1)
    if add is not None:
        out = out + add
    return bias_act_dropout_torch(out, bias, act, rate, clock, site)


def _suits_triton(x: Tensor, weight: Tensor, finished: bool = False) -> bool:
    """Whether Weft's kernel is faster than cuBLAS: many rows of float32 through a narrow layer.

    In half precision cuBLAS is faster, unless the product is ``finished`` (activation, dropout) in the same pass (0.025
    ms against 0.033 for 169,343 rows, 128 to 64).
    """
    tasks = weight.shape[:-2].numel()
    outputs, inputs = weight.shape[-2:]
    single = x.dtype == torch.float32 or (finished and x.dtype in HALF)
    one_input = x.dtype == torch.float32 and tasks > 1 and x.dim() == 2
    fits = outputs <= NARROW and inputs <= (WIDE if one_input else NARROW)
    return use_triton(x) and single and fits and x.shape[-2] * tasks >= MANY_ROWS


HALF = (torch.bfloat16, torch.float16)
MANY_ROWS = 16384
NARROW = 512
WIDE = 4096  # if tasks share their input: 8 on 169,343 x 768 take 1.79 ms on an H200 against cuBLAS's 2.74
FUSED = 128  # widths up to which the whole backward pass is one kernel
TALL = 4  # times as many rows as columns


def is_tall(rows: int, inputs: int, outputs: int, tasks: int = 1, shared: bool = False) -> bool:
    """Whether to use these kernels for ``rows x inputs`` per task (``shared``: for all) times ``inputs x outputs``.

    For callers with an alternative: cuBLAS is as fast for results with many tiles, or for few rows.
    """
    fits = outputs <= NARROW and inputs <= (WIDE if shared else NARROW)
    return fits and rows * tasks >= MANY_ROWS and rows >= TALL * max(inputs, outputs)


def _fuses_backward(grad: Tensor, x: Tensor, weight: Tensor, wants_x: bool, finished: bool) -> bool:
    """Whether one kernel for all gradients is faster than one per gradient; ``finished``: with activation or dropout.

    It is if products are cheap: through tf32 (16 tasks of 169,343 x 64 x 64 on an H200: 0.053 ms per task against
    0.086) and in half precision (0.023 against 0.037). With float32's accuracy, six products per term, it is if the
    activation's backward would be a pass of its own (0.071 against 0.087; 128 shared inputs, 0.056 against 0.090).
    """
    if not on_gpu(x) or x.dtype not in (torch.float32, *HALF) or max(weight.shape[-2:]) > FUSED:
        return False
    shared = x.dim() < grad.dim() or weight.dim() < grad.dim()
    if (shared and wants_x) or grad.shape[:-1].numel() < MANY_ROWS:
        return False
    if term_bytes(x.dtype) > 4 and not (finished and weight.shape[-2] <= 64 and (x.shape[-1] <= 64 or not wants_x)):
        return False
    sizes = (x.shape[-1], weight.shape[-2], term_bytes(x.dtype))
    return choose_backward_launch(*sizes, wants_x, limits_of(x.device)) is not None


def linear_backward_torch(grad, out, x, weight, passed, act, rate, clock, site, wants_in, wants_x):
    """Reference: ``(g, grad_x, grad_W, grad_b)``; gradients that are not needed are empty."""
    nothing = grad.new_empty(0)
    if out is not None:
        grad = bias_act_dropout_backward_torch(grad, out, act, rate, clock, site)
    grad_x = grad @ weight if wants_x else nothing
    if passed is not None:
        grad_x = grad_x + passed
    grad_in = grad.clone() if wants_in else nothing
    return grad_in, grad_x, weight_grad_torch(grad, x).contiguous(), grad.sum(-2)


BACKWARD_ARGUMENTS = (
    "(Tensor grad, Tensor? out, Tensor x, Tensor weight, Tensor? passed, str act, Tensor? rate, Tensor? clock,"
    " int site, bool wants_in, bool wants_x)"
)


@custom_op("weft::linear_backward", f"{BACKWARD_ARGUMENTS} -> (Tensor, Tensor, Tensor, Tensor)")
def linear_backward(grad, out, x, weight, passed, act, rate, clock, site, wants_in, wants_x):
    """All gradients of a dense layer: ``(g [..., N, O], grad_x [..., N, I], grad_W [..., O, I], grad_b [..., O])``.

    ``out`` is the layer's result if an activation or dropout followed the product; ``passed [..., N, I]`` is added to
    ``grad_x``. ``g`` (the gradient of what the product was added to) and ``grad_x`` are empty unless requested.
    """
    serve = linear_backward_triton if use_triton(x) else linear_backward_torch
    return serve(grad, out, x, weight, passed, act, rate, clock, site, wants_in, wants_x)


@linear_backward.register_fake
def _linear_backward_fake(grad, out, x, weight, passed, act, rate, clock, site, wants_in, wants_x):
    lead, (rows, inputs), outputs = grad.shape[:-2], x.shape[-2:], weight.shape[-2]
    grad_in = x.new_empty(*lead, rows, outputs) if wants_in else x.new_empty(0)
    grad_x = x.new_empty(*lead, rows, inputs) if wants_x else x.new_empty(0)
    return grad_in, grad_x, x.new_empty(*lead, outputs, inputs), x.new_empty(*lead, outputs)


@linear_backward.register_vmap
def _linear_backward_vmap(info, in_dims, grad, out, x, weight, passed, act, rate, clock, site, wants_in, wants_x):
    tensors, dims = (grad, out, weight, passed, rate, clock), (*in_dims[:2], *in_dims[3:5], *in_dims[6:8])
    grad, out, weight, passed, rate, clock = (
        lead_task(value, dim, info.batch_size) for value, dim in zip(tensors, dims, strict=True)
    )
    x = task_rows(x, in_dims[2], grad)
    grads = linear_backward(grad, out, x, weight, passed, act, rate, clock, site, wants_in, wants_x)
    # Gradients that were not requested are empty, without a task dimension: add one.
    requested = (wants_in, wants_x, True, True)
    return tuple(v if k else v.reshape(info.batch_size, 0) for v, k in zip(grads, requested, strict=True)), (0, 0, 0, 0)


@custom_op(
    "weft::linear",
    "(Tensor x, Tensor weight, Tensor? bias, Tensor? add, str act, Tensor? rate, Tensor? clock, int site) -> Tensor",
)
def _linear_op(x, weight, bias, add, act, rate, clock, site):
    if _suits_triton(x, weight, act != "none" or rate is not None):
        return linear_triton(x, weight, bias, add, act, rate, clock, site)
    if on_gpu(x) and act == "none" and rate is None and add is None and x.dim() == 2 and weight.dim() == 2:
        return torch.mm(x, weight.t()) if bias is None else torch.addmm(bias, x, weight.t())
    if not use_triton(x):
        return linear_torch(x, weight, bias, add, act, rate, clock, site)
    out = x @ weight.transpose(-2, -1)
    out = out if add is None else out + add
    if bias is None and act == "none" and rate is None:
        return out
    return bias_act_dropout_triton(out, bias, act, rate, clock, site)


@_linear_op.register_fake
def _linear_fake(x, weight, bias, add, act, rate, clock, site):
    lead = common_lead(x, weight)
    return x.new_empty(*lead, x.shape[-2], weight.shape[-2])


def _linear_setup(ctx, inputs, output):
    x, weight, bias, _, ctx.act, rate, clock, ctx.site = inputs
    ctx.bias_shape = None if bias is None else bias.shape
    plain = ctx.act == "none" and rate is None
    ctx.save_for_backward(x, weight, None if plain else output, rate, clock)


def _linear_backward(ctx, grad):
    x, weight, out, rate, clock = ctx.saved_tensors
    wants_x, wants_weight, wants_bias, wants_add = ctx.needs_input_grad[:4]
    grad = grad.contiguous()
    if torch.is_grad_enabled() and out is None:  # for a second derivative
        grad_x = (grad @ weight).sum_to_size(x.shape)
        grad_weight = weight_grad_torch(grad, x).sum_to_size(weight.shape)
        grad_bias = None if ctx.bias_shape is None else grad.sum(-2).sum_to_size(ctx.bias_shape)
        return grad_x, grad_weight, grad_bias, grad if wants_add else None, None, None, None, None
    if wants_weight and _fuses_backward(grad, x, weight, wants_x, out is not None):
        grad_add, grad_x, grad_weight, grad_bias = linear_backward(
            grad, out, x, weight, None, ctx.act, rate, clock, ctx.site, wants_add, wants_x
        )
        chosen = zip((wants_x, True, wants_bias, wants_add), (grad_x, grad_weight, grad_bias, grad_add), strict=True)
        return *(value if wanted else None for wanted, value in chosen), None, None, None, None
    bias_shape = ctx.bias_shape if wants_bias else None
    grad, grad_bias = epilogue_gradients(grad, out, bias_shape, ctx.act, rate, clock, ctx.site)
    grad_x = None
    if wants_x:
        grad_x = product(grad, weight.transpose(-2, -1)).sum_to_size(x.shape)
    grad_weight = weight_grad(grad, x) if wants_weight else None
    return grad_x, grad_weight, grad_bias, grad if wants_add else None, None, None, None, None


_linear_op.register_autograd(_linear_backward, setup_context=_linear_setup)
batch_tasks(_linear_op, rows=(0, 1))


@custom_op("weft::product", "(Tensor x, Tensor weight) -> Tensor")
def product(x, weight):
    """``x [..., N, I]`` times ``weight [..., O, I]`` transposed, ``[..., N, O]``; serves backward passes."""
    # The fastest implementation for the shape; cuBLAS takes a transposed weight as it lies.
    return linear_triton(x, weight) if _suits_triton(x, weight) else x @ weight.transpose(-2, -1)


product.register_fake(lambda x, weight: x.new_empty(*x.shape[:-1], weight.shape[-2]))
batch_tasks(product)


def linear(
    x: Tensor,
    weight: Tensor,
    bias: Tensor | None = None,
    *,
    add: Tensor | None = None,
    act: str = "none",
    p: float | Tensor = 0.0,
    clock: Tensor | None = None,
    site: int = 0,
) -> Tensor:
    """``dropout(act(x W^T + bias + add))`` in one pass over ``x [..., N, I]``: ``[..., N, O]``.

    ``weight [..., O, I]``, ``bias [..., O]``, ``add [..., N, O]``; ``act`` and dropout as in
    :func:`weft.ops.bias_act_dropout`.
    """
    if not on_gpu(x) and weight.dim() == 2:
        fused_bias = bias if act == "none" and clock is None else None
        out = torch.nn.functional.linear(x, weight, fused_bias)
        out = out if add is None else out + add
        return out if fused_bias is not None else bias_act_dropout(out, bias, act, p, clock, site)
    return _linear_op(x, weight, bias, add, act, *rate_and_clock(p, clock, x.device), site)


def needs_gradient(x: Tensor) -> bool:
    """Whether ``x``, or under ``vmap`` the batch of it, requires a gradient."""
    while torch._C._functorch.is_batchedtensor(x):
        x = torch._C._functorch.get_unwrapped(x)
    return x.requires_grad


class _LinearAndPass(torch.autograd.Function):
    """``(x W^T, x)``: the gradients of both uses of ``x`` are added in the pass that computes one of them."""

    generate_vmap_rule = True

    @staticmethod
    def forward(x: Tensor, weight: Tensor) -> tuple[Tensor, Tensor]:
        return _linear_op(x, weight, None, None, "none", None, None, 0), x.view_as(x)

    @staticmethod
    def setup_context(ctx, inputs, output) -> None:
        ctx.save_for_backward(*inputs)

    @staticmethod
    def backward(ctx, grad: Tensor, grad_passed: Tensor) -> tuple[Tensor | None, Tensor]:
        x, weight = ctx.saved_tensors
        grad, grad_x = grad.contiguous(), None
        if ctx.needs_input_grad[0] and _fuses_backward(grad, x, weight, True, False):
            _, grad_x, grad_weight, _ = linear_backward(
                grad, None, x, weight, grad_passed, "none", None, None, 0, False, True
            )
            return grad_x, grad_weight
        if ctx.needs_input_grad[0]:
            grad_x = _linear_op(grad, weight.transpose(-2, -1), None, grad_passed, "none", None, None, 0)
        return grad_x, weight_grad(grad, x)


def linear_keep_input(x: Tensor, weight: Tensor) -> tuple[Tensor, Tensor]:
    """``x W^T [..., N, O]`` and ``x`` itself, for its next use.

    Using the returned ``x`` instead of the argument saves the backward pass on a GPU an addition over the whole matrix
    (0.03 ms for 169,343 x 64 on an H200). If ``x`` needs no gradient, it is returned unchanged; returning it as an
    output would make autograd allocate an ``[N, I]`` gradient per member.
    """
    if not on_gpu(x) or not needs_gradient(x):
        return linear(x, weight), x
    return _LinearAndPass.apply(x, weight)


# ---- split_rows: copy the parameters of T tasks out of their flat rows, each contiguous, in one pass
#     parts[k][t] = flat[t, begin_k : begin_k + sizes[k]]
#
# In a view of ``flat [T, P]`` a parameter's tasks are P numbers apart, and every kernel that reads it would first
# make it contiguous: one launch per parameter and use, instead of one for all of them.


def split_rows_torch(flat: Tensor, sizes: Sequence[int]) -> list[Tensor]:
    """Reference."""
    return [part.clone(memory_format=torch.contiguous_format) for part in flat.split(list(sizes), dim=1)]


@custom_op("weft::split_rows", "(Tensor flat, int[] sizes) -> Tensor[]")
def _op(flat, sizes):
    parts = [flat.new_empty(flat.shape[0], size) for size in sizes]
    torch.split_with_sizes_copy(flat.contiguous(), list(sizes), 1, out=parts)  # one kernel on a GPU
    return parts


def _setup(ctx, inputs, output):
    flat, ctx.sizes = inputs
    ctx.save_for_backward(flat.new_empty(0))  # type and device, for unused parts
    ctx.tasks = flat.shape[0]


def _backward(ctx, grads):
    (like,) = ctx.saved_tensors
    pairs = zip(grads, ctx.sizes, strict=True)
    return torch.cat([like.new_zeros(ctx.tasks, n) if g is None else g for g, n in pairs], 1), None


_op.register_fake(lambda flat, sizes: [flat.new_empty(flat.shape[0], size) for size in sizes])
_op.register_autograd(_backward, setup_context=_setup)


def split_rows(flat: Tensor, sizes: Sequence[int]) -> list[Tensor]:
    """``flat [T, P]`` as contiguous ``[T, sizes[k]]``, differentiable; the sizes add up to P."""
    if sum(sizes) != flat.shape[1]:
        raise InputError(f"split_rows: sizes add up to {sum(sizes)}; the rows have {flat.shape[1]} numbers")
    return _op(flat, list(sizes))
