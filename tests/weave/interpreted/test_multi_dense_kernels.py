"""Dense operators in merged launches: bit-identical to separate launches, and equal to the references."""

from __future__ import annotations

import pytest
import torch

from tests.ops.interpreted.packed import assert_same, both_csr, numbers, small
from weft.ops.dense.bias_act_dropout import bias_act_dropout_torch
from weft.ops.dense.linear import linear_torch
from weft.ops.launch import backend
from weft.weave.merged_launch import OpCall, merged_call_triton

AS_ON_A_GPU = (lambda tensor: True).__code__
ROWS = 70


@pytest.fixture
def as_on_a_gpu(monkeypatch):
    monkeypatch.setattr(backend.on_gpu, "__code__", AS_ON_A_GPU)


def calls(dtype) -> list[OpCall]:
    """A layer forward and backward, a loss, copies and a sum over edges: some of a kind twice, in other sizes."""
    adj = small()
    csr = both_csr(adj)[0]
    edges = [csr.indptr, csr.indices, csr.perm, csr.row_of_edge, *csr.work.tensors()]
    clock, rate = torch.tensor([[3, 1], [4, 1]]), torch.tensor([0.5, 0.2])
    x, grad = numbers(2, ROWS, 6, dtype=dtype), numbers(2, ROWS, 5, dtype=dtype, seed=1)
    weight, bias = numbers(2, 5, 6, dtype=dtype, seed=2), numbers(2, 5, dtype=dtype, seed=3)
    layer = linear_torch(x, weight, bias, None, "relu", rate, clock, 1).to(dtype)
    out = bias_act_dropout_torch(numbers(2, ROWS, 5, dtype=dtype, seed=4), None, "relu", rate, clock, 2)
    labels, rows = torch.arange(ROWS) % 5, torch.arange(0, ROWS, 3)
    return [
        OpCall("linear", (x, weight, bias, None, "relu", rate, clock, 1)),
        OpCall("linear", (x[0], weight[0], None, None, "none", None, None, 0)),
        OpCall("product", (grad, weight.transpose(1, 2).contiguous())),
        OpCall("weight_grad_parts", (grad, x)),
        OpCall("weight_grad_parts", (grad[0], x[0])),
        OpCall("linear_backward_parts", (grad, layer, x, weight, None, "relu", rate, clock, 1, True, True)),
        OpCall("bias_act_dropout", (grad, bias, "relu", rate, clock, 2)),
        OpCall("bias_act_dropout_backward", (grad, out, "relu", rate, clock, 2)),
        OpCall("bias_act_dropout_backward_bias_parts", (grad, out, [2, 5], "relu", rate, clock, 2)),
        OpCall("mean_heads", (numbers(2, ROWS, 3, 5, dtype=dtype), bias)),
        OpCall("column_sum_parts", (grad,)),
        OpCall("cross_entropy_rows_parts", (grad, labels, rows)),
        OpCall("cross_entropy_rows_backward", (torch.ones(2), grad, labels, rows)),
        OpCall("add_parts", (numbers(2, 9, 7), 4, 3, "float32")),
        OpCall("add_parts", (numbers(1, 40, 7, seed=5), 7, 0, "float32")),
        OpCall("copied", (x.transpose(1, 2),)),
        OpCall("copied", (weight[0].t(),)),
        OpCall("side_by_side", ([bias, numbers(2, 3, dtype=dtype), numbers(2, 4, dtype=dtype)],)),
        OpCall("spmm", (numbers(adj.num_cols, 5, dtype=dtype), None, None, None, edges, [], None)),
    ]


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16], ids=str)
def test_bits_of_a_launch_of_their_own(as_on_a_gpu, dtype):
    given = calls(dtype)
    for call, mine in zip(given, merged_call_triton(given), strict=True):
        alone = merged_call_triton([call])[0]
        assert len(mine) == len(alone)
        assert all(torch.equal(one, other) for one, other in zip(mine, alone, strict=True)), call.name


def test_numbers_of_the_references(monkeypatch):
    given = calls(torch.float32)
    expected = [_summed(call.name, call()) for call in given]
    monkeypatch.setattr(backend.on_gpu, "__code__", AS_ON_A_GPU)
    for call, mine, theirs in zip(given, merged_call_triton(given), expected, strict=True):
        found = _summed(call.name, mine)
        assert len(found) == len(theirs)
        assert_same(found, theirs, torch.float32)


def _summed(name: str, outputs: tuple[torch.Tensor, ...]) -> list[torch.Tensor]:
    """Parts, of which there may be one or many, added up."""
    return [*outputs[:-1], outputs[-1].sum(1)] if name.endswith("_parts") and name != "add_parts" else list(outputs)


def test_updates_in_one_launch(as_on_a_gpu):
    hyper = torch.tensor([0.01, 0.9, 0.999, 1e-8, 5e-4, 0.0, 0.1, 0.001, 0.1, 0.001])
    states = [[numbers(*shape, seed=seed) for seed in range(2)] for shape in ((2, 700), (1, 30))]
    states = [[*state, torch.zeros_like(state[0]), torch.zeros_like(state[0])] for state in states]
    alone = [[tensor.clone() for tensor in state] for state in states]
    merged_call_triton([OpCall("adam_", (*state, hyper, None)) for state in states])
    for state in alone:
        merged_call_triton([OpCall("adam_", (*state, hyper, None))])
    for mine, theirs in zip(states, alone, strict=True):
        assert all(torch.equal(one, other) for one, other in zip(mine, theirs, strict=True))
