"""multi_spmm, joined_spmm, pull_push_spmm: several sources, each as if alone."""

from __future__ import annotations

import pytest
import torch
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st
from torch.fx.experimental.proxy_tensor import make_fx

from tests.graphs_for_tests import GRAPHS, adjacencies, mixed
from tests.ops.comparing import TOLERANCE, CallsOfWeftOps, assert_near
from weft.core.errors import InputError
from weft.ops import Adjacency, spmm
from weft.ops.csr.packed import pack_csr, unpack_csr
from weft.weave.lab.multi import Source, joined_spmm, multi_spmm, multi_spmm_torch, pull_push_spmm, pull_push_spmm_torch
from weft.weave.merged_launch import FlatCalls, OpCall, flatten, together, unflatten


def made(*shape: int, seed: int = 0, dtype: torch.dtype = torch.float64) -> torch.Tensor:
    return torch.randn(*shape, generator=torch.Generator().manual_seed(seed), dtype=torch.float64).to(dtype)


def sources(adj: Adjacency, dtype: torch.dtype = torch.float64) -> list[Source]:
    """Every aggregator, with and without factors, of different widths and numbers of tasks."""
    m, n, e = adj.num_cols, adj.num_rows, adj.num_edges
    scales = {"row_scale": made(n, seed=1, dtype=dtype), "col_scale": made(m, seed=2, dtype=dtype)}
    return [
        Source(made(m, 3, dtype=dtype)),
        Source(made(2, m, 5, seed=3, dtype=dtype), **scales),
        Source(made(m, 1, seed=4, dtype=dtype), "mean"),
        Source(made(m, 4, seed=5, dtype=dtype), "max"),
        Source(made(2, 2, m, 2, seed=6, dtype=dtype), weight=made(e, seed=7, dtype=dtype)),
        Source(made(2, m, 2, seed=8, dtype=dtype), weight=made(2, e, seed=9, dtype=dtype)),
    ]


@pytest.mark.parametrize("dtype", [torch.float32, torch.float64, torch.bfloat16], ids=str)
@pytest.mark.parametrize("name", GRAPHS)
def test_every_source_as_the_reference_has_it(name, dtype):
    adj = GRAPHS[name]()
    given_sources = sources(adj, dtype)
    expected = multi_spmm_torch(unpack_csr(pack_csr(adj)), given_sources)
    for mine, theirs in zip(multi_spmm(adj, given_sources), expected, strict=True):
        assert_near(mine, theirs, TOLERANCE[dtype])


def test_every_source_as_alone_bit_for_bit():
    adj = mixed(num_rows=20, num_cols=20)
    x = made(20, 7, dtype=torch.float32)
    forms = [(adj, "sum"), (adj, "mean"), (adj, "max")]
    alone = [spmm(form, x, reduce=reduce) for form, reduce in forms]
    for mine, theirs in zip(multi_spmm(adj, [Source(x, reduce) for _, reduce in forms]), alone, strict=True):
        assert torch.equal(mine, theirs)
    gcn = adj.gcn()
    assert torch.equal(multi_spmm(gcn, [Source.over(gcn, x)])[0], spmm(gcn, x))


def test_gradcheck_of_every_aggregator():
    adj = mixed(num_rows=7, num_cols=5)
    base = sources(adj)
    leaves = [source.x.requires_grad_() for source in base]
    weights = [
        source.weight.requires_grad_() for source in base if source.weight is not None and source.reduce == "sum"
    ]

    def run(*values):
        xs, own = values[: len(base)], iter(values[len(base) :])
        again = [
            Source(x, s.reduce, None if s.weight is None else next(own), s.row_scale, s.col_scale)
            for x, s in zip(xs, base, strict=True)
        ]
        return tuple(multi_spmm(adj, again))

    assert torch.autograd.gradcheck(run, (*leaves, *weights), check_undefined_grad=False)


def test_only_the_asked_gradients_are_computed():
    adj = mixed()
    x, y = made(adj.num_cols, 3).requires_grad_(), made(adj.num_cols, 2)
    out = multi_spmm(adj, [Source(x), Source(y), Source(y, "max")])
    with CallsOfWeftOps() as backward:
        (grad,) = torch.autograd.grad(out[0].sum(), x)
    _, (names, *_) = backward.calls["weft.together.default"]
    assert names == ["spmm"]
    assert_near(grad, spmm(adj.transposed(), torch.ones(adj.num_rows, 3).double()), 1e-12)


@pytest.mark.parametrize("form", [joined_spmm, pull_push_spmm])
@pytest.mark.parametrize("name", GRAPHS)
def test_both_directions(form, name):
    adj = GRAPHS[name]()
    e, n, m = adj.num_edges, adj.num_rows, adj.num_cols
    pulls = sources(adj, torch.float32)
    scales = {"row_scale": made(n, seed=1).float(), "col_scale": made(m, seed=2).float()}
    pushes = [
        Source(made(n, 3, dtype=torch.float32)),
        Source(made(2, n, 4, seed=3, dtype=torch.float32), weight=made(e, seed=4, dtype=torch.float32), **scales),
        Source(made(2, n, 2, seed=5, dtype=torch.float32), weight=made(2, e, seed=6, dtype=torch.float32)),
    ]
    expected = pull_push_spmm_torch(unpack_csr(pack_csr(adj)), pulls, pushes, adj.num_cols)
    pulled, pushed = form(adj, pulls, pushes)
    for mine, theirs in zip([*pulled, *pushed], expected, strict=True):
        assert_near(mine, theirs, 1e-5)


@settings(max_examples=25, deadline=None, suppress_health_check=[HealthCheck.differing_executors])
@given(adj=adjacencies(), seed=st.integers(0, 100))
def test_a_push_is_the_gradient_of_a_pull(adj, seed):
    x = made(adj.num_cols, 3, seed=seed).requires_grad_()
    weight = made(adj.num_edges, seed=seed + 1)
    grad = made(adj.num_rows, 3, seed=seed + 2)
    (expected,) = torch.autograd.grad(multi_spmm(adj, [Source(x, weight=weight)])[0], x, grad)
    for form in (joined_spmm, pull_push_spmm):
        assert_near(form(adj, [], [Source(grad, weight=weight)])[1][0], expected, 1e-12)


def test_calls_survive_the_border():
    adj = mixed()
    csr = pack_csr(adj)
    calls = [
        OpCall("spmm", (made(adj.num_cols, 2), None, None, None, csr, [], None)),
        OpCall("sddmm", (made(adj.num_rows, 4), made(adj.num_cols, 4), 2, csr, [])),
    ]
    flat = flatten(calls)
    again = unflatten(FlatCalls(flat.names, flat.tensors, flat.counts, flat.numbers))
    assert again == calls
    assert isinstance(again[1].arguments[2], int)


def test_registration():
    adj = mixed(num_rows=7, num_cols=5)
    with CallsOfWeftOps() as seen:
        multi_spmm(adj, sources(adj, torch.float32))
        pull_push_spmm(adj, [], [Source(made(7, 2).float())])
    for operator, arguments in seen.calls.values():
        torch.library.opcheck(operator, arguments, test_utils=("test_schema", "test_faketensor"))


def test_traced_over_fake_tensors():
    adj = mixed()
    given_sources = sources(adj)
    calls = [
        OpCall("spmm", (s.x, s.weight, None, None, pack_csr(adj), [], None)) for s in given_sources if s.reduce == "sum"
    ]

    def run(x):
        return together([OpCall("spmm", (x, *calls[0].arguments[1:])), *calls[1:]])

    traced = make_fx(run, tracing_mode="fake", _allow_non_fake_inputs=True)(calls[0].arguments[0])
    assert "together" in traced.code
    for mine, theirs in zip(traced(calls[0].arguments[0]), run(calls[0].arguments[0]), strict=True):
        assert torch.equal(mine[0], theirs[0])


def test_complaints():
    adj = mixed()
    with pytest.raises(InputError, match="reduce='median' must be one of 'sum', 'mean', 'max'"):
        multi_spmm(adj, [Source(made(19, 2), "median")])
    with pytest.raises(InputError, match=r"a source of shape \(18, 2\) must be \[..., 19, F\]"):
        multi_spmm(adj, [Source(made(18, 2))])
    with pytest.raises(InputError, match="takes no row_scale"):
        multi_spmm(adj, [Source(made(19, 2), "max", row_scale=made(24))])
    with pytest.raises(InputError, match=r"must be \[..., 24, F\] over 24 x 19 transposed"):
        pull_push_spmm(adj, [], [Source(made(19, 2))])
    with pytest.raises(InputError, match="a push sums"):
        joined_spmm(adj, [], [Source(made(24, 2), "mean")])
