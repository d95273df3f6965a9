"""Light rules give what torch's own rules give, leave the rest to torch, and spare an estimate torch's compiler."""

from __future__ import annotations

import subprocess
import sys

import pytest
import torch

from weft.capture.light_rules import light
from weft.capture.observer import Observer

aten = torch.ops.aten
A, B = (torch.empty(3, 4, device="meta") for _ in range(2))
ROW, WIDE = torch.empty(4, device="meta"), torch.empty(5, 3, 4, device="meta")
WHOLE, HALF = torch.empty(3, 4, dtype=torch.int32, device="meta"), torch.empty(3, 4, dtype=torch.half, device="meta")
MASK = torch.empty(3, 1, dtype=torch.bool, device="meta")


@pytest.mark.parametrize(
    ("func", "args"),
    [
        (aten.cat.default, ([A, B],)),
        (aten.cat.default, ([A, B], -1)),
        (aten.stack.default, ([A, B], -1)),
        (aten.cumsum.default, (WHOLE, 0)),
        (aten.cumsum.default, (A, 1)),
        (aten.add.Tensor, (A, ROW)),
        (aten.mul.Tensor, (WHOLE, 2.5)),
        (aten.mul.Tensor, (HALF, A)),
        (aten.sub.Tensor, (ROW.expand(3, 4), WIDE)),
        (aten.div.Tensor, (A, 3)),
        (aten.add.Tensor, (WIDE[:, :2], WIDE[:, 1:])),
        (aten.rsqrt.default, (A,)),
        (aten.zeros_like.default, (WHOLE,)),
        (aten.clamp.default, (WHOLE, 1)),
        (aten.isinf.default, (A,)),
        (aten.gt.Tensor, (WHOLE, A)),
        (aten.le.Scalar, (WHOLE, 3)),
        (aten.where.self, (MASK, A, ROW)),
        (aten.addmm.default, (ROW, A, torch.empty(4, 4, device="meta").t())),
    ],
)
def test_they_agree_with_torch(func, args):
    found, wanted = light(func, args, {}), func(*args)
    assert (found.shape, found.stride(), found.dtype) == (wanted.shape, wanted.stride(), wanted.dtype)


@pytest.mark.parametrize(
    ("func", "args", "kwargs"),
    [
        (aten.cat.default, ([A, WIDE],), {}),
        (aten.cat.default, ([A, WHOLE],), {}),
        (aten.add.Tensor, (A, torch.empty(5, device="meta")), {}),
        (aten.add.Tensor, (A, A), {"alpha": 2}),
        (aten.add.Tensor, (torch.empty(4, 3, device="meta").t(), A), {}),
        (aten.div.Tensor, (WHOLE, 2), {}),
        (aten.zeros_like.default, (A,), {"dtype": torch.int64}),
        (aten.addmm.default, (ROW, A, A), {}),
        (aten.mm.default, (A, A.t()), {}),
    ],
)
def test_the_rest_is_left_to_torch(func, args, kwargs):
    assert light(func, args, kwargs) is NotImplemented


def test_what_does_not_fit_is_an_error_in_torchs_words():
    with Observer("meta"), pytest.raises(RuntimeError):
        A + torch.empty(5, device="meta")


def test_in_place_is_in_place():
    assert light(aten.add_.Tensor, (A, ROW), {}) is A
    assert light(aten.add_.Tensor, (ROW, A), {}) is NotImplemented


@pytest.mark.parametrize("model", ["gcn", "sage", "gin"])
def test_an_estimate_does_without_torchs_compiler(model):
    code = (
        "import sys; from tests.capture.graphs import PRODUCTS; from weft.core.task import Task;"
        "from weft.run.captured import capture;"
        f"capture(Task(graph='products', model='{model}', layers=3), PRODUCTS);"
        "assert 'torch._dynamo' not in sys.modules"
    )
    subprocess.run([sys.executable, "-c", code], check=True)
