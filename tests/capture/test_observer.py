"""The Observer records calls, lifetimes of storages, and views."""

from __future__ import annotations

import pytest
import torch

from weft.capture.observer import Observer, in_backward, look_inside, watched_launches
from weft.ops.launch.triton_lang import InertKernel, triton


@triton.jit
def _add_kernel(x, y, out, BLOCK: int):
    pass


def names(observer: Observer) -> list[str]:
    return [call.name for call in observer.calls]


def empty(*shape: int) -> torch.Tensor:
    return torch.empty(*shape, device="meta")


def test_views_are_one_storage_and_no_call():
    with Observer("meta") as observer:
        x = empty(4, 6)
        y = x.t()[1:3].reshape(-1).view(2, 4)  # the reshape of a transpose is a copy
        assert observer.number(x[0]) == observer.number(x)
        assert observer.number(y) != observer.number(x)
    assert names(observer) == ["aten.empty", "aten.clone"]
    assert [storage.bytes for storage in observer.storages] == [96, 32]


def test_a_storage_goes_when_nobody_holds_it():
    with Observer("meta") as observer:
        x = empty(8)
        y = x + 1
        view = y[:2]
        del y
        x.mul_(2)
        del view
        x.mul_(3)
    assert [(call.name, call.frees) for call in observer.calls] == [
        ("aten.empty", []),
        ("aten.add", []),
        ("aten.mul_", [1]),
        ("aten.mul_", []),
    ]
    assert observer.alive() == [0]


def test_what_autograd_keeps_lives_until_its_backward():
    weight = empty(5, 5).requires_grad_()
    with Observer("meta") as observer:
        out = (empty(7, 5) @ weight).sigmoid().sum()
        kept = observer.alive()
        (grad,) = torch.autograd.grad(out, weight)
        del out
        left = observer.alive()
    made = {number: call.name for call in observer.calls for number in call.made}
    assert {made.get(number) for number in kept} == {"aten.empty", "aten.sigmoid", "aten.sum", None}
    assert [number for number in left if made.get(number) == "aten.sigmoid"] == []
    assert observer.number(grad) in left
    backward = [call.name for call in observer.calls if call.in_backward]
    assert backward[-2:] == ["aten.sigmoid_backward", "aten.mm"]


def backward_adds(function) -> list[str]:
    """The additions in the backward pass of ``function`` of two matrices."""
    leaves = [empty(6, 6).requires_grad_() for _ in range(2)]
    with Observer("meta") as observer:
        torch.autograd.grad(function(*leaves).sum(), leaves, allow_unused=True)
    return [call.name for call in observer.calls if call.in_backward and call.name.startswith("aten.add")]


def test_gradients_that_the_engine_alone_holds_are_added_in_place():
    assert backward_adds(lambda x, _: x.sin() * x.cos()) == ["aten.add_"]


def test_a_gradient_that_somebody_else_holds_is_not_written_to():
    assert backward_adds(lambda x, y: (x.sin() + (x + y)) * 2) == ["aten.add"]  # the sum's gradient is y's, too


def test_an_addition_of_somebodys_own_is_one():
    class Twice(torch.autograd.Function):
        @staticmethod
        def forward(ctx, x):
            return x.clone()

        @staticmethod
        def backward(ctx, grad):
            return grad.sin() + grad.cos()

    assert backward_adds(lambda x, _: Twice.apply(x)) == ["aten.add"]


def test_in_place_operators_write_what_is_there():
    x = empty(4)
    with Observer("meta") as observer:
        torch.add(x, x, out=x)
        x.add_(1)
    assert [(call.reads, call.writes, call.made) for call in observer.calls] == [((0,), (0,), ())] * 2


def test_tensors_of_other_devices_do_not_count():
    with Observer("meta") as observer:
        torch.ones(3).add(1)
        x = torch.ones(3).to("meta")
    assert names(observer) == ["aten._to_copy"]
    assert observer.number(x) == 0


def test_a_launch_is_seen_and_not_made():
    with Observer("meta") as observer:
        x, out = empty(4), empty(4)
        _add_kernel[(1,)](x, x, out, BLOCK=4)
    call = observer.calls[-1]
    assert (call.name, call.reads, call.inside.launches) == ("triton.add_kernel", (0, 1), 1)


def test_kernels_are_themselves_again_afterwards():
    before = {kind: kind.__dict__.get("__getitem__") for kind in (type(_add_kernel), InertKernel)}
    with pytest.raises(RuntimeError, match="inside"), watched_launches(lambda *_: None):
        raise RuntimeError("inside")
    assert {kind: kind.__dict__.get("__getitem__") for kind in before} == before


def test_a_kernel_without_triton_says_so():
    with pytest.raises(RuntimeError, match="empty is a Triton kernel, and Triton is not installed"):
        InertKernel(empty)[(1,)]


def test_inside_of_an_operator_only_its_own_blocks_count():
    from weft.ops.launch.backend import meta_means_gpu

    with meta_means_gpu():
        inside = look_inside(torch.ops.weft.column_sum.default, (empty(50_000, 8),), {}, "meta")
    parts = -(-50_000 // 512)
    assert inside.launches == 2  # partial sums, and the sum of them
    assert inside.pieces == (4 * 8 * parts,)


def test_what_is_written_in_terms_of_others_is_taken_apart():
    with torch.inference_mode(), Observer("meta") as observer:
        empty(5, 7, 3) @ empty(3, 4)
    assert names(observer) == ["aten.empty", "aten.empty", "aten.mm"]


def test_nothing_is_in_a_backward_pass_outside_of_one():
    assert not in_backward()
