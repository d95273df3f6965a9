"""Same outputs and same gradients as PyG for the same weights."""

from __future__ import annotations

import copy
from collections.abc import Callable

import torch
from torch import Tensor, nn

from weft.nn import to_pyg

RELATIVE = 1e-5


def assert_close(found: Tensor, expected: Tensor, name: str, scale: float = 1.0) -> None:
    """Within 1e-5 of each value, or of ``scale`` for values that are small beside the terms they sum."""
    torch.testing.assert_close(
        found, expected, rtol=RELATIVE, atol=RELATIVE * scale, msg=lambda message: f"{name}: {message}"
    )


def run(model: nn.Module, call: Callable[[Tensor], Tensor], x: Tensor, cotangent: Tensor) -> tuple:
    """Output, gradient of x; the gradients of the parameters stay in the model."""
    model.zero_grad(set_to_none=True)
    leaf = x.clone().requires_grad_()
    out = call(leaf)
    out.backward(cotangent)
    return out.detach(), leaf.grad


def gradients_in_pyg_order(ours: nn.Module) -> list[Tensor]:
    """Our gradients in the order of PyG's parameters, by converting a copy whose weights are the gradients."""
    carrier = copy.deepcopy(ours)
    for slot, parameter in zip(carrier.parameters(), ours.parameters(), strict=True):
        assert parameter.grad is not None
        slot.data = parameter.grad.clone()
    return [parameter.detach() for parameter in to_pyg(carrier).parameters()]


def assert_same(ours: nn.Module, theirs: nn.Module, x: Tensor, example) -> None:
    """Outputs, gradients of ``x`` and of every parameter, and buffers agree."""
    weights = () if example.edge_weight is None else (example.edge_weight,)
    with torch.no_grad():
        shape = copy.deepcopy(theirs)(x, example.edge_index, *weights).shape
    cotangent = torch.randn(shape)
    out, grad = run(ours, lambda leaf: ours(leaf, example.adj), x, cotangent)
    expected, expected_grad = run(theirs, lambda leaf: theirs(leaf, example.edge_index, *weights), x, cotangent)
    assert_close(out, expected, "output")
    assert_close(grad, expected_grad, "gradient of x")
    # A bias in front of a batch norm has gradient zero: exactly so here, to rounding of its terms in PyG.
    scale = max(float(p.grad.abs().max()) for p in theirs.parameters())
    for found, (name, parameter) in zip(gradients_in_pyg_order(ours), theirs.named_parameters(), strict=True):
        assert_close(found, parameter.grad, f"gradient of {name}", scale)
    buffers = dict(to_pyg(ours).named_buffers())
    for name, buffer in theirs.named_buffers():
        if not name.endswith("num_batches_tracked"):
            assert_close(buffers[name], buffer, name)
