"""Run users' modules as a GPU would, Weft's products under Triton's interpreter, and compare with torch's.

A program of its own, because the interpreter is chosen before Triton is imported: see test_kernels.py.
"""

from __future__ import annotations

from collections.abc import Callable
from importlib import import_module

import torch
from interpreted_stack import AS_IT_IS, AS_ON_A_GPU, start
from operator_names import Names
from torch import Tensor, nn
from torch.nn import functional as F

from tests.stacks import best_tensors
from weft.core.task import Task
from weft.ops.launch import backend
from weft.runtime.modules.layers import TallLinear


def outcome(layer: Callable[..., Tensor], tensors: list[Tensor], dims: tuple[int | None, ...]) -> list[Tensor]:
    """The result of ``layer``, for a batch wherever ``dims`` says so, and the gradients of a sum with uneven slopes."""
    leaves = [tensor.clone().requires_grad_() for tensor in tensors]
    out = torch.vmap(layer, dims)(*leaves) if any(dim is not None for dim in dims) else layer(*leaves)
    slopes = torch.linspace(0.5, 2, out.numel()).view(out.shape).to(out.dtype)
    return [out, *torch.autograd.grad((out * slopes).sum(), leaves)]


def check(layer: Callable[..., Tensor], tensors: list[Tensor], dims: tuple[int | None, ...], near: float) -> None:
    """``layer`` has the same result and gradients through Weft's products, and does go through them."""
    backend.on_gpu.__code__ = AS_IT_IS
    expected = outcome(layer, tensors, dims)

    def through_weft(*arguments: Tensor) -> Tensor:
        with TallLinear():
            return layer(*arguments)

    backend.on_gpu.__code__ = AS_ON_A_GPU
    with Names() as names:
        found = outcome(through_weft, tensors, dims)
    assert "weft::linear" in names.met
    for mine, theirs in zip(found, expected, strict=True):
        assert mine.dtype == theirs.dtype
        torch.testing.assert_close(mine, theirs, rtol=near, atol=near * float(theirs.detach().abs().max()))


def layers() -> None:
    random = torch.Generator().manual_seed(0)

    def draw(*shape: int) -> Tensor:
        return torch.randn(*shape, generator=random)

    x, xs, weight, weights, bias, biases = (
        draw(70, 9), draw(3, 70, 9), draw(5, 9), draw(3, 5, 9), draw(5), draw(3, 5)
    )  # fmt: skip
    for dtype, near in ((torch.float32, 1e-5), (torch.float16, 5e-3)):  # the interpreter has no bfloat16 dots
        cases = [
            ([x, weight, bias], (None, None, None)), ([x, weights, biases], (None, 0, 0)),
            ([xs, weights, biases], (0, 0, 0)), ([xs, weight, bias], (0, None, None)),
            ([x, weights, bias], (None, 0, None)), ([x, weight, biases], (None, None, 0)),
            ([xs.movedim(0, 1).contiguous(), weights.movedim(0, 2).contiguous(), biases], (1, 2, 0)),
        ]  # fmt: skip
        for tensors, dims in cases:
            cast = [tensor.to(dtype) for tensor in tensors]
            check(F.linear, cast, dims, near)
            check(lambda a, b: F.linear(input=a, weight=b), cast[:2], dims[:2], near)
            check(lambda a, b: a @ b.T, cast[:2], dims[:2], near)
    check(F.linear, [draw(3, 18, 4, 9), weights, biases], (0, 0, 0), 1e-5)
    check(torch.matmul, [draw(18, 4, 9), draw(3, 9, 5)], (None, 0), 1e-5)
    for product in (torch.matmul, torch.mm, Tensor.matmul, Tensor.mm, lambda a, b: a @ b):
        check(product, [x, draw(9, 5)], (None, None), 1e-5)
        check(product, [x, draw(3, 9, 5)], (None, 0), 1e-5)
    check(lambda a, b: torch.vmap(F.linear, (None, 0))(a, b), [x, draw(3, 2, 5, 9)], (None, 0), 1e-5)
    check(lambda a, b: torch.vmap(F.linear, (0, None))(a, b), [draw(2, 70, 9), weights], (None, 0), 1e-5)


def second_derivatives() -> None:
    """A module may differentiate its own layers, and what comes of it is differentiated in training."""

    def penalty(x: Tensor, weight: Tensor, bias: Tensor) -> Tensor:
        (slope,) = torch.autograd.grad(F.linear(x, weight, bias).square().sum(), x, create_graph=True)
        return slope.square().sum(-1)

    random = torch.Generator().manual_seed(1)
    tensors = [torch.randn(*shape, generator=random) for shape in ((70, 9), (5, 9), (5,))]
    check(penalty, tensors, (None, None, None), 1e-5)


class Mixed(nn.Module):
    """Dense layers in the ways that people write them."""

    def __init__(self, in_features: int, out_features: int) -> None:
        super().__init__()
        self.a, self.norm, self.b = nn.Linear(in_features, 8), nn.BatchNorm1d(8), nn.Linear(8, 8, bias=False)
        self.weight, self.bias = nn.Parameter(torch.randn(8, out_features)), nn.Parameter(torch.zeros(out_features))

    def forward(self, x: Tensor) -> Tensor:
        h = torch.relu(self.norm(self.a(x)))
        return torch.relu(self.b(h) + h) @ self.weight + self.bias


def trainings(members: int) -> None:
    """Losses, scores and weights of two epochs on a GPU's way are those of the CPU's."""
    made = [Task(graph="tiny", model=Mixed, epochs=2, eps=1e-3, lr=0.05 / (seed + 1)) for seed in range(members)]
    torch.manual_seed(0)
    mine = start(made, as_on_a_gpu=True)
    with Names() as names:
        found = mine.advance(2)
    assert names.met.count("weft::linear") == 2 * 2 * 3  # two epochs, each with an evaluation; three layers
    assert names.met.count("weft::linear_backward") == 2 * 3
    torch.manual_seed(0)
    plain = start(made, as_on_a_gpu=False)
    expected = plain.advance(2)
    for index in range(members):
        torch.testing.assert_close(
            torch.tensor(found[index].rows), torch.tensor(expected[index].rows), rtol=1e-4, atol=1e-5
        )
        tensors = best_tensors(mine, index)
        for name, value in best_tensors(plain, index).items():
            torch.testing.assert_close(tensors[name], value, rtol=1e-4, atol=1e-5)


if __name__ == "__main__":
    import_module("weft.ops.dense.linear").MANY_ROWS = 0  # the kernels for many rows, on few
    torch.set_num_threads(1)
    layers()
    second_derivatives()
    trainings(1)
    trainings(3)
    print("equal")
