"""merged_call: several operators in one call, each as if alone; sums pushed along their edges."""

from __future__ import annotations

import pytest
import torch
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st
from torch.fx.experimental.proxy_tensor import make_fx

from tests.graphs_for_tests import GRAPHS, adjacencies, mixed
from tests.ops.comparing import CallsOfWeftOps, assert_near
from tests.weave.merged_calls import merged_call
from weft.ops import Adjacency, spmm
from weft.ops.csr.packed import pack_csr
from weft.weave.merged_launch import FlatCalls, OpCall, flatten, unflatten


def made(*shape: int, seed: int = 0, dtype: torch.dtype = torch.float64) -> torch.Tensor:
    return torch.randn(*shape, generator=torch.Generator().manual_seed(seed), dtype=torch.float64).to(dtype)


def calls_over(adj: Adjacency, dtype: torch.dtype = torch.float64) -> list[OpCall]:
    """Every sparse operator, with and without factors, of different widths and numbers of tasks."""
    m, n, e, csr = adj.num_cols, adj.num_rows, adj.num_edges, pack_csr(adj, rows=True)
    scales = made(n, seed=1, dtype=dtype), made(m, seed=2, dtype=dtype)
    return [
        OpCall("spmm", (made(m, 3, dtype=dtype), None, None, None, csr, [], None)),
        OpCall("spmm", (made(2, m, 5, seed=3, dtype=dtype), None, *scales, csr, [], None)),
        OpCall(
            "spmm", (made(2, 2, m, 2, seed=6, dtype=dtype), made(e, seed=7, dtype=dtype), None, None, csr, [], None)
        ),
        OpCall("spmm_max", (made(m, 4, seed=5, dtype=dtype), None, csr, [])),
        OpCall("sddmm", (made(n, 4, dtype=dtype), made(m, 4, seed=8, dtype=dtype), 2, csr, [])),
        OpCall("edge_softmax", (made(e, 3, seed=9, dtype=dtype), csr)),
        OpCall("spmm_push", (made(2, n, 3, seed=10, dtype=dtype), None, None, None, csr, m)),
    ]


@pytest.mark.parametrize("dtype", [torch.float32, torch.float64, torch.bfloat16], ids=str)
@pytest.mark.parametrize("name", GRAPHS)
def test_every_call_has_the_bits_it_has_alone(name, dtype):
    calls = calls_over(GRAPHS[name](), dtype)
    for results, call in zip(merged_call(calls), calls, strict=True):
        for mine, alone in zip(results, call(), strict=True):
            assert torch.equal(mine, alone)


@settings(max_examples=25, deadline=None, suppress_health_check=[HealthCheck.differing_executors])
@given(adj=adjacencies(), seed=st.integers(0, 100))
def test_a_push_is_the_gradient_of_a_pull(adj, seed):
    """Over the structure itself, without its transpose."""
    x = made(adj.num_cols, 3, seed=seed).requires_grad_()
    adj = adj.scaled(weight=made(adj.num_edges, seed=seed + 1))
    grad = made(adj.num_rows, 3, seed=seed + 2)
    (expected,) = torch.autograd.grad(spmm(adj, x), x, grad)
    push = OpCall("spmm_push", (grad, adj.weight, adj.row_scale, adj.col_scale, pack_csr(adj), adj.num_cols))
    assert_near(merged_call([push])[0][0], expected, 1e-12)


def test_calls_survive_flattening():
    calls = calls_over(mixed())
    flat = flatten(calls)
    again = unflatten(FlatCalls(*flat))
    assert again == calls
    assert isinstance(again[4].arguments[2], int)


def test_registration():
    with CallsOfWeftOps() as seen:
        merged_call(calls_over(mixed(num_rows=7, num_cols=5), torch.float32))
    assert "weft.merged_call.default" in seen.calls
    for operator, arguments in seen.calls.values():
        torch.library.opcheck(operator, arguments, test_utils=("test_schema", "test_faketensor"))


def test_traced_over_fake_tensors():
    calls = calls_over(mixed())

    def run(x):
        return merged_call([OpCall("spmm", (x, *calls[0].arguments[1:])), *calls[1:]])

    traced = make_fx(run, tracing_mode="fake", _allow_non_fake_inputs=True)(calls[0].arguments[0])
    assert "merged_call" in traced.code
    for mine, theirs in zip(traced(calls[0].arguments[0]), run(calls[0].arguments[0]), strict=True):
        assert torch.equal(mine[0], theirs[0])
