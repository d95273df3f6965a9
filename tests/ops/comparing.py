"""Comparison of an operator, its output and its gradients, with a plain formula in float64."""

from __future__ import annotations

from collections.abc import Callable, Sequence

import torch
from torch import Tensor
from torch.utils._python_dispatch import TorchDispatchMode
from torch.utils._pytree import tree_map_only

# Largest error, relative to the largest expected value. Half precision rounds the inputs of the formula too, so what
# remains is the rounding of results and of values saved for the backward pass: 2^-11 and 2^-8, a few times over.
TOLERANCE = {torch.float64: 1e-12, torch.float32: 1e-5, torch.float16: 5e-3, torch.bfloat16: 4e-2}


def assert_near(actual: Tensor, expected: Tensor, tolerance: float, what: str = "output") -> None:
    """Equal shapes, NaN and infinity in the same places, and numbers within the tolerance."""
    assert actual.shape == expected.shape, f"{what}: shape {tuple(actual.shape)}, expected {tuple(expected.shape)}"
    actual, expected = actual.detach().double().cpu(), expected.detach().double().cpu()
    finite = expected.isfinite()
    assert torch.equal(actual.isnan(), expected.isnan()), f"{what}: NaN in other places than expected"
    infinite = ~finite & ~expected.isnan()
    assert torch.equal(actual[infinite], expected[infinite]), f"{what}: infinities differ"
    if finite.any():
        error = (actual - expected)[finite].abs().max().item()
        scale = max(1.0, expected[finite].abs().max().item())
        assert error <= tolerance * scale, f"{what}: off by {error:.3g} where values reach {scale:.3g}"


def cotangent(like: Tensor, dtype: torch.dtype) -> Tensor:
    """A fixed gradient for an output, exactly representable in ``dtype``."""
    values = torch.randn(like.shape, generator=torch.Generator().manual_seed(7), dtype=torch.float64)
    return values.to(like.device, dtype)


def value_and_gradients(function: Callable[..., Tensor], inputs: Sequence[Tensor], grad: Tensor | None = None):
    """``(output, gradients)`` of ``function(*inputs)``, the inputs being leaves of their own."""
    leaves = [value.detach().clone().requires_grad_() for value in inputs]
    out = function(*leaves)
    grad = cotangent(out, out.dtype) if grad is None else grad.to(out)
    if not out.requires_grad:  # a plain formula that found no edge to follow
        return out, [torch.zeros_like(leaf) for leaf in leaves]
    return out, torch.autograd.grad(out, leaves, grad, allow_unused=True, materialize_grads=True)


def assert_agrees(
    function: Callable[..., Tensor],
    plain: Callable[..., Tensor],
    inputs: Sequence[Tensor],
    dtype: torch.dtype,
    tolerance: float | None = None,
) -> None:
    """``function`` in ``dtype`` gives what ``plain`` gives in float64 for the same (rounded) numbers."""
    tolerance = tolerance or TOLERANCE[dtype]
    rounded = [value.to(dtype) for value in inputs]
    grad = cotangent(plain(*[value.double() for value in rounded]), dtype)
    expected, expected_grads = value_and_gradients(plain, [value.double() for value in rounded], grad.double())
    out, grads = value_and_gradients(function, rounded, grad)
    assert out.dtype == dtype
    assert_near(out, expected, tolerance)
    for number, (mine, theirs) in enumerate(zip(grads, expected_grads, strict=True)):
        assert mine.dtype == dtype
        assert_near(mine, theirs, tolerance, f"gradient to input {number}")


class CallsOfWeftOps(TorchDispatchMode):
    """Collects the calls of ``weft::`` operators made inside: name to (operator, arguments)."""

    def __init__(self) -> None:
        super().__init__()
        self.calls: dict[str, tuple] = {}

    def __torch_dispatch__(self, function, types, args=(), kwargs=None):
        if function.namespace == "weft":
            self.calls[str(function)] = (function, args)
        return function(*args, **(kwargs or {}))


def detached(arguments: tuple) -> tuple:
    """The same arguments, none of which asks for a gradient."""
    return tree_map_only(Tensor, Tensor.detach, arguments)


def assert_registered(function, leaves) -> None:
    """``torch.library.opcheck`` of every operator that ``function(*leaves)`` calls, forward and backward."""
    with CallsOfWeftOps() as forward:
        out = function(*leaves)
    with CallsOfWeftOps() as backward:
        torch.autograd.grad(out, leaves, torch.ones_like(out))
    assert forward.calls
    assert backward.calls
    for operator, arguments in forward.calls.values():
        torch.library.opcheck(operator, arguments)
    for operator, arguments in backward.calls.values():
        torch.library.opcheck(operator, detached(arguments))
