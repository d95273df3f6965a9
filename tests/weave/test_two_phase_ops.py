"""Two-phase operators equal the whole ones, and calls of every kind survive flattening for ``merged_call``."""

from __future__ import annotations

import pytest
import torch

from tests.weave.merged_calls import merged_call
from weft import ops
from weft.ops.launch.backend import meta_means_gpu
from weft.weave.launchers import add_parts, copied, side_by_side
from weft.weave.merged_launch import FlatCalls, OpCall, flatten, operator, unflatten

weft = torch.ops.weft
LEADS = [(), (3,)]


def made(*shape: int, seed: int = 0) -> torch.Tensor:
    return torch.randn(*shape, generator=torch.Generator().manual_seed(seed))


def whole_and_apart(name: str, lead: tuple[int, ...], device: str = "cpu"):
    """A call, the results of it that are sums, and the call of its parts."""
    tasks = max(1, torch.Size(lead).numel())
    grad, x, out = made(*lead, 70, 5), made(*lead, 70, 7, seed=1), made(*lead, 70, 5, seed=2).relu()
    rate, clock = torch.full(lead, 0.5), torch.zeros(*lead, 2, dtype=torch.int64)
    labels, rows = torch.arange(70) % 5, torch.arange(0, 70, 3)
    given = {
        "weight_grad": ((grad, x), (35, 0)),
        "column_sum": ((grad,), (5, 0)),
        "bias_act_dropout_backward_bias": ((grad, out, [*lead, 5], "relu", rate, clock, 2, 1), (5, 0)),
        "cross_entropy_rows": ((grad, labels, rows), (1, 0)),
        "linear_backward": (
            (grad, out, x, made(*lead, 5, 7, seed=3), None, "relu", rate, clock, 1, True, True),
            (35, 5),
        ),
    }
    args, sizes = given[name]
    args = tuple(arg.to(device) if isinstance(arg, torch.Tensor) else arg for arg in args)
    return args, sizes, tasks


@pytest.mark.parametrize("lead", LEADS, ids=str)
@pytest.mark.parametrize(
    "name",
    ["weight_grad", "column_sum", "bias_act_dropout_backward_bias", "cross_entropy_rows", "linear_backward"],
)
def test_parts_add_up_to_the_whole(name, lead):
    args, sizes, tasks = whole_and_apart(name, lead)
    expected = operator(name)(*args)
    expected = expected if isinstance(expected, tuple) else (expected,)
    *early, partial = apart if isinstance(apart := operator(f"{name}_parts")(*args), tuple) else (apart,)
    sums = add_parts(partial, *sizes, "float32")
    assert partial.shape[0] == tasks
    for mine, theirs in zip(early, expected, strict=False):
        assert torch.equal(mine, theirs)
    for mine, theirs in zip(sums, expected[len(early) :], strict=False):
        assert torch.equal(mine.view(theirs.shape), theirs)


@pytest.mark.parametrize(
    ("name", "parts"),
    [
        ("weight_grad", 1),  # 70 rows are one range
        ("column_sum", 1),
        ("bias_act_dropout_backward_bias", 1),
        ("cross_entropy_rows", 1),
    ],
)
def test_a_gpu_would_get_the_same_shapes(name, parts):
    """Without data the launches are looked at, not made."""
    with meta_means_gpu():
        args, sizes, _ = whole_and_apart(name, (3,), "meta")
        *_, partial = found if isinstance(found := operator(f"{name}_parts")(*args), tuple) else (found,)
        assert partial.shape == (3, parts, sum(sizes))
        assert weft.add_parts(partial, *sizes, "bfloat16")[0].dtype == torch.bfloat16


def test_many_rows_have_many_parts():
    with meta_means_gpu():
        grad, x = torch.empty(20_000, 3, device="meta"), torch.empty(20_000, 64, device="meta")
        assert weft.weight_grad_parts(grad, x).shape[1] > 100  # a tile's waste is no matter in company


def test_copies():
    x = made(4, 5, 6)
    turned = x.transpose(1, 2)
    assert torch.equal(copied(turned), turned)
    assert copied(turned).is_contiguous()
    parts = [made(2, 3), made(2, 4, seed=1)]
    assert torch.equal(side_by_side(parts), torch.cat(parts, 1))
    assert torch.equal(side_by_side([made(3), made(2)]), torch.cat([made(3), made(2)]))


def test_registration():
    checks = ("test_schema", "test_faketensor")
    for name in ("weight_grad", "bias_act_dropout_backward_bias", "linear_backward", "cross_entropy_rows"):
        args, _, _ = whole_and_apart(name, (2,))
        torch.library.opcheck(operator(f"{name}_parts"), args, test_utils=checks)
    torch.library.opcheck(weft.add_parts.default, (made(2, 1, 5), 3, 2, "float32"), test_utils=checks)
    torch.library.opcheck(weft.copied.default, (made(3, 4).t(),), test_utils=checks)
    torch.library.opcheck(weft.side_by_side.default, ([made(2, 3), made(2, 4)],), test_utils=checks)


def test_words_lists_and_defaults_survive_the_border():
    args, _, _ = whole_and_apart("linear_backward", (2,))
    short = whole_and_apart("bias_act_dropout_backward_bias", ())[0][:-1]  # its last argument has a default
    calls = [OpCall("linear_backward_parts", args), OpCall("bias_act_dropout_backward_bias_parts", short)]
    flat = flatten(calls)
    again = unflatten(FlatCalls(*flat))
    assert again[0].arguments[9] is True
    assert again[0].arguments[5] == "relu"
    assert again[1].arguments[2] == [5]
    assert again[1].arguments[7] == 1
    for mine, call in zip(merged_call(calls), calls, strict=True):
        assert all(torch.equal(one, other) for one, other in zip(mine, call(), strict=True))


def test_updates_of_several_members_at_once():
    hyper = torch.tensor([0.01, 0.9, 0.999, 1e-8, 5e-4, 0.0, 0.1, 0.001, 0.1, 0.001])
    states = [[made(size), made(size, seed=1), torch.zeros(size), torch.zeros(size)] for size in (5, 9)]
    expected = [[tensor.clone() for tensor in state] for state in states]
    for param, grad, first, second in expected:
        ops.adam_(param, grad, first, second, hyper)
    flat = flatten([OpCall("adam_", (*state, hyper, None)) for state in states])
    weft.merged_call_(flat.names, flat.tensors, flat.counts, flat.numbers, flat.words)
    for mine, theirs in zip(states, expected, strict=True):
        assert all(torch.equal(one, other) for one, other in zip(mine, theirs, strict=True))
