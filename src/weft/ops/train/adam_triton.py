"""Triton kernel of ``adam.py``: one Adam step for the parameters of every task."""

from __future__ import annotations

from torch import Tensor

from weft.ops.launch.triton_lang import jit_any_size, tl

BLOCK = 512


@jit_any_size("stride_hyper", "last")  # they depend on the number of epochs, and only scalars are read by them
def _adam_kernel(
    param, grad, exp_avg, exp_avg_sq, hyper, decay_mask, step, P, stride_hyper, last,
    HAS_MASK: tl.constexpr, HAS_STEP: tl.constexpr, BLOCK: tl.constexpr,
):  # fmt: skip
    task = tl.program_id(1).to(tl.int64)
    index = tl.program_id(0) * BLOCK + tl.arange(0, BLOCK)
    inside = index < P
    at = task * P + index
    hyper += task * stride_hyper
    if HAS_STEP:
        hyper += tl.minimum(tl.load(step), last) * 10
    lr, beta2, eps = tl.load(hyper), tl.load(hyper + 2), tl.load(hyper + 3)
    decay, decoupled = tl.load(hyper + 4), tl.load(hyper + 5)
    correction1, correction2 = tl.load(hyper + 6), tl.load(hyper + 7)
    rest1, rest2 = tl.load(hyper + 8), tl.load(hyper + 9)
    p = tl.load(param + at, mask=inside, other=0.0)
    g = tl.load(grad + at, mask=inside, other=0.0)
    m = tl.load(exp_avg + at, mask=inside, other=0.0)
    v = tl.load(exp_avg_sq + at, mask=inside, other=0.0)
    decays = tl.full([BLOCK], 1.0, tl.float32) * decay
    if HAS_MASK:
        decays *= tl.load(decay_mask + index, mask=inside, other=0.0)
    p *= 1.0 - lr * decays * decoupled
    g += decays * (1.0 - decoupled) * p
    m += rest1 * (g - m)
    v = beta2 * v + rest2 * g * g
    p -= lr / correction1 * m / (tl.sqrt(v / correction2) + eps)
    tl.store(param + at, p, mask=inside)
    tl.store(exp_avg + at, m, mask=inside)
    tl.store(exp_avg_sq + at, v, mask=inside)


def adam_triton(
    param: Tensor, grad: Tensor, exp_avg: Tensor, exp_avg_sq: Tensor, hyper: Tensor, decay_mask: Tensor | None,
    step: Tensor | None = None,
) -> None:  # fmt: skip
    """Launch over ``[..., P]``; ``hyper [..., 10]``, or ``[..., L, 10]`` with ``step``, may be shared by all tasks."""
    P = param.shape[-1]
    tasks = param.numel() // max(P, 1)
    rows = 1 if step is None else hyper.shape[-2]
    if param.numel():
        _adam_kernel[(-(-P // BLOCK), tasks)](
            param, grad.contiguous(), exp_avg, exp_avg_sq, hyper.contiguous(),
            param if decay_mask is None else decay_mask, param if step is None else step, P,
            10 * rows if hyper.numel() == 10 * rows * tasks and tasks > 1 else 0, rows - 1,
            HAS_MASK=decay_mask is not None, HAS_STEP=step is not None, BLOCK=BLOCK,
        )  # fmt: skip
