"""GAT's forward with a large spread of source scores: one bound for all rows, or each row's own maximum."""

from __future__ import annotations

from dataclasses import replace

import pytest
import torch

from tests.graphs_for_tests import from_pairs
from tests.ops.interpreted.packed import assert_same, both_csr, numbers
from weft.ops.attention.gat import attention_forward_torch
from weft.ops.attention.gat_gather_triton import score_bounds, spread_limit
from weft.ops.attention.gat_triton import attention_forward_triton
from weft.ops.csr.worklist import build_worklist

pytestmark = pytest.mark.usefixtures("passes")

FAR = 8  # the column that stands out; neither the hub nor most other rows know it


def csr_of_hubs(hubs: bool):
    """Row 2 is a hub of two chunks, row 4 knows FAR alone, row 5 another column as well, row 0 has no edge."""
    columns = {1: [0], 2: range(7), 3: [1, 7], 4: [FAR], 5: [1, FAR], 6: [2, 3, 4]}
    pairs = torch.tensor([(row, col) for row in columns for col in columns[row]])
    adj = from_pairs(*pairs.T, 7, 9)
    csr, _ = both_csr(adj)
    return csr if hubs else replace(csr, work=build_worklist(csr.indptr, 16, 256))


def scores(spread: float, *lead: int, heads: int = 2, dtype=torch.float32):
    """``(x, a_src, a_dst)``: FAR's source score is ``spread`` above the lowest; the hub's chunks differ as well."""
    a_src = numbers(*lead, 9, heads, seed=1).clamp(-1, 1)
    a_src[..., :3, :] -= 0.4 * spread
    a_src[..., FAR, :] = a_src.amin(-2) + spread
    x, a_dst = numbers(*lead, 9, heads, 3, dtype=dtype), numbers(*lead, 7, heads, dtype=dtype, seed=2)
    return x, a_src.to(dtype), a_dst


def compare(csr, given, slope, dtype, rate=None, clock=None):
    *mine, log_sum = attention_forward_triton(*given, slope, rate, clock, 7, csr, True)
    *theirs, expected = attention_forward_torch(*given, slope, rate, clock, 7, csr)
    some = csr.indptr.diff() > 0
    assert_same((*mine, log_sum[..., some, :]), (*theirs, expected[..., some, :]), dtype)
    assert not mine[0][..., ~some, :, :].any()
    return mine[0]


@pytest.mark.parametrize("hubs", [True, False], ids=["hubs", "no hubs"])
@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16, torch.float16], ids=str)
@pytest.mark.parametrize("spread", [3.0, 25.0, 300.0])
def test_rows_far_below_the_highest_score(spread, dtype, hubs):
    out = compare(csr_of_hubs(hubs), scores(spread, dtype=dtype), 0.2, dtype)
    assert out[[1, 2, 3, 6]].abs().amin(-1).amin() > 0  # they know nothing of FAR, and did not vanish beside it


@pytest.mark.parametrize("hubs", [True, False], ids=["hubs", "no hubs"])
@pytest.mark.parametrize("slope", [-0.5, 1.5])
def test_slopes_outside_of_the_unit_interval(slope, hubs):
    compare(csr_of_hubs(hubs), scores(300.0), slope, torch.float32)


@pytest.mark.parametrize("spread", [4.0, 29.0])
def test_the_bound_and_the_maximum_give_the_same(spread):
    csr, given = csr_of_hubs(True), scores(spread)
    assert spread < spread_limit(torch.float32, 0.2)
    bound, own = (
        attention_forward_triton(*given, 0.2, None, None, 0, csr, True, limit=limit) for limit in (None, -1.0)
    )
    for mine, theirs in zip(bound, own, strict=True):
        torch.testing.assert_close(mine, theirs, rtol=1e-6, atol=1e-6)


def test_every_task_and_head_decides_for_itself():
    """A head whose scores lie close has the same bits beside one whose scores do not, alone or in a stack."""
    csr = csr_of_hubs(True)
    x, a_src, a_dst = scores(300.0, 2)
    a_src[0], a_src[1, :, 0] = a_src[0] / 100, a_src[1, :, 0] / 100
    rate, clock = torch.tensor([0.25, 0.5]), torch.tensor([[1, 2], [3, 4]])
    together = compare(csr, (x, a_src, a_dst), 0.2, torch.float32, rate, clock)
    for task in range(2):
        one = (value[task] for value in (x, a_src, a_dst))
        assert torch.equal(together[task], compare(csr, tuple(one), 0.2, torch.float32, rate[task], clock[task]))
    close = a_src.clone()
    close[1, :, 1] /= 100
    beside_close = compare(csr, (x, close, a_dst), 0.2, torch.float32, rate, clock)
    assert torch.equal(together[..., 0, :], beside_close[..., 0, :])


@pytest.mark.parametrize("hubs", [True, False], ids=["hubs", "no hubs"])
@pytest.mark.parametrize("spread", [3.0, 300.0])
@pytest.mark.parametrize("where", ["source", "destination"])
def test_what_is_no_number_stays_in_its_row(where, spread, hubs):
    csr, (x, a_src, a_dst) = csr_of_hubs(hubs), scores(spread)
    if where == "source":
        a_src[3, 0] = torch.nan  # of the hub and of row 6
    else:
        a_dst[[2, 6], 0] = torch.nan
    out = compare(csr, (x, a_src, a_dst), 0.2, torch.float32)
    broken = torch.zeros(7, 2, dtype=torch.bool)
    broken[[2, 6], 0] = True
    assert torch.equal(out.isnan().all(-1), broken)
    assert torch.equal(out.isnan().any(-1), broken)


@pytest.mark.parametrize("hubs", [True, False], ids=["hubs", "no hubs"])
def test_an_infinite_score_concerns_the_rows_that_see_it(hubs):
    csr, (x, a_src, a_dst) = csr_of_hubs(hubs), scores(3.0)
    a_src[FAR] = -torch.inf
    out = attention_forward_triton(x, a_src, a_dst, 0.2, None, None, 0, csr, True)[0]
    expected = attention_forward_torch(x, a_src, a_dst, 0.2, None, None, 0, csr)[0]
    known = [1, 2, 3, 5, 6]  # row 4 sees nothing else
    assert_same(out[known], expected[known], torch.float32)


@pytest.mark.parametrize("dtype", [torch.float32, torch.float64, torch.bfloat16], ids=str)
@pytest.mark.parametrize(("lead", "rows", "heads"), [((), 1, 1), ((2,), 300, 3), ((2, 2), 130, 9)])
def test_bounds(lead, rows, heads, dtype):
    """Of columns cut out of a wider matrix, in one run of rows and in several."""
    wide = numbers(*lead, rows, heads + 2, dtype=dtype)
    a_src, like = wide[..., 1:-1], torch.zeros(1, dtype=torch.float64 if dtype == torch.float64 else torch.float32)
    bounds = score_bounds(a_src, heads + 2, like, programs=3)
    assert bounds.dtype == like.dtype
    expected = torch.stack([a_src.amax(-2), a_src.amin(-2)], -2).reshape(-1, 2, heads)
    assert torch.equal(bounds, expected.to(like.dtype))
