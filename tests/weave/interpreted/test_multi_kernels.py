"""Several operators in one launch: every kernel against the references of its members."""

from __future__ import annotations

from dataclasses import dataclass

import pytest
import torch

from tests.graphs_for_tests import empty, no_rows
from tests.ops.interpreted.packed import assert_same, both_csr, numbers, small
from weft.ops.attention.gat import attention_forward_torch, take_apart
from weft.ops.attention.gatv2 import attention_v2_backward_torch, attention_v2_forward_torch
from weft.ops.sparse.edge_softmax import edge_softmax_backward_torch, edge_softmax_torch
from weft.ops.sparse.sddmm import sddmm_torch
from weft.ops.sparse.spmm import spmm_torch, spmm_triton
from weft.ops.sparse.spmm_max import spmm_max_backward_torch, spmm_max_torch
from weft.weave.launchers import push_torch
from weft.weave.merged_launch import (
    OpCall,
    collected,
    group_by_kind,
    kernel_source,
    merged_call_triton,
    merged_launch,
)

TYPES = [torch.float32, torch.float64, torch.bfloat16, torch.float16]


@dataclass(frozen=True)
class Source:
    """What one call aggregates."""

    x: torch.Tensor
    reduce: str = "sum"
    weight: torch.Tensor | None = None
    row_scale: torch.Tensor | None = None
    col_scale: torch.Tensor | None = None

    def expected(self, csr):
        """The reference."""
        if self.reduce == "max":
            return spmm_max_torch(self.x, self.weight, csr)[0]
        return spmm_torch(self.x, self.weight, self.row_scale, self.col_scale, csr)


def packed(csr):
    """A packed CSR as operators take it."""
    return [csr.indptr, csr.indices, csr.perm, csr.row_of_edge, *csr.work.tensors()]


def spmm_call(csr, source):
    if source.reduce == "max":
        return OpCall("spmm_max", (source.x, source.weight, packed(csr), []))
    return OpCall("spmm", (source.x, source.weight, source.row_scale, source.col_scale, packed(csr), [], None))


def sources(adj, dtype):
    """Different widths, tasks, factors and aggregators, some of them alike."""
    scales = {"row_scale": numbers(adj.num_rows, seed=1), "col_scale": numbers(adj.num_cols, seed=2)}
    per_task = numbers(2, adj.num_edges, dtype=dtype, seed=3)
    return [
        Source(numbers(adj.num_cols, 3, dtype=dtype)),
        Source(numbers(2, adj.num_cols, 17, dtype=dtype), **scales),
        Source(numbers(adj.num_cols, 3, dtype=dtype, seed=4)),
        Source(numbers(adj.num_cols, 5, dtype=dtype), "max"),
        Source(numbers(2, adj.num_cols, 3, dtype=dtype, seed=5), weight=per_task),
        Source(numbers(3, adj.num_cols, 3, dtype=dtype, seed=6)),
        Source(numbers(2, adj.num_cols, 5, dtype=dtype), "max", weight=numbers(adj.num_edges, dtype=dtype, seed=7)),
    ]


@pytest.mark.parametrize("dtype", TYPES, ids=str)
def test_sums_and_maxima_in_one_launch(dtype):
    adj = small()
    csr, _ = both_csr(adj)
    given = sources(adj, dtype)
    done = merged_call_triton([spmm_call(csr, source) for source in given])
    assert_same([outputs[0] for outputs in done], [source.expected(csr) for source in given], dtype)


def test_each_source_has_the_bits_it_has_alone():
    adj = small()
    csr, _ = both_csr(adj)
    given = [source for source in sources(adj, torch.float32) if source.reduce == "sum"]
    done = merged_call_triton([spmm_call(csr, source) for source in given])
    for source, (out,) in zip(given, done, strict=True):
        assert torch.equal(out, spmm_triton(source.x, source.weight, source.row_scale, source.col_scale, csr))


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16], ids=str)
def test_both_directions_and_the_gradient_of_a_maximum_in_one_launch(dtype):
    adj = small()
    csr, back = both_csr(adj)
    x, grad = numbers(2, adj.num_cols, 3, dtype=dtype), numbers(adj.num_rows, 5, dtype=dtype)
    to_max = numbers(adj.num_cols, 4, dtype=dtype, seed=2)
    _, winner = spmm_max_torch(to_max, None, csr)
    grad_max = numbers(adj.num_rows, 4, dtype=dtype, seed=3)
    calls = [
        OpCall("spmm", (x, None, None, None, packed(csr), packed(back), None)),
        OpCall("spmm", (grad, None, None, None, packed(back), packed(csr), None)),
        OpCall("spmm_max_backward", (grad_max, winner, None, packed(csr), packed(back))),
    ]
    expected = [
        spmm_torch(x, None, None, None, csr),
        spmm_torch(grad, None, None, None, back),
        spmm_max_backward_torch(grad_max, winner, None, csr, adj.num_cols),
    ]
    assert_same([outputs[0] for outputs in merged_call_triton(calls)], expected, dtype)


@pytest.mark.parametrize("dtype", TYPES, ids=str)
def test_pull_and_push_in_one_launch(dtype):
    adj = small()
    csr, _ = both_csr(adj)
    pull = Source(numbers(2, adj.num_cols, 3, dtype=dtype))
    scales = numbers(adj.num_rows, seed=1), numbers(adj.num_cols, seed=2)
    pushes = [
        (numbers(adj.num_rows, 3, dtype=dtype), None, None, None),
        (numbers(2, adj.num_rows, 17, dtype=dtype, seed=3), numbers(adj.num_edges, dtype=dtype, seed=4), *scales),
    ]
    calls = [OpCall("spmm_push", (*push, packed(csr), adj.num_cols)) for push in pushes]
    (pulled,), *sent = merged_call_triton([spmm_call(csr, pull), *calls])
    assert_same(pulled, pull.expected(csr), dtype)
    expected = [push_torch(*push, csr, adj.num_cols) for push in pushes]
    assert_same([outputs[0] for outputs in sent], expected, torch.float32 if dtype != torch.float64 else dtype)


@pytest.mark.parametrize("dtype", TYPES, ids=str)
def test_sddmm(dtype):
    adj = small()
    csr, _ = both_csr(adj)
    given = [
        (
            numbers(*lead, adj.num_rows, heads * width, dtype=dtype, seed=heads),
            numbers(*lead, adj.num_cols, heads * width, dtype=dtype, seed=width),
            heads,
        )
        for lead, heads, width in (((), 1, 1), ((2,), 3, 5), ((), 1, 130), ((), 3, 5))
    ]
    calls = [OpCall("sddmm", (*arguments, packed(csr), [])) for arguments in given]
    expected = [sddmm_torch(*arguments, csr) for arguments in given]
    assert_same([outputs[0] for outputs in merged_call_triton(calls)], expected, dtype)


@pytest.mark.parametrize("dtype", TYPES, ids=str)
def test_edge_softmax(dtype):
    adj = small()
    csr, _ = both_csr(adj)
    shapes = [((), 1), ((), 3), ((2,), 4), ((), 3)]
    given = [5 * numbers(*lead, adj.num_edges, heads, dtype=dtype) for lead, heads in shapes]
    given[3][3, 0] = torch.nan
    given[3][5, 1] = -torch.inf
    outs = [out for (out,) in merged_call_triton([OpCall("edge_softmax", (scores, packed(csr))) for scores in given])]
    assert_same(outs, [edge_softmax_torch(scores, csr) for scores in given], dtype)
    grads = [numbers(*lead, adj.num_edges, heads, dtype=dtype, seed=1) for lead, heads in shapes]
    pairs = list(zip(grads, outs, strict=True))
    done = merged_call_triton([OpCall("edge_softmax_backward", (*pair, packed(csr))) for pair in pairs])
    expected = [edge_softmax_backward_torch(*pair, csr) for pair in pairs]
    assert_same([outputs[0] for outputs in done], expected, dtype)


def test_attention_of_different_heads():
    dtype = torch.float32
    adj = small(num_rows=9, num_cols=9)
    csr, back = both_csr(adj)
    forward, grads = [], []
    for seed, (lead, heads, width) in enumerate((((), 1, 4), ((2,), 2, 3), ((), 1, 4))):
        packed_rows = numbers(*lead, 9, heads * (width + 2), dtype=dtype, seed=seed)
        clock = torch.arange(2 * torch.Size(lead).numel()).reshape(*lead, 2)
        random = (torch.full(lead, 0.25), clock, seed) if seed else (None, None, 0)
        forward.append(OpCall("graph_attention_packed", (packed_rows, heads, 0.2, *random, packed(csr), packed(back))))
        grads.append(numbers(*lead, 9, heads, width, dtype=dtype, seed=9))
    done = merged_call_triton(forward)
    alone = [merged_call_triton([call])[0] for call in forward]
    assert_same([out for outs in done for out in outs], [out for outs in alone for out in outs], dtype)
    for call, (out, *_) in zip(forward, done, strict=True):
        parts = take_apart(call.arguments[0], call.arguments[1])
        expected = attention_forward_torch(*parts, *call.arguments[2:6], csr)
        assert_same(out, expected[0], dtype)
    backward = [
        OpCall("graph_attention_packed_backward", (grad, call.arguments[0], *outs, *call.arguments[2:]))
        for call, grad, outs in zip(forward, grads, alone, strict=True)
    ]
    done = merged_call_triton(backward)
    alone = [merged_call_triton([call])[0] for call in backward]
    for mine, theirs in zip(done, alone, strict=True):
        assert torch.equal(mine[0], theirs[0])


def test_attention_v2_beside_a_sum():
    adj = small()
    csr, back = both_csr(adj)
    x_src, x_dst, att = numbers(9, 2, 3), numbers(11, 2, 3, seed=1), numbers(2, 3, seed=2)
    given = (x_src, x_dst, att, 0.2, None, None, 0)
    calls = [OpCall("graph_attention_v2", (*given, packed(csr), packed(back))), spmm_call(csr, Source(numbers(9, 5)))]
    (out, log_sum), (summed,) = merged_call_triton(calls)
    assert_same(out, attention_v2_forward_torch(*given, csr)[0], torch.float32)
    grad = numbers(11, 2, 3, seed=3)
    saved = (grad, *given[:3], (grad * out).sum(-1), log_sum, *given[3:])
    calls = [OpCall("graph_attention_v2_backward", (*saved, packed(csr), packed(back))), calls[1]]
    grads, _ = merged_call_triton(calls)
    assert_same(grads, attention_v2_backward_torch(*saved, csr), torch.float32)
    assert_same(summed, Source(numbers(9, 5)).expected(csr), torch.float32)


def test_operators_of_different_families_in_one_launch():
    adj = small()
    csr, _ = both_csr(adj)
    source, scores = Source(numbers(adj.num_cols, 3)), numbers(adj.num_edges, 2)
    calls = [spmm_call(csr, source), OpCall("edge_softmax", (scores, packed(csr)))]
    (summed,), (share,) = merged_call_triton(calls)
    assert_same((summed, share), (source.expected(csr), edge_softmax_torch(scores, csr)), torch.float32)


@pytest.mark.parametrize("make", [empty, no_rows])
def test_graphs_without_edges(make):
    adj = make()
    csr, _ = both_csr(adj)
    x = numbers(adj.num_cols, 3)
    calls = [spmm_call(csr, Source(x)), spmm_call(csr, Source(x, "max"))]
    calls += [OpCall("spmm_push", (numbers(adj.num_rows, 2), None, None, None, packed(csr), adj.num_cols))]
    calls += [OpCall("edge_softmax", (numbers(0, 2), packed(csr)))]
    summed, largest, sent, share = merged_call_triton(calls)
    for out, shape in ((summed, (adj.num_rows, 3)), (largest, (adj.num_rows, 3)), (sent, (adj.num_cols, 2))):
        assert_same(out[0], torch.zeros(shape), torch.float32)
    assert share[0].shape == (0, 2)


def test_more_sources_than_one_launch_holds(monkeypatch):
    from weft.weave import merged_launch as multi_launch

    monkeypatch.setattr(multi_launch, "LIMIT", 50)
    adj = small()
    csr, _ = both_csr(adj)
    given = [Source(numbers(adj.num_cols, 3, seed=seed)) for seed in range(5)]
    done = merged_call_triton([spmm_call(csr, source) for source in given])
    assert_same([outputs[0] for outputs in done], [source.expected(csr) for source in given], torch.float32)


def test_alike_sources_share_one_branch():
    adj = small()
    csr, _ = both_csr(adj)
    with collected() as parts:
        outs = [spmm_triton(numbers(adj.num_cols, width), None, None, None, csr) for width in (3, 3, 5, 3)]
    firsts = parts[::2]  # over all rows; each is followed by its hubs
    branches = group_by_kind(firsts)
    assert [len(branch.launches) for branch in branches] == [4, 1]  # three, and room for a fourth
    assert any(launch is firsts[0] for launch in group_by_kind(firsts[::-1])[0].launches)  # in any order
    text = kernel_source([branch.code for branch in branches])
    assert text.count("body0(") == 1
    assert text.count("body1(") == 1
    merged_launch(firsts)
    merged_launch(parts[1::2])
    expected = [spmm_torch(numbers(adj.num_cols, width), None, None, None, csr) for width in (3, 3, 5, 3)]
    assert_same(outs, expected, torch.float32)
