"""Every operator on a GPU, at sizes where hubs are split and launches have many programs, against float64 torch.

Outputs and gradients; the plain side is each operator's reference, or ordinary torch, in float64 on the same device.
A new width or type means kernels to compile, half a second each, so the cases are few and shared.
"""

from __future__ import annotations

from functools import cache

import pytest
import torch
from torch.nn.functional import cross_entropy, elu, relu

from tests.graphs_for_tests import GRAPHS, from_pairs
from tests.ops.comparing import TOLERANCE, assert_agrees, assert_near, value_and_gradients
from weft import ops
from weft.ops.attention.gat import attention_torch, coefficient_mask
from weft.ops.attention.gatv2 import attention_v2_torch
from weft.ops.csr.packed import pack_csr, unpack_csr
from weft.ops.dense.cross_entropy import cross_entropy_rows_triton
from weft.ops.random_bits import keep_mask_rows, uniform
from weft.ops.sparse.edge_softmax import edge_softmax_torch
from weft.ops.sparse.sddmm import sddmm_torch
from weft.ops.sparse.spmm import spmm_torch
from weft.ops.sparse.spmm_max import spmm_max_torch

pytestmark = [
    pytest.mark.gpu,
    pytest.mark.skipif(not torch.cuda.is_available(), reason="needs a CUDA device"),
]

NODES = 3000
ACTIVATE = {"none": lambda x: x, "relu": relu, "elu": elu}
F32, F64, BF16, F16 = torch.float32, torch.float64, torch.bfloat16, torch.float16


@cache
def graph():
    """3000 nodes, 30,000 random edges, two rows and two columns of more than 2000, a few nodes without any."""
    random = torch.Generator().manual_seed(0)
    rows, cols = torch.randint(20, NODES, (2, 30_000), generator=random)
    many = torch.randperm(NODES - 20, generator=random)[:2500] + 20
    rows = torch.cat([rows, torch.full((2500,), 30), torch.full((2300,), 31), many, many[:2200]])
    cols = torch.cat([cols, many, many[:2300], torch.full((2500,), 30), torch.full((2200,), 32)])
    return from_pairs(rows, cols, NODES, NODES)


@cache
def graph_on_gpu():
    return graph().to("cuda")


@cache
def csr():
    return unpack_csr(pack_csr(graph_on_gpu(), rows=True))


def make(*shape: int, seed: int = 0) -> torch.Tensor:
    random = torch.Generator().manual_seed(seed)
    return torch.randn(*shape, generator=random, dtype=torch.float64).to("cuda")


def clocks(*lead: int) -> torch.Tensor:
    return torch.arange(2 * torch.Size(lead).numel(), device="cuda").reshape(*lead, 2)


@pytest.mark.parametrize(("width", "dtype"), [(3, F64), (17, F32), (64, F32), (256, BF16), (65, F16)], ids=str)
def test_spmm(width, dtype):
    x = make(NODES, width)
    assert_agrees(lambda x: ops.spmm(graph_on_gpu(), x), lambda x: spmm_torch(x, None, None, None, csr()), [x], dtype)


@pytest.mark.parametrize(("width", "dtype"), [(17, F32), (65, F16)], ids=str)
@pytest.mark.parametrize("lead", [(), (5,), (2, 3)], ids=str)
def test_weighted_spmm(lead, width, dtype):
    inputs = [make(*lead, NODES, width), make(*lead, graph().num_edges, seed=1)]
    call, plain = lambda *a: ops.spmm(graph_on_gpu(), *a), lambda *a: spmm_torch(*a, None, None, csr())
    assert_agrees(call, plain, inputs, dtype)
    if len(lead) == 1:
        assert_agrees(torch.vmap(call), plain, inputs, dtype)


def test_spmm_with_scales():
    gcn = graph_on_gpu().gcn()
    loops = unpack_csr(pack_csr(gcn))
    scales = gcn.row_scale.double(), gcn.col_scale.double()
    call, plain = lambda x: ops.spmm(gcn, x), lambda x: spmm_torch(x, None, *scales, loops)
    assert_agrees(call, plain, [make(3, NODES, 64)], F32)
    assert_agrees(torch.vmap(call), plain, [make(3, NODES, 64)], F32)


@pytest.mark.parametrize(("width", "dtype"), [(17, F32), (64, BF16)], ids=str)
def test_spmm_max(width, dtype):
    """Half precision ties often: values, winners and gradients against the CPU's, which take the first edge too."""
    x, grad = make(2, NODES, width).to(dtype), make(2, NODES, width, seed=1).to(dtype)
    out, winner = torch.ops.weft.spmm_max(x, None, pack_csr(graph_on_gpu()), [])
    expected, expected_winner = spmm_max_torch(x, None, csr())
    assert torch.equal(out, expected)
    assert torch.equal(winner, expected_winner)
    mine, (mine_grad,) = value_and_gradients(lambda x: ops.spmm(graph_on_gpu(), x, reduce="max"), [x], grad)
    theirs, (theirs_grad,) = value_and_gradients(lambda x: ops.spmm(graph(), x, reduce="max"), [x.cpu()], grad)
    assert_near(mine, theirs, 0.0)
    assert_near(mine_grad, theirs_grad, TOLERANCE[dtype])


@pytest.mark.parametrize(("lead", "heads", "width", "dtype"), [((3,), 1, 17, F32), ((), 4, 16, BF16)])
def test_sddmm(lead, heads, width, dtype):
    inputs = [make(*lead, NODES, heads * width) / width**0.5, make(*lead, NODES, heads * width, seed=1)]
    assert_agrees(
        lambda a, b: ops.sddmm(graph_on_gpu(), a, b, heads),
        lambda a, b: sddmm_torch(a, b, heads, csr()),
        inputs,
        dtype,
    )


@pytest.mark.parametrize(("lead", "heads", "dtype"), [((), 3, F32), ((2,), 4, BF16)])
def test_edge_softmax(lead, heads, dtype):
    scores = 3 * make(*lead, graph().num_edges, heads)
    assert_agrees(
        lambda s: ops.edge_softmax(graph_on_gpu(), s), lambda s: edge_softmax_torch(s, csr()), [scores], dtype
    )


ATTENTION = [  # leading dimensions, heads, width, dropout, type
    ((2,), 4, 16, 0.0, F32),
    ((3,), 3, 17, 0.5, BF16),
    ((), 1, 65, 0.5, F32),
]


MORE = [
    ((), 8, 8, 0.5, F16),
    ((2,), 4, 40, 0.5, F32),
    ((), 6, 16, 0.0, BF16),
    ((), 1, 256, 0.5, F32),
]


@pytest.mark.parametrize(("lead", "heads", "width", "rate", "dtype"), [*ATTENTION, *MORE])
def test_attention(lead, heads, width, rate, dtype):
    inputs = [make(*lead, NODES, heads, width), make(*lead, NODES, heads, seed=1), make(*lead, NODES, heads, seed=2)]
    clock, rates = clocks(*lead), torch.full(lead, rate, device="cuda")
    mask = coefficient_mask(rates, clock, 5, graph().num_edges, heads) if rate else None
    assert_agrees(
        lambda *a: ops.graph_attention(graph_on_gpu(), *a, dropout=rate, clock=clock, site=5),
        lambda *a: attention_torch(*a, 0.2, mask, csr()), inputs, dtype,
    )  # fmt: skip


@pytest.mark.parametrize(
    ("lead", "heads", "width", "dtype"), [((), 4, 40, F32), ((3,), 3, 17, BF16), ((2,), 8, 64, F16)]
)
def test_attention_whose_heads_share_a_gradient(lead, heads, width, dtype):
    """Behind a sum over heads every head has the same gradient, kept once."""
    inputs = [make(*lead, NODES, heads, width), make(*lead, NODES, heads, seed=1), make(*lead, NODES, heads, seed=2)]
    assert_agrees(
        lambda *a: ops.graph_attention(graph_on_gpu(), *a).sum(-2),
        lambda *a: attention_torch(*a, 0.2, None, csr()).sum(-2), inputs, dtype,
    )  # fmt: skip


@pytest.mark.parametrize("slope", [0.2, 1.5])
@pytest.mark.parametrize(("spread", "dtype"), [(25.0, F32), (55.0, BF16), (300.0, F32), (300.0, BF16), (300.0, F16)])
def test_attention_of_scores_far_apart(spread, dtype, slope):
    """One source stands out, and most rows do not know it: by the bound of all rows or each by its own maximum."""
    inputs = [make(NODES, 4, 16), make(NODES, 4, seed=1), make(NODES, 4, seed=2)]
    inputs[1][100] = spread
    assert_agrees(
        lambda *a: ops.graph_attention(graph_on_gpu(), *a, slope=slope),
        lambda *a: attention_torch(*a, slope, None, csr()), inputs, dtype,
    )  # fmt: skip


def test_a_score_that_is_no_number_stays_in_its_rows():
    x, a_src, a_dst = make(NODES, 4, 16).float(), make(NODES, 4, seed=1).float(), make(NODES, 4, seed=2).float()
    a_src[100, 0] = torch.nan
    out = ops.graph_attention(graph_on_gpu(), x, a_src, a_dst)
    expected = attention_torch(x, a_src, a_dst, 0.2, None, csr())
    assert expected.isnan().any()
    assert torch.equal(out.isnan(), expected.isnan())


@pytest.mark.parametrize(
    ("lead", "heads", "width", "dtype"), [((), 4, 40, F32), ((3,), 3, 17, BF16), ((2,), 8, 64, F16)]
)
def test_mean_of_heads(lead, heads, width, dtype):
    def plain(x, bias):
        return x.mean(-2) + bias.unsqueeze(-2)

    assert_agrees(ops.mean_heads, plain, [make(*lead, 2001, heads, width), make(*lead, width, seed=1)], dtype)


@pytest.mark.parametrize(("lead", "heads", "width", "rate", "dtype"), ATTENTION)
def test_attention_v2(lead, heads, width, rate, dtype):
    shapes = (NODES, heads, width), (NODES, heads, width), (heads, width)
    inputs = [make(*lead, *shape, seed=k) / 2 for k, shape in enumerate(shapes)]
    clock, rates = clocks(*lead), torch.full(lead, rate, device="cuda")
    mask = coefficient_mask(rates, clock, 5, graph().num_edges, heads) if rate else None
    assert_agrees(
        lambda *a: ops.graph_attention_v2(graph_on_gpu(), *a, dropout=rate, clock=clock, site=5),
        lambda *a: attention_v2_torch(*a, 0.2, mask, csr()), inputs, dtype,
    )  # fmt: skip


def plain_epilogue(x, bias, act, rate, clock, site):
    out = ACTIVATE[act](x + bias.unsqueeze(-2))
    if rate is None:
        return out
    kept = keep_mask_rows(rate, clock, site, x.shape[-2], x.shape[-1])
    return out * kept / (1 - rate.double()[..., None, None])


@pytest.mark.parametrize(("lead", "width", "act", "dtype"), [((), 64, "relu", F32), ((3,), 17, "elu", BF16)])
def test_epilogue(lead, width, act, dtype):
    inputs = [make(*lead, 2001, width), make(*lead, width, seed=1)]
    clock = clocks(*lead)
    for rate in (None, torch.full(lead, 0.5, device="cuda")):
        assert_agrees(
            lambda x, b: ops.bias_act_dropout(x, b, act, 0.0 if rate is None else rate, clock, 5),  # noqa: B023
            lambda x, b: plain_epilogue(x, b, act, rate, clock, 5), inputs, dtype,  # noqa: B023
        )  # fmt: skip


@pytest.mark.parametrize("rate", [0.0, 0.1, 0.5, 0.9])
def test_the_same_bits_as_on_the_cpu(rate):
    clock = torch.tensor([[0, 0], [-5, 7], [2**62, 2**40]])
    x = torch.ones(3, 100_003)
    rates = torch.full((3,), rate)
    here = ops.dropout(x, rates, clock, 9)
    there = ops.dropout(x.cuda(), rates.cuda(), clock.cuda(), 9)
    assert torch.equal(here, there.cpu())
    assert torch.equal(uniform(3, 4, (1000,)), uniform(3, 4, (1000,), "cuda").cpu())


LINEAR = [((), 20_001, 64, 40, F32), ((3,), 6001, 17, 65, F32), ((3,), 501, 17, 40, BF16), ((), 50, 3, 2, F64)]


@pytest.mark.parametrize(("lead", "rows", "inputs", "outputs", "dtype"), LINEAR)
def test_linear(lead, rows, inputs, outputs, dtype):
    act = "none" if dtype == BF16 else "relu"  # half precision may round across the bend

    def plain(x, weight, bias, add):
        return ACTIVATE[act](x @ weight.transpose(-2, -1) + bias.unsqueeze(-2) + add)

    given = [
        make(*lead, rows, inputs) / inputs**0.5,
        make(*lead, outputs, inputs, seed=1),
        make(*lead, outputs, seed=2),
    ]
    given.append(make(*lead, rows, outputs, seed=3))
    # Sums over thousands of rows: float32's own rounding is a few 1e-5 of the largest term.
    assert_agrees(
        lambda x, w, b, a: ops.linear(x, w, b, add=a, act=act), plain, given, dtype, 5e-5 if dtype == F32 else None
    )


@pytest.mark.parametrize(("lead", "classes", "dtype"), [((), 7, F32), ((4,), 47, BF16)])
def test_loss(lead, classes, dtype):
    labels, rows = torch.arange(NODES, device="cuda") % classes, torch.arange(0, NODES, 3, device="cuda")
    logits = (3 * make(*lead, NODES, classes)).to(dtype)

    def plain(x):
        tasks = [cross_entropy(task[rows], labels[rows]) for task in x.reshape(-1, NODES, classes)]
        return torch.stack(tasks).reshape(lead)

    mine, (mine_grad,) = value_and_gradients(lambda x: ops.cross_entropy_rows(x, labels, rows), [logits])
    theirs, (theirs_grad,) = value_and_gradients(plain, [logits.double()])
    assert_near(mine, theirs, 1e-5)
    assert_near(1000 * mine_grad.double(), 1000 * theirs_grad, 10 * TOLERANCE[dtype])


@pytest.mark.parametrize("decoupled", [0.0, 1.0])
def test_adam(decoupled):
    hyper = torch.tensor([1e-2, 0.9, 0.999, 1e-8, 0.1, decoupled, 0.1, 0.001, 0.1, 0.001]).repeat(3, 1)
    hyper[:, 0] = torch.tensor([1e-3, 1e-2, 1e-1])
    state = [make(3, 10_001, seed=k).float() for k in range(3)] + [make(3, 10_001, seed=3).square().float()]
    here, there = [v.cpu() for v in state], [v.clone() for v in state]
    ops.adam_(*here, hyper)
    ops.adam_(*there, hyper.cuda())
    for mine, theirs in zip(there, here, strict=True):
        assert_near(mine, theirs, 1e-5)


def test_adam_looks_its_rows_up():
    table = torch.rand(3, 6, 10, device="cuda") + 0.1
    state = [make(3, 10_001, seed=k).float() for k in range(3)] + [make(3, 10_001, seed=3).square().float()]
    mine, apart = [v.clone() for v in state], [v.clone() for v in state]
    clock = torch.tensor([[5, 4]] * 3, device="cuda")
    ops.adam_(*mine, table, None, clock[:1, 1])
    ops.adam_(*apart, table[:, 4])
    assert all(torch.equal(a, b) for a, b in zip(mine, apart, strict=True))


@pytest.mark.parametrize("count", [60, 140, 500])
def test_loss_of_few_rows_is_the_sum_of_its_parts(count):
    logits, labels = make(2, 600, 7).float(), torch.arange(600, device="cuda") % 7
    rows = torch.arange(count, device="cuda")
    one, several = (cross_entropy_rows_triton(logits, labels, rows, few) for few in (4, 1))
    assert_near(one, several, 1e-6)


@pytest.mark.parametrize("name", GRAPHS)
def test_awkward_graphs(name):
    adj = GRAPHS[name]()
    gpu = adj.to("cuda")
    csr = unpack_csr(pack_csr(gpu))
    x, scores = make(adj.num_cols, 17), make(adj.num_edges, 3)
    assert_agrees(lambda x: ops.spmm(gpu, x), lambda x: spmm_torch(x, None, None, None, csr), [x], F32)
    assert_near(ops.spmm(gpu, x.float(), reduce="max"), ops.spmm(adj, x.float().cpu(), reduce="max"), 0.0)
    assert_agrees(lambda s: ops.edge_softmax(gpu, s), lambda s: edge_softmax_torch(s, csr), [scores], F32)
    inputs = [make(adj.num_cols, 4, 16), make(adj.num_cols, 4), make(adj.num_rows, 4)]
    assert_agrees(lambda *a: ops.graph_attention(gpu, *a), lambda *a: attention_torch(*a, 0.2, None, csr), inputs, F32)


def test_the_same_bits_every_time():
    adj = graph_on_gpu()
    x, scores = make(2, NODES, 4, 16).float(), make(2, NODES, 4).float()
    narrow, weight = make(2, NODES, 17).float(), make(2, adj.num_edges).float()
    for function, inputs in (
        (lambda x, w: ops.spmm(adj, x, w), [narrow, weight]),
        (lambda x: ops.spmm(adj, x, reduce="max"), [narrow]),
        (lambda x, s, d: ops.graph_attention(adj, x, s, d), [x, scores, scores]),
        (lambda x, d, a: ops.graph_attention_v2(adj, x, d, a), [x, x, x[:, 0]]),
        (lambda x, w: ops.linear(x, w), [narrow, narrow[:, :8]]),
    ):
        first, first_grads = value_and_gradients(function, inputs)
        again, again_grads = value_and_gradients(function, inputs)
        assert torch.equal(first, again)
        assert all(torch.equal(a, b) for a, b in zip(first_grads, again_grads, strict=True))


def test_a_step_can_be_recorded():
    """Forward and backward of sparse operators inside a CUDA graph; replayed under another clock."""
    adj = graph_on_gpu()
    x = make(NODES, 64).float().requires_grad_()
    clock, rate = torch.zeros(2, dtype=torch.int64, device="cuda"), torch.full((), 0.5, device="cuda")

    def step():
        hidden = ops.bias_act_dropout(ops.spmm(adj, x), None, "relu", rate, clock, 1)
        out = ops.graph_attention(adj, hidden.unflatten(1, (4, 16)), hidden[:, :4], hidden[:, 4:8])
        return torch.autograd.grad(out.square().sum(), x)[0]

    side = torch.cuda.Stream()
    side.wait_stream(torch.cuda.current_stream())
    with torch.cuda.stream(side):
        for _ in range(2):
            step()
    torch.cuda.current_stream().wait_stream(side)
    recorded = torch.cuda.CUDAGraph()
    with torch.cuda.graph(recorded):
        result = step()
    for number in (3, 4):
        clock.fill_(number)
        recorded.replay()
        assert torch.equal(result, step())
