"""adam_: the same updates as torch's Adam and AdamW, one task or many."""

from __future__ import annotations

import pytest
import torch

from tests.ops.comparing import assert_near
from tests.ops.dense.test_bias_act_dropout import make
from weft.core.errors import InputError
from weft.ops import adam_


def hyper(step: int, lr=1e-2, beta1=0.9, beta2=0.999, eps=1e-8, decay=0.0, decoupled=False) -> torch.Tensor:
    corrections, rests = [1 - beta1**step, 1 - beta2**step], [1 - beta1, 1 - beta2]
    return torch.tensor([lr, beta1, beta2, eps, decay, float(decoupled), *corrections, *rests])


def run_torch(param, grads, kind, **settings):
    leaf = param.clone().requires_grad_()
    optimizer = kind([leaf], **settings)
    for grad in grads:
        leaf.grad = grad.clone()
        optimizer.step()
    return leaf.detach()


def run_weft(param, grads, **settings):
    param, first, second = param.clone(), torch.zeros_like(param), torch.zeros_like(param)
    for step, grad in enumerate(grads, 1):
        adam_(param, grad, first, second, hyper(step, **settings).to(param.dtype))
    return param


@pytest.mark.parametrize("decay", [0.0, 0.1])
@pytest.mark.parametrize("decoupled", [False, True])
def test_equals_torch(decoupled, decay):
    param, grads = make(23), [make(23, seed=k) for k in range(1, 6)]
    kind = torch.optim.AdamW if decoupled else torch.optim.Adam
    expected = run_torch(param, grads, kind, lr=1e-2, weight_decay=decay)
    assert_near(run_weft(param, grads, decay=decay, decoupled=decoupled), expected, 1e-6)
    single = run_weft(param.float(), [grad.float() for grad in grads], decay=decay, decoupled=decoupled)
    assert_near(single, expected, 1e-5)


@pytest.mark.parametrize("lead", [(3,), (2, 3)], ids=str)
def test_every_task_has_its_own_numbers(lead):
    count = int(torch.Size(lead).numel())
    settings = [{"lr": 0.01 * (k + 1), "decay": 0.1 * k, "decoupled": bool(k % 2)} for k in range(count)]
    param, grads = make(count, 7), [make(count, 7, seed=k) for k in range(1, 4)]
    expected = torch.stack([run_weft(param[k], [g[k] for g in grads], **settings[k]) for k in range(count)])
    mine, first, second = (
        param.reshape(*lead, 7).clone(),
        torch.zeros(*lead, 7).double(),
        torch.zeros(*lead, 7).double(),
    )
    for step, grad in enumerate(grads, 1):
        rows = torch.stack([hyper(step, **one) for one in settings]).double().reshape(*lead, 10)
        adam_(mine, grad.reshape(*lead, 7), first, second, rows)
    assert_near(mine.reshape(count, 7), expected, 1e-12)


def test_a_row_of_a_table_is_picked_by_the_step():
    param, grad = make(2, 7), make(2, 7, seed=1)
    table = torch.stack(
        [torch.stack([hyper(k + 1, lr=0.1 * (k + t + 1)) for k in range(4)]) for t in range(2)]
    ).double()
    mine, theirs = ([param.clone(), grad, torch.zeros_like(param), torch.zeros_like(param)] for _ in range(2))
    adam_(*mine, table, None, torch.tensor([2]))
    adam_(*theirs, table[:, 2])
    assert all(torch.equal(a, b) for a, b in zip(mine, theirs, strict=True))


def test_decay_mask_spares_the_rest():
    param, grad = make(6), torch.zeros(6, dtype=torch.float64)
    mine, first, second = param.clone(), torch.zeros_like(param), torch.zeros_like(param)
    mask = torch.tensor([1.0, 0.0, 1.0, 0.0, 1.0, 0.0], dtype=torch.float64)
    adam_(mine, grad, first, second, hyper(1, lr=0.1, decay=0.5, decoupled=True).double(), mask)
    assert_near(mine, param * (1 - 0.05 * mask), 1e-7)


def test_schema():
    given = [make(2, 5).float(), make(2, 5, seed=1).float(), torch.zeros(2, 5), torch.zeros(2, 5)]
    rows = torch.stack([hyper(1), hyper(1)])
    torch.library.opcheck(torch.ops.weft.adam_.default, (*given, rows, None))
    torch.library.opcheck(torch.ops.weft.adam_.default, (*given, rows, torch.ones(5)))
    torch.library.opcheck(torch.ops.weft.adam_.default, (*given, rows[:, None], None, torch.tensor([0])))


def test_nan_gradient_reaches_its_own_parameter_alone():
    param, grad = make(4).float(), torch.zeros(4)
    grad[2] = float("nan")
    adam_(param, grad, torch.zeros(4), torch.zeros(4), hyper(1))
    assert param.isnan().tolist() == [False, False, True, False]


@pytest.mark.parametrize("beta2", [0.999, 0.99999, 0.99999999])
def test_a_beta_close_to_one_is_not_rounded(beta2):
    """In float32, 1 - 0.99999 is off by 7e-4, and 1 - 0.99999999 is 0."""
    param, grads = make(50).float(), [make(50, seed=k).float() for k in range(1, 4)]
    expected = run_torch(param, grads, torch.optim.Adam, lr=1e-2, betas=(0.9, beta2))
    moved = run_weft(param, grads, beta2=beta2) - param
    assert float((moved - (expected - param)).norm() / (expected - param).norm()) < 1e-5


def test_numbers_of_another_layout_are_refused():
    with pytest.raises(InputError, match="hyper has 8 numbers per task; expected 10"):
        adam_(torch.ones(3), torch.ones(3), torch.zeros(3), torch.zeros(3), torch.zeros(8))
