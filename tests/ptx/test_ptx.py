"""The PTX of kernels with known results, run on the CPU; and what a GPU would not survive is named."""

from __future__ import annotations

import os

import pytest
import torch

pytest.importorskip("triton")

pytestmark = [
    pytest.mark.skipif(os.environ.get("TRITON_INTERPRET") == "1", reason="the interpreter compiles nothing"),
    pytest.mark.filterwarnings("ignore:TRITON_DEFAULT_FP_FUSION"),
]

from tests.ptx.launching import run_as_ptx  # noqa: E402  after Triton was found
from tests.ptx.memory import Fault  # noqa: E402
from weft.ops.dense.linear_triton import linear_triton  # noqa: E402
from weft.weave.launchers import BLOCK, _copy_kernel, copied_triton  # noqa: E402  # noqa: E402
from weft.weave.merged_launch import collected, merged_launch  # noqa: E402


@pytest.mark.parametrize("sizes", [(70, 24, 16), (33, 5, 3)])
def test_products_and_epilogue(sizes):
    rows, inputs, outputs = sizes
    draw = torch.Generator().manual_seed(0)
    x, weight, bias = (torch.randn(*size, generator=draw) for size in ((rows, inputs), (outputs, inputs), (outputs,)))
    with run_as_ptx() as made:
        found = linear_triton(x, weight, bias, act="relu")
    assert made == ["_linear_kernel"]
    torch.testing.assert_close(found, torch.relu(x @ weight.T + bias), rtol=1e-5, atol=1e-5)


def test_merged_parts_that_differ_in_constants_alone():
    draw = torch.Generator().manual_seed(0)
    x, first, second, bias = (torch.randn(*size, generator=draw) for size in ((70, 16), (3, 16), (3, 16), (3,)))
    with collected() as parts:
        plain, activated = linear_triton(x, first, bias), linear_triton(x, second, bias, act="relu")
    with run_as_ptx() as made:
        merged_launch(parts)
    assert made == ["woven_kernel"]
    torch.testing.assert_close(plain, x @ first.T + bias, rtol=1e-5, atol=1e-5)
    torch.testing.assert_close(activated, torch.relu(x @ second.T + bias), rtol=1e-5, atol=1e-5)


def test_strides():
    x = torch.arange(3 * 50 * 20, dtype=torch.float32).view(3, 50, 20).transpose(1, 2)
    with run_as_ptx():
        assert torch.equal(copied_triton(x), x)


def test_an_address_outside_of_a_tensor_is_named():
    x, out = torch.zeros(40), torch.zeros(50)
    with run_as_ptx(), pytest.raises(Fault, match=r"byte 160 of the 160 of a tensor \(40,\)(.|\n)*ld.global"):
        _copy_kernel[(1,)](x, out, 50, 1, 50, 0, 0, 1, 0, BLOCK=BLOCK)
