"""cross_entropy_rows: the mean over the listed rows."""

from __future__ import annotations

import pytest
import torch
from torch.nn.functional import cross_entropy

from tests.ops.comparing import TOLERANCE, assert_near, assert_registered, value_and_gradients
from tests.ops.contract import TYPES
from tests.ops.dense.test_bias_act_dropout import make
from weft.ops import cross_entropy_rows

LABELS = torch.tensor([0, 1, 2, 1, 0, 2, 2, 1])
ROWS = torch.tensor([1, 2, 5, 7])


def plain(logits, labels=LABELS, rows=ROWS):
    tasks = [cross_entropy(task[rows], labels[rows]) for task in logits.reshape(-1, *logits.shape[-2:])]
    return torch.stack(tasks).reshape(logits.shape[:-2])


@pytest.mark.parametrize("dtype", TYPES, ids=str)
@pytest.mark.parametrize("classes", [3, 17, 65])
@pytest.mark.parametrize("lead", [(), (3,), (2, 3)], ids=str)
def test_shapes_and_types(lead, classes, dtype):
    logits = (3 * make(*lead, 8, classes)).to(dtype)
    out, (grad,) = value_and_gradients(lambda x: cross_entropy_rows(x, LABELS, ROWS), [logits])
    expected, (expected_grad,) = value_and_gradients(plain, [logits.double()])
    assert out.dtype == (torch.float64 if dtype == torch.float64 else torch.float32)
    assert_near(out, expected, min(1e-5, TOLERANCE[dtype]))
    assert grad.dtype == dtype
    assert_near(grad, expected_grad, TOLERANCE[dtype])


def test_gradient_touches_the_listed_rows_alone():
    _, (grad,) = value_and_gradients(lambda x: cross_entropy_rows(x, LABELS, ROWS), [make(8, 3)])
    others = [row for row in range(8) if row not in ROWS.tolist()]
    assert grad[others].abs().sum() == 0
    assert (grad[ROWS].abs().sum(1) > 0).all()


def test_vmap_equals_loop():
    logits = make(3, 8, 4)
    mapped = torch.vmap(lambda x: cross_entropy_rows(x, LABELS, ROWS))
    out, (grad,) = value_and_gradients(mapped, [logits])
    expected, (expected_grad,) = value_and_gradients(plain, [logits])
    assert_near(out, expected, 1e-12)
    assert_near(grad, expected_grad, 1e-12)
    nested = torch.vmap(torch.vmap(lambda x: cross_entropy_rows(x, LABELS, ROWS)))
    out, (grad,) = value_and_gradients(nested, [make(2, 3, 8, 4)])
    expected, (expected_grad,) = value_and_gradients(plain, [make(2, 3, 8, 4)])
    assert_near(out, expected, 1e-12)
    assert_near(grad, expected_grad, 1e-12)


def test_gradcheck():
    logits = make(2, 8, 3).requires_grad_()
    assert torch.autograd.gradcheck(lambda x: cross_entropy_rows(x, LABELS, ROWS), [logits])


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16], ids=str)
def test_registration(dtype):
    logits = make(2, 8, 3).to(dtype).requires_grad_()
    assert_registered(lambda x: cross_entropy_rows(x, LABELS, ROWS), [logits])


def test_large_logits_do_not_overflow():
    logits = make(8, 3) * 1e4
    assert_near(cross_entropy_rows(logits.float(), LABELS, ROWS), plain(logits.float().double()), 1e-6)


def test_nan_arrives():
    logits = make(2, 8, 3)
    logits[1, ROWS[0], 2] = float("nan")
    out = cross_entropy_rows(logits, LABELS, ROWS)
    assert out[0].isfinite()
    assert out[1].isnan()
