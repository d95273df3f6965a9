"""What every sparse operator promises. A test file of an operator subclasses :class:`OperatorContract`."""

from __future__ import annotations

from collections.abc import Sequence
from typing import ClassVar

import pytest
import torch
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st
from torch import Tensor
from torch.fx.experimental.proxy_tensor import make_fx

from tests.graphs_for_tests import GRAPHS, adjacencies, mixed
from tests.ops.comparing import TOLERANCE, CallsOfWeftOps, assert_agrees, assert_near, detached, value_and_gradients
from weft.ops import Adjacency
from weft.ops import cpu as threads

LEADS = {"T": (3,), "T1 T2": (2, 3), "no tasks": (0,)}
CHECKS = ("test_schema", "test_autograd_registration", "test_faketensor", "test_aot_dispatch_dynamic")
TYPES = (torch.float32, torch.float64, torch.bfloat16, torch.float16)


class OperatorContract:
    """Subclasses give the operator, the same in plain torch, and inputs for it."""

    widths: ClassVar[Sequence[int]] = (1, 3, 17, 64, 65)
    exact: ClassVar[float] = 1e-12  # largest error in float64

    def inputs(self, adj: Adjacency, width: int, lead: tuple[int, ...], random: torch.Generator) -> list[Tensor]:
        """Float64 inputs; every one of them has the leading dimensions."""
        raise NotImplementedError

    def call(self, adj: Adjacency, *inputs: Tensor) -> Tensor:
        """The operator."""
        raise NotImplementedError

    def plain(self, adj: Adjacency, *inputs: Tensor) -> Tensor:
        """The same, row by row, without the package."""
        raise NotImplementedError

    def made(self, adj: Adjacency, width: int = 5, lead: tuple[int, ...] = (), seed: int = 0) -> list[Tensor]:
        return self.inputs(adj, width, lead, torch.Generator().manual_seed(seed))

    def check(self, adj: Adjacency, inputs: list[Tensor], dtype: torch.dtype) -> None:
        """Output and gradients against the plain formula."""
        tolerance = self.exact if dtype == torch.float64 else TOLERANCE[dtype]
        assert_agrees(lambda *a: self.call(adj, *a), lambda *a: self.plain(adj, *a), inputs, dtype, tolerance)

    @pytest.mark.parametrize("dtype", TYPES, ids=str)
    @pytest.mark.parametrize("position", range(5))
    def test_widths_and_types(self, position, dtype):
        adj = mixed()
        inputs = self.made(adj, self.widths[position])
        self.check(adj, inputs, dtype)

    @pytest.mark.parametrize("name", GRAPHS)
    def test_graphs(self, name):
        adj = GRAPHS[name]()
        for dtype in (torch.float32, torch.bfloat16):  # the compiled kernels and the torch references
            self.check(adj, self.made(adj), dtype)

    @pytest.mark.parametrize("name", LEADS)
    def test_leading_dimensions(self, name):
        adj = mixed()
        inputs = self.made(adj, lead=LEADS[name])
        for dtype in (torch.float32, torch.bfloat16):
            self.check(adj, inputs, dtype)

    @settings(max_examples=25, deadline=None, suppress_health_check=[HealthCheck.differing_executors])
    @given(adj=adjacencies(), width=st.integers(1, 20), seed=st.integers(0, 1000))
    def test_any_graph(self, adj, width, seed):
        inputs = self.made(adj, width, seed=seed)
        self.check(adj, inputs, torch.float64)

    def test_gradcheck(self):
        adj = mixed(num_rows=7, num_cols=5)
        inputs = [value.requires_grad_() for value in self.made(adj, 2)]
        assert torch.autograd.gradcheck(lambda *a: self.call(adj, *a), inputs, check_undefined_grad=False)

    def test_vmap_equals_loop(self):
        adj = mixed()
        stacked = self.made(adj, lead=(3,))
        batched = torch.vmap(lambda *a: self.call(adj, *a))
        self.check_against_loop(adj, batched, stacked)

    def test_vmap_over_each_input_alone(self):
        adj = mixed()
        single, stacked = self.made(adj, seed=1), self.made(adj, lead=(3,))
        for chosen in range(len(single)):
            inputs = [stacked[k] if k == chosen else single[k] for k in range(len(single))]
            dims = tuple(0 if k == chosen else None for k in range(len(single)))
            batched = torch.vmap(lambda *a: self.call(adj, *a), in_dims=dims)
            self.check_against_loop(adj, batched, inputs, dims)

    def test_vmap_inside_vmap(self):
        adj = mixed()
        stacked = self.made(adj, lead=(2, 3))
        batched = torch.vmap(torch.vmap(lambda *a: self.call(adj, *a)))
        out, grads = value_and_gradients(batched, stacked)
        expected, expected_grads = value_and_gradients(lambda *a: self.plain(adj, *a), stacked)
        assert_near(out, expected, self.exact)
        for mine, theirs in zip(grads, expected_grads, strict=True):
            assert_near(mine, theirs, self.exact)

    def check_against_loop(self, adj, batched, inputs, dims=None) -> None:
        """vmap inside, autograd.grad outside, against one task after another."""
        dims = dims or (0,) * len(inputs)

        def loop(*values):
            tasks = max(len(value) for value, dim in zip(values, dims, strict=True) if dim == 0)
            rows = [[v[t] if d == 0 else v for v, d in zip(values, dims, strict=True)] for t in range(tasks)]
            return torch.stack([self.call(adj, *row) for row in rows])

        out, grads = value_and_gradients(batched, inputs)
        expected, expected_grads = value_and_gradients(loop, inputs)
        assert_near(out, expected, self.exact)
        for mine, theirs in zip(grads, expected_grads, strict=True):
            assert_near(mine, theirs, self.exact)

    @pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16], ids=str)
    def test_registration(self, dtype):
        adj = mixed(num_rows=7, num_cols=5)
        inputs = [value.to(dtype) for value in self.made(adj, 3)]
        leaves = [value.requires_grad_() for value in inputs]
        with CallsOfWeftOps() as forward:
            out = self.call(adj, *leaves)
        with CallsOfWeftOps() as backward:
            torch.autograd.grad(out, leaves, torch.ones_like(out))
        assert forward.calls
        assert backward.calls
        checks = CHECKS if dtype == torch.float32 else CHECKS[:3]
        for operator, arguments in forward.calls.values():
            torch.library.opcheck(operator, arguments, test_utils=checks)
        for operator, arguments in backward.calls.values():
            torch.library.opcheck(operator, detached(arguments), test_utils=checks)

    def test_traced_step_equals_eager(self):
        """The whole step of a group, traced over fake tensors: vmap, gradient, update."""
        adj = mixed()
        stacked = self.made(adj, lead=(3,))
        with torch.enable_grad():
            self.call(adj, *[value[0] for value in stacked])  # what the adjacency derives is built before tracing

        def step(*values):
            leaves = [value.detach().requires_grad_() for value in values]
            loss = torch.vmap(lambda *a: self.call(adj, *a))(*leaves).square().sum()
            return [v - 0.1 * g for v, g in zip(values, torch.autograd.grad(loss, leaves), strict=True)]

        traced = make_fx(step, tracing_mode="fake", _allow_non_fake_inputs=True)(*stacked)
        for mine, theirs in zip(traced(*stacked), step(*stacked), strict=True):
            assert torch.equal(mine, theirs)

    def test_same_bits_every_time_on_any_number_of_threads(self, monkeypatch):
        monkeypatch.setattr(threads, "WORK_OF_A_SHARE", 50)  # so that a small graph is shared too
        adj = mixed()
        inputs = [value.float() for value in self.made(adj, 20, lead=(2,))]
        before = torch.get_num_threads()
        results = []
        try:
            for count in (1, 2, 2, 5):
                torch.set_num_threads(count)
                results.append(value_and_gradients(lambda *a: self.call(adj, *a), inputs))
        finally:
            torch.set_num_threads(before)
        first, first_grads = results[0]
        for out, grads in results[1:]:
            assert torch.equal(out, first)
            assert all(torch.equal(a, b) for a, b in zip(grads, first_grads, strict=True))

    @pytest.mark.parametrize("value", [float("nan"), float("inf")])
    def test_nan_and_infinity_arrive(self, value):
        adj = mixed()
        for position in range(len(self.made(adj))):
            inputs = self.made(adj)
            inputs[position].view(-1)[2] = value
            for dtype in (torch.float32, torch.bfloat16):
                rounded = [given.to(dtype) for given in inputs]
                expected = self.plain(adj, *[given.double() for given in rounded])
                assert_near(self.call(adj, *rounded), expected, TOLERANCE[dtype])

    def test_noncontiguous_inputs(self):
        adj = mixed()
        inputs = self.made(adj, lead=(2,))
        turned = [value.transpose(0, -1).contiguous().transpose(0, -1) for value in inputs]
        assert_near(self.call(adj, *turned), self.plain(adj, *inputs), self.exact)
