"""adam_: one optimizer step over the flat parameters of one task or of many, in place.

Every number that a sweep may vary is read from ``hyper``, so tasks with different rates share the kernel.
Shapes: P parameters of a task, L steps; ``param, grad, exp_avg, exp_avg_sq [..., P]``; ``hyper [..., 10]``, or a table
``[..., L, 10]`` of which ``step [1]`` picks the rows: looking them up on its own would be one more launch per step.
"""

from __future__ import annotations

from torch import Tensor

from weft.core.errors import InputError
from weft.ops.launch.backend import by_device, custom_op
from weft.ops.launch.triton_lang import jit_any_size, tl

# ---- Triton kernels: one Adam step for the parameters of every task

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


HYPER = (
    *("lr", "beta1", "beta2", "eps", "weight_decay", "decoupled", "bias_correction1", "bias_correction2"),
    # One minus each beta, as numbers of their own: 1 - 0.99999999 in float32 would be 0.
    *("rest1", "rest2"),
)


def adam_torch(
    param: Tensor, grad: Tensor, exp_avg: Tensor, exp_avg_sq: Tensor, hyper: Tensor, decay_mask: Tensor | None,
    step: Tensor | None = None, rate_scales: Tensor | None = None,
) -> None:  # fmt: skip
    """Reference: Adam with L2 decay, or AdamW where ``decoupled`` is 1.

    With ``rate_scales [..., P]``, factors of the rate, ``decay_mask [..., P]`` holds the decays themselves.
    """
    hyper = hyper if step is None else hyper.index_select(-2, step).squeeze(-2)
    lr, _, beta2, eps, decay, decoupled, correction1, correction2, rest1, rest2 = (
        column[..., None] for column in hyper.unbind(-1)
    )
    if rate_scales is not None:
        lr, decay = lr * rate_scales, decay_mask
    elif decay_mask is not None:
        decay = decay * decay_mask
    param.mul_(1.0 - lr * decay * decoupled)
    grad = grad + decay * (1.0 - decoupled) * param
    exp_avg.lerp_(grad, rest1.expand_as(grad))
    exp_avg_sq.mul_(beta2).add_(rest2 * grad * grad)
    denominator = (exp_avg_sq / correction2).sqrt_().add_(eps)
    param.sub_(lr / correction1 * exp_avg / denominator)


_op = custom_op(
    "weft::adam_",
    "(Tensor(a!) param, Tensor grad, Tensor(b!) exp_avg, Tensor(c!) exp_avg_sq, Tensor hyper,"
    " Tensor? decay_mask, Tensor? step=None) -> ()",
    mutates_args=("param", "exp_avg", "exp_avg_sq"),
)(by_device(adam_triton, adam_torch))
_op.register_fake(lambda *arguments: None)


def adam_(
    param: Tensor,
    grad: Tensor,
    exp_avg: Tensor,
    exp_avg_sq: Tensor,
    hyper: Tensor,
    decay_mask: Tensor | None = None,
    step: Tensor | None = None,
) -> None:
    """Update ``param [..., P]`` and its moments in place.

    ``hyper [..., 10]`` float32 holds, in order: lr, beta1, beta2, eps, weight_decay, decoupled (1 for AdamW, 0 for
    Adam), the bias corrections ``1 - beta1^step``, ``1 - beta2^step``, and ``1 - beta1``, ``1 - beta2``, which float32
    betas could not give. ``decay_mask [P]`` (0 or 1) says which parameters decay; all do without it. With ``step [1]``
    int64, ``hyper [..., L, 10]`` has a row per step, and that one is used.
    """
    if hyper.shape[-1] != len(HYPER):
        raise InputError(
            f"adam_: hyper has {hyper.shape[-1]} numbers per task; expected {len(HYPER)}: {', '.join(HYPER)}"
        )
    _op(param, grad, exp_avg, exp_avg_sq, hyper, decay_mask, step)
