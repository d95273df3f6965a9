"""adam_: one optimizer step over the flat parameters of one task or of many, in place.

Every number that a sweep may vary is read from ``hyper``, so tasks with different rates share the kernel.
Shapes: P parameters of a task; ``param, grad, exp_avg, exp_avg_sq [..., P]``; ``hyper [..., 8]``.
"""

from __future__ import annotations

from torch import Tensor

from weft.ops.launch.backend import use_triton
from weft.ops.launch.custom_op import custom_op
from weft.ops.train.adam_triton import adam_triton

HYPER = ("lr", "beta1", "beta2", "eps", "weight_decay", "decoupled", "bias_correction1", "bias_correction2")


def adam_torch(
    param: Tensor, grad: Tensor, exp_avg: Tensor, exp_avg_sq: Tensor, hyper: Tensor, decay_mask: Tensor | None
) -> None:
    """Reference: Adam with L2 decay, or AdamW where ``decoupled`` is 1."""
    lr, beta1, beta2, eps, decay, decoupled, correction1, correction2 = (
        column[..., None] for column in hyper.unbind(-1)
    )
    if decay_mask is not None:
        decay = decay * decay_mask
    param.mul_(1.0 - lr * decay * decoupled)
    grad = grad + decay * (1.0 - decoupled) * param
    exp_avg.lerp_(grad, (1.0 - beta1).expand_as(grad))
    exp_avg_sq.mul_(beta2).add_((1.0 - beta2) * grad * grad)
    denominator = (exp_avg_sq / correction2).sqrt_().add_(eps)
    param.sub_(lr / correction1 * exp_avg / denominator)


@custom_op(
    "weft::adam_",
    mutates_args=("param", "exp_avg", "exp_avg_sq"),
    schema=(
        "(Tensor(a!) param, Tensor grad, Tensor(b!) exp_avg, Tensor(c!) exp_avg_sq, Tensor hyper,"
        " Tensor? decay_mask) -> ()"
    ),
)
def _op(param, grad, exp_avg, exp_avg_sq, hyper, decay_mask):
    if use_triton(param):
        adam_triton(param, grad, exp_avg, exp_avg_sq, hyper, decay_mask)
    else:
        adam_torch(param, grad, exp_avg, exp_avg_sq, hyper, decay_mask)


@_op.register_fake
def _fake(param, grad, exp_avg, exp_avg_sq, hyper, decay_mask):
    return None


def adam_(
    param: Tensor,
    grad: Tensor,
    exp_avg: Tensor,
    exp_avg_sq: Tensor,
    hyper: Tensor,
    decay_mask: Tensor | None = None,
) -> None:
    """Update ``param [..., P]`` and its moments in place.

    ``hyper [..., 8]`` float32 holds, in order: lr, beta1, beta2, eps, weight_decay, decoupled (1 for AdamW, 0 for
    Adam), and the bias corrections ``1 - beta1^step``, ``1 - beta2^step``. ``decay_mask [P]`` (0 or 1) says which
    parameters decay; all do without it.
    """
    _op(param, grad, exp_avg, exp_avg_sq, hyper, decay_mask)
